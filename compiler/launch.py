"""How a compiled GPU kernel is launched: pagec's own description, independent of the compiler that made it.

A kernel takes pointers alone: everything else is a constant of its source. The last one, `count`, points at
the word of the device array `counts` that says how many rows or items there are, so that a captured graph
depends on the bucket only. After these a launcher passes a pointer to scratch memory and a null pointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

from pagec.compiler.errors import ArtifactError

# Pointers to arrays are multiples of this: kernels are compiled on that promise, and launchers check it.
POINTER_ALIGN: Final = 16
COUNT_ALIGN: Final = 4


class Counts(IntEnum):
    """Which word of the device array `counts` holds how many of what the step has.

    T, S, R: see dims.py. TILES: work items of prefill attention. SPLITS: work items of decode attention.
    COPIES: blocks that are copied before the step.
    """

    T = 0
    S = 1
    R = 2
    TILES = 3
    SPLITS = 4
    COPIES = 5


@dataclass(frozen=True, slots=True)
class GridRule:
    """Programs of a launch: `columns` for each `rows` rows, and `extra` ones.

    `per_sm`: at most so many programs for each multiprocessor, which share out the items; 0: one for each.
    """

    rows: int
    columns: int
    per_sm: int = 0
    extra: int = 0

    def programs(self, num_rows: int, sms: int) -> int:
        """For a bucket of up to `num_rows` rows on a GPU of `sms` multiprocessors."""
        items = -(-num_rows // self.rows) * self.columns + self.extra
        return min(items, self.per_sm * sms) if self.per_sm else items


@dataclass(frozen=True, slots=True)
class LaunchMetadata:
    """What a launcher needs: the function in the cubin, its arguments (name, "*type") in order, the bytes
    that each pointer must be a multiple of, warps, dynamic shared memory, and scratch per program."""

    symbol: str
    arguments: tuple[tuple[str, str], ...]
    align: tuple[int, ...]
    warps: int
    shared_bytes: int
    grid: GridRule
    scratch_bytes: int = 0
    scratch_align: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> LaunchMetadata:
        return LaunchMetadata(
            **{
                **data,
                "arguments": tuple((name, kind) for name, kind in data["arguments"]),
                "align": tuple(data["align"]),
                "grid": GridRule(**data["grid"]),
            }
        )

    def check_pointers(self, pointers: tuple[int, ...]) -> None:
        """Refuses pointers that break what the kernel was compiled on."""
        if len(pointers) != len(self.arguments):
            raise ArtifactError(
                f"takes {len(self.arguments)} pointers, not {len(pointers)}",
                place=self.symbol,
                remedy="compile the model again",
            )
        for (name, _), align, pointer in zip(self.arguments, self.align, pointers, strict=True):
            if pointer % align:
                raise ArtifactError(
                    f"argument {name} lies at {pointer:#x}, which is no multiple of {align}",
                    place=self.symbol,
                    remedy=f"allocate it aligned to {align} bytes",
                )
