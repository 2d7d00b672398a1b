"""What a step costs the host: schedule, prepare and commit, without any kernel.

So many sequences decode, one token a step each; nothing ends meanwhile. Times are of this process's CPU, so
other processes do not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagec.compiler.dims import Capacity
from pagec.compiler.program import KvGroup, KvLayout, Program
from pagec.runtime.batch import build_batch
from pagec.runtime.bench.dry import VOCAB, count_rows, dry_loop
from pagec.runtime.bench.summary import Summary, summarise
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.policies import make_policy
from pagec.runtime.scheduler import Entry, Limits, Scheduler
from pagec.runtime.sequence import Request
from pagec.runtime.trace import Trace

SIZES: Final = (64, 256, 1024)
PROMPT: Final = 100
STEPS: Final = 300
BLOCK_SIZE: Final = 16
# More steps than it takes until all prompts are computed: nobody ends while others are measured.
SKEW: Final = 100


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of one step's parts, over all steps."""

    num_sequences: int
    parts: dict[str, Summary]

    def to_json(self) -> dict[str, Any]:
        medians = {f"{name}_us": round(s.median, 1) for name, s in self.parts.items()}
        return {"sequences": self.num_sequences, **medians}


def measure_host(num_sequences: int, policy: str = "fcfs", steps: int = STEPS) -> HostCost:
    """The cost of steps in which all sequences decode."""
    program = program_of(num_sequences)
    num_tokens = steps + SKEW
    blocks = BlockManager(num_sequences * -(-(PROMPT + num_tokens) // BLOCK_SIZE) + 1, BLOCK_SIZE)
    limits = Limits(program.capacity.T, num_sequences, program.max_len)
    scheduler = Scheduler(blocks, limits, make_policy(policy))

    def prepare(entries: Sequence[Entry]) -> int:
        build_batch(entries, program)
        return count_rows(entries)

    loop = dry_loop(scheduler, prepare)
    rng = np.random.default_rng(0)
    for number in range(num_sequences):
        tokens = rng.integers(0, VOCAB, PROMPT).tolist()
        scheduler.add(Request(number, tokens, num_tokens, 1))
    while any(request.num_emitted == 0 for request in (*scheduler.running, *scheduler.waiting)):
        loop.step()
    clock = _PartsClock()
    loop.trace = clock
    for _ in range(steps):
        loop.step()
    parts = {name: summarise(times[-steps:]) for name, times in clock.times.items()}
    totals = [sum(step) for step in zip(*clock.times.values(), strict=True)]
    return HostCost(num_sequences, {**parts, "total": summarise(totals)})


class _PartsClock(Trace):
    """CPU time of each part of each step, in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.process_time_ns()
        yield
        self.times.setdefault(name, []).append((time.process_time_ns() - began) / 1e3)


def program_of(num_sequences: int) -> Program:
    """Of a model that computes nothing."""
    return Program(
        model="none",
        vocab=VOCAB,
        max_len=4096,
        capacity=Capacity(4 * num_sequences, num_sequences, num_sequences),
        query_tile=16,
        few_tiles=4,
        key_split=256,
        kv=KvLayout("bf16", BLOCK_SIZE, 1, 16, (KvGroup((0,), None),)),
        slots=(),
        buffers=(),
        weights=(),
        tables=(),
        scratch_bytes=0,
        kernels=(),
        body=(),
        head=(),
        outputs={},
    )
