"""GGUF checkpoints: metadata, and tensors dequantised to float32 (by the `gguf` package)."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers.checkpoint import Checkpoint
from pagec.compiler.importers.gguf_file import GgufError, GgufFile, GgufTensor, shortest


class GgufCheckpoint:
    """A GGUF file. Files list shapes reversed; here they read rows first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = GgufFile(path)
            for tensor in self._file.tensors.values():
                self._bytes(tensor)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CheckpointError(
                f"not a GGUF file that can be read: {reason}", place=str(path), remedy="fetch it again"
            ) from error
        parts = self.value("split.count")
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"is one of {parts} parts",
                place=str(path),
                remedy="join them with llama.cpp's `llama-gguf-split --merge`",
            )

    def value(self, key: str) -> Any:
        """A metadata value; None if there is none."""
        return self._file.values[key]() if self.has(key) else None

    def has(self, key: str) -> bool:
        return key in self._file.values

    def names(self) -> set[str]:
        return set(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def read(self, name: str) -> npt.NDArray[np.float32]:
        from gguf import GGMLQuantizationType, quants

        tensor = self._file.tensors[name]
        kind = GGMLQuantizationType(tensor.type)
        rows = self._bytes(tensor).reshape(*tensor.shape[:-1], -1)
        try:
            array = quants.dequantize(rows.view(_PLAIN.get(kind.name, np.uint8)), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{name} is stored as {kind.name}, which cannot be dequantised",
                place=str(self.path),
                remedy="use another quantisation of the model",
            ) from error
        return np.asarray(array, dtype=np.float32).reshape(tensor.shape)

    def _bytes(self, tensor: GgufTensor) -> Any:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        if prod(tensor.shape) % elements:
            raise GgufError(f"{tensor.name} has no whole number of blocks of {elements}")
        return self._file.bytes_of(tensor, prod(tensor.shape) // elements * size)


# Types that are stored as numbers.
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


class GgufFacts:
    """A GGUF file's metadata and tensors, for the mapping of params."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self.file = GgufCheckpoint(path)
        self.checkpoint: Checkpoint = self.file
        self.architecture = str(self.file.value("general.architecture"))

    def value(self, key: str) -> Any:
        """A metadata value; a list of equal numbers (one for each layer) is that number."""
        found = self.file.value(key.replace("{arch}", self.architecture))
        if not isinstance(found, list):
            return found
        if len(set(map(str, found))) == 1:
            return shortest(found[0]) if isinstance(found[0], float) else found[0]
        raise CheckpointError(
            f"{key.replace('{arch}', self.architecture)} differs from layer to layer: {found!r:.80}",
            place=self.place,
            remedy="write a spec by hand, with the value as an expression of the layer index i",
        )

    def has(self, key: str) -> bool:
        return self.file.has(key.replace("{arch}", self.architecture))
