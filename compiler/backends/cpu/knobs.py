"""Which schedule knobs a kernel takes: tuned ones where a table has its shape, else the defaults.

    linear      MB     rows of a register tile, for each bucket of rows
    attention   RM     rows of a register tile; KV vectors of keys, OV vectors of the head beside it

None of them changes a bit: sums along K and along keys keep their order. The columns of a linear's tile (NT)
are a property of the packed weights, the key tile and split of attention are numeric: they are not tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pagec.compiler.backends.cpu.tiles import (
    KEY_TILE,
    LINE,
    AttentionTiles,
    attention_tiles,
    fits,
    linear_buckets,
    linear_columns,
)
from pagec.compiler.backends.tuned import Choices, Tuned
from pagec.compiler.dims import DType
from pagec.compiler.errors import CompileError
from pagec.compiler.target import CpuTarget

KNOBS: Final[Mapping[str, tuple[str, ...]]] = {"linear": ("MB",), "attention": ("RM", "KV", "OV")}
MOST_ROWS: Final = 8
Point = Mapping[str, int]
# Up to how many rows (0: any), and the rows of the register tile.
Bucket = tuple[int, int]


def linear_points(target: CpuTarget) -> list[Point]:
    """All tiles of a linear that stay in registers."""
    vectors = linear_columns(target) // target.lanes
    return [{"MB": rows} for rows in range(1, MOST_ROWS + 1) if fits(target, rows, vectors)]


def attention_points(target: CpuTarget, head_dim: int) -> list[Point]:
    """All tiles of attention that stay in registers; `head_dim` as it is padded."""
    return [
        {"RM": rows, "KV": wide, "OV": deep}
        for rows in range(2, min(MOST_ROWS, target.lanes) + 1)
        for wide in _vectors(KEY_TILE // target.lanes, target)
        for deep in _vectors(head_dim // target.lanes, target)
        if fits(target, rows, wide) and fits(target, rows, deep)
    ]


def _vectors(whole: int, target: CpuTarget) -> list[int]:
    """Numbers of vectors that divide so many, in whole lines (of memory, and blocks of keys)."""
    return [n for n in range(1, whole + 1) if whole % n == 0 and n * target.lanes % LINE == 0]


class Chooser:
    """Chooses for one program; a shape is named as its table's entry is."""

    def __init__(self, target: CpuTarget, tuned: Tuned) -> None:
        self._target, self._tuned = target, tuned

    def linear(self, shape: str, dtype: DType, kept: int) -> tuple[str, tuple[Bucket, ...]]:
        """The key of the tuned choice, if there is one, and the buckets. Up to `kept` rows they are the
        default ones: there the linear does the norm before it itself, for the rows of one tile."""
        own = linear_buckets(self._target, dtype)
        key, choices = self._find("linear", shape, linear_points(self._target))
        if not key:
            return "", own
        chosen = [(limit, point["MB"]) for limit, point in choices if limit == 0 or limit > kept]
        return key, (*(one for one in own if 0 < one[0] <= kept), *_joined(chosen))

    def attention(self, shape: str, head_dim: int, group: int) -> tuple[str, AttentionTiles]:
        """The key of the tuned choice, if there is one, and the tiles. `head_dim` as it is padded."""
        key, choices = self._find("attention", shape, attention_points(self._target, head_dim))
        if not key:
            return "", attention_tiles(self._target, head_dim, group)
        _, point = choices[-1]
        return key, AttentionTiles(point["RM"], point["KV"], point["OV"])

    def _find(self, kind: str, shape: str, legal: Sequence[Point]) -> tuple[str, Choices]:
        key = f"{kind}/{shape}"
        choices = self._tuned.get(key, ())
        for _, point in choices:
            if point not in legal:
                raise CompileError(
                    f"the tuned choice {dict(point)} is no tile of {self._target.name}",
                    place=key,
                    remedy="tune again (pagec tune), or compile with --no-tuned",
                )
        return (key if choices else ""), choices


def _joined(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Neighbours of the same tile are one bucket."""
    later = [*buckets[1:], (0, 0)]
    return [one for one, after in zip(buckets, later, strict=True) if one[1] != after[1]]
