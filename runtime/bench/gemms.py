"""The matrix products of recorded steps alone: the same linears with the same numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagec.compiler.program import Launch
from pagec.runtime.bench.probes import seconds
from pagec.runtime.engine import Engine
from pagec.runtime.runner import Runner
from pagec.runtime.trace import StepShape


class Gemms(Protocol):
    """The program's matrix products as lists of their own."""

    def seconds(self, steps: Sequence[StepShape]) -> float:
        """How long the products of these steps take."""


def gemms_of(engine: Engine) -> Gemms:
    """Of an engine's program."""
    if isinstance(engine.runner, Runner):
        return CpuGemms(engine.runner)
    from pagec.runtime.bench.gpu_gemms import GpuGemms

    return GpuGemms(engine.runner)


class CpuGemms:
    """As Gemms."""

    def __init__(self, runner: Runner) -> None:
        program = runner.program
        kernels = {kernel.key: kernel.template for kernel in program.kernels}

        def products(launches: Sequence[Launch]) -> list[str]:
            return [launch.name for launch in launches if "linear" in kernels[launch.variants[-1][1]]]

        self._body = runner.prepare(products(program.body))
        self._head = runner.prepare(products(program.head))
        self._counts = runner.head_counts

    def seconds(self, steps: Sequence[StepShape]) -> float:
        body = sum(seconds(self._body, step.num_tokens, step.num_tiles, 0, 0, 0, 0, 0) for step in steps)
        counts = [self._counts(rows, want_logits=False) for step in steps for rows in step.head_rows]
        return body + sum(seconds(self._head, *count) for count in counts)
