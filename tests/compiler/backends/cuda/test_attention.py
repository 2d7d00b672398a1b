"""The attention templates in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.interpret import KINDS, interpret
from support.targets import few

from pagec.compiler.backends.cuda.attention import (
    AttentionShape,
    DecodeKnobs,
    PrefillKnobs,
    decode,
    merge,
    prefill,
    query_tile,
)
from pagec.compiler.dims import row_stride

BLOCKS = 200
MAX_LEN = 512
U = {"f32": 2.0**-24, "f16": 2.0**-11}


@dataclass
class Batch:
    """Sequences of (tokens before, tokens now) in a pool that is NaN where no sequence has a token."""

    shape: AttentionShape
    chunks: list[tuple[int, int]]
    seed: int

    def __post_init__(self) -> None:
        shape, rng = self.shape, np.random.default_rng(self.seed)
        self.starts = np.cumsum([0, *(now for _, now in self.chunks)]).astype(np.int32)
        self.lengths = np.array([before + now for before, now in self.chunks], np.int32)
        self.tables = self._tables(rng)
        self.keys, self.values = (self._random(rng) for _ in range(2))
        self.q = self._rounded(2 * rng.standard_normal((self.starts[-1], shape.heads, shape.head_dim)))
        self.pool = self._pool()

    def _rounded(self, x: Any) -> Any:
        return x.astype(KINDS[self.shape.dtype])

    def _random(self, rng: Any) -> list[Any]:
        sizes = self.shape.kv_heads, self.shape.head_dim
        return [self._rounded(rng.standard_normal((n, *sizes))) for n in self.lengths]

    def _tables(self, rng: Any) -> Any:
        """Block tables; blocks that no row's window reaches are gone: their entries name block 0."""
        block, window = self.shape.block_size, self.shape.window
        free = list(rng.permutation(np.arange(1, BLOCKS)))
        tables = np.zeros((len(self.chunks), -(-MAX_LEN // block)), np.int32)
        for row, (before, now) in zip(tables, self.chunks, strict=True):
            gone = max(before - window + 1, 0) // block if window else 0
            for i in range(gone, -(-(before + now) // block)):
                row[i] = free.pop()
        return tables

    def _pool(self) -> Any:
        """[block][K, V][KV head][token][padded head]."""
        shape = self.shape
        size = (BLOCKS, 2, shape.kv_heads, shape.block_size, shape.padded)
        pool = np.full(size, np.nan, KINDS[shape.dtype])
        for table, k, v in zip(self.tables, self.keys, self.values, strict=True):
            for position in range(len(k)):
                block = table[position // shape.block_size]
                if block:
                    for which, x in enumerate((k, v)):
                        line = pool[block, which, :, position % shape.block_size]
                        line[...] = 0
                        line[:, : shape.head_dim] = x[position]
        return pool

    def padded_q(self) -> Any:
        """q as it lies in a buffer."""
        shape = self.shape
        rows = np.zeros((len(self.q), row_stride((shape.heads, shape.head_dim))), self.q.dtype)
        heads = rows[:, : shape.heads * shape.padded].reshape(len(rows), shape.heads, shape.padded)
        heads[..., : shape.head_dim] = self.q
        return rows

    def out(self) -> Any:
        """A result's buffer, poisoned."""
        return np.full(self.padded_q().shape, np.nan, KINDS[self.shape.out_dtype])

    def unpadded(self, out: Any) -> Any:
        """The result without its padding, which must be zero."""
        shape = self.shape
        wide = out[:, : shape.heads * shape.padded].reshape(len(out), shape.heads, shape.padded)
        assert not out[:, shape.heads * shape.padded :].any()
        assert not wide[..., shape.head_dim :].any()
        return wide[..., : shape.head_dim]

    def run_prefill(self, knobs: PrefillKnobs) -> Any:
        height = query_tile(self.shape, knobs)
        tiles = [(s, row) for s, (_, now) in enumerate(self.chunks) for row in range(0, now, height)]
        arrays = {"tiles": np.array(tiles, np.int32), **self._step(), "q": self.padded_q(), "kv": self.pool}
        arrays["out"] = self.out()
        interpret(prefill(self.shape, knobs), arrays, {"TILES": len(tiles)})
        return self.unpadded(arrays["out"])

    def run_decode(self, knobs: DecodeKnobs) -> Any:
        """The last token of each chunk, which must be its only one."""
        shape, pieces = self.shape, []
        for s, length in enumerate(self.lengths):
            first = max(length - shape.window, 0) // knobs.split if shape.window else 0
            pieces += [(s, i) for i in range(first, -(-int(length) // knobs.split))]
        splits = np.array(pieces, np.int32)
        counts = {"SPLITS": len(splits), "S": len(self.chunks)}
        stats = np.full((len(splits), shape.heads, 2), np.nan, np.float32)
        sums = np.full((len(splits), shape.heads, shape.padded), np.nan, np.float32)
        arrays = {"splits": splits, **self._step(), "q": self.padded_q(), "kv": self.pool}
        interpret(decode(shape, knobs), {**arrays, "stats": stats, "sums": sums}, counts)
        split_start = np.searchsorted(splits[:, 0], np.arange(len(self.chunks) + 1)).astype(np.int32)
        arrays = {"split_start": split_start, "query_start": self.starts, "stats": stats, "sums": sums}
        arrays["out"] = self.out()
        interpret(merge(shape), arrays, counts)
        return self.unpadded(arrays["out"])

    def _step(self) -> dict[str, Any]:
        return {"query_start": self.starts, "seq_lens": self.lengths, "block_tables": self.tables}

    def expected(self) -> Any:
        """Float64, sequence by sequence."""
        parts = []
        for s, (before, now) in enumerate(self.chunks):
            q = self.q[self.starts[s] : self.starts[s + 1]].astype(np.float64)
            k, v = (
                np.repeat(x[s].astype(np.float64), self.shape.group, axis=1) for x in (self.keys, self.values)
            )
            scores = np.einsum("nhd,khd->hnk", q, k) * self.shape.scale
            if self.shape.softcap:
                scores = self.shape.softcap * np.tanh(scores / self.shape.softcap)
            row, key = before + np.arange(now)[:, None], np.arange(len(k))[None]
            seen = (key <= row) & (key > row - (self.shape.window or MAX_LEN))
            p = np.exp(
                np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True)
            )
            parts.append(np.einsum("hnk,khd->nhd", p / p.sum(-1, keepdims=True), v))
        return np.concatenate(parts)

    def allowed(self) -> float:
        """P and the result are rounded (u of each), so a row is off by 2 u of a mean of |v|, which is below
        6; scores of 50 keep 50 x 2^-24, and sums of n terms n x 2^-24."""
        return 6 * (2 * U[self.shape.dtype] + (50 + MAX_LEN) * U["f32"])


def make_shape(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **more: Any) -> AttentionShape:
    given: dict[str, Any] = {"dtype": "f16", "block_size": 16, "max_len": MAX_LEN, **more}
    return AttentionShape(heads, kv_heads, head_dim, out_dtype=given["dtype"], scale=head_dim**-0.5, **given)


shapes = st.builds(
    lambda ratio, *args: make_shape(
        *ratio, args[0], dtype=args[1], block_size=args[2], window=args[3], softcap=args[4]
    ),
    st.sampled_from([(9, 3), (14, 2), (28, 4), (8, 1), (2, 2), (40, 1)]),
    st.sampled_from([64, 80, 96, 112, 128, 256, 20]),
    st.sampled_from(["f32", "f16"]),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([None, 1, 17, 64, 200]),
    st.sampled_from([None, 30.0]),
)


@few
@given(
    shape=shapes,
    tile=st.sampled_from([(16, 16), (32, 64), (64, 32)]),
    split=st.sampled_from([0, 64, 128]),
    chunks=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 24)), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_prefill(
    shape: AttentionShape, tile: tuple[int, int], split: int, chunks: list[tuple[int, int]], seed: int
) -> None:
    batch = Batch(shape, chunks, seed)
    got = batch.run_prefill(PrefillKnobs(*tile, split=split))
    assert np.abs(got - batch.expected()).max() <= batch.allowed()


@few
@given(
    shape=shapes,
    knobs=st.sampled_from([(16, 64), (64, 64), (32, 256)]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_decode(shape: AttentionShape, knobs: tuple[int, int], lengths: list[int], seed: int) -> None:
    batch = Batch(shape, [(n - 1, 1) for n in lengths], seed)
    got = batch.run_decode(DecodeKnobs(*knobs))
    assert np.abs(got - batch.expected()).max() <= batch.allowed()


@pytest.mark.parametrize("window", [None, 50])
def test_strict_prefill_takes_the_splits_of_decode(window: int | None) -> None:
    """Same tiles, same splits, same merge: only the shape of the matrix product differs."""
    shape = make_shape(dtype="f32", window=window)
    batch = Batch(shape, [(299, 1), (17, 1)], 3)
    strict = batch.run_prefill(PrefillKnobs(16, 32, split=64))
    apart = batch.run_decode(DecodeKnobs(32, 64))
    assert np.array_equal(strict, apart)


def test_a_dominant_key_gives_its_value() -> None:
    """One key outweighs the others by more than e^87."""
    shape = make_shape(1, 1, 16, dtype="f32")
    batch = Batch(shape, [(40, 1)], 0)
    batch.q[...] = 100 * batch.keys[0][7] / np.linalg.norm(batch.keys[0][7])
    batch.q *= 1000
    for got in (batch.run_prefill(PrefillKnobs(16, 16)), batch.run_decode(DecodeKnobs(16, 32))):
        assert np.abs(got - batch.expected()).max() <= batch.allowed()
        assert np.isfinite(got).all()
