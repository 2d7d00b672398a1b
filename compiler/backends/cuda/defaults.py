"""Knobs where nothing has been tuned: safe points that compile clean, by shape, rows and target."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagec.compiler.backends.cuda.attention import AttentionShape, DecodeKnobs, PrefillKnobs
from pagec.compiler.backends.cuda.experts import GroupedKnobs
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape
from pagec.compiler.target import CudaTarget

# Up to so many rows a linear is bound by the memory that its weights come from.
FEW_ROWS: Final = 16
# Keys of a split where all numbers of rows are to have the same.
STRICT_SPLIT: Final = 512
# Elements of a head from which on a block of rows has room for half as many.
WIDE_HEAD: Final = 128


def linear_knobs(shape: LinearShape, rows: int, target: CudaTarget) -> LinearKnobs:
    """For a bucket of up to `rows` rows. Few rows: K is split until every multiprocessor has a tile."""
    if rows > FEW_ROWS:
        bm = 64 if rows <= 64 else 128
        return LinearKnobs(
            BM=bm, BN=64 if shape.n < 512 else 128, warps=bm // 16, group_m=1 if bm == 64 else 8
        )
    bk = 128 if shape.k % 128 == 0 else 64
    splits = 1
    while (
        splits < 8
        and splits * -(-shape.n // 64) < target.sms
        and shape.k % (2 * splits * bk) == 0
        and shape.k >= 8 * splits * bk
    ):
        splits *= 2
    return LinearKnobs(BM=16, BN=64, BK=bk, warps=4, stages=4, group_m=1, splits=splits)


def grouped_knobs(k: int, rows: int) -> GroupedKnobs:
    """For experts whose rows are `k` long; of few rows each has one or two."""
    bk = next(step for step in (64, 32, 16) if k % step == 0)
    return GroupedKnobs(BM=16 if rows <= 4 * FEW_ROWS else 64, BN=64, BK=bk)


def prefill_knobs(shape: AttentionShape) -> PrefillKnobs:
    """For chunks."""
    if shape.padded > WIDE_HEAD:
        return PrefillKnobs(BM=64, BN=32, warps=8, stages=2)
    return PrefillKnobs(BM=128, BN=64, warps=8, stages=2)


def strict_prefill_knobs(shape: AttentionShape, target: CudaTarget) -> PrefillKnobs:
    """The same for strict programs: the sums of all splits take registers beside a split's own, which leaves
    128 rows none but to warp groups, whose operands lie in shared memory."""
    knobs = replace(prefill_knobs(shape), split=STRICT_SPLIT)
    return replace(knobs, BM=64) if target.sm < 90 and shape.padded > 64 else knobs


def decode_knobs(shape: AttentionShape) -> DecodeKnobs:
    """For single new tokens."""
    wide = shape.padded > WIDE_HEAD
    return DecodeKnobs(BN=32 if wide else 64, split=512, warps=4, stages=2 if wide else 3, per_sm=2)
