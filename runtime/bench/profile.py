"""Where the time of real steps goes, kernel by kernel, beside each kernel's bound.

Prompts are computed first, then tokens are decoded: the two kinds of step are reported apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.runtime.bench.bounds import Bounds, bound, bounds_of
from pagec.runtime.bench.cost import Chunk
from pagec.runtime.bench.limits import Limits, median_limits
from pagec.runtime.bench.probes import open_probes
from pagec.runtime.bench.summary import rounded
from pagec.runtime.engine import Engine
from pagec.runtime.trace import Event, Recorder

Phase = Literal["prefill", "decode"]
# Spans of the engine that hold other spans or kernels: their own time is what is left.
_LAUNCHING = ("body", "head")


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A kernel, a template, or a part of the engine within the steps of a phase; times are of one step."""

    name: str
    launches: float
    us: float
    share: float
    bound_us: float
    bound: str

    @property
    def of_bound(self) -> float:
        """The least time over the time it took."""
        return self.bound_us / self.us if self.us else 0.0

    def to_json(self) -> dict[str, Any]:
        row = {k: rounded(v) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**row, "of_bound": rounded(self.of_bound)}


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """The steps of one phase: kernels by key and by template, and the engine's own work."""

    phase: Phase
    steps: int
    tokens: float
    step_us: float
    kernels: list[ProfileRow]
    templates: list[ProfileRow]
    engine: list[ProfileRow]

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "steps": self.steps,
            "tokens": rounded(self.tokens),
            "step_us": rounded(self.step_us),
            **{
                name: [row.to_json() for row in rows]
                for name, rows in (
                    ("kernels", self.kernels),
                    ("templates", self.templates),
                    ("engine", self.engine),
                )
            },
        }


def record_steps(engine: Engine, prompt_tokens: int, batch: int, steps: int) -> Recorder:
    """Steps of `batch` prompts and then `steps` steps of decoding, recorded; once before, unrecorded."""
    recorder = Recorder(kernels=True)
    for trace in (None, recorder):
        engine.trace = trace
        rng = np.random.default_rng()
        for _ in range(batch):
            tokens = rng.integers(0, engine.program.vocab, prompt_tokens).tolist()
            engine.add_request(tokens, steps + 1, ignore_eos=True)
        for _ in engine.stream():
            pass
    engine.trace = None
    return recorder


def profile(
    artifact: Artifact | GpuArtifact, engine: Engine, prompt_tokens: int, batch: int, steps: int
) -> tuple[list[PhaseProfile], Recorder, Limits]:
    """Profiles of prefill and decoding, the trace that they come from, and the machine's limits."""
    probes = open_probes(engine)
    measured = [probes.measure()]
    recorder = record_steps(engine, prompt_tokens, batch, steps)
    measured.append(probes.measure())
    limits = median_limits(measured)
    return phases(artifact, recorder, limits), recorder, limits


def phases(artifact: Artifact | GpuArtifact, recorder: Recorder, limits: Limits) -> list[PhaseProfile]:
    """The profile of each phase that occurs in a recording."""
    bounds = bounds_of(artifact)
    found = []
    for phase in ("prefill", "decode"):
        chosen = [i for i, shape in enumerate(recorder.steps) if _phase(shape.chunks) == phase]
        if chosen:
            found.append(_phase_profile(recorder, bounds, limits, phase, chosen))
    return found


def _phase(chunks: Sequence[Chunk]) -> Phase:
    return "prefill" if any(count > 1 or start == 0 for start, count in chunks) else "decode"


@dataclass(slots=True)
class _Total:
    launches: int = 0
    us: float = 0.0
    nbytes: int = 0
    flops: int = 0


def _phase_profile(
    recorder: Recorder, bounds: Bounds, limits: Limits, phase: Phase, chosen: list[int]
) -> PhaseProfile:
    steps = set(chosen)
    kernel_events = [e for e in recorder.events if e.step in steps and e.row == "kernels"]
    engine_events = [e for e in recorder.events if e.step in steps and e.row == "engine"]
    step_us = sum(event.duration_us for event in engine_events) / len(steps)

    def cost(event: Event) -> tuple[int, int]:
        shape = recorder.steps[event.step]
        return bounds.of(event.name, event.args["kernel"], event.args["rows"], shape.chunks)

    def grouped(key: Callable[[Event], str], events: Iterable[Event]) -> list[ProfileRow]:
        totals: dict[str, _Total] = {}
        for event in events:
            total = totals.setdefault(key(event), _Total())
            nbytes, flops = cost(event) if event.row == "kernels" else (0, 0)
            total.launches += 1
            total.us += event.duration_us
            total.nbytes += nbytes
            total.flops += flops
        rows = [_row(name, total, len(steps), step_us, limits) for name, total in totals.items()]
        return sorted(rows, key=lambda row: -row.us)

    kernels_us = sum(event.duration_us for event in kernel_events) / len(steps)
    own = [row for row in grouped(lambda e: e.name, engine_events) if row.name not in _LAUNCHING]
    launching = sum(e.duration_us for e in engine_events if e.name in _LAUNCHING) / len(steps) - kernels_us
    own.append(ProfileRow("launch", 1.0, launching, launching / step_us, 0.0, ""))
    return PhaseProfile(
        phase=phase,
        steps=len(steps),
        tokens=sum(recorder.steps[i].num_tokens for i in chosen) / len(steps),
        step_us=step_us,
        kernels=grouped(lambda e: e.args["kernel"], kernel_events),
        templates=grouped(lambda e: bounds.templates[e.args["kernel"]], kernel_events),
        engine=own,
    )


def _row(name: str, total: _Total, steps: int, step_us: float, limits: Limits) -> ProfileRow:
    us = total.us / steps
    least, what = bound(total.nbytes / steps, total.flops / steps, limits)
    return ProfileRow(name, total.launches / steps, us, us / step_us if step_us else 0.0, least, what)
