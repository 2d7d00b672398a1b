"""Hugging Face directories: config.json, and safetensors in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers.checkpoint import Checkpoint

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a map; CheckpointError if it does not."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {error}", place=str(path), remedy="fetch it again") from error
    if not isinstance(data, dict):
        raise CheckpointError("is no map", place=str(path), remedy="fetch it again")
    return data


class SafetensorsCheckpoint:
    """The tensors of a directory. Files are opened at once, which reads and checks their headers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}  # of each tensor
        if (path / SINGLE).is_file():
            handle = _open(path / SINGLE)
            self._files = dict.fromkeys(handle.keys(), handle)
        elif (path / INDEX).is_file():
            self._open_shards(read_json(path / INDEX).get("weight_map"))
        else:
            raise CheckpointError(
                f"there is neither {SINGLE} nor {INDEX}",
                place=str(path),
                remedy="pagec reads safetensors; convert other files with transformers' save_pretrained",
            )

    def _open_shards(self, weight_map: Any) -> None:
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError("has no weight_map", place=str(self.path / INDEX), remedy="fetch it again")
        missing = sorted({f for f in weight_map.values() if not (self.path / f).is_file()})
        if missing:
            raise CheckpointError(
                f"the index names files that are not there: {', '.join(missing)}",
                place=str(self.path / INDEX),
                remedy="fetch the missing files",
            )
        handles = {f: _open(self.path / f) for f in sorted(set(weight_map.values()))}
        held = {f: set(handle.keys()) for f, handle in handles.items()}
        absent = sorted(name for name, f in weight_map.items() if name not in held[f])
        if absent:
            raise CheckpointError(
                f"the index names tensors that their files do not hold: {', '.join(absent[:10])}",
                place=str(self.path / INDEX),
                remedy="fetch the files again",
            )
        self._files = {name: handles[f] for name, f in weight_map.items()}

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> npt.NDArray[np.float32]:
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} has dtype {dtype}; pagec reads {', '.join(_FLOATS)}",
                place=str(self.path),
                remedy="use the checkpoint that was not quantised",
            )
        array: npt.NDArray[np.float32] = self._files[name].get_tensor(name).float().numpy()
        return array


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    opener: Callable[..., Any] = safe_open
    try:
        return opener(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", place=str(path), remedy="fetch it again") from error


class HfFacts:
    """A directory's config.json and tensors, for the mapping of params."""

    def __init__(self, directory: Path) -> None:
        self.place = str(directory / "config.json")
        self.config = read_json(directory / "config.json")
        if self.config.get("quantization_config"):
            raise CheckpointError(
                "the checkpoint is quantised (quantization_config)",
                place=self.place,
                remedy="use the checkpoint that was not quantised, or a GGUF file",
            )
        self.checkpoint: Checkpoint = SafetensorsCheckpoint(directory)

    def value(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def has(self, key: str) -> bool:
        *maps, last = key.split(".")
        inner = self.value(".".join(maps)) if maps else self.config
        return isinstance(inner, dict) and last in inner
