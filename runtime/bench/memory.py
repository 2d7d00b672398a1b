"""What the pool holds: slots that wait for tokens, and what sharing and paging save.

    waste          slots unwritten and not reclaimable at once, over slots in use, averaged over steps; what
                   is only promised to a prompt is in nobody's table, and holds cached tokens until it is
    static_waste   the same had every running request all the slots of the longest sequence
    shared_blocks  the most blocks that requests with a common beginning use, beside those without a cache

The trace is that of `throughput` with all lengths doubled. Steps run without kernels (dry.py): the numbers
are exact and depend on no machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagec.compiler.program import Memory
from pagec.runtime.bench.dry import dry_loop
from pagec.runtime.bench.workloads import WORKLOADS, Ask, throughput_lengths
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.scheduler import Limits, Scheduler
from pagec.runtime.sequence import Request
from pagec.runtime.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """See above. Slots are those of one KV group's tokens; `peak_` the most of any step. `mean_run`: blocks
    of a table that are neighbours, `fragmentation`: 1 - longest free run / free; both averaged over steps."""

    waste: float
    static_waste: float
    peak_slots: int
    static_slots: int
    steps: int
    preemptions: int
    mean_run: float
    fragmentation: float
    shared_blocks: int
    unshared_blocks: int
    blocks_saved: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Pool:
    """A scheduler with a pool that is large enough, or as large as said, and a loop without kernels."""

    def __init__(self, program: Memory, num_blocks: int | None, prefix_cache: bool = True) -> None:
        groups = program.kv.groups
        enough = program.capacity.S * program.max_blocks * len(groups) + 1
        windows = [group.window for group in groups]
        size = program.kv.block_size
        self.blocks = BlockManager(num_blocks or enough, size, windows, prefix_cache=prefix_cache)
        limits = Limits(program.capacity.T, program.capacity.S, program.max_len)
        self.scheduler = Scheduler(self.blocks, limits)
        self.loop = dry_loop(self.scheduler)
        self.num_groups = len(groups)

    def add(self, asks: Iterable[Ask]) -> None:
        for number, ask in enumerate(asks):
            request = Request(number, ask.prompt, ask.max_tokens, self.num_groups)
            self.scheduler.add(request)

    def sequences(self) -> list[TokenSequence]:
        return [s for request in self.scheduler.running for s in request.sequences]


def measure_memory(program: Memory, num_blocks: int | None = None) -> MemoryFigures:
    """Both measurements for a program's limits, KV groups and block size."""
    pool = _Pool(program, num_blocks)
    pool.add(doubled_trace(program.vocab))
    size, waste, static_waste = program.kv.block_size, [], []
    runs, fragmentation = [], []
    peak = static_peak = 0
    while pool.loop.has_work:
        pool.loop.step()
        running = pool.sequences()
        if not running:
            continue
        held, unwritten = held_slots(running, size)
        written = held - unwritten
        static = len(running) * program.max_len * pool.num_groups
        waste.append(unwritten / held)
        static_waste.append((static - written) / static)
        runs.append(pool.blocks.mean_run())
        fragmentation.append(pool.blocks.fragmentation())
        peak, static_peak = max(peak, held), max(static_peak, static)
    shared, unshared = (_peak_blocks(program, cache) for cache in (True, False))
    return MemoryFigures(
        round(float(np.mean(waste)), 5),
        round(float(np.mean(static_waste)), 5),
        peak,
        static_peak,
        len(waste),
        pool.scheduler.num_preemptions,
        round(float(np.mean(runs)), 2),
        round(float(np.mean(fragmentation)), 4),
        shared,
        unshared,
        round(1 - shared / unshared, 4),
    )


def doubled_trace(vocab: int) -> list[Ask]:
    """The `throughput` workload's lengths, doubled."""
    rng = np.random.default_rng(0)
    return [Ask(rng.integers(0, vocab, 2 * p).tolist(), 2 * o) for p, o in throughput_lengths()]


def held_slots(running: Sequence[TokenSequence], block_size: int) -> tuple[int, int]:
    """Slots of the blocks in these tables, each block counted once, and how many of them are unwritten.

    Claims ahead of need are in no table: any allocation may take them.
    """
    seen: set[int] = set()
    unwritten = 0
    for sequence in running:
        for table in sequence.block_tables:
            spare = len(table) * block_size - sequence.num_computed
            assert 0 <= spare < block_size, "between steps a table ends in the block of the last token"
            if table and table[-1] not in seen:
                unwritten += spare
            seen.update(block for block in table if block)
    return len(seen) * block_size, unwritten


def _peak_blocks(program: Memory, prefix_cache: bool) -> int:
    """The most blocks used by the requests of `prefix`."""
    pool = _Pool(program, None, prefix_cache)
    pool.add(WORKLOADS["prefix"].asks(program.vocab, seed=0))
    peak = 0
    while pool.loop.has_work:
        pool.loop.step()
        peak = max(peak, pool.blocks.num_used)
    return peak
