"""Preempted requests' keys and values in host memory: see preemption.Swapper.

A copy runs in the tiers' thread while steps run; until it has ended, the blocks in the pool stay the
request's own. What comes back shares nothing with anyone until it is committed. A copy out that fails makes
the request compute its tokens again.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.sequence import Request, Sequence

# A block's place: sequence of the request, KV group, number in the table.
_Place = tuple[Sequence, int, int]


@dataclass(slots=True)
class _Swapped:
    """A request whose blocks are beyond the pool, or on the way. `data`: a block per place."""

    places: list[_Place]
    data: list[Any] = field(default_factory=list)
    job: Future[Any] | None = None
    is_returning: bool = False


class HostSwapper:
    """Swaps whole requests between the pool and the tiers' host memory."""

    def __init__(self, blocks: BlockManager, tiers: Tiers) -> None:
        self._blocks, self._tiers = blocks, tiers
        self._swapped: dict[Request, _Swapped] = {}

    def swap_out(self, request: Request) -> bool:
        """Begins to copy what the sequences have computed; False if host memory has no room for it."""
        places = [
            (sequence, group, number)
            for sequence in request.sequences
            if sequence.finish_reason is None
            for group, table in enumerate(sequence.block_tables)
            for number in range(self._blocks.blocks_for(sequence.num_computed))
            if table[number]
        ]
        if not self._tiers.reserve(len(places)):
            return False
        swapped = self._swapped[request] = _Swapped(places)
        self._blocks.flush_copies()  # some of it may still have to be copied into the blocks
        swapped.job = self._tiers.start(self._tiers.pool.read_blocks, self._block_ids(places))
        return True

    def swap_in(self, request: Request) -> bool:
        """Grows the tables to hold all tokens and begins to copy back; False, and nothing changed, if
        blocks lack."""
        swapped, blocks = self._swapped[request], self._blocks
        living = [s for s in request.sequences if s.finish_reason is None]
        for sequence in living:
            if not blocks.grow(sequence, len(sequence.tokens)):
                for grown in living:
                    blocks.release(grown)
                return False
            blocks.drop_behind_windows(sequence)
        blocks.flush_copies()  # nothing that was ordered before may write into these blocks later
        swapped.is_returning = True
        ids = self._block_ids(swapped.places)
        swapped.job = self._tiers.start(self._tiers.pool.write_blocks, ids, swapped.data)
        return True

    def is_copying(self, request: Request) -> bool:
        """Whether a copy of the request is under way. Takes note of its end."""
        swapped = self._swapped.get(request)
        if swapped is None or swapped.job is None:
            return False
        if not swapped.job.done():
            return True
        job, swapped.job = swapped.job, None
        if swapped.is_returning:
            job.result()
            self._forget(request, has_moved_up=True)
        elif job.exception() is None:
            swapped.data = job.result()
        else:
            request.is_swapped = False
            self._forget(request)
        return False

    def drop(self, request: Request) -> None:
        """Forgets the copy outside the pool. Idempotent."""
        if request in self._swapped:
            self._forget(request)

    def _forget(self, request: Request, *, has_moved_up: bool = False) -> None:
        swapped = self._swapped.pop(request)
        self._tiers.give_back(len(swapped.places), has_moved_up=has_moved_up)

    @staticmethod
    def _block_ids(places: list[_Place]) -> list[int]:
        return [sequence.block_tables[group][number] for sequence, group, number in places]
