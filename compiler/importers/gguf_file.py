"""Reads a GGUF file: metadata, and where its tensors lie. Nothing is decoded before it is asked for.

    "GGUF" version:u32 tensors:u64 entries:u64
    entries   key:string type:u32 value    (string: length:u64 bytes; array: type:u32 count:u64 values)
    tensors   name:string axes:u32 size:u64... type:u32 offset:u64       the fastest axis first
    data      from the next multiple of general.alignment (32) on

(The format: ggml's docs/gguf.md. The `gguf` package maps each string by itself, which takes seconds for a
vocabulary of 262,144.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
# Scalars by their type's number.
_SCALARS: Final[Mapping[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_ALIGNMENT: Final = "general.alignment"
_MAX_AXES: Final = 8


class GgufError(ValueError):
    """The file is damaged, or no GGUF file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` reads rows first, `type` is ggml's number, `offset` counts from the data's start."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GgufFile:
    """An opened file; `values` decode metadata, `tensors` are by name."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as error:
            raise GgufError(f"it is damaged at byte {self._at}") from error

    def _read(self) -> None:
        if self._bytes(4) != _MAGIC:
            raise GgufError("it does not begin with GGUF")
        version = self._u32()
        if version not in _VERSIONS:
            raise GgufError(f"its version is {version}; known: 2, 3 (little-endian)")
        num_tensors, num_entries = self._u64(), self._u64()
        self.values: dict[str, Callable[[], Any]] = {}
        for _ in range(num_entries):
            key = self._string()
            self.values[key] = self._value(self._u32())
        self.tensors = {tensor.name: tensor for tensor in (self._tensor() for _ in range(num_tensors))}
        alignment = self.values[_ALIGNMENT]() if _ALIGNMENT in self.values else 32
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"its alignment is {alignment!r}")
        self.data_start = -(-self._at // alignment) * alignment

    def bytes_of(self, tensor: GgufTensor, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A tensor's bytes in the file; GgufError if the file ends before."""
        start = self.data_start + tensor.offset
        if start + num_bytes > len(self._map):
            raise GgufError(f"it ends before the tensor {tensor.name}")
        return np.frombuffer(self._map, np.uint8, num_bytes, start)

    # ------------------------------------------------------------------------------------ parts

    def _bytes(self, count: int) -> bytes:
        if count > len(self._map) - self._at:
            raise IndexError(count)
        self._at += count
        return self._map[self._at - count : self._at]

    def _u32(self) -> int:
        self._at += 4
        return int(_U32.unpack_from(self._map, self._at - 4)[0])

    def _u64(self) -> int:
        self._at += 8
        return int(_U64.unpack_from(self._map, self._at - 8)[0])

    def _string(self) -> str:
        return self._bytes(self._u64()).decode("utf-8")

    def _value(self, kind: int) -> Callable[[], Any]:
        """Steps over a value; what decodes it."""
        if kind == _STRING:
            text = self._bytes(self._u64())
            return lambda: text.decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(self._u32(), self._u64())
        scalar = np.frombuffer(self._bytes(_dtype(kind).itemsize), _dtype(kind))[0]
        # 1e-05, not 9.999999747378752e-06, is what was meant by a float32.
        value = shortest(scalar) if kind == _FLOAT32 else scalar.item()
        return lambda: value

    def _array(self, kind: int, count: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self._strings(count)
        start, dtype = self._at, _dtype(kind)
        if count * dtype.itemsize > len(self._map) - start:
            raise IndexError(count)
        self._at += count * dtype.itemsize
        return lambda: np.frombuffer(self._map, dtype, count, start).tolist()

    def _strings(self, count: int) -> Callable[[], list[str]]:
        start = at = self._at
        data, unpack = self._map, _U64.unpack_from
        if count > len(data):
            raise IndexError(count)
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        if at > len(data):
            raise IndexError(at)
        self._at = at

        def decode() -> list[str]:
            found, position = [], start
            for _ in range(count):
                end = position + 8 + unpack(data, position)[0]
                found.append(data[position + 8 : end].decode("utf-8", "replace"))
                position = end
            return found

        return decode

    def _tensor(self) -> GgufTensor:
        name, axes = self._string(), self._u32()
        if axes > _MAX_AXES:
            raise GgufError(f"{name} has {axes} axes")
        sizes = [self._u64() for _ in range(axes)]
        if prod(sizes) > 1 << 50:
            raise GgufError(f"{name} has {prod(sizes)} elements")
        return GgufTensor(name, tuple(reversed(sizes)), self._u32(), self._u64())


def _dtype(kind: int) -> np.dtype[Any]:
    if kind not in _SCALARS:
        raise GgufError(f"it holds a value of the unknown type {kind}")
    return _SCALARS[kind]


def shortest(value: Any) -> float:
    """The shortest decimal that rounds to a float32."""
    return float(str(np.float32(value)))
