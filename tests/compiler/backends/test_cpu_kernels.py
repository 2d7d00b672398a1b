"""Each CPU template alone, against float64 or torch, on every target that this machine can run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.kernels import KernelRun, one_node_graph

from pagec.compiler import reference
from pagec.compiler.backends.targets import PREFERENCE, load_target
from pagec.compiler.dims import DType, padded_last
from pagec.compiler.ir import CacheType, Graph, Node, Type
from pagec.compiler.packing import from_bf16, kv_elements, to_bf16
from pagec.compiler.passes.fuse_epilogue import fuse_epilogue
from pagec.compiler.passes.fuse_rowwise import fuse_rowwise
from pagec.compiler.program import KvGroup, KvLayout
from pagec.compiler.target import host

U = 2.0**-24
RUNNABLE = [name for name in PREFERENCE if host().flags.issuperset(load_target(name).requires)]
few = settings(
    max_examples=6,
    deadline=None,  # an example compiles kernels, so shrinking one would take minutes
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
targets = pytest.mark.parametrize("target", RUNNABLE)
dtypes = pytest.mark.parametrize("dtype", ["bf16", "f32"])


def rounded(x: Any, dtype: DType) -> Any:
    return from_bf16(to_bf16(x)) if dtype == "bf16" else np.asarray(x, np.float32)


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


# ------------------------------------------------------------------------------------- attention


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
) -> tuple[Any, list[Any]]:
    """The kernel's result on random inputs, and float64's for each sequence. `rows`: of the one sequence,
    which begins at 0, these only, the others having been computed before."""
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


# --------------------------------------------------------------------------------------- the rest


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
    slots = rng.permutation(9 * 32)[:50].astype(np.int32)
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


def test_softmax_of_large_scores_is_exact_in_its_extremes() -> None:
    """One key dominates by more than e^87: its value comes out as it is."""
    got, expected = run_attention(
        target=RUNNABLE[0], dtype="f32", heads=1, kv_heads=1, head_dim=16, chunks=[(0, 1)]
    )
    assert math.isfinite(float(got.sum()))
    assert np.array_equal(got, np.concatenate(expected).astype(np.float32))


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
