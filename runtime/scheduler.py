"""Continuous batching, first come, first served.

A step has a budget of tokens. Running decodes take one each, then prompts fill the rest in chunks: first
those that have begun, then waiting ones while there is room for their blocks. A prompt gets all its
blocks when it is admitted, so only decodes can find the pool dry; the youngest running request is then
preempted: its blocks are freed and its tokens are computed again later. Since a request that could not
fit alone is refused, the oldest one always advances, and every admitted request finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from pagec.compiler.errors import RequestError
from pagec.runtime.block_manager import BlockManager
from pagec.runtime.sequence import Request, Sequence, Status


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a sequence may hold. `prefill_chunk`: most prompt tokens of a request in a step."""

    tokens: int
    sequences: int
    length: int
    prefill_chunk: int | None = None


class Entry(NamedTuple):
    """A sequence's part of a step: `num_tokens` from position `start`, logits of the last `num_logits`."""

    request: Request
    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_tokens]


class Scheduler:
    """Decides who computes what in each step. Owns the queues; `blocks` owns the memory."""

    def __init__(self, blocks: BlockManager, limits: Limits) -> None:
        self.blocks = blocks
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    def add(self, request: Request) -> None:
        """Queues a request; RequestError if it could never run."""
        self._check(request)
        self.waiting.append(request)

    def schedule(self) -> list[Entry]:
        """The next step, decodes first; empty if nothing can run."""
        entries: list[Entry] = []
        self._schedule_decodes(entries)
        budget = self.limits.tokens - sum(entry.num_tokens for entry in entries)
        for request in self.running:
            for sequence in request.sequences:
                # One pending token is a decode, seen above (a prompt's last one counts as such too).
                if budget and sequence.num_pending > 1:
                    budget -= self._chunk(entries, request, sequence, budget)
        while budget and self._admit_next():
            request = self.running[-1]
            for sequence in request.sequences:
                if budget:
                    budget -= self._chunk(entries, request, sequence, budget)
        return entries

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its blocks. Idempotent."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING and request in self.waiting:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        for sequence in request.sequences:
            self.blocks.release(sequence.block_tables)

    def _check(self, request: Request) -> None:
        if request.max_len > self.limits.length:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens are "
                f"{request.max_len}; a sequence holds {self.limits.length} at most",
                place="max_tokens",
            )
        # The last token is never fed back, so it needs no slot.
        needed = self.blocks.blocks_for(request.max_len - 1) * request.num_groups * len(request.sequences)
        if needed > self.blocks.num_blocks - 1:
            raise RequestError(
                f"needs {needed} KV blocks at its full length; the pool has {self.blocks.num_blocks - 1}",
                place="max_tokens",
                remedy="ask for fewer tokens, or start the engine with a larger KV pool",
            )

    def _schedule_decodes(self, entries: list[Entry]) -> None:
        index = 0
        while index < len(self.running) and len(entries) < self.limits.tokens:
            request = self.running[index]
            ready = [sequence for sequence in request.sequences if sequence.num_pending == 1]
            if not self._make_room(request, ready):
                return  # it was the youngest, and has been preempted itself
            entries.extend(self._entry(request, s, 1) for s in ready[: self.limits.tokens - len(entries)])
            index += 1

    def _make_room(self, request: Request, sequences: Items[Sequence]) -> bool:
        """Blocks for the sequences' next token, taken from the youngest if need be."""
        for sequence in sequences:
            while not self.blocks.grow(sequence.block_tables, len(sequence.tokens)):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        for sequence in request.sequences:
            self.blocks.release(sequence.block_tables)
            sequence.num_computed = 0

    def _admit_next(self) -> bool:
        """Starts the first waiting request if sequences and blocks allow."""
        if not self.waiting:
            return False
        request = self.waiting[0]
        rows = sum(len(r.sequences) for r in self.running) + len(request.sequences)
        needed = sum(self.blocks.blocks_for(len(s)) for s in request.sequences) * request.num_groups
        if rows > self.limits.sequences or needed > self.blocks.num_free:
            return False
        for sequence in request.sequences:
            self.blocks.grow(sequence.block_tables, len(sequence))
        self.running.append(self.waiting.popleft())
        request.status = Status.RUNNING
        return True

    def _chunk(self, entries: list[Entry], request: Request, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_pending, budget, self.limits.prefill_chunk or budget)
        entries.append(self._entry(request, sequence, count))
        return count

    def _entry(self, request: Request, sequence: Sequence, count: int) -> Entry:
        start = sequence.num_computed
        num_logits = min(max(start + count - sequence.next_logit, 0), count)
        return Entry(request, sequence, start, count, num_logits)
