"""What the cost model says of a point, or why it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagec.autotune.clocks import Bound
from pagec.autotune.problem import Problem
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.target import CudaTarget

# Knobs by name. Plain, so that tables of them can be read and written by hand.
Point = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of a problem at a point, and what bounds it.

    `occupancy`: blocks per multiprocessor. `resources` are the compiler's figures or, before it has run,
    estimates. `clocks`: what a step of the inner loop asks of each pipe.
    """

    us: float
    bound: Bound
    occupancy: int
    resources: Resources
    clocks: Mapping[Bound, float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point and its prediction, or the reason why it was dropped."""

    point: Point
    prediction: Prediction | None
    reason: str = ""

    @property
    def us(self) -> float:
        """Infinite for one that was dropped."""
        return self.prediction.us if self.prediction else float("inf")


def roofline_us(problem: Problem, target: CudaTarget) -> tuple[float, Bound]:
    """The least time that the problem's products and bytes allow on the target, and which of them sets it."""
    compute = problem.flops / (target.mma_flops_per_clock * target.sms * target.clock_mhz)
    memory = problem.nbytes / (1e3 * target.memory_bytes_per_ns)
    return (compute, "tensor cores") if compute >= memory else (memory, "DRAM bandwidth")
