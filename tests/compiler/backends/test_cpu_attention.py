"""The attention templates, against float64, on every target that this machine can run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import KernelRun
from support.targets import RUNNABLE, U, dtypes, few, rounded, targets

from pagec.compiler.dims import DType, padded_last
from pagec.compiler.ir import CacheType, Graph, Node, Type
from pagec.compiler.packing import kv_elements, to_bf16
from pagec.compiler.program import KvGroup, KvLayout


def attention_step(layout: KvLayout, chunks: list[tuple[int, int]], max_blocks: int, rng: Any) -> Any:
    """Step arrays for sequences of (tokens before, tokens now), their blocks in random order."""
    free = list(rng.permutation(np.arange(1, 400)))
    tables = np.zeros((len(chunks), max_blocks), np.int32)
    for row, (before, now) in zip(tables, chunks, strict=True):
        count = -(-(before + now) // layout.block_size)
        row[:count] = [free.pop() for _ in range(count)]
    starts = np.cumsum([0, *(now for _, now in chunks)]).astype(np.int32)
    return tables, starts, np.array([b + n for b, n in chunks], np.int32)


def tiles_of(chunks: list[tuple[int, int]], height: int) -> Any:
    tiles = [(s, row) for s, (_, now) in enumerate(chunks) for row in range(0, now, height)]
    return np.array(tiles, np.int32)


def fill_pool(layout: KvLayout, tables: Any, keys: list[Any], values: list[Any]) -> Any:
    """One layer's pool: NaN but for the keys and values of each sequence (padded heads, as kv_write does)."""
    padded = padded_last((layout.head_dim,))
    whole = replace(layout, head_dim=padded)
    kind: Any = np.uint16 if layout.dtype == "bf16" else np.float32
    pool = np.full(400 * layout.span_bytes, 0xFF, np.uint8).view(kind)
    for table, k, v in zip(tables, keys, values, strict=True):
        positions = np.arange(len(k))
        slots = table[positions // layout.block_size] * layout.block_size + positions % layout.block_size
        for place, part in zip(kv_elements(whole, slots), (k, v), strict=True):
            x = np.pad(part, ((0, 0), (0, 0), (0, padded - layout.head_dim)))
            pool[place] = to_bf16(x) if layout.dtype == "bf16" else x
    return pool


def expected_attention(q: Any, k: Any, v: Any, start: int, scale: float, window: int | None, cap: Any) -> Any:
    """Float64, one sequence: q[n,h,d] from position `start`, k and v [length,g,d]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("nhd,khd->hnk", q.astype(np.float64), k) * scale
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    row, key = start + np.arange(len(q))[:, None], np.arange(len(k))[None]
    seen = (key <= row) & ((key > row - window) if window else True)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnk,khd->nhd", p / p.sum(-1, keepdims=True), v)


def run_attention(
    *,
    target: str,
    dtype: DType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunks: list[tuple[int, int]],
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 16,
    height: int = 8,
    seed: int = 0,
    threads: int = 2,
    rows: tuple[int, int] | None = None,
    evicted: bool = False,
) -> tuple[Any, list[Any]]:
    """The kernel's result on random inputs, and float64's for each sequence. `rows`: of the one sequence,
    which begins at 0, these only, the others having been computed before. `evicted`: blocks that no row's
    window reaches have been taken away."""
    rng = np.random.default_rng(seed)
    cache = CacheType(0, kv_heads, head_dim, window)
    layout = KvLayout(dtype, block_size, kv_heads, head_dim, (KvGroup((0,), window),))
    out = Type("T", (heads, head_dim), "f32")
    attrs: dict[str, Any] = {"scale": head_dim**-0.5}
    attrs |= {"window": window} if window else {}
    attrs |= {"softcap": softcap} if softcap else {}
    core = Node("paged_attention", ("%q", "%kv", "%positions", "%sequences"), ("a",), attrs)
    node = Node("fused.attention", core.inputs, ("a",), body=(core,))
    integers = Type("T", (), "i32")
    types: Any = {"q": Type("T", (heads, head_dim), dtype), "kv": cache, "a": out}
    types |= {"positions": integers, "sequences": integers}
    graph = Graph(("q", "kv", "positions", "sequences"), ("a",), (node,), types, {})
    kernels = KernelRun(graph, kv=layout, query_tile=height, target=target, threads=threads, max_len=1024)
    tables, starts, lengths = attention_step(layout, chunks, -(-1024 // block_size), rng)
    spread = [rng.standard_normal((n, kv_heads, head_dim)) for n in lengths]
    keys = [rounded(x, dtype) for x in spread]
    values = [rounded(rng.standard_normal(x.shape), dtype) for x in keys]
    q = rounded(2 * rng.standard_normal((starts[-1], heads, head_dim)), dtype)
    if rows:
        q, starts = q[rows[0] : rows[1]], np.array([0, rows[1] - rows[0]], np.int32)
        chunks, lengths = [(rows[0], rows[1] - rows[0])], np.array([rows[1]], np.int32)
    if evicted and window:
        for table, (before, _) in zip(tables, chunks, strict=True):
            table[: max(before - window + 1, 0) // block_size] = 0
    step = {
        "step:tiles": tiles_of(chunks, height),
        "step:query_start": starts,
        "step:seq_lens": lengths,
        "step:block_tables.0": tables,
        "kv:0": fill_pool(layout, tables, keys, values),
    }
    got = kernels.run({"q": q}, step)["a"]
    expected = [
        expected_attention(q[a:b], k, v, before, attrs["scale"], window, softcap)
        for a, b, k, v, (before, _) in zip(starts[:-1], starts[1:], keys, values, chunks, strict=True)
    ]
    return got, expected


# P is rounded to bf16 (2^-9 of each), so a row is off by 2^-9 of a mean of |v|, which is below 6 here; in
# float32 scores of 50 keep 50 u, and sums of n terms n u.
ALLOWED = {"bf16": 6 * 2.0**-9, "f32": 6 * 700 * U}


@targets
@dtypes
@few
@given(
    ratio=st.sampled_from([(9, 3), (14, 2), (28, 4), (1, 1), (4, 4), (8, 1)]),
    head_dim=st.sampled_from([64, 80, 96, 112, 128, 256, 40, 20]),
    window=st.sampled_from([None, 1, 17, 64, 300]),
    softcap=st.sampled_from([None, 30.0]),
    block_size=st.sampled_from([16, 32, 64]),
    chunks=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_attention(
    target: str,
    dtype: DType,
    ratio: tuple[int, int],
    head_dim: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
    chunks: list[tuple[int, int]],
    seed: int,
) -> None:
    heads, kv_heads = ratio
    got, expected = run_attention(
        target=target,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        chunks=chunks,
        window=window,
        softcap=softcap,
        block_size=block_size,
        seed=seed,
    )
    assert np.abs(got - np.concatenate(expected)).max() <= ALLOWED[dtype]


@targets
@dtypes
@pytest.mark.parametrize("window", [None, 50])
def test_an_attention_row_has_the_same_bits_in_any_chunk(
    target: str, dtype: DType, window: int | None
) -> None:
    """Rows of one sequence, computed together, alone, in tiles of other heights and by other threads."""
    shape: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 64, "target": target, "dtype": dtype}
    whole, _ = run_attention(**shape, window=window, chunks=[(0, 300)], height=8, seed=5)
    for height, threads in ((1, 1), (7, 2), (32, 1)):
        other, _ = run_attention(
            **shape, window=window, chunks=[(0, 300)], height=height, threads=threads, seed=5
        )
        assert other.tobytes() == whole.tobytes()


def test_softmax_of_large_scores_is_exact_in_its_extremes() -> None:
    """One key dominates by more than e^87: its value comes out as it is."""
    got, expected = run_attention(
        target=RUNNABLE[0], dtype="f32", heads=1, kv_heads=1, head_dim=16, chunks=[(0, 1)]
    )
    assert math.isfinite(float(got.sum()))
    assert np.array_equal(got, np.concatenate(expected).astype(np.float32))


@targets
@dtypes
@pytest.mark.parametrize("window", [None, 300])
def test_splits_computed_apart_give_the_same_bits(target: str, dtype: DType, window: int | None) -> None:
    """Long contexts: few decoding rows are cut into splits, many are not, and neither are rows of a chunk."""
    shape: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 64, "target": target, "dtype": dtype}
    chunk = [(0, 900)]
    whole, expected = run_attention(**shape, window=window, chunks=chunk, height=10, seed=3)
    assert np.abs(whole - expected[0]).max() <= ALLOWED[dtype]
    for threads in (1, 2):
        last, _ = run_attention(
            **shape, window=window, chunks=chunk, height=10, seed=3, threads=threads, rows=(899, 900)
        )
        assert last.tobytes() == whole[899:].tobytes()


@targets
@dtypes
@pytest.mark.parametrize("window", [1, 20, 50, 300])
@pytest.mark.parametrize("rows", [(700, 703), (899, 900)])
def test_blocks_behind_the_window_may_be_gone(
    target: str, dtype: DType, window: int, rows: tuple[int, int]
) -> None:
    """Their table entries name block 0, which is full of NaN here."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "target": target, "dtype": dtype}
    shape |= {"window": window, "chunks": [(0, 900)], "seed": 7, "rows": rows, "height": 10}
    kept, _ = run_attention(**shape)
    gone, _ = run_attention(**shape, evicted=True)
    assert np.isfinite(kept).all()
    assert gone.tobytes() == kept.tobytes()
