"""The device and the runner that an artifact asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.runtime.device import Device
from pagec.runtime.weights import WeightsMemory

if TYPE_CHECKING:
    from pagec.runtime.gpu.runner import GpuRunner
    from pagec.runtime.runner import Runner

AnyArtifact = Artifact | GpuArtifact


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load and where to: `weights` and `weights_memory` as in load_weights; `num_blocks` or
    `kv_bytes` size the KV pool; `threads` of a CPU; `graph_rows` of a GPU, as in GpuRunner."""

    weights: str | None = None
    weights_memory: WeightsMemory = "copy"
    num_blocks: int | None = None
    kv_bytes: int | None = None
    threads: int | None = None
    graph_rows: int | None = None


def load(
    artifact: AnyArtifact, options: LoadOptions, device: Device | None = None
) -> tuple[Device, Runner | GpuRunner]:
    """The artifact's device (or the one that is given) and its runner. Only what that device needs is
    imported: a serving process on a CPU never sees torch, one on a GPU no TVM."""
    memory = {
        "weights": options.weights,
        "weights_memory": options.weights_memory,
        "num_blocks": options.num_blocks,
        "kv_bytes": options.kv_bytes,
    }
    if isinstance(artifact, GpuArtifact):
        from pagec.runtime.device.cuda.device import CudaDevice
        from pagec.runtime.gpu.runner import GpuRunner

        gpu = device or CudaDevice(artifact)
        assert isinstance(gpu, CudaDevice)
        return gpu, GpuRunner(artifact, gpu, **memory, graph_rows=options.graph_rows)  # type: ignore[arg-type]
    from pagec.runtime.device.cpu import CpuDevice
    from pagec.runtime.runner import Runner

    cpu = device or CpuDevice(artifact.path, options.threads)
    return cpu, Runner(artifact, cpu, **memory)  # type: ignore[arg-type]
