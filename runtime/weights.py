"""Brings a program's packed weights into a device's memory.

The source is the artifact's own file, another weights file of the same program, or `random:SEED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import numpy as np

from pagec.compiler.artifact import WEIGHTS, Artifact, GpuArtifact, weights_header
from pagec.compiler.errors import ArtifactError, CheckpointError
from pagec.compiler.program import PackedWeight
from pagec.compiler.random_weights import random_packed
from pagec.runtime.device import Device, Memory

RANDOM: Final = "random:"

# copy: several threads read the file into huge pages. mmap: the file's pages as they are.
WeightsMemory = Literal["copy", "mmap"]


def load_weights(
    device: Device, artifact: Artifact | GpuArtifact, source: str | None, kind: WeightsMemory = "copy"
) -> Mapping[str, Memory]:
    """Each packed tensor's memory, by name. `source` None: the artifact's own weights."""
    weights = artifact.program.weights
    if source is None and not artifact.has_weights:
        raise ArtifactError(
            "holds kernels only, no weights",
            place=str(artifact.path),
            remedy="give --weights PATH or --weights random:SEED, or compile with weights",
        )
    if source is not None and source.startswith(RANDOM):
        if kind == "mmap":
            raise CheckpointError(
                f"{source} is no file to map", place="weights", remedy="use --weights-memory copy"
            )
        return _random(device, weights, source.removeprefix(RANDOM))
    return _from_file(device, weights, Path(source) if source else artifact.path / WEIGHTS, kind)


def _from_file(
    device: Device, weights: tuple[PackedWeight, ...], path: Path, kind: WeightsMemory
) -> dict[str, Memory]:
    head, offsets = weights_header(weights)
    nbytes = sum(w.nbytes for w in weights)
    if not path.is_file():
        raise CheckpointError("no such file", place=str(path), remedy="give a weights.safetensors")
    with path.open("rb") as file:
        same = file.read(len(head)) == head
    if not same or path.stat().st_size != len(head) + nbytes:
        raise ArtifactError(
            "does not hold this program's packed tensors",
            place=str(path),
            remedy="use the weights.safetensors of the same program, or compile again with these weights",
        )
    bring = device.map_file if kind == "mmap" else device.read_file
    memory = bring(path, len(head), nbytes)
    return {w.name: memory[offsets[w.name] - len(head) :][: w.nbytes] for w in weights}


def _random(device: Device, weights: tuple[PackedWeight, ...], text: str) -> dict[str, Memory]:
    if not text.isdecimal():
        raise CheckpointError(f"{text!r} is not a seed", place="weights", remedy="write random:0")
    seed = int(text)

    def make(weight: PackedWeight) -> Memory:
        memory = device.allocate(weight.nbytes)
        device.upload(memory, np.ascontiguousarray(random_packed(seed, weight)))
        return memory

    with ThreadPoolExecutor(device.num_workers) as pool:
        return dict(zip((w.name for w in weights), pool.map(make, weights), strict=True))
