"""The kernels of experts: choices, lists of rows by expert, grouped linears, softmax of a router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import KernelRun, one_node_graph
from support.targets import RUNNABLE, U, dtypes, few, rounded, targets

from pagec.compiler.dims import DType
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.ops.shapes import expert_lists_width


@pytest.fixture(autouse=True)
def _more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "3")


def run_by(threads: int, graph: Graph, values: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A graph's results by so many workers. TVM makes a pool for each thread that asks, which never grows."""
    with ThreadPoolExecutor(1) as caller:
        return caller.submit(lambda: KernelRun(graph, threads=threads, **options).run(values)).result()


# ---------------------------------------------------------------------------------------- top_k


def top_k(width: int, k: int, normalize: bool) -> Graph:
    return one_node_graph(
        "top_k_of",
        {"x": Type("T", (width,), "f32")},
        {"w": Type("T", (k,), "f32"), "e": Type("T", (k,), "i32")},
        k=k,
        normalize=normalize,
    )


@targets
@pytest.mark.parametrize(("width", "k"), [(1, 1), (5, 5), (8, 2), (60, 4), (128, 8)])
@pytest.mark.parametrize("normalize", [False, True])
def test_top_k(target: str, width: int, k: int, normalize: bool) -> None:
    """Descending; of equal elements the first; divided by their sum in the order of choice."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (40, width)).astype(np.float32)  # many ties
    x[20:] = rng.random((20, width), np.float32)
    x[0] = 3.0
    got = KernelRun(top_k(width, k, normalize), target=target).run({"x": x})
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert np.array_equal(got["e"], order)
    values = np.take_along_axis(x, order, 1)
    if normalize:
        total = np.zeros(40, np.float32)
        for j in range(k):
            total += values[:, j]
        values = values / total[:, None]
    assert got["w"].tobytes() == values.tobytes()


def test_top_k_gives_each_row_the_same_bits_in_any_batch_and_for_any_number_of_workers() -> None:
    x = np.random.default_rng(0).standard_normal((23, 40)).astype(np.float32)
    graph = top_k(40, 3, True)
    whole = [run_by(threads, graph, {"x": x}) for threads in (1, 3)]
    alone = KernelRun(graph)
    for name in ("w", "e"):
        assert whole[0][name].tobytes() == whole[1][name].tobytes()
        rows = [alone.run({"x": x[i : i + 1]})[name] for i in range(len(x))]
        assert np.concatenate(rows).tobytes() == whole[0][name].tobytes()


# --------------------------------------------------------------------------------- expert_lists


def chosen_experts(rows: int, k: int, among: list[int], seed: int = 0) -> Any:
    """Different experts for each row, out of these."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(among)[:k] for _ in range(rows)]).astype(np.int32)


@targets
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (60, 4)])
def test_expert_lists(target: str, rows: int, experts: int, k: int) -> None:
    """Chosen experts in order with start and count, then row * k + choice expert by expert, then zeros."""
    among = list(range(0, experts, 2)) if experts > 2 * k else list(range(experts))
    chosen = chosen_experts(rows, k, among)
    width = expert_lists_width(experts, k)
    graph = one_node_graph(
        "expert_lists", {"e": Type("T", (k,), "i32")}, {"l": Type("T", (width,), "i32")}, experts=experts
    )
    flat = KernelRun(graph, target=target).run({"e": chosen})["l"].ravel()
    entries = [[i for i, e in enumerate(chosen.ravel()) if e == expert] for expert in range(experts)]
    head, at = [], 0
    for expert, rows_of in enumerate(entries):
        if rows_of:
            head += [expert, at, len(rows_of)]
            at += len(rows_of)
    expected = np.zeros(flat.size, np.int32)
    expected[0] = len(head) // 3
    expected[1 : 1 + len(head)] = head
    expected[1 + 3 * experts : 1 + 3 * experts + rows * k] = [i for part in entries for i in part]
    assert np.array_equal(flat, expected)
    if (rows, experts, target) == (37, 8, RUNNABLE[0]):
        for threads in (1, 3):
            assert np.array_equal(run_by(threads, graph, {"e": chosen})["l"].ravel(), flat)


# ------------------------------------------------------------------------------- grouped_linear


def grouped(
    experts: int, k: int, n: int, inner: int, dtype: DType, per_choice: bool, bias: bool
) -> tuple[Graph, dict[str, Any]]:
    """expert_lists and the grouped linear behind it, and its weights."""
    rng = np.random.default_rng(experts * n + inner)
    x = Type("T", (k, inner) if per_choice else (inner,), dtype)
    types = {
        "x": x,
        "e": Type("T", (k,), "i32"),
        "l": Type("T", (expert_lists_width(experts, k),), "i32"),
        "y": Type("T", (k, n), "f32"),
    }
    weights = {"w": Type(None, (experts, n, inner), dtype)}
    inputs = ["%x", "$w", "%e", "%l"]
    values = {"w": rounded(rng.standard_normal((experts, n, inner)), dtype)}
    if bias:
        weights["b"] = Type(None, (experts, n), "f32")
        values["b"] = rng.standard_normal((experts, n)).astype(np.float32)
        inputs.append("$b")
    nodes = (
        Node("expert_lists", ("%e",), ("l",), {"experts": experts}),
        Node("grouped_linear", tuple(inputs), ("y",)),
    )
    return Graph(("x", "e"), ("y",), nodes, types, weights), values


def expected_rows(x: Any, chosen: Any, weights: dict[str, Any]) -> tuple[Any, Any]:
    """Float64 [rows, k, n], and the error that sums in float32 may have."""
    rows = x if x.ndim == 3 else np.repeat(x[:, None], chosen.shape[1], 1)
    w = weights["w"].astype(np.float64)[chosen]
    exact = np.einsum("rjk,rjnk->rjn", rows.astype(np.float64), w)
    size = np.einsum("rjk,rjnk->rjn", np.abs(rows).astype(np.float64), np.abs(w))
    if "b" in weights:
        exact, size = exact + weights["b"][chosen], size + np.abs(weights["b"][chosen])
    return exact, (x.shape[-1] + 1) * U * size + 1e-30


@targets
@dtypes
@few
@given(
    sizes=st.sampled_from([(1, 1), (4, 2), (6, 3), (16, 4)]),
    n=st.integers(1, 150),
    inner=st.integers(1, 150),
    per_choice=st.booleans(),
    bias=st.booleans(),
)
def test_grouped_linear(
    target: str, dtype: DType, sizes: tuple[int, int], n: int, inner: int, per_choice: bool, bias: bool
) -> None:
    """One row, many rows, experts that no row chose; each row's bits the same whatever stands beside it."""
    experts, k = sizes
    graph, weights = grouped(experts, k, n, inner, dtype, per_choice, bias)
    kernels = KernelRun(graph, weights, target=target)
    rng = np.random.default_rng(1)
    x = rounded(rng.standard_normal((21, *graph.type("x").inner)), dtype)
    among = list(range(experts - k // 2))  # the last are never chosen
    chosen = chosen_experts(21, k, among if len(among) >= k else list(range(experts)))
    y = kernels.run({"x": x, "e": chosen})["y"]
    exact, allowed = expected_rows(x, chosen, weights)
    assert (np.abs(y - exact) <= allowed).all()
    for start, stop in ((0, 1), (5, 6), (3, 7), (0, 20)):
        part = kernels.run({"x": x[start:stop], "e": chosen[start:stop]})["y"]
        assert part.tobytes() == y[start:stop].tobytes()


@dtypes
@pytest.mark.parametrize("per_choice", [False, True])
def test_a_grouped_linear_has_the_same_bits_for_any_number_of_workers(dtype: DType, per_choice: bool) -> None:
    graph, weights = grouped(5, 2, 100, 70, dtype, per_choice, True)
    x = rounded(np.random.default_rng(1).standard_normal((50, *graph.type("x").inner)), dtype)
    chosen = chosen_experts(50, 2, [0, 1, 2, 4])
    chosen[:, 0] = 3  # one expert has all rows
    results = [run_by(n, graph, {"x": x, "e": chosen}, weights=weights)["y"] for n in (1, 3)]
    assert results[0].tobytes() == results[1].tobytes()
    exact, allowed = expected_rows(x, chosen, weights)
    assert (np.abs(results[0] - exact) <= allowed).all()


# -------------------------------------------------------------------------------------- softmax


@targets
@pytest.mark.parametrize("width", [1, 5, 24, 64, 100, 1000])
def test_softmax(target: str, width: int) -> None:
    """Against float64, also where one element leaves nothing to the others; rows have their bits alone."""
    t = Type("T", (width,), "f32")
    node = Node("softmax", ("%x",), ("y",))
    fused = Node("fused.rowwise", ("%x",), ("y",), body=(node,))
    graph = Graph(("x",), ("y",), (fused,), {"x": t, "y": t}, {})
    x = (5 * np.random.default_rng(0).standard_normal((24, width))).astype(np.float32)
    x[1], x[2, -1], x[3] = 0, 300, x[3] - 1e4
    kernel = KernelRun(graph, target=target)
    y = kernel.run({"x": x})["y"]
    power = np.exp(x - x.max(-1, keepdims=True).astype(np.float64))
    exact = power / power.sum(-1, keepdims=True)
    # x - max is rounded once: half an ulp of 64 changes e^x by 64 u; e^x and the sum in lanes add the rest.
    assert (np.abs(y - exact) <= (80 + width / 8) * U * exact + 1e-37).all()
    assert kernel.run({"x": x[2:3]})["y"].tobytes() == y[2:3].tobytes()
    if width == 100:
        for threads in (1, 3):
            assert run_by(threads, graph, {"x": x}, target=target)["y"].tobytes() == y.tobytes()
