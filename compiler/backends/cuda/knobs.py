"""Which knobs a kernel takes: tuned ones where a table covers the problem, else the defaults.

A strict program holds one set of numeric choices for all buckets of rows: BLOCK_K and the pieces of K of each
linear, the keys of a tile and of a split in prefill and decode alike, how warps share these, and the matrix
instructions, which sm_90 chooses by the rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pagec.compiler.backends.cuda.attention import AttentionShape, DecodeKnobs, PrefillKnobs
from pagec.compiler.backends.cuda.defaults import (
    FEW_ROWS,
    decode_knobs,
    grouped_knobs,
    linear_knobs,
    prefill_knobs,
    strict_prefill_knobs,
)
from pagec.compiler.backends.cuda.experts import GroupedKnobs
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape
from pagec.compiler.backends.tuned import Tuned
from pagec.compiler.target import CudaTarget

# Rows from which on sm_90 takes the instructions of warp groups, of four warps at least.
GROUP_ROWS: Final = 64
GROUP_WARPS: Final = 4
# Warps of strict linears of few rows elsewhere: to four ptxas grants so few registers that some spill.
FEW_WARPS: Final = 2
# Numbers of rows at which the defaults change.
DEFAULT_LIMITS: Final = (FEW_ROWS, 64)


class Choice(NamedTuple):
    """A tuned choice: its table's key, and up to how many rows it is for."""

    key: str
    rows: int


class Chooser:
    """Chooses for one program. `refused`: tuned choices that did not compile clean in this program."""

    def __init__(
        self,
        target: CudaTarget,
        tuned: Tuned,
        *,
        strict: bool = False,
        refused: frozenset[Choice] = frozenset(),
    ) -> None:
        self.target, self.strict, self.refused = target, strict, refused
        self._tuned = tuned
        self.limits: set[int] = set(DEFAULT_LIMITS)  # at which some choice changes; of what was asked so far

    def linear(self, shape: LinearShape, rows: int) -> tuple[LinearKnobs, Choice | None]:
        """For a bucket of up to `rows` rows."""
        key = f"linear/n{shape.n}_k{shape.k}"
        choice, point = self._find(key, rows)
        if point is not None:
            return LinearKnobs.of(point), choice
        knobs = linear_knobs(shape, rows, self.target)
        if self.strict:
            few = rows <= FEW_ROWS
            knobs = replace(knobs, BK=64, splits=1, BM=max(knobs.BM, self._least_rows()))
            warps = GROUP_WARPS if self.target.sm >= 90 else FEW_WARPS
            knobs = replace(knobs, warps=warps if few else knobs.warps)
        return knobs, None

    def grouped(self, k: int, rows: int) -> GroupedKnobs:
        """For experts whose rows are `k` long."""
        knobs = grouped_knobs(k, rows)
        return replace(knobs, BM=max(knobs.BM, self._least_rows())) if self.strict else knobs

    def prefill(self, shape: AttentionShape) -> tuple[PrefillKnobs, Choice | None]:
        """For chunks, of any number of tokens."""
        choice, point = self._attention("attention_prefill", shape, 0)
        if point is not None:
            return PrefillKnobs(**point), choice
        return strict_prefill_knobs(shape, self.target) if self.strict else prefill_knobs(shape), None

    def decode(self, shape: AttentionShape, rows: int) -> tuple[DecodeKnobs, Choice | None]:
        """For up to `rows` sequences."""
        choice, point = self._attention("attention_decode", shape, rows)
        knobs = decode_knobs(shape)
        if point is not None:
            knobs = DecodeKnobs(**{name: value for name, value in point.items() if name != "block_size"})
        if self.strict:
            knobs = replace(knobs, BM=GROUP_ROWS, warps=GROUP_WARPS, stages=2, per_sm=1)
        return knobs, choice

    def block_size(self, shape: AttentionShape) -> int | None:
        """Tokens of a cache block by the table; all choices of a shape agree in it."""
        _, point = self._attention("attention_decode", shape, 0)
        return None if point is None else point.get("block_size")

    # ------------------------------------------------------------------------------------ tables

    def _attention(
        self, kind: str, shape: AttentionShape, rows: int
    ) -> tuple[Choice | None, Mapping[str, Any] | None]:
        """Strict programs take prefill's and decode's tables both, or neither."""
        size = f"d{shape.head_dim}_g{shape.group}"
        kinds = ("attention_prefill", "attention_decode")
        if self.strict and not all(self._usable(f"{one}/{size}") for one in kinds):
            return None, None
        return self._find(f"{kind}/{size}", rows)

    def _usable(self, key: str) -> bool:
        return key in self._tuned and all(choice.key != key for choice in self.refused)

    def _find(self, key: str, rows: int) -> tuple[Choice | None, Mapping[str, Any] | None]:
        """Rows 0: any number. A strict program takes all choices of a key, or none."""
        if key not in self._tuned or (self.strict and not self._usable(key)):
            return None, None
        choices = self._tuned[key]
        self.limits |= {limit for limit, _ in choices if limit}
        limit, point = next(one for one in choices if one[0] == 0 or 0 < rows <= one[0])
        choice = Choice(key, limit)
        return (None, None) if choice in self.refused else (choice, point)

    def _least_rows(self) -> int:
        return GROUP_ROWS if self.target.sm >= 90 else 0
