"""Packing is exact both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pagec.compiler.dims import DType, row_stride
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.packer import Layout, Packer
from pagec.compiler.packing import (
    buffer_to_rows,
    from_bf16,
    kv_elements,
    pack,
    rows_to_buffer,
    to_bf16,
    unpack,
)
from pagec.compiler.program import KvGroup, KvKind, KvLayout, PackedWeight

floats = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False))


@given(floats)
def test_bf16_rounds_to_the_nearest_even(x: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (to_bf16(x) == expected).all()


def test_bf16_keeps_nan() -> None:
    assert np.isnan(from_bf16(to_bf16(np.array([np.nan, -np.nan], np.float32)))).all()


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    out_size=st.integers(1, 40),
    groups=st.integers(1, 3),
    size=st.integers(1, 40),
    dtype=st.sampled_from(["bf16", "f32"]),
    nt=st.sampled_from([16, 32, 64]),
)
def test_unpacking_a_matrix_gives_its_parts_back(
    parts: list[int], out_size: int, groups: int, size: int, dtype: DType, nt: int
) -> None:
    """Merged weights of heads of any size, for rows of heads of any size."""
    rng = np.random.default_rng(0)
    names = [f"w{n}" for n in range(len(parts))]
    source = {
        name: Type(None, (count * out_size, groups * size), dtype)
        for name, count in zip(names, parts, strict=True)
    }
    x, out = (groups, size), (sum(parts), out_size)
    merged = "+".join(names)
    whole = Type(None, (sum(parts) * out_size, groups * size), dtype)
    types = {"x": Type("T", x, dtype), "y": Type("T", out, "f32")}
    node = Node("linear", ("%x", f"${merged}"), ("y",))
    packer = Packer(Graph(("x",), ("y",), (node,), types, {merged: whole}), source, nt)
    weight = packer.weights[packer.matrix(merged, Layout(out), x, dtype)]
    tensors = [rng.standard_normal(source[name].inner).astype(np.float32) for name in names]
    packed = pack(weight, tensors)
    assert packed.shape == weight.shape
    assert packed.nbytes == weight.nbytes
    assert packed.shape[0] * nt == row_stride(out)
    for name, tensor in zip(names, tensors, strict=True):
        expected = from_bf16(to_bf16(tensor)) if dtype == "bf16" else tensor
        assert (unpack(weight, packed)[name] == expected).all()


@given(
    groups=st.integers(1, 4),
    size=st.integers(2, 40),
    axis=st.sampled_from([0, 1]),
    data=st.data(),
)
def test_pairs_that_rope_turns_lie_side_by_side(
    groups: int, size: int, axis: int, data: st.DataObject
) -> None:
    """Element i of a group and element i + turned/2; the rest of it stays. Unpacked it is what it was."""
    turned = 2 * data.draw(st.integers(1, size // 2))
    shape = (groups * size, 3) if axis == 0 else (3, groups * size)
    steps = (("pairs", (axis, size, turned)),)
    weight = PackedWeight("w", ("w",), (shape,), steps, "f32", shape)
    x = np.arange(groups * size * 3, dtype=np.float32).reshape(shape)
    packed = pack(weight, [x])
    assert np.array_equal(unpack(weight, packed)["w"], x)
    for group, before in zip(np.split(packed, groups, axis), np.split(x, groups, axis), strict=True):
        columns, own = (np.moveaxis(a, axis, 0) for a in (group, before))
        assert np.array_equal(columns[0:turned:2], own[: turned // 2])
        assert np.array_equal(columns[1:turned:2], own[turned // 2 : turned])
        assert np.array_equal(columns[turned:], own[turned:])


@given(
    inner=st.one_of(st.tuples(st.integers(1, 100)), st.tuples(st.integers(1, 4), st.integers(1, 40))),
    dtype=st.sampled_from(["bf16", "f32"]),
)
def test_rows_survive_a_buffer(inner: tuple[int, ...], dtype: DType) -> None:
    x = np.random.default_rng(0).standard_normal((5, *inner)).astype(np.float32)
    raw = rows_to_buffer(x, dtype)
    assert raw.shape == (5, row_stride(inner))
    expected = from_bf16(to_bf16(x)) if dtype == "bf16" else x
    assert (buffer_to_rows(raw, inner, dtype) == expected).all()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("kind", ["words", "rows"])
def test_every_token_has_elements_of_its_own_in_the_pool(dtype: DType, block_size: int, kind: KvKind) -> None:
    layout = KvLayout(dtype, block_size, 3, 20, (KvGroup((0,), None),), kind)
    keys, values = kv_elements(layout, np.arange(5 * block_size, dtype=np.int32))
    places = np.concatenate([keys.ravel(), values.ravel()])
    assert len(np.unique(places)) == len(places)
    elements = layout.span_bytes // (2 if dtype == "bf16" else 4)
    assert places.max() < 5 * elements


def test_rows_of_a_gpu_lie_block_by_block() -> None:
    """[block][K, V][kv_head][token][padded head], as the kernels read them."""
    layout = KvLayout("bf16", 16, 3, 20, (KvGroup((0,), None),), "rows")
    pool = np.arange(2 * layout.span_bytes // 2).reshape(2, 2, 3, 16, 32)
    keys, values = kv_elements(layout, np.array([0, 21], np.int32))
    for token, (block, offset) in enumerate([(0, 0), (1, 5)]):
        assert (keys[token] == pool[block, 0, :, offset, :20]).all()
        assert (values[token] == pool[block, 1, :, offset, :20]).all()


def test_layouts_of_cpus_and_gpus_have_ids_of_their_own() -> None:
    words, rows = (KvLayout("bf16", 16, 3, 20, (KvGroup((0,), None),), kind) for kind in ("words", "rows"))
    assert words.layout_id != rows.layout_id
    assert [KvLayout.from_json(one.to_json()) for one in (words, rows)] == [words, rows]
