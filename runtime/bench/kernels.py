"""Each kernel of a program alone, at several row counts, beside its bound.

All launches of a kernel run one after the other (the layers have weights of their own), and the caches are
emptied before, so that weights, keys and values come from memory as they do in a step. Activations of few
rows stay in the caches: a row-wise kernel may take less time than its bytes would from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.runtime.bench.bounds import Bounds, bound, bounds_of
from pagec.runtime.bench.cases import Case, KernelBench
from pagec.runtime.bench.limits import Limits, Probes, median_limits
from pagec.runtime.bench.probes import open_probes
from pagec.runtime.bench.summary import rounded
from pagec.runtime.engine import Engine

Progress = Callable[[str, int, int], None]

# The machine's limits are measured again after so many cases: they change with what else runs.
CASES_PER_PROBE: Final = 8


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel at a number of rows; times are of one launch. `bound`: what sets the least time."""

    kernel: str
    template: str
    launches: int
    rows: int
    case: str
    us: float
    bound_us: float
    bound: str

    @property
    def share(self) -> float:
        """The least time over the time it took."""
        return self.bound_us / self.us if self.us else 0.0

    def to_json(self) -> dict[str, Any]:
        row = {k: rounded(v) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**row, "share": rounded(self.share)}


def time_kernels(
    artifact: Artifact | GpuArtifact, engine: Engine, repeat: int, progress: Progress
) -> tuple[list[KernelTime], Limits]:
    """Every kernel at every row count, and the machine's limits beside them."""
    probes, bounds, bench = open_probes(engine), bounds_of(artifact), _bench(engine)
    engine.device.upload(engine.runner.memory.kv, np.zeros(len(engine.runner.memory.kv), np.uint8))
    cases = bench.cases()
    measured, timed = [], []
    for done, case in enumerate(cases):
        progress("time kernels", done, len(cases))
        if done % CASES_PER_PROBE == 0:
            measured.append(probes.measure(passes=1))
        timed.append((case, bench.time_us(case, _before(case, bounds, probes), repeat)))
    progress("time kernels", len(cases), len(cases))
    limits = median_limits(measured)
    return [_row(case, us, bounds, limits) for case, us in timed], limits


def _bench(engine: Engine) -> KernelBench:
    from pagec.runtime.runner import Runner

    if isinstance(engine.runner, Runner):
        from pagec.runtime.bench.cpu_kernels import CpuKernels

        return CpuKernels(engine.runner)
    from pagec.runtime.bench.gpu_kernels import GpuKernels

    return GpuKernels(engine.runner)


def _before(case: Case, bounds: Bounds, probes: Probes) -> Callable[[], None]:
    if bounds.reads_memory(case.launches[0], case.kernel):
        return probes.empty_caches
    return lambda: None


def _row(case: Case, us: float, bounds: Bounds, limits: Limits) -> KernelTime:
    least, what = bound(*bounds.of(case.launches[0], case.kernel, case.rows, case.chunks), limits)
    count, template = len(case.launches), bounds.templates[case.kernel]
    return KernelTime(case.kernel, template, count, case.rows, case.name, us / count, least, what)
