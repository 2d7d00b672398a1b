"""Devices: what allocates, copies, loads and launches. The only part of the runtime that knows hardware.

A device hands out *memory*: a flat range of bytes that slices like an array (`memory[a:b]`) and is opaque
to everyone else. A *tensor* is a typed flat view of memory, as kernels take it; a *function* is a kernel,
called as `function(*tensors, num_rows, num_workers)`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy.typing as npt

Memory = Any
Tensor = Any
Function = Callable[..., object]
ElementType = Literal["int32", "float32", "int16"]
ELEMENT_BYTES: Final[dict[str, int]] = {"int32": 4, "float32": 4, "int16": 2}

Array = npt.NDArray[Any]


class Device(Protocol):
    """What the runner, autotune and verify ask of a device."""

    @property
    def num_workers(self) -> int:
        """Shares into which a kernel's work is cut."""

    def allocate(self, nbytes: int, *, sparse: bool = False) -> Memory:
        """Zeroed memory, aligned as kernels need it. `sparse`: much of it may never be touched."""

    def read_file(self, path: Path, offset: int, nbytes: int) -> Memory:
        """Memory that holds a range of a file."""

    def upload(self, memory: Memory, array: Array) -> None:
        """Copies a contiguous host array to the start of `memory`."""

    def download(self, memory: Memory, dtype: npt.DTypeLike) -> Array:
        """A host copy of `memory`, flat. Waits for the launches before it."""

    def fill_nan(self, memory: Memory) -> None:
        """Fills memory with NaN, whatever its float type (for tests: nothing may depend on stale bytes)."""

    def tensor(self, memory: Memory, dtype: str) -> Tensor:
        """A flat view of `memory` as kernel argument; `dtype` is an ElementType."""

    def function(self, symbol: str) -> Function:
        """The kernel of this name; ArtifactError if there is none."""

    def free_bytes(self) -> int:
        """Bytes that may still be allocated."""
