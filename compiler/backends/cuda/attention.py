"""Attention over the paged cache: from shapes and knobs to the kernels of prefill, decode and merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pagec.compiler.backends.cuda.emit import ELEMENTS, CudaKernel, make_kernel
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.launch import Counts, GridRule

# The least rows of a matrix instruction; fewer query rows are repeated.
MIN_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is computed; `dtype` of q and the cache, `out_dtype` of the result, sequences up to `max_len`."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    out_dtype: str
    scale: float
    block_size: int
    max_len: int
    window: int | None = None
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def padded(self) -> int:
        """Elements of a head in memory."""
        return padded_last((self.head_dim,))

    def words(self) -> str:
        """For keys of kernels."""
        sizes = f"{self.dtype}_h{self.heads}_kv{self.kv_heads}_d{self.head_dim}"
        return sizes + (f"_w{self.window}" if self.window else "")


@dataclass(frozen=True, slots=True)
class PrefillKnobs:
    """BM query rows and BN keys of a tile; `split`: keys between fresh starts (strict mode), 0 for none."""

    BM: int = 128
    BN: int = 64
    warps: int = 8
    stages: int = 2
    split: int = 0


@dataclass(frozen=True, slots=True)
class DecodeKnobs:
    """BN keys of a tile, `split` keys of a work item, `per_sm` programs that a multiprocessor holds.

    BM: query rows at least. More than there are heads, only strict mode wants: then the instructions, and the
    way in which warps share a tile, are those of prefill.
    """

    BN: int = 64
    split: int = 512
    warps: int = 4
    stages: int = 3
    per_sm: int = 2
    BM: int = MIN_ROWS


def heads_taken(group: int, most: int) -> tuple[int, int]:
    """(heads of an item, items to a KV head), for a group of heads of which `most` fit: as even as can be."""
    chunks = -(-group // most)
    return -(-group // chunks), chunks


def query_tile(shape: AttentionShape, knobs: PrefillKnobs) -> int:
    """Tokens of an item of prefill attention."""
    return max(1, knobs.BM // heads_taken(shape.group, knobs.BM)[0])


def key_warps(bm: int, bn: int, warps: int, *, groups: bool) -> int:
    """Warps among which Triton deals the keys of a tile, which is the order of a row's sum. With warp groups'
    instructions (`groups`) each warp takes 16 rows, and those left over go along the keys; with others all go
    along the rows, or along the keys if a tile has more keys than rows."""
    if groups:
        return max(1, 16 * warps // bm)
    return 1 if bm >= bn else warps


def parts_of(width: int) -> list[tuple[int, int]]:
    """A width as powers of two: (start, width) of each part, the widest first."""
    parts, start = [], 0
    while start < width:
        part = 1 << (width - start).bit_length() - 1
        parts.append((start, part))
        start += part
    return parts


def prefill(shape: AttentionShape, knobs: PrefillKnobs) -> CudaKernel:
    """The kernel for chunks and mixed rows."""
    taken, chunks = heads_taken(shape.group, knobs.BM)
    params = _params(shape, knobs.BM, knobs.BN, knobs.split, taken, chunks)
    params["query_tile"] = query_tile(shape, knobs)
    arrays = (
        ("tiles", "i32"),
        ("query_start", "i32"),
        ("seq_lens", "i32"),
        ("block_tables", "i32"),
        ("q", shape.dtype),
        ("kv", shape.dtype),
        ("out", shape.out_dtype),
    )
    words = f"{shape.words()}_{knobs.BM}x{knobs.BN}{'_strict' if knobs.split else ''}"
    grid = GridRule(1, shape.kv_heads * chunks)
    return make_kernel(
        "attention_prefill", words, params, arrays, Counts.TILES, grid, knobs.warps, knobs.stages
    )


def decode(shape: AttentionShape, knobs: DecodeKnobs) -> CudaKernel:
    """The kernel that leaves partial results of single new tokens."""
    rows = max(knobs.BM, 1 << (min(shape.group, 64) - 1).bit_length())
    taken, chunks = heads_taken(shape.group, rows)
    params = _params(shape, rows, knobs.BN, knobs.split, taken, chunks)
    arrays = (
        ("splits", "i32"),
        ("query_start", "i32"),
        ("seq_lens", "i32"),
        ("block_tables", "i32"),
        ("q", shape.dtype),
        ("kv", shape.dtype),
        ("stats", "f32"),
        ("sums", "f32"),
    )
    grid = GridRule(1, shape.kv_heads * chunks, knobs.per_sm)
    words = f"{shape.words()}_{knobs.BN}x{knobs.split}"
    return make_kernel(
        "attention_decode", words, params, arrays, Counts.SPLITS, grid, knobs.warps, knobs.stages
    )


def merge(shape: AttentionShape, warps: int = 1) -> CudaKernel:
    """The kernel that puts decode's partial results together."""
    params = _params(shape, MIN_ROWS, MIN_ROWS, 0, 1, 1)
    names = ("heads", "kv_heads", "DP", "dtype", "out_dtype", "out_stride", "rest", "scale", "softcap")
    params = {name: params[name] for name in names}
    params |= {"width": _power(shape.padded)}
    arrays = (
        ("split_start", "i32"),
        ("query_start", "i32"),
        ("stats", "f32"),
        ("sums", "f32"),
        ("out", shape.out_dtype),
    )
    grid = GridRule(1, shape.heads)
    return make_kernel("attention_merge", shape.words(), params, arrays, Counts.S, grid, warps)


def _power(width: int) -> int:
    """The least power of two that is not below width."""
    return 1 << (width - 1).bit_length()


def _params(shape: AttentionShape, bm: int, bn: int, split: int, taken: int, chunks: int) -> dict[str, Any]:
    if split % bn:
        raise CompileError(f"splits of {split} keys are no whole tiles of {bn}", place=shape.words())
    if shape.heads % shape.kv_heads:
        raise CompileError(
            f"{shape.heads} query heads cannot share {shape.kv_heads} KV heads", place=shape.words()
        )
    dp, block = shape.padded, shape.block_size
    out_stride = row_stride((shape.heads, shape.head_dim))
    parts = parts_of(dp)
    return {
        "dtype": ELEMENTS[shape.dtype],
        "out_dtype": ELEMENTS[shape.out_dtype],
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "taken": taken,
        "chunks": chunks,
        "DP": dp,
        "parts": parts,
        "accumulators": [f"acc{i}" for i in range(len(parts))],
        "scale": shape.scale,
        "window": shape.window,
        "softcap": shape.softcap,
        "BM": bm,
        "BN": bn,
        "split": split,
        "block_size": block,
        "max_blocks": -(-shape.max_len // block),
        "q_stride": out_stride,
        "out_stride": out_stride,
        "rest": _power(max(out_stride - shape.heads * dp, 1)),
    }
