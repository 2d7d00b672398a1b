"""What a launch must at least compute, read and write, and the time that this takes at least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.runtime.bench.cost import AttentionCost, Chunk, ModelCost, model_cost
from pagec.runtime.bench.limits import Limits


class Bounds(Protocol):
    """Of a program's launches."""

    @property
    def templates(self) -> Mapping[str, str]:
        """Of the program's kernels, by key."""

    def of(self, launch: str, kernel: str, rows: int, chunks: Sequence[Chunk]) -> tuple[int, int]:
        """(bytes, FLOPs) of a launch that takes this kernel for so many rows of a step. Only attention
        depends on the chunks."""

    def reads_memory(self, launch: str, kernel: str) -> bool:
        """Whether it reads what no cache holds in a step: weights, or keys and values."""


def bounds_of(artifact: Artifact | GpuArtifact) -> Bounds:
    """Of an artifact's program."""
    if isinstance(artifact, Artifact):
        return CpuBounds(artifact)
    from pagec.runtime.bench.gpu_bounds import GpuBounds

    return GpuBounds(artifact)


class CpuBounds:
    """By what the compiler has counted for each kernel."""

    def __init__(self, artifact: Artifact) -> None:
        self.cost: ModelCost = model_cost(artifact)
        program = artifact.program
        self._kernels = {kernel.key: kernel for kernel in program.kernels}
        self._launches = {launch.name: launch for launch in (*program.body, *program.head)}
        self.templates = {kernel.key: kernel.template for kernel in program.kernels}

    def of(self, launch: str, kernel: str, rows: int, chunks: Sequence[Chunk]) -> tuple[int, int]:
        counted, layer = self._kernels[kernel], self._attention(launch)
        if self._launches[launch].rows in ("tiles", "merges"):
            rows = sum(count for _, count in chunks)
        if layer is None:
            return counted.bytes_fixed + counted.bytes_per_row * rows, counted.flops_per_row * rows
        nbytes = sum(layer.kv_bytes(*chunk, self.cost.kv_item_bytes) for chunk in chunks)
        nbytes += counted.bytes_per_row * rows
        return nbytes, sum(layer.flops(*chunk) for chunk in chunks)

    def reads_memory(self, launch: str, kernel: str) -> bool:
        return self._launches[launch].rows in ("tiles", "merges") or self._kernels[kernel].bytes_fixed > 0

    def _attention(self, launch: str) -> AttentionCost | None:
        """Attention takes tiles and reads the pool; what merges its parts takes tiles alone."""
        one = self._launches[launch]
        layers = [int(arg.removeprefix("kv:")) for arg in one.args if arg.startswith("kv:")]
        return self.cost.layers[layers[0]] if one.rows == "tiles" and layers else None


def bound(nbytes: float, flops: float, limits: Limits) -> tuple[float, str]:
    """The least time in microseconds, and what sets it."""
    memory, compute = 1e6 * nbytes / limits.read_bytes_per_s, 1e6 * flops / limits.flops_per_s
    if not memory and not compute:
        return 0.0, ""
    return max(memory, compute), "memory" if memory >= compute else "compute"
