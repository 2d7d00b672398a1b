"""An artifact on a GPU, with random weights that are made there: no file of gigabytes is read or sent."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from gpu.watch import CountingLibrary
from pagec.compiler.artifact import GpuArtifact, weights_header
from pagec.compiler.program import PackedWeight
from pagec.compiler.random_weights import SCALE
from pagec.runtime.device import Memory
from pagec.runtime.device.cuda.device import CudaDevice
from pagec.runtime.device.cuda.driver import open_library
from pagec.runtime.device.cuda.gpu import TorchGpu
from pagec.runtime.engine import Engine
from pagec.runtime.gpu.runner import GpuRunner

DTYPES: Final = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}


class UnreadWeights(CudaDevice):
    """Gives memory for a file's tensors that it does not read."""

    def read_file(self, path: Path, offset: int, nbytes: int) -> Memory:
        del path, offset
        return self.allocate(nbytes)


class Machine:
    """The GPU and its driver. `gpu` and `library` (of an artifact) may be replaced by tests."""

    def __init__(self, gpu: TorchGpu | None = None, library: Any = None) -> None:
        self.gpu = gpu or TorchGpu()
        self._library = library or (lambda _: open_library())

    def load(self, artifact: GpuArtifact, *, seed: int = 0, **options: Any) -> Loaded:
        """An engine for the artifact; `options` are Engine's."""
        library = CountingLibrary(self._library(artifact))
        device = UnreadWeights(artifact, gpu=self.gpu, library=library)
        with tempfile.TemporaryDirectory() as directory:
            weights = hollow_weights(artifact.program.weights, Path(directory) / "weights.safetensors")
            engine = Engine(
                artifact,
                device=device,
                weights=str(weights),
                prefix_cache=False,
                eos_token_ids=(),
                **options,
            )
        runner = engine.runner
        assert isinstance(runner, GpuRunner)
        fill_weights(artifact.program.weights, runner.memory.weights, seed)
        return Loaded(artifact, device, engine, runner, library)

    def free(self) -> None:
        """Gives memory that nothing holds back to the GPU: torch keeps it for itself."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Loaded:
    """An artifact that is ready to run. Its engine is idle between checks, which use the runner as well."""

    artifact: GpuArtifact
    device: CudaDevice
    engine: Engine
    runner: GpuRunner
    library: CountingLibrary


def hollow_weights(weights: tuple[PackedWeight, ...], path: Path) -> Path:
    """A weights file of the right size that holds nothing but its head, and takes no place."""
    head, _ = weights_header(weights)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(weight.nbytes for weight in weights))
    return path


def is_padded(weight: PackedWeight) -> bool:
    """Whether it holds more than the model's own numbers."""
    return prod(weight.shape) > sum(map(prod, weight.part_shapes))


def fill_weights(weights: Sequence[PackedWeight], memory: Any, seed: int) -> None:
    """As random_weights.py has it, of other numbers: normal, and ones for norms. Not for padded weights,
    whose padding would not be zero."""
    generator: torch.Generator | None = None
    for weight in weights:
        assert not is_padded(weight), weight.name
        tensor = memory[weight.name].view(DTYPES[weight.dtype])
        if len(weight.shape) == 1:
            tensor.fill_(1)
            continue
        generator = generator or torch.Generator(tensor.device).manual_seed(seed)
        tensor.normal_(0.0, SCALE, generator=generator)
