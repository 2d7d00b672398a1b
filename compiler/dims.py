"""Sizes that every part agrees on: row dimensions, data types, and how rows are padded in memory.

A value is `rows x inner`. Its rows are counted in one of three dimensions, known only at run time and
bounded by the program's capacity:

    T   tokens in the step            S   sequences in the step            R   rows whose logits are wanted

The inner dimensions are constants. In memory a row is contiguous; its last inner dimension is padded to
`LANES` elements and the whole row to `ROW_ALIGN` elements, so that kernels read and write full vectors
and every row starts on a cache line. Padding always holds finite numbers (zeros), never stale bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

Rows = Literal["T", "S", "R"]
DType = Literal["f32", "bf16", "i32"]

LANES: Final = 16
ROW_ALIGN: Final = 64
BYTE_ALIGN: Final = 64
ITEM_BYTES: Final[dict[DType, int]] = {"f32": 4, "bf16": 2, "i32": 4}
# Elements of a dtype that one 32-bit word holds: kernels see memory as 32-bit words.
WORD_ELEMENTS: Final[dict[DType, int]] = {"f32": 1, "bf16": 2, "i32": 1}


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def padded_last(inner: tuple[int, ...]) -> int:
    """Elements from one group of the last inner dimension to the next, e.g. from head to head."""
    return round_up(inner[-1], LANES)


def row_stride(inner: tuple[int, ...]) -> int:
    """Elements from one row to the next. A row of scalars (inner = ()) is not padded."""
    if not inner:
        return 1
    return round_up(prod(inner[:-1]) * padded_last(inner), ROW_ALIGN)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most rows that a program's step holds: tokens T, sequences S, logit rows R."""

    T: int
    S: int
    R: int

    def rows(self, dim: Rows) -> int:
        return int(getattr(self, dim))
