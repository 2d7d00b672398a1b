"""A program's launches, resolved and packed for the memory that they work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.errors import ArtifactError
from pagec.compiler.gpu_program import GpuLaunch, Span, When
from pagec.runtime.device.cuda.device import CudaDevice, GpuCall, GpuCalls
from pagec.runtime.gpu.memory import GpuAreas

# What a head is to give: tokens, by the greatest logit or sampled; or first the logits, and then draws from
# what the host has made of them.
HeadKind = Literal["greedy", "sampled", "logits", "draws"]
_WANTED: Final[dict[HeadKind, tuple[When, ...]]] = {
    "greedy": ("always", "greedy"),
    "sampled": ("always", "sampled"),
    "logits": ("always",),
    "draws": ("sampled",),
}


class Launches:
    """All lists of launches that steps take; `most`: rows at most, by Counts."""

    def __init__(
        self, artifact: GpuArtifact, device: CudaDevice, memory: GpuAreas, most: tuple[int, ...]
    ) -> None:
        self._artifact, self._memory, self._most = artifact, memory, most
        program = artifact.program

        def prepare(launches: Iterable[GpuLaunch]) -> GpuCalls:
            return device.prepare([self._call(launch) for launch in launches], most)

        self._body = {span.rows: prepare(span.launches) for span in program.body}
        self._head = {
            (span.rows, kind): prepare(_head_launches(span, kind))
            for span in program.head
            for kind in _WANTED
        }
        self.copy = prepare([program.copy])
        self.prepare: Callable[[Iterable[GpuLaunch]], GpuCalls] = prepare

    def run_empty(self) -> None:
        """Launches every kernel once while `counts` is zero, so that none does anything: what a driver
        prepares at a first launch could not be captured."""
        for calls in (*self._body.values(), *self._head.values(), self.copy):
            calls.run([min(rows, 1) for rows in self._most])

    def body(self, span: Span) -> GpuCalls:
        """A body's launches."""
        return self._body[span.rows]

    def head(self, span: Span, kind: HeadKind) -> GpuCalls:
        """A head's launches."""
        return self._head[span.rows, kind]

    def _call(self, launch: GpuLaunch) -> GpuCall:
        try:
            pointers = tuple(self._memory.find(argument) for argument in launch.args)
            return GpuCall(
                launch.name, launch.kernel, launch.counts, pointers, self._memory.count(launch.counts)
            )
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"launch {launch.name} cannot be resolved ({error})",
                place=f"{self._artifact.path}/program.json",
                remedy="compile the model again",
            ) from error


def _head_launches(span: Span, kind: HeadKind) -> list[GpuLaunch]:
    """Those of a head that a step of this kind wants."""
    return [launch for launch in span.launches if launch.when in _WANTED[kind]]
