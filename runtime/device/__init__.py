"""Devices: what allocates, copies, loads and launches. The only part of the runtime that knows hardware.

A device hands out *memory*: a flat range of bytes that slices like an array (`memory[a:b]`) and is opaque
to everyone else. Kernel calls are *prepared* as a list, once; running the list then takes only numbers of
rows. A CPU's kernels take *tensors*, typed flat views of memory, a GPU's take addresses (cuda/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy.typing as npt

Memory = Any
Tensor = Any
ElementType = Literal["int32", "float32"]
ELEMENT_BYTES: Final[dict[str, int]] = {"int32": 4, "float32": 4}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel's place in a list: which of the row counts that `run` gets it takes (`rows`), and which
    kernel for how many: `variants` are (max_rows, symbol), ascending, the last one without bound (0); for
    as many rows as a variant with an empty symbol takes there is nothing to do. `shares`:
    those of each variant's kernel (see program.Kernel); none: one each."""

    name: str
    rows: int
    variants: tuple[tuple[int, str], ...]
    tensors: tuple[Tensor, ...]
    shares: tuple[int, ...] = ()


class Prepared(Protocol):
    """A list of kernel calls that is ready to run."""

    def run(self, *rows: int) -> None:
        """Runs all calls in order, but those that get no rows."""

    def time_us(self, *rows: int) -> list[float]:
        """The same; microseconds that each took."""


def copy_runs(copies: Array) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of block ranges that may be copied at once in place of `copies`, in order.

    Neighbours become a range unless it would overwrite what it still has to read.
    """
    source = target = count = 0
    for next_source, next_target in copies.tolist():
        if (
            count
            and (next_source, next_target) == (source + count, target + count)
            and abs(source - target) > count
        ):
            count += 1
            continue
        if count:
            yield source, target, count
        source, target, count = next_source, next_target, 1
    if count:
        yield source, target, count


class Device(Protocol):
    """What the runtime, autotune and verify ask of any device."""

    @property
    def num_workers(self) -> int:
        """Shares into which a kernel's work is cut."""

    def allocate(self, nbytes: int, *, parts: int = 1) -> Memory:
        """Zeroed memory, aligned as kernels need it: so many equal parts, each used from its beginning on,
        maybe never to its end."""

    def read_file(self, path: Path, offset: int, nbytes: int) -> Memory:
        """Memory that holds a copy of a range of a file."""

    def map_file(self, path: Path, offset: int, nbytes: int) -> Memory:
        """A range of a file as memory, read when it is touched; the file itself is never written."""

    def upload(self, memory: Memory, array: Array) -> None:
        """Copies a contiguous host array to the start of `memory`."""

    def download(self, memory: Memory, dtype: npt.DTypeLike) -> Array:
        """A host copy of `memory`, flat. Waits for the launches before it."""

    def copy_blocks(self, memory: Memory, spans: int, span_bytes: int, copies: Array) -> None:
        """Copies blocks within a pool [spans][blocks][span_bytes], all spans of each, one after the other.

        `copies`: int32 [n, 2], (source, target).
        """

    def read_blocks(
        self,
        memory: Memory,
        spans: int,
        span_bytes: int,
        blocks: Sequence[int],
        spare: list[Array] | None = None,
    ) -> list[Array]:
        """Host copies of a pool's blocks, uint8 [spans * span_bytes], each an array of its own; those in
        `spare` are used up first. Sees what the launches before it wrote; may run in another thread."""

    def write_blocks(
        self, memory: Memory, spans: int, span_bytes: int, blocks: Sequence[int], data: Sequence[Array]
    ) -> None:
        """Puts such copies into a pool's blocks, before the launches that follow; likewise."""

    def upload_rows(self, memory: Memory, array: Array, row_bytes: int) -> None:
        """Copies the rows of a contiguous host array [n, k] into `memory`, `row_bytes` apart. What lies
        between them is left as it is."""

    def fill_nan(self, memory: Memory) -> None:
        """Fills memory with NaN, whatever its float type (for tests: nothing may depend on stale bytes)."""

    def free_bytes(self) -> int:
        """Bytes that may still be allocated."""


class TensorDevice(Device, Protocol):
    """A device whose kernels take tensors."""

    def tensor(self, memory: Memory, dtype: str) -> Tensor:
        """A flat view of `memory` as kernel argument; `dtype` is an ElementType."""

    def touch_ahead(self, memory: Memory, parts: int, nbytes: int) -> None:
        """The first `nbytes` of each of the parts of `memory` will be used soon: where the system gives
        memory only to who touches it, it is touched while the device has nothing else to do. One memory at
        a time."""

    def settle(self) -> None:
        """Waits until all that is asked of touch_ahead is done."""

    def prepare(self, calls: Sequence[KernelCall]) -> Prepared:
        """A list of calls, resolved; ArtifactError if there is no such kernel."""
