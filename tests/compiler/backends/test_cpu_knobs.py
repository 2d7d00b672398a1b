"""Tuned tiles of CPU kernels: which numbers of rows they are for, and that no tile changes a bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import KernelRun, normed_linear
from support.targets import dtypes, rounded, targets

from pagec.autotune.cpu_space import shape_key
from pagec.compiler.backends.cpu.knobs import Bucket, Chooser, attention_points, linear_points
from pagec.compiler.backends.cpu.tiles import attention_tiles, linear_buckets
from pagec.compiler.backends.targets import PREFERENCE, load_cpu_target
from pagec.compiler.dims import DType
from pagec.compiler.errors import CompileError
from pagec.compiler.passes.fuse_epilogue import fuse_epilogue
from pagec.compiler.passes.fuse_rowwise import fuse_rowwise

AVX2 = load_cpu_target("cpu-avx2")


def tile(buckets: tuple[Bucket, ...], rows: int) -> int:
    """The rows of the tile that a step of so many rows takes."""
    return next(found for limit, found in buckets if limit == 0 or rows <= limit)


@pytest.mark.parametrize("name", PREFERENCE)
def test_the_default_tiles_are_points_of_the_space(name: str) -> None:
    target = load_cpu_target(name)
    for dtype in ("f32", "bf16"):
        rows = {rows for _, rows in linear_buckets(target, dtype)}
        assert rows <= {p["MB"] for p in linear_points(target)}
    for head_dim, group in ((64, 3), (128, 4), (32, 1)):
        own = attention_tiles(target, head_dim, group)
        point = {"RM": own.rows, "KV": own.key_vectors, "OV": own.dim_vectors}
        assert point in attention_points(target, head_dim)


@given(data=st.data(), kept=st.sampled_from([0, 1, 2]))
def test_every_number_of_rows_takes_what_the_table_has_for_it(data: st.DataObject, kept: int) -> None:
    """But where a linear does the norm itself it takes its own tile."""
    limits = (*sorted(data.draw(st.sets(st.integers(1, 40), max_size=5))), 0)
    chosen = tuple((limit, data.draw(st.sampled_from(linear_points(AVX2)))) for limit in limits)
    key, buckets = Chooser(AVX2, {"linear/w": chosen}).linear("w", "bf16", kept)
    assert key == "linear/w"
    assert [limit for limit, _ in buckets] == [*sorted(limit for limit, _ in buckets if limit), 0]
    own = linear_buckets(AVX2, "bf16")
    for rows in range(1, 50):
        expected = next(point["MB"] for limit, point in chosen if limit == 0 or rows <= limit)
        assert tile(buckets, rows) == (tile(own, rows) if rows <= kept else expected), rows
    tiles = [found for limit, found in buckets if limit == 0 or limit > kept]
    assert all(one != after for one, after in itertools.pairwise(tiles)), "two buckets of one tile"


def test_another_shape_takes_the_defaults() -> None:
    chooser = Chooser(AVX2, {"linear/w": ((0, {"MB": 1}),), "attention/a": ((0, {"RM": 2}),)})
    assert chooser.linear("w2", "f32", 0) == ("", linear_buckets(AVX2, "f32"))
    assert chooser.attention("b", 64, 3) == ("", attention_tiles(AVX2, 64, 3))


@pytest.mark.parametrize("point", [{"MB": 7}, {"MB": 0}, {"BM": 4}, {}])
def test_a_point_that_is_no_tile_of_the_target_is_refused_with_a_remedy(point: dict[str, int]) -> None:
    with pytest.raises(CompileError, match="is no tile of cpu-avx2") as error:
        Chooser(AVX2, {"linear/w": ((0, point),)}).linear("w", "f32", 0)
    assert error.value.place == "linear/w"
    assert "--no-tuned" in error.value.remedy


@targets
@dtypes
def test_every_tile_of_a_linear_gives_the_bits_of_the_default(target: str, dtype: DType) -> None:
    """With a norm before it and a residual sum behind it, for tails of every length."""
    rng = np.random.default_rng(0)
    graph = fuse_rowwise(fuse_epilogue(normed_linear(dtype, residual=True)))
    weights = {name: rounded(rng.standard_normal(t.inner), t.dtype) for name, t in graph.weights.items()}
    values = {name: rng.standard_normal((17, *graph.type(name).inner)) for name in graph.inputs}
    plain = KernelRun(graph, weights, target=target)
    key = f"linear/{shape_key(plain.calls[-1].kernels()[-1])}"

    def results(kernels: KernelRun, rows: int) -> Any:
        return kernels.run({name: x[:rows] for name, x in values.items()})[graph.outputs[0]].tobytes()

    expected = {rows: results(plain, rows) for rows in (1, 2, *range(3, 18))}
    for point in linear_points(load_cpu_target(target)):
        tuned = KernelRun(graph, weights, target=target, tuned={key: ((0, point),)})
        call = tuned.calls[-1]
        assert call.tuned == key
        assert call.kernels()[-1].params["MB"] == point["MB"]
        for rows, stored in expected.items():
            assert results(tuned, rows) == stored, (point, rows)
