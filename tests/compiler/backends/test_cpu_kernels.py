"""Each CPU template alone, against float64 or torch, on every target that this machine can run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import KernelRun, normed_linear, one_node_graph
from support.targets import RUNNABLE, U, dtypes, few, rounded, targets

from pagec.compiler import reference
from pagec.compiler.backends.cpu.prologue import find_prologues
from pagec.compiler.backends.targets import load_target
from pagec.compiler.dims import DType
from pagec.compiler.ir import CacheType, Graph, Node, Type
from pagec.compiler.packing import from_bf16, kv_elements
from pagec.compiler.passes.fuse_epilogue import fuse_epilogue
from pagec.compiler.passes.fuse_kv_write import fuse_kv_write
from pagec.compiler.passes.fuse_rowwise import fuse_rowwise
from pagec.compiler.program import KvGroup, KvLayout

# ---------------------------------------------------------------------------------------- linear


@targets
@dtypes
@few
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear(target: str, dtype: DType, n: int, k: int, bias: bool, seed: int) -> None:
    """Any N and K; every bucket's kernel, and each row's bits the same whatever the number of rows."""
    rng = np.random.default_rng(seed)
    x = rounded(rng.standard_normal((23, k)), dtype)
    w, b = rounded(rng.standard_normal((n, k)), dtype), rng.standard_normal(n).astype(np.float32)
    inputs = {"x": Type("T", (k,), dtype), "w": Type(None, (n, k), dtype)}
    if bias:
        inputs["b"] = Type(None, (n,), "f32")
    graph = one_node_graph("linear", inputs, {"y": Type("T", (n,), "f32")})
    kernels = KernelRun(graph, {"w": w, "b": b}, target=target)
    y = kernels.run({"x": x})["y"]
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + (b if bias else 0)
    allowed = (k + 1) * U * (np.abs(x).astype(np.float64) @ np.abs(w).T + np.abs(b)) + 1e-30
    assert (np.abs(y - exact) <= allowed).all()
    for rows in (1, 2, 3, 4, 5):
        assert kernels.run({"x": x[:rows]})["y"].tobytes() == y[:rows].tobytes()


@targets
@dtypes
@pytest.mark.parametrize("threads", [1, 3])
def test_a_linear_of_any_number_of_rows(target: str, dtype: DType, threads: int) -> None:
    """Tiles of two sizes, and blocks of rows: each row's bits are those it has alone."""
    rng = np.random.default_rng(threads)
    x = rounded(rng.standard_normal((1030, 70)), dtype)
    w = rounded(rng.standard_normal((130, 70)), dtype)
    inputs = {"x": Type("T", (70,), dtype), "w": Type(None, (130, 70), dtype)}
    graph = one_node_graph("linear", inputs, {"y": Type("T", (130,), "f32")})
    kernels = KernelRun(graph, {"w": w}, target=target, threads=threads)
    alone = np.concatenate([kernels.run({"x": x[row : row + 1]})["y"] for row in range(len(x))])
    for rows in (*range(2, 34), 255, 256, 257, 263, 511, 512, 513, 515, 767, 768, 770, 1023, 1024, 1030):
        assert kernels.run({"x": x[:rows]})["y"].tobytes() == alone[:rows].tobytes(), rows


def test_a_linear_of_heads_reads_and_writes_padded_heads() -> None:
    """Heads of 20 lie 32 apart; the weight's rows and columns follow."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((7, 3, 20)).astype(np.float32), rng.standard_normal((100, 60))
    graph = one_node_graph(
        "linear",
        {"x": Type("T", (3, 20), "f32"), "w": Type(None, (100, 60), "f32")},
        {"y": Type("T", (5, 20), "f32")},
        split=20,
    )
    y = KernelRun(graph, {"w": w}).run({"x": x})["y"]
    assert np.allclose(y, (x.reshape(7, 60) @ w.T).reshape(7, 5, 20), rtol=0, atol=1e-4)


@targets
@dtypes
@pytest.mark.parametrize("tiled", [True, False])
def test_embed(target: str, dtype: DType, tiled: bool) -> None:
    """Rows of the table, exactly; also out of a table that lies as a linear's weight."""
    rng = np.random.default_rng(0)
    table = rounded(rng.standard_normal((100, 70)), dtype)
    types = {"ids": Type("T", (), "i32"), "e": Type("T", (70,), "f32"), "l": Type("T", (100,), "f32")}
    nodes = [Node("embed", ("%ids", "$w"), ("e",))]
    if tiled:
        types["x"] = Type("T", (70,), dtype)
        nodes.append(Node("linear", ("%x", "$w"), ("l",)))
    graph = Graph(tuple(types), ("e",), tuple(nodes), types, {"w": Type(None, (100, 70), dtype)})
    ids = np.array([0, 99, 17, 17, 63, 64], np.int32)
    values = {"ids": ids} | ({"x": np.zeros((6, 70), np.float32)} if tiled else {})
    assert (KernelRun(graph, {"w": table}, target=target).run(values)["e"] == table[ids]).all()


@targets
@pytest.mark.parametrize("width", [1, 5, 16, 100, 1000])
def test_argmax_takes_the_first_of_equals(target: str, width: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-5, 6, (40, width)).astype(np.float32)
    x[3] = -np.inf
    graph = one_node_graph("argmax", {"x": Type("T", (width,), "f32")}, {"i": Type("T", (), "i32")})
    assert (KernelRun(graph, target=target).run({"x": x})["i"] == x.argmax(-1)).all()


@targets
@dtypes
@pytest.mark.parametrize(
    ("head_dim", "dims", "interleaved"), [(64, 64, False), (80, 80, False), (96, 32, False), (20, 12, True)]
)
def test_kv_write(target: str, dtype: DType, head_dim: int, dims: int, interleaved: bool) -> None:
    """Rope of q and k, rounding, and every element at its place; nothing else in the pool is touched."""
    heads, kv_heads = 6, 2
    rng = np.random.default_rng(0)
    layout = KvLayout(dtype, 32, kv_heads, head_dim, (KvGroup((0,), None),))
    groups = heads + 2 * kv_heads
    q, kv = Type("T", (heads, head_dim), "f32"), Type("T", (kv_heads, head_dim), "f32")
    step_types = {name: Type("T", (), "i32") for name in ("positions", "sequences")}
    cache = CacheType(0, kv_heads, head_dim, None)
    rope = {"base": 10000.0, "dims": dims, "interleaved": interleaved}
    body = [
        Node("slice", ("%qkv",), ("q",), {"start": 0, "stop": heads}),
        Node("slice", ("%qkv",), ("k",), {"start": heads, "stop": heads + kv_heads}),
        Node("slice", ("%qkv",), ("v",), {"start": heads + kv_heads, "stop": groups}),
        Node("rope", ("%q", "%k", "%positions"), ("qr", "kr"), rope),
        *(Node("cast", (f"%{n}",), (f"{n}.c",), {"dtype": dtype}) for n in ("qr", "kr", "v")),
        Node("kv_write", ("%kv", "%kr.c", "%v.c", "%positions", "%sequences"), ("kv.new",)),
    ]
    node = Node(
        "fused.kv_write", ("%qkv", "%positions", "%kv", "%sequences"), ("qr.c", "kv.new"), body=tuple(body)
    )
    types: Any = {"qkv": Type("T", (groups, head_dim), "f32"), "kv": cache, "kv.new": cache, **step_types}
    types |= {"q": q, "qr": q, "qr.c": Type("T", (heads, head_dim), dtype), "k": kv, "kr": kv, "v": kv}
    types |= {f"{n}.c": Type("T", (kv_heads, head_dim), dtype) for n in ("kr", "v")}
    graph = Graph(("qkv", "positions", "kv", "sequences"), ("qr.c", "kv.new"), (node,), types, {})

    x = rng.standard_normal((50, groups, head_dim)).astype(np.float32)
    positions = rng.permutation(1000)[:50].astype(np.int32)
    # Chunks of sequences. The two workers part at row 25, slot 77, which shares a word with slot 76.
    slots = np.concatenate([np.arange(5, 22), [64], np.arange(70, 90), np.arange(200, 212)]).astype(np.int32)
    kind: Any = np.uint16 if dtype == "bf16" else np.float32
    pool = np.full(9 * layout.span_bytes, 0xFF, np.uint8).view(kind)
    step = {"step:slot_mapping.0": slots, "step:positions": positions, "kv:0": pool}
    got = KernelRun(graph, kv=layout, target=target).run({"qkv": x}, step)["qr.c"]

    values = {"qkv": torch.from_numpy(x), "positions": torch.from_numpy(positions)}
    for inner in body[:-1]:
        values |= reference.run_node(inner, values, lambda _: torch.empty(0))
    ulp = 2.0**-8 if dtype == "bf16" else 0.0
    padded = -(-head_dim // 16) * 16
    for mine, name in ((got, "qr"), *zip(_read(pool, layout, slots), ("kr", "v"), strict=True)):
        exact = values[name].numpy()
        assert (np.abs(mine - exact) <= 2 * ulp * np.abs(exact) + 8 * U * np.abs(x).max()).all(), name
    written = 50 * 2 * kv_heads * padded
    untouched = pool.view(np.uint8).reshape(-1, pool.itemsize) == 0xFF
    assert untouched.all(axis=1).sum() == pool.size - written


@targets
@pytest.mark.parametrize(
    ("head_dim", "dims", "interleaved"), [(64, 64, False), (80, 80, False), (96, 32, False), (20, 12, True)]
)
def test_rope_that_no_kv_write_follows(target: str, head_dim: int, dims: int, interleaved: bool) -> None:
    """Turns part of each head, copies the rest; padding is zero."""
    rng = np.random.default_rng(0)
    types: Any = {"q": Type("T", (5, head_dim), "f32"), "k": Type("T", (2, head_dim), "f32")}
    types |= {"qr": types["q"], "kr": types["k"], "positions": Type("T", (), "i32")}
    attrs = {"base": 10000.0, "dims": dims, "interleaved": interleaved}
    node = Node("rope", ("%q", "%k", "%positions"), ("qr", "kr"), attrs)
    graph = Graph(("q", "k", "positions"), ("qr", "kr"), (node,), types, {})
    values = {n: rng.standard_normal((23, *types[n].inner)).astype(np.float32) for n in ("q", "k")}
    positions = rng.permutation(1000)[:23].astype(np.int32)
    got = KernelRun(graph, target=target).run(values, {"step:positions": positions})
    inputs = {n: torch.from_numpy(x) for n, x in values.items()} | {"positions": torch.from_numpy(positions)}
    expected = reference.run_node(node, inputs, lambda _: torch.empty(0))
    for name in ("qr", "kr"):
        assert np.abs(got[name] - expected[name].numpy()).max() <= 8 * U * np.abs(values[name[0]]).max()
        assert np.array_equal(got[name][..., dims:], values[name[0]][..., dims:])


def normed_heads(dtype: DType, head_dim: int, offset: int) -> Graph:
    """Heads of q and k, normed and turned, on their way into the cache and to its reader."""
    q, kv = Type("T", (4, head_dim), "f32"), Type("T", (2, head_dim), "f32")
    norm = {"eps": 1e-6, "offset": offset}
    nodes = [
        Node("slice", ("%qkv",), ("q",), {"start": 0, "stop": 4}),
        Node("slice", ("%qkv",), ("k",), {"start": 4, "stop": 6}),
        Node("slice", ("%qkv",), ("v",), {"start": 6, "stop": 8}),
        Node("rmsnorm", ("%q", "$qw"), ("qn",), norm),
        Node("rmsnorm", ("%k", "$kw"), ("kn",), norm),
        Node("rope", ("%qn", "%kn", "%positions"), ("qr", "kr"), {"base": 10000.0, "dims": head_dim}),
    ]
    types: dict[str, Any] = {name: Type("T", (), "i32") for name in ("positions", "sequences")}
    types |= {"qkv": Type("T", (8, head_dim), "f32"), "kv": CacheType(0, 2, head_dim, None)}
    types |= {"kv.new": types["kv"], "a": q, "q": q, "qn": q, "qr": q}
    types |= dict.fromkeys(("k", "kn", "kr", "v"), kv)
    names = ["qr", "kr", "v"]
    if dtype == "bf16":
        nodes += [Node("cast", (f"%{name}",), (f"{name}.c",), {"dtype": dtype}) for name in names]
        types |= {f"{name}.c": replace(types[name], dtype=dtype) for name in names}
        names = [f"{name}.c" for name in names]
    step = ("%positions", "%sequences")
    nodes.append(Node("kv_write", ("%kv", f"%{names[1]}", f"%{names[2]}", *step), ("kv.new",)))
    nodes.append(Node("paged_attention", (f"%{names[0]}", "%kv.new", *step), ("a",), {"scale": 1.0}))
    weights = dict.fromkeys(("qw", "kw"), Type(None, (head_dim,), "f32"))
    return Graph(("qkv", "kv", "positions", "sequences"), ("a",), tuple(nodes), types, weights)


@targets
@dtypes
@pytest.mark.parametrize(("head_dim", "offset"), [(64, 0), (64, 1), (20, 0), (128, 1)])
def test_norms_of_heads_in_a_kv_write_give_the_bits_of_separate_kernels(
    target: str, dtype: DType, head_dim: int, offset: int
) -> None:
    rng = np.random.default_rng(0)
    graph = normed_heads(dtype, head_dim, offset)
    layout = KvLayout(dtype, 16, 2, head_dim, (KvGroup((0,), None),))
    weights = {name: rng.standard_normal(head_dim) for name in ("qw", "kw")}
    x = rng.standard_normal((23, 8, head_dim)).astype(np.float32)
    results = []
    for kept in ((), ("qn", "kn")):  # what is a result stays a kernel of its own
        whole = fuse_rowwise(fuse_kv_write(replace(graph, outputs=(*graph.outputs, *kept))))
        nodes = [node for node in whole.nodes if node.op != "paged_attention"]
        query = next(node for node in nodes if node.op == "fused.kv_write").outputs[0]
        assert len(nodes) == 1 + len(kept)
        pool = np.zeros(4 * layout.span_bytes, np.uint8).view(np.uint16 if dtype == "bf16" else np.float32)
        step = {"step:slot_mapping.0": np.arange(7, 30, dtype=np.int32), "kv:0": pool}
        step["step:positions"] = np.arange(100, 123, dtype=np.int32)
        run = KernelRun(whole.with_nodes(nodes), weights, kv=layout, target=target)
        results.append((run.run({"qkv": x}, step)[query].tobytes(), pool.tobytes()))
        assert pool.any()
    assert results[0] == results[1]


def _read(pool: Any, layout: KvLayout, slots: Any) -> Any:
    parts = [pool[place] for place in kv_elements(layout, slots)]
    return [from_bf16(part) if layout.dtype == "bf16" else part for part in parts]


def region(nodes: list[Node], types: dict[str, Type], weights: dict[str, Type], outputs: list[str]) -> Graph:
    """A graph of one row-wise region."""
    made = {name for node in nodes for name in node.outputs}
    inputs = dict.fromkeys(n for node in nodes for n in node.inputs if n[0] == "$" or n[1:] not in made)
    node = Node("fused.rowwise", tuple(inputs), tuple(outputs), body=tuple(nodes))
    given = tuple(n[1:] for n in inputs if n[0] == "%")
    return Graph(given, tuple(outputs), (node,), types, weights)


@targets
@pytest.mark.parametrize("inner", [(64,), (100,), (7,), (3, 20), (2, 64)])
@pytest.mark.parametrize("out", ["bf16", "f32"])
def test_rowwise(target: str, inner: tuple[int, ...], out: DType) -> None:
    """x + y, both norms, activations, arithmetic with scalars, and a cast, in one region."""
    rng = np.random.default_rng(0)
    t, d = Type("T", inner, "f32"), inner[-1]
    chain = [
        Node("add", ("%x", "%y"), ("s",)),
        Node("rmsnorm", ("%s", "$w"), ("n",), {"eps": 1e-5, "offset": 1}),
        Node("activation", ("%n",), ("a",), {"name": "gelu_tanh"}),
        Node("mul", ("%a",), ("m",), {"scalar": 3.0}),
        Node("sub", ("%m", "%x"), ("u",)),
        Node("layernorm", ("%u", "$w", "$b"), ("l",), {"eps": 1e-6}),
        Node("softcap", ("%l",), ("c",), {"cap": 2.0}),
        Node("rsub", ("%c",), ("r",), {"scalar": 1.0}),
        Node("cast", ("%r",), ("o",), {"dtype": out}),
    ]
    types = {name: t for node in chain for name in node.outputs} | {"x": t, "y": t}
    types["o"] = Type("T", inner, out)
    vector = Type(None, (d,), "f32")
    graph = region(chain, types, {"w": vector, "b": vector}, ["s", "o"])
    weights = {"w": rng.standard_normal(d), "b": rng.standard_normal(d)}
    x, y = (rng.standard_normal((13, *inner)).astype(np.float32) for _ in range(2))
    got = KernelRun(graph, weights, target=target).run({"x": x, "y": y})

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(weights[name]).float()

    values = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    expected = reference.run_node(graph.nodes[0], values, weight)
    assert (got["s"] == expected["s"].numpy()).all()
    ulp = 2.0**-7 if out == "bf16" else 0.0
    exact = expected["o"].numpy()
    # Two norms of rows near 1: a few hundred roundings, enlarged where a row of 7 nearly cancels.
    assert (np.abs(got["o"] - exact) <= ulp * np.abs(exact) + 2000 * U).all()


@targets
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh"])
def test_activations(target: str, name: str) -> None:
    """Absolute error against float64 of a few units of float32 at the size of the result."""
    x = np.concatenate([np.linspace(-20, 20, 4096), [0.0, -0.0, 88.0, -88.0, 1e-3, -300.0]]).astype(
        np.float32
    )
    x = np.resize(x, (64, 65))
    t = Type("T", (65,), "f32")
    node = Node("activation", ("%x",), ("y",), {"name": name})
    got = KernelRun(region([node], {"x": t, "y": t}, {}, ["y"]), target=target).run({"x": x})["y"]
    exact = reference.run_node(node, {"x": torch.from_numpy(x.astype(np.float64))}, lambda _: torch.empty(0))[
        "y"
    ]
    assert (np.abs(got - exact.numpy()) <= 8 * U * np.maximum(np.abs(exact.numpy()), 1)).all()


def test_a_region_cut_in_two_gives_the_same_bits() -> None:
    """A product and a sum in one kernel must not become one fused multiply-add."""
    rng = np.random.default_rng(0)
    t = Type("T", (640,), "f32")
    types = dict.fromkeys("xyzms", t)
    product = Node("mul", ("%x", "%y"), ("m",))
    total = Node("add", ("%m", "%z"), ("s",))
    x, y, z = (rng.standard_normal((20, 640)).astype(np.float32) for _ in range(3))
    for target in RUNNABLE:
        whole = KernelRun(region([product, total], types, {}, ["s"]), target=target)
        first, second = (
            KernelRun(region([n], types, {}, list(n.outputs)), target=target) for n in (product, total)
        )
        m = first.run({"x": x, "y": y})["m"]
        assert (m == x * y).all()
        expected = second.run({"m": m, "z": z})["s"]
        assert whole.run({"x": x, "y": y, "z": z})["s"].tobytes() == expected.tobytes()
        assert (expected == x * y + z).all()


# ------------------------------------------------------------------------------------- epilogues


def linear_chain(kind: str, dtype: DType) -> Graph:
    """A linear (K = 70) and what follows it, as the passes leave them before fusion."""
    wide, rows = Type("T", (100,), "f32"), Type("T", (70,), dtype)
    types: dict[str, Any] = {"x": rows, "r": wide, "y": wide, "o": wide}
    weights = {"w": Type(None, (100, 70), dtype)}
    match kind:
        case "residual":
            nodes = [Node("linear", ("%x", "$w"), ("y",)), Node("add", ("%r", "%y"), ("o",))]
        case "bias and soft cap":
            weights |= {"b": Type(None, (100,), "f32"), "s": Type(None, (100,), "f32")}
            types |= {"c": wide}
            nodes = [
                Node("linear", ("%x", "$w", "$b"), ("y",)),
                Node("softcap", ("%y",), ("c",), {"cap": 3.0}),
                Node("mul", ("%c", "$s"), ("o",)),
            ]
        case _:
            types |= {"y": Type("T", (2, 50), "f32")}
            types |= dict.fromkeys(["g", "u", "a", "m"], Type("T", (50,), "f32"))
            types["o"] = Type("T", (50,), "bf16")
            nodes = [
                Node("linear", ("%x", "$w"), ("y",), {"split": 50}),
                Node("slice", ("%y",), ("g",), {"start": 0, "stop": 1, "drop_axis": True}),
                Node("slice", ("%y",), ("u",), {"start": 1, "stop": 2, "drop_axis": True}),
                Node("activation", ("%g",), ("a",), {"name": "silu"}),
                Node("mul", ("%a", "%u"), ("m",)),
                Node("cast", ("%m",), ("o",), {"dtype": "bf16"}),
            ]
    inputs = ("x", "r") if kind == "residual" else ("x",)
    types = {name: t for name, t in types.items() if name != "r" or kind == "residual"}
    return Graph(inputs, ("o",), tuple(nodes), types, weights)


@targets
@dtypes
@pytest.mark.parametrize("kind", ["residual", "bias and soft cap", "gated"])
def test_an_epilogue_gives_the_bits_of_separate_kernels(target: str, dtype: DType, kind: str) -> None:
    rng = np.random.default_rng(0)
    graph = linear_chain(kind, dtype)
    weights = {name: rounded(rng.standard_normal(t.inner), t.dtype) for name, t in graph.weights.items()}
    values = {
        name: rounded(rng.standard_normal((11, *graph.type(name).inner)), graph.type(name).dtype)
        for name in graph.inputs
    }
    whole = fuse_rowwise(fuse_epilogue(graph))
    assert [node.op for node in whole.nodes] == ["fused.linear"]
    separate = fuse_rowwise(graph)
    assert len(separate.nodes) == 2
    results = [KernelRun(g, weights, target=target).run(values)["o"] for g in (whole, separate)]
    assert results[0].tobytes() == results[1].tobytes()
    assert np.abs(results[0]).max() > 0.1


# ------------------------------------------------------------------------- prologues and the argmax


@targets
@dtypes
@pytest.mark.parametrize("residual", [False, True])
def test_a_linear_that_norms_few_rows_itself_gives_the_same_bits(
    target: str, dtype: DType, residual: bool
) -> None:
    """Up to two rows are normed by the linear, more by a kernel of its own: each row's bits are the same."""
    rng = np.random.default_rng(0)
    graph = fuse_rowwise(fuse_epilogue(normed_linear(dtype, residual)))
    weights = {name: rounded(rng.standard_normal(t.inner), t.dtype) for name, t in graph.weights.items()}
    values = {name: rng.standard_normal((9, *graph.type(name).inner)) for name in graph.inputs}
    kernels = KernelRun(graph, weights, target=target)
    norm, linear = kernels.calls
    assert [limit for limit, kernel in norm.variants if kernel is None] == [2]
    assert [bool(kernel.params["before"]) for kernel in linear.kernels()] == [True, True, False]
    whole = kernels.run(values)[graph.outputs[0]]
    assert np.abs(whole).max() > 0.1
    for rows in (1, 2):
        part = kernels.run({name: x[:rows] for name, x in values.items()})[graph.outputs[0]]
        assert part.tobytes() == whole[:rows].tobytes()


def test_a_norm_that_others_read_too_or_that_costs_more_than_a_launch_stays_apart() -> None:
    target = load_target(RUNNABLE[0])
    graph = fuse_rowwise(normed_linear("bf16", residual=False))
    found, refused = find_prologues(graph, target)
    assert [(p.node.outputs, p.rows) for p in found.values()] == [(("h.c",), 2)]
    assert not refused
    kept = fuse_rowwise(replace(normed_linear("bf16", residual=False), outputs=("y", "h.c")))
    assert find_prologues(kept, target) == ({}, {"h.c": "%h.c is a result"})
    found, refused = find_prologues(graph, replace(target, launch_ns=1))
    assert not found
    assert "costs more than the launch" in refused["h.c"]


@targets
@dtypes
@pytest.mark.parametrize("width", [1, 63, 64, 100, 1000])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_argmax_of_a_linear_is_the_same_without_its_results(
    target: str, dtype: DType, width: int, cap: float | None
) -> None:
    """Also where all logits are negative, and where several are the greatest: then it is the first."""
    rng = np.random.default_rng(width)
    logits = Type("R", (width,), "f32")
    types: dict[str, Any] = {"h": Type("R", (48,), dtype), "y": logits, "i": Type("R", (), "i32")}
    nodes = [Node("linear", ("%h", "$w", "$b"), ("y",))]
    if cap:
        types["c"] = logits
        nodes.append(Node("softcap", ("%y",), ("c",), {"cap": cap}))
    name = nodes[-1].outputs[0]
    nodes.append(Node("argmax", (f"%{name}",), ("i",)))
    weights = {"w": Type(None, (width, 48), dtype), "b": Type(None, (width,), "f32")}
    graph = fuse_epilogue(Graph(("h",), (name, "i"), tuple(nodes), types, weights))
    w = rounded(rng.standard_normal((width, 48)), dtype)
    w[width // 2 :] = w[: width - width // 2]  # every logit twice or more
    h = rounded(rng.standard_normal((9, 48)), dtype)
    for bias in (0.0, -100.0):
        kernels = KernelRun(graph, {"w": w, "b": np.full(width, bias)}, target=target)
        every = kernels.calls
        assert [call.rows for call in every] == ["logits", "logits", "greedy", "greedy"]
        for count in (1, 2, 3, 5, 9):
            kernels.calls = every[:2]
            expected = kernels.run({"h": h[:count]})
            assert (expected["i"] == expected[name].argmax(-1)).all()
            kernels.calls = every  # what comes last overwrites the index
            assert (kernels.run({"h": h[:count]})["i"] == expected["i"]).all()
