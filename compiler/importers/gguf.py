"""GGUF files: metadata, and tensors dequantised to float32 (the `gguf` package reads both)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers.checkpoint import Checkpoint


class GgufCheckpoint:
    """A GGUF file. Files list shapes reversed; here they read rows first."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CheckpointError(
                f"not a GGUF file that can be read: {reason}", place=str(path), remedy="fetch it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        parts = self.value("split.count")
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"is one of {parts} parts",
                place=str(path),
                remedy="join them with llama.cpp's `llama-gguf-split --merge`",
            )

    def value(self, key: str) -> Any:
        """A metadata value; None if there is none.

        A float32 becomes the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06, is
        what was meant.
        """
        field = self._reader.fields.get(key)
        if field is None:
            return None
        value = field.contents()
        if field.types[-1].name == "FLOAT32":
            return [_shortest(v) for v in value] if isinstance(value, list) else _shortest(value)
        return value

    def has(self, key: str) -> bool:
        return key in self._reader.fields

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        from gguf import quants

        tensor = self._tensors[name]
        try:
            array = quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{name} is stored as {tensor.tensor_type.name}, which cannot be dequantised",
                place=str(self.path),
                remedy="use another quantisation of the model",
            ) from error
        return np.asarray(array, dtype=np.float32).reshape(self.shape(name))


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


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
            return found[0]
        raise CheckpointError(
            f"{key.replace('{arch}', self.architecture)} differs from layer to layer: {found!r:.80}",
            place=self.place,
            remedy="write a spec by hand, with the value as an expression of the layer index i",
        )

    def has(self, key: str) -> bool:
        return self.file.has(key.replace("{arch}", self.architecture))
