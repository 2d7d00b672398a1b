"""Tile sizes of the CPU kernels.

*Numeric* choices (they can change a bit) hold for a whole program: the key tile BN and the split length of
attention. *Schedule* choices are free per kernel and bucket: register tiles, tokens per attention item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagec.compiler.dims import DType
from pagec.compiler.target import CpuTarget

# Keys per softmax step, and per split of a long context. Splits are what decoding can share out.
KEY_TILE: Final = 64
KEY_SPLIT: Final = 256
# Up to so many tiles in a step, the splits of decoding sequences are dealt out one by one.
FEW_TILES: Final = 4
# A partial result is a row's sums, then its maximum and its sum of weights, padded to a vector.
PARTIAL_EXTRA: Final = 16
# Query rows (tokens x heads of a group) that an attention item holds in the first-level cache.
QUERY_ROWS: Final = 32


# Sums that are added to in turn, so that none waits for its last addition: its latency times two a cycle, and
# half as many again for what else comes between.
ENOUGH_SUMS: Final = 12


# In how many shares for each worker attention and linears are dealt out: more level the work better and cost
# more calls, so step.c makes fewer of a row or two.
SHARES: Final = 16
# Words that a cache line and a block of keys hold.
LINE: Final = 16
# Rows that a linear takes at once, if there are more: enough for a panel of weights that comes from memory.
BLOCK_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Register tile of attention: `rows` x `key_vectors` scores, `rows` x `dim_vectors` outputs."""

    rows: int
    key_vectors: int
    dim_vectors: int


def fits(target: CpuTarget, rows: int, vectors: int, dtype: DType = "f32") -> bool:
    """Whether rows x vectors accumulators, the vectors' operands and a broadcast stay in registers. Where
    bf16 dots are made of two float32 ones, an operand takes two."""
    operands = (vectors + 1) * (2 if dtype == "bf16" and not target.bf16_dot else 1)
    return rows * vectors + operands <= target.vector_registers


def linear_columns(target: CpuTarget) -> int:
    """Columns of a linear's register tile, a property of the packed weights: at most 64, with room for four
    rows."""
    return next(v for v in (4, 2, 1) if fits(target, 4, v)) * target.lanes


def linear_buckets(target: CpuTarget, dtype: DType) -> tuple[tuple[int, int], ...]:
    """(up to how many rows, 0 for any; rows of the register tile), for dots of `dtype`."""
    vectors = linear_columns(target) // target.lanes
    legal = [rows for rows in (4, 6) if fits(target, rows, vectors, dtype)] or [2]
    most = next((rows for rows in legal if rows * vectors >= ENOUGH_SUMS), legal[-1])
    return (*((rows, rows) for rows in (1, 2) if rows < most), (0, most))


def attention_tiles(target: CpuTarget, head_dim: int, group: int) -> AttentionTiles:
    """Four rows where registers allow it, three if that divides a group's query heads (a decode step then
    computes no row twice); vectors divide the key tile and the padded head."""
    rows = 2 if not fits(target, 4, 4) else 3 if group % 3 == 0 else 4
    dims = head_dim // target.lanes
    wide = [v for v in range(1, dims + 1) if dims % v == 0 and fits(target, rows, v)]
    return AttentionTiles(rows, 4, max(wide))


def query_tile(group: int) -> int:
    """Tokens of an attention item, for `group` query heads per KV head."""
    return max(1, QUERY_ROWS // group)
