"""Experts in Triton's interpreter: choices, lists of rows by expert, grouped linears, weighted sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.interpret import interpret
from support.kernels import one_node_graph

from pagec.compiler import ops
from pagec.compiler.backends.cuda.experts import GroupedKnobs, expert_lists, grouped_linear, top_k
from pagec.compiler.backends.cuda.rowwise import RowwiseKnobs, rowwise
from pagec.compiler.dims import row_stride
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.ops.shapes import expert_lists_width
from pagec.compiler.packing import buffer_to_rows, rows_to_buffer


@pytest.mark.parametrize(("width", "k"), [(1, 1), (5, 5), (8, 2), (60, 4), (128, 8)])
@pytest.mark.parametrize("normalize", [False, True])
def test_top_k(width: int, k: int, normalize: bool) -> None:
    """Descending; of equal elements the first; divided by their sum."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (12, width)).astype(np.float32)
    x[6:] = rng.random((6, width), np.float32)
    outputs = {"w": Type("T", (k,), "f32"), "e": Type("T", (k,), "i32")}
    graph = one_node_graph("top_k_of", {"x": Type("T", (width,), "f32")}, outputs, k=k, normalize=normalize)
    values = np.full((12, row_stride((k,))), np.nan, np.float32)
    indices = np.full((12, row_stride((k,))), -1, np.int32)
    arrays = {"x": rows_to_buffer(x, "f32"), "values": values, "indices": indices}
    interpret(top_k(graph.nodes[0], graph), arrays, {"T": 12})
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    expected = np.take_along_axis(x, order, 1)
    expected = expected / expected.sum(1, keepdims=True) if normalize else expected
    assert np.array_equal(indices[:, :k], order)
    assert np.allclose(values[:, :k], expected, rtol=1e-6, atol=0)
    assert not values[:, k:].any()
    assert not indices[:, k:].any()


def lists_of(chosen: Any, experts: int) -> tuple[Any, Any]:
    """(the kernel's lists, what the op means), flat."""
    rows, k = chosen.shape
    width = expert_lists_width(experts, k)
    graph = one_node_graph(
        "expert_lists", {"e": Type("T", (k,), "i32")}, {"l": Type("T", (width,), "i32")}, experts=experts
    )
    buffer = np.full((rows, row_stride((k,))), 1 << 20, np.int32)
    buffer[:, :k] = chosen
    out = np.full(rows * width, -1, np.int32)
    interpret(expert_lists(graph.nodes[0], graph), {"chosen": buffer, "out": out}, {"T": rows})
    (expected,) = ops.run("expert_lists", [torch.from_numpy(chosen)], {"experts": experts})
    return out, expected.numpy().ravel()


def choices(rows: int, k: int, experts: int, seed: int = 0) -> Any:
    """Different experts for each row, some chosen by none."""
    rng = np.random.default_rng(seed)
    among = np.arange(0, experts, 2) if experts > 2 * k else np.arange(experts)
    return np.stack([rng.permutation(among)[:k] for _ in range(rows)]).astype(np.int32)


@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (60, 4)])
def test_expert_lists(rows: int, experts: int, k: int) -> None:
    """Chosen experts in order with start and count, zeros, then row * k + choice expert by expert."""
    got, expected = lists_of(choices(rows, k, experts), experts)
    used = 1 + 3 * experts + rows * k
    assert np.array_equal(got[:used], expected[:used])
    assert (got[used:] == -1).all()


@pytest.mark.parametrize(("n", "k", "bias"), [(96, 64, False), (40, 48, True), (128, 128, True)])
@pytest.mark.parametrize("per_choice", [False, True])
@pytest.mark.parametrize("rows", [1, 23])
def test_grouped_linear(n: int, k: int, bias: bool, per_choice: bool, rows: int) -> None:
    """Each row by its own experts, in tiles that end within an expert; padding is zero."""
    experts, count = 8, 3
    rng = np.random.default_rng(0)
    chosen = choices(rows, count, experts)
    lists, _ = lists_of(chosen, experts)
    x = rng.standard_normal((rows, count, k) if per_choice else (rows, k)).astype(np.float32)
    w = rng.standard_normal((experts, n, k)).astype(np.float32)
    b = rng.standard_normal((experts, n)).astype(np.float32)
    types = {"x": Type("T", x.shape[1:], "f32"), "w": Type(None, w.shape, "f32")}
    types |= {"e": Type("T", (count,), "i32"), "l": Type("T", (expert_lists_width(experts, count),), "i32")}
    types |= {"b": Type(None, b.shape, "f32")} if bias else {}
    out_type = Type("T", (count, n), "f32")
    graph = one_node_graph("grouped_linear", types, {"y": out_type})
    kp = row_stride((k,)) if not per_choice else -(-k // 16) * 16
    packed = np.zeros((experts, row_stride((n,)), kp), np.float32)
    packed[:, :n, :k] = w
    vector = np.zeros((experts, row_stride((n,))), np.float32)
    vector[:, :n] = b
    out = np.full((rows, row_stride(out_type.inner)), np.nan, np.float32)
    arrays = {"x": rows_to_buffer(x, "f32"), "w": packed, "lists": lists}
    arrays |= ({"bias": vector} if bias else {}) | {"out": out}
    interpret(grouped_linear(graph.nodes[0], graph, GroupedKnobs(16, 64, 16)), arrays, {"T": rows})
    (expected,) = ops.run(
        "expert_linear", [torch.from_numpy(a) for a in (x, w, chosen, *((b,) if bias else ()))], {}
    )
    assert np.abs(buffer_to_rows(out, out_type.inner, "f32") - expected.numpy()).max() < 1e-4
    assert np.isfinite(out).all()
    assert (out != 0).sum() <= rows * count * n


def test_the_weighted_sum_of_choices() -> None:
    y = Type("T", (3, 100), "f32")
    types = {
        "y": y,
        "w": Type("T", (3,), "f32"),
        "r": Type("T", (100,), "f32"),
        "s": Type("T", (100,), "f32"),
    }
    body = (Node("weighted_sum", ("%y", "%w"), ("s",)), Node("add", ("%s", "%x"), ("r",)))
    types["x"] = types["r"]
    node = Node("fused.rowwise", ("%y", "%w", "%x"), ("r",), body=body)
    graph = Graph(("y", "w", "x"), ("r",), (node,), types, {})
    rng = np.random.default_rng(0)
    given = {
        name: rng.standard_normal((5, *types[name].inner)).astype(np.float32) for name in ("y", "w", "x")
    }
    kernel, args = rowwise(node, graph, RowwiseKnobs())
    memory = {f"value:{name}": rows_to_buffer(x, "f32") for name, x in given.items()}
    memory["value:r"] = np.full((5, row_stride((100,))), np.nan, np.float32)
    interpret(kernel, {n: memory[a] for (n, _), a in zip(kernel.arrays, args, strict=True)}, {"T": 5})
    expected = (given["y"] * given["w"][..., None]).sum(1) + given["x"]
    assert np.abs(buffer_to_rows(memory["value:r"], (100,), "f32") - expected).max() < 1e-5
