"""Workloads in turns on one engine, which has been idle for a moment before each. In every turn the machine's
limits are measured, too.

Beside each rate stands what the matrix products alone reach: the same linears with the same numbers of rows
as in the steps just run, and nothing in between (`gemm_only_*`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.runtime.bench.cost import model_cost
from pagec.runtime.bench.gemms import Gemms, gemms_of
from pagec.runtime.bench.limits import Limits, median_limits
from pagec.runtime.bench.probes import open_probes
from pagec.runtime.bench.summary import Summary, summarise_all, to_json
from pagec.runtime.bench.workloads import WORKLOADS, Ask, Figures, Timeline, Workload, run_asks
from pagec.runtime.engine import Engine
from pagec.runtime.trace import Recorder

Progress = Callable[[str, int, int], None]

# The rate of a workload that its matrix products alone are compared with.
_RATES: Final = ("decode_tokens_per_s", "prefill_tokens_per_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Turn:
    """One repetition of one workload, before the limits of the whole run are known."""

    asks: list[Ask]
    line: Timeline
    gemm_only_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """A workload's figures over all turns."""

    workload: str
    figures: dict[str, Summary]
    repeat: int
    threads: int
    model: str

    def to_json(self) -> dict[str, Any]:
        head = {"workload": self.workload, "model": self.model, "threads": self.threads}
        return {**head, "repeat": self.repeat, **to_json(self.figures)}


def run_workloads(
    artifact: Artifact | GpuArtifact, engine: Engine, names: Sequence[str], repeat: int, progress: Progress
) -> list[Report]:
    """Runs the workloads in turns, after one of each that does not count."""
    cost, probes = model_cost(artifact), open_probes(engine)
    gemms = gemms_of(engine)
    chosen = [WORKLOADS[name] for name in names]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    measured: list[Limits] = []
    for index in range(-1, repeat):
        for place, workload in enumerate(chosen):
            progress("measure", max(index * len(chosen) + place, 0), repeat * len(chosen))
            limits, turn = probes.measure(), _turn(engine, workload, gemms)
            if index >= 0:
                measured.append(limits)
                turns[workload.name].append(turn)
    progress("measure", repeat * len(chosen), repeat * len(chosen))
    limits = median_limits(measured)
    spread = summarise_all([m.figures for m in measured])
    return [
        Report(
            workload.name,
            {**summarise_all([_figures(workload, t, cost, limits) for t in turns[workload.name]]), **spread},
            repeat,
            engine.device.num_workers,
            artifact.program.model,
        )
        for workload in chosen
    ]


def _turn(engine: Engine, workload: Workload, gemms: Gemms) -> Turn:
    asks = workload.asks(engine.program.vocab)
    recorder = Recorder()
    engine.runner.settle()
    engine.trace = recorder
    try:
        line = run_asks(engine, asks)
    finally:
        engine.trace = None
    # Of one stream only decoding is compared: its prompt is another workload.
    steps = recorder.steps[-(asks[0].max_tokens - 1) :] if workload.name == "latency" else recorder.steps
    return Turn(asks, line, gemms.seconds(steps))


def _figures(workload: Workload, turn: Turn, cost: Any, limits: Limits) -> Figures:
    figures = workload.figures(turn.line, turn.asks, cost, limits)
    rate = next(name for name in _RATES if name in figures)
    took = turn.line.end_s - turn.line.first_s if workload.name == "latency" else turn.line.end_s
    figures[f"gemm_only_{rate}"] = figures[rate] * took / turn.gemm_only_s
    figures["gemm_only_share"] = turn.gemm_only_s / took
    return figures
