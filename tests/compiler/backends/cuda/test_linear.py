"""The linear and row-wise templates in Triton's interpreter, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.interpret import KINDS, interpret
from support.targets import U, few

from pagec.compiler import ops
from pagec.compiler.backends.cuda.linear import (
    LinearKnobs,
    LinearShape,
    linear,
    linear_of,
    plain,
)
from pagec.compiler.backends.cuda.rowwise import RowwiseKnobs, rowwise
from pagec.compiler.dims import row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.packing import buffer_to_rows, rows_to_buffer

KNOBS = [
    LinearKnobs(BM=16, BN=64, BK=32, group_m=1),
    LinearKnobs(BM=32, BN=32, BK=64, group_m=2),
    LinearKnobs(BM=16, BN=128, BK=64, group_m=1, splits=2),
    LinearKnobs(BM=32, BN=128, BK=32, group_m=3, tma=True),
]


@few
@given(
    n=st.sampled_from([64, 192, 320]),
    k=st.sampled_from([128, 256]),
    dtype=st.sampled_from(["f32", "f16"]),
    rows=st.integers(1, 80),
    bias=st.booleans(),
    knobs=st.sampled_from(KNOBS),
    seed=st.integers(0, 2**31),
)
def test_linear(n: int, k: int, dtype: str, rows: int, bias: bool, knobs: LinearKnobs, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(size).astype(KINDS[dtype]) for size in ((rows, k), (n, k)))
    b = rng.standard_normal(n).astype(np.float32)
    out = np.full((rows + 1, n), np.nan, np.float32)
    shape = LinearShape(n, k, dtype, bias=bias)
    arrays = {"x": x, "w": w, "bias": b, "partial": np.full((knobs.splits, rows, n), np.nan, np.float32)}
    run(linear(shape, plain(shape, "f32"), knobs), {**arrays, "out0": out}, rows)
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + (b if bias else 0)
    allowed = (k + 1) * U * (np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64) + np.abs(b))
    assert (np.abs(out[:-1] - exact) <= allowed).all()
    assert np.isnan(out[-1]).all()


def run(kernels: Any, arrays: dict[str, Any], rows: int) -> None:
    """Launches kernels that take arrays by their own names."""
    for kernel in kernels:
        interpret(kernel, {name: arrays[name] for name, _ in kernel.arrays}, {"T": rows})


def run_node(node: Node, graph: Graph, values: dict[str, Any], calls: Any) -> dict[str, Any]:
    """Launches (kernel, arguments) of a node on float32 rows; its results, their padding checked."""
    rows = len(next(iter(values.values())))
    memory = {
        f"value:{n}": rows_to_buffer(x, "f32").astype(KINDS[graph.type(n).dtype])
        for n, x in values.items()
        if n in graph.types
    }
    memory |= {f"weight:{n}": x for n, x in values.items() if n in graph.weights}
    for name in node.outputs:
        t = graph.type(name)
        memory[f"value:{name}"] = np.full((rows, row_stride(t.inner)), np.nan, KINDS[t.dtype])
    memory["scratch:"] = np.full(4 * rows * 4096, np.nan, np.float32)
    for kernel, args in calls:
        arrays = {name: memory[arg] for (name, _), arg in zip(kernel.arrays, args, strict=True)}
        interpret(kernel, arrays, {"T": rows})
    results = {}
    for name in node.outputs:
        t, raw = graph.type(name), memory[f"value:{name}"]
        whole = buffer_to_rows(raw, (raw.shape[1],), t.dtype)
        assert np.isfinite(whole).all(), "padding holds stale bytes"
        results[name] = buffer_to_rows(raw, t.inner, t.dtype)
    return results


def meant(node: Node, values: dict[str, Any]) -> dict[str, Any]:
    """The same by the ops' meanings, in float64."""
    known = {n: torch.from_numpy(np.asarray(x)) for n, x in values.items()}
    known = {n: x.double() if x.is_floating_point() else x for n, x in known.items()}
    for inner in node.body:
        inputs = [known[name[1:]] for name in inner.inputs]
        known.update(zip(inner.outputs, ops.run(inner.op, inputs, inner.attrs), strict=True))
    return {name: known[name].numpy() for name in node.outputs}


def close(got: dict[str, Any], expected: dict[str, Any], allowed: float = 2e-5) -> None:
    for name, x in got.items():
        assert np.abs(x - expected[name].reshape(x.shape)).max() <= allowed, name


def chain(body: list[Node], types: dict[str, Type], outputs: tuple[str, ...], op: str) -> tuple[Node, Graph]:
    """A fused node and a graph of it alone; what has no rows is a weight."""
    made = {name for node in body for name in node.outputs}
    inputs = dict.fromkeys(n for node in body for n in node.inputs if n[1:] not in made)
    node = Node(op, tuple(inputs), outputs, body=tuple(body))
    values = {n: t for n, t in types.items() if t.rows is not None}
    graph = Graph(
        tuple(n[1:] for n in inputs if n[0] == "%"),
        outputs,
        (node,),
        values,
        {n: t for n, t in types.items() if t.rows is None},
    )
    return node, graph


@pytest.mark.parametrize("width", [96, 128, 50])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_the_product_of_activations(width: int, splits: int, activation: str) -> None:
    """Columns of the two parts take turns; padding of the result is zero."""
    body = [
        Node("linear", ("%x", "$w"), ("gu",), {"split": width}),
        Node("slice", ("%gu",), ("g",), {"start": 0, "stop": 1, "drop_axis": True}),
        Node("slice", ("%gu",), ("u",), {"start": 1, "stop": 2, "drop_axis": True}),
        Node("activation", ("%g",), ("a",), {"name": activation}),
        Node("mul", ("%a", "%u"), ("m",)),
    ]
    row = Type("T", (width,), "f32")
    types = {"x": Type("T", (64,), "f32"), "gu": Type("T", (2, width), "f32"), "g": row, "u": row, "a": row}
    types |= {"m": row, "w": Type(None, (2 * width, 64), "f32")}
    node, graph = chain(body, types, ("m",), "fused.linear")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(size).astype(np.float32) for size in ((9, 64), (2 * width, 64)))
    turns = np.zeros((row_stride((width,)), 2, 64), np.float32)
    turns[:width] = w.reshape(2, width, 64).swapaxes(0, 1)
    knobs = LinearKnobs(BM=16, BN=128, BK=32, group_m=1, splits=splits)
    got = run_node(node, graph, {"x": x, "w": turns}, linear_of(node, graph, knobs))
    close(got, meant(node, {"x": x, "w": w}), 64 * 8 * U * 100)


@pytest.mark.parametrize("width", [64, 100, 320])
def test_bias_residual_and_soft_cap(width: int) -> None:
    body = [
        Node("linear", ("%x", "$w", "$b"), ("y",)),
        Node("add", ("%r", "%y"), ("s",)),
        Node("mul", ("%s", "$v"), ("p",)),
        Node("softcap", ("%p",), ("c",), {"cap": 30.0}),
        Node("add", ("%c",), ("z",), {"scalar": 1.5}),
    ]
    row = Type("T", (width,), "f32")
    types = dict.fromkeys(("r", "y", "s", "p", "c", "z"), row) | {"x": Type("T", (64,), "f32")}
    types |= {
        "w": Type(None, (width, 64), "f32"),
        "b": Type(None, (width,), "f32"),
        "v": Type(None, (width,), "f32"),
    }
    node, graph = chain(body, types, ("z",), "fused.linear")
    rng = np.random.default_rng(1)
    values = {n: rng.standard_normal((21, *types[n].inner)).astype(np.float32) for n in ("x", "r")}
    weights = {n: rng.standard_normal(types[n].inner).astype(np.float32) for n in ("w", "b", "v")}
    stride = row_stride((width,))
    packed = {n: np.pad(w, [(0, stride - width)] + [(0, 0)] * (w.ndim - 1)) for n, w in weights.items()}
    knobs = LinearKnobs(BM=16, BN=128, BK=64, group_m=2)
    got = run_node(node, graph, {**values, **packed}, linear_of(node, graph, knobs))
    close(got, meant(node, {**values, **weights}), 64 * 8 * U * 100)


@pytest.mark.parametrize("splits", [1, 2])
def test_an_epilogue_rounds_where_a_kernel_apart_would_have(splits: int) -> None:
    """linear, rounded, then an activation and a residual sum: in one kernel or in two, the same bits."""
    row = {name: Type("T", (128,), "f32") for name in ("y", "a", "r", "s")}
    half: Any = Type("T", (128,), "f16")
    types = {**row, "h": half, "x": Type("T", (64,), "f32"), "w": Type(None, (128, 64), "f32")}
    first = [Node("linear", ("%x", "$w"), ("y",)), Node("cast", ("%y",), ("h",), {"dtype": "f16"})]
    then = [
        Node("activation", ("%h",), ("a",), {"name": "gelu_tanh"}),
        Node("add", ("%a", "%r"), ("s",)),
    ]
    rng = np.random.default_rng(4)
    values = {n: rng.standard_normal((19, *types[n].inner)).astype(np.float32) for n in ("x", "r")}
    values["w"] = rng.standard_normal((128, 64)).astype(np.float32)
    knobs = LinearKnobs(BM=16, BN=64, BK=32, group_m=1, splits=splits)
    node, graph = chain([*first, *then], types, ("s",), "fused.linear")
    fused = run_node(node, graph, values, linear_of(node, graph, knobs))["s"]
    node, graph = chain(first, types, ("h",), "fused.linear")
    rounded = run_node(node, graph, values, linear_of(node, graph, knobs))["h"]
    node, graph = chain(then, types, ("s",), "fused.rowwise")
    apart = run_node(node, graph, {"h": rounded, "r": values["r"]}, [rowwise(node, graph, RowwiseKnobs())])
    assert np.array_equal(fused, apart["s"])


@pytest.mark.parametrize("width", [64, 100, 576])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("rm", [1, 4])
def test_add_and_norm(width: int, norm: str, rm: int) -> None:
    """The sum is kept and normed."""
    attrs: dict[str, Any] = {"eps": 1e-5, "offset": 1.0 if norm == "rmsnorm" else 0.0}
    weights = ("$w",) if norm == "rmsnorm" else ("$w", "$b")
    body = [Node("add", ("%x", "%y"), ("s",)), Node(norm, ("%s", *weights), ("h",), attrs)]
    row, vector = Type("T", (width,), "f32"), Type(None, (width,), "f32")
    types = {"x": row, "y": row, "s": row, "h": row, "w": vector, "b": vector}
    node, graph = chain(body, types, ("s", "h"), "fused.rowwise")
    rng = np.random.default_rng(2)
    values = {n: rng.standard_normal((7, width)).astype(np.float32) for n in ("x", "y")}
    values |= {n: rng.standard_normal(width).astype(np.float32) for n in ("w", "b")}
    got = run_node(node, graph, values, [rowwise(node, graph, RowwiseKnobs(rm))])
    close(got, meant(node, values))


@pytest.mark.parametrize(("groups", "width"), [(3, 64), (5, 20), (2, 80)])
def test_norms_of_heads(groups: int, width: int) -> None:
    """Heads lie padded; the row's own padding belongs to the last of them."""
    body = [
        Node("slice", ("%qkv",), ("q",), {"start": 1, "stop": 1 + groups}),
        Node("rmsnorm", ("%q", "$w"), ("h",), {"eps": 1e-6}),
        Node("softmax", ("%h",), ("p",)),
    ]
    heads = Type("T", (groups, width), "f32")
    types = {"qkv": Type("T", (groups + 2, width), "f32"), "q": heads, "h": heads, "p": heads}
    types["w"] = Type(None, (width,), "f32")
    node, graph = chain(body, types, ("h", "p"), "fused.rowwise")
    rng = np.random.default_rng(3)
    values = {"qkv": rng.standard_normal((6, groups + 2, width)).astype(np.float32)}
    values["w"] = rng.standard_normal(width).astype(np.float32)
    got = run_node(node, graph, values, [rowwise(node, graph, RowwiseKnobs(2))])
    close(got, meant(node, values))


def test_k_must_be_whole_steps() -> None:
    shape = LinearShape(64, 192, "f16")
    with pytest.raises(CompileError, match="whole steps"):
        linear(shape, plain(shape, "f32"), LinearKnobs(BK=128))
