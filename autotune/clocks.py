"""The part of the cost model that all kernels share: clocks of an inner loop, and blocks dealt to slots.

A block of threads asks several pipes of its multiprocessor for a number of clocks at each step of its inner
loop. With r blocks on a multiprocessor a step costs it

    busy = max(pipes) + (tensor cores + exp + arithmetic - max of them) / max(1, r * warps / 4) + syncs 60 / r

for a warp does these three one after the other, and other warps fill the gaps: four schedulers, so
r * warps / 4 of them each. No step can be shorter than its loads take to arrive, which `stages` buffers
spread over (stages - 1) * r steps. From an offline model that ranked known kernels sensibly; L2 rates and
latencies are estimates, not measured: it is meant to cut a space to the points worth compiling and timing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pagec.compiler.backends.cuda.resources import SCHEDULERS
from pagec.compiler.target import CudaTarget

Bound = Literal[
    "tensor cores", "exp", "arithmetic", "issue", "shared memory", "L2", "DRAM bandwidth", "latency", "waves"
]
# What a warp does one after the other.
IN_TURN: Final[tuple[Bound, ...]] = ("tensor cores", "exp", "arithmetic")
# Clocks that the barriers of a step cost.
SYNC: Final = 60
SHARED_BYTES_PER_CLOCK: Final = 128
EXP_PER_CLOCK: Final = 16
# Of the memory's peak, what long reads reach.
DRAM_SHARE: Final = 0.92
# From one kernel to the next in a captured graph.
LAUNCH_US: Final = 1.5
# Beyond this share of an even distribution the uneven one is what bounds a kernel.
UNEVEN: Final = 1.25
# Entries of free slots that are worth joining.
MANY: Final = 32


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a multiprocessor: float32 operations, bytes from the L2 cache, and products by the instructions of
    single warps, per clock; clocks from a load's issue to its data, from the L2 and from memory."""

    float_per_clock: int
    l2_bytes_per_clock: int
    warp_mma_flops_per_clock: int
    l2_latency: int
    memory_latency: int


RATES: Final[Mapping[int, Rates]] = {
    80: Rates(64, 32, 2048, 300, 700),
    90: Rates(128, 24, 2048, 300, 800),
}


def rates_of(target: CudaTarget) -> Rates:
    """Of the target's architecture; of the newest known for later ones."""
    return RATES[max(sm for sm in RATES if sm <= target.sm)]


@dataclass(frozen=True, slots=True)
class Loop:
    """What a step of a block's inner loop asks for, in clocks; `wait`: loads' latency over the steps that it
    is spread over; `syncs`: barriers."""

    pipes: Mapping[Bound, float]
    warps: int
    wait: float
    syncs: int = 1

    def clocks_of(self, around: float, residents: int) -> Callable[[int], float]:
        """Clocks that a block takes for so many steps and what is `around` them (latencies before the first
        and after the last), while others do theirs."""
        shared, alone = self.step(residents)[0], self.step(1)[0]
        return lambda steps: max(steps * shared, around + steps * alone)

    def step(self, residents: int) -> tuple[float, Bound]:
        """Clocks from one step of a block to its next while `residents` of them share the multiprocessor, and
        what sets them."""
        bound = max(self.pipes, key=lambda pipe: self.pipes[pipe])
        turns = [self.pipes[pipe] for pipe in IN_TURN if pipe in self.pipes]
        rest = sum(turns) - max(turns, default=0.0)
        busy = self.pipes[bound] + rest / max(1.0, residents * self.warps / SCHEDULERS)
        busy += self.syncs * SYNC / residents
        if self.wait > residents * busy:
            return self.wait, "latency"
        return residents * busy, bound


def loads_wait(latency: float, stages: int) -> float:
    """The latency over the steps that a pipeline of so many stages loads ahead."""
    return latency / max(stages - 1, 1)


def memory_bytes_per_clock(target: CudaTarget) -> float:
    """What long reads get from memory, all multiprocessors together."""
    return DRAM_SHARE * 1e3 * target.memory_bytes_per_ns / target.clock_mhz


def residents_of(occupancy: int, blocks: int, sms: int) -> int:
    """Blocks that share a multiprocessor: no more than there are."""
    return max(1, min(occupancy, -(-blocks // sms)))


def makespan(jobs: Iterable[tuple[float, int]], slots: int) -> float:
    """When the last of the jobs (clocks, how many) ends, the longest dealt first to whoever is free."""
    free = [(0.0, slots)]  # (when, how many slots)
    for clocks, count in sorted(jobs, reverse=True):
        while count:
            when, width = heapq.heappop(free)
            taken = min(width, count)
            if taken < width:
                heapq.heappush(free, (when, width - taken))
            heapq.heappush(free, (when + clocks, taken))
            count -= taken
            free = _joined(free)
    return max((when for when, _ in free), default=0.0)


def _joined(free: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Slots that are free at the same time as one entry."""
    if len(free) < MANY:
        return free
    widths: dict[float, int] = {}
    for when, width in free:
        widths[when] = widths.get(when, 0) + width
    joined = list(widths.items())
    heapq.heapify(joined)
    return joined
