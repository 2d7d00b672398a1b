"""KV write, embedding, argmax and copies in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.interpret import interpret

from pagec.compiler import ops
from pagec.compiler.backends.cuda.kv_write import CacheUse, KvWriteKnobs, kv_write
from pagec.compiler.backends.cuda.tokens import argmax, copy_blocks, embed, take_tokens
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.ir import CacheType, Graph, Node, Type
from pagec.compiler.ops.frequencies import frequencies
from pagec.compiler.packing import buffer_to_rows, rows_to_buffer
from pagec.compiler.rope import RopeConfig, cos_sin_of

BLOCK, LENGTH = 32, 128


def write_node(heads: int, kv_heads: int, head_dim: int, rope: dict[str, Any], norms: bool) -> Graph:
    """What fuse_kv_write leaves behind a q/k/v linear."""
    groups = heads + 2 * kv_heads
    q, kv = Type("T", (heads, head_dim), "f32"), Type("T", (kv_heads, head_dim), "f32")
    first = {"q": ("q", "q.n"), "k": ("k", "k.n")} if norms else {}
    body = [
        Node("slice", ("%qkv",), ("q",), {"start": 0, "stop": heads}),
        Node("slice", ("%qkv",), ("k",), {"start": heads, "stop": heads + kv_heads}),
        Node("slice", ("%qkv",), ("v",), {"start": heads + kv_heads, "stop": groups}),
        *(
            Node("rmsnorm", (f"%{x}", f"${x}_norm"), (y,), {"eps": 1e-6, "offset": 1})
            for x, y in first.values()
        ),
        Node(
            "rope",
            ("%q.n", "%k.n", "%positions") if norms else ("%q", "%k", "%positions"),
            ("qr", "kr"),
            rope,
        ),
        Node("kv_write", ("%kv", "%kr", "%v", "%positions", "%sequences"), ("kv.new",)),
    ]
    weights = {f"{x}_norm": Type(None, (head_dim,), "f32") for x in first}
    inputs = ("%qkv", "%positions", "%kv", "%sequences", *(f"${name}" for name in weights))
    node = Node("fused.kv_write", inputs, ("qr", "kv.new"), body=tuple(body))
    cache = CacheType(0, kv_heads, head_dim, None)
    types: Any = {"qkv": Type("T", (groups, head_dim), "f32"), "kv": cache, "kv.new": cache}
    types |= {name: Type("T", (), "i32") for name in ("positions", "sequences")}
    types |= {"q": q, "q.n": q, "qr": q, "k": kv, "k.n": kv, "kr": kv, "v": kv}
    return Graph(("qkv", "positions", "kv", "sequences"), ("qr", "kv.new"), (node,), types, weights)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("hb", [2, 8])
@pytest.mark.parametrize(
    ("head_dim", "dims", "interleaved"), [(64, 64, False), (80, 80, False), (96, 32, False), (20, 12, True)]
)
def test_kv_write(head_dim: int, dims: int, interleaved: bool, hb: int, norms: bool) -> None:
    """Norms, rope of q and k, and every element at its place; nothing else in the pool is touched."""
    heads, kv_heads, rows = 5, 2, 9
    rope = {"base": 10000.0, "dims": dims, "interleaved": interleaved}
    graph = write_node(heads, kv_heads, head_dim, rope, norms)
    node, rng = graph.nodes[0], np.random.default_rng(0)
    x = rng.standard_normal((rows, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    weights = {name: rng.standard_normal(head_dim).astype(np.float32) for name in graph.weights}
    positions, slots = (rng.permutation(LENGTH)[:rows].astype(np.int32) for _ in range(2))
    use = CacheUse("f32", BLOCK, LENGTH)
    kernel, args = kv_write(node, graph, use, "table:rope", KvWriteKnobs(hb))
    padded = padded_last((head_dim,))
    pool = np.full((LENGTH // BLOCK, 2, kv_heads, BLOCK, padded), np.nan, np.float32)
    out = np.full((rows, row_stride((heads, head_dim))), np.nan, np.float32)
    table = np.stack(cos_sin_of(frequencies(RopeConfig.from_attrs(rope)), LENGTH, 1.0))
    memory = {
        "value:qkv": rows_to_buffer(x, "f32"),
        "step:slot_mapping.0": slots,
        "step:positions": positions,
    }
    memory |= {"table:rope": table, "value:qr": out, "kv:0": pool}
    memory |= {f"weight:{name}": w for name, w in weights.items()}
    interpret(kernel, {n: memory[a] for (n, _), a in zip(kernel.arrays, args, strict=True)}, {"T": rows})

    known: dict[str, Any] = {n: torch.from_numpy(w) for n, w in weights.items()}
    known |= {"qkv": torch.from_numpy(x), "positions": torch.from_numpy(positions)}
    for inner in node.body[:-1]:
        results = ops.run(inner.op, [known[n[1:]] for n in inner.inputs], inner.attrs)
        known.update(zip(inner.outputs, results, strict=True))
    heads_of = {name: known[name].numpy() for name in ("qr", "kr", "v")}
    assert not np.isnan(out).any()
    assert np.abs(buffer_to_rows(out, (heads, head_dim), "f32") - heads_of["qr"]).max() < 1e-5
    for which, name in enumerate(("kr", "v")):
        lines = pool[slots // BLOCK, which, :, slots % BLOCK]
        assert np.abs(lines[..., :head_dim] - heads_of[name]).max() < 1e-5
        assert not lines[..., head_dim:].any()
    assert (~np.isnan(pool)).sum() == rows * 2 * kv_heads * padded


@pytest.mark.parametrize("width", [64, 70, 576])
def test_embed(width: int) -> None:
    rng = np.random.default_rng(0)
    table = rows_to_buffer(rng.standard_normal((100, width)).astype(np.float32), "f32")
    ids = np.array([0, 99, 17, 17, 63], np.int32)
    out = np.full((5, row_stride((width,))), np.nan, np.float32)
    interpret(embed(width, "f32", "f32"), {"ids": ids, "table": table, "out": out}, {"T": 5})
    assert np.array_equal(out, table[ids])


@pytest.mark.parametrize("width", [1, 5, 100, 3000, 20000])
def test_argmax_takes_the_first_of_equals(width: int) -> None:
    rng = np.random.default_rng(0)
    x = np.full((6, row_stride((width,))), np.inf, np.float32)
    x[:, :width] = rng.integers(-5, 6, (6, width))
    x[3, :width] = -np.inf
    x[4, : width // 2] = np.nan
    expected = np.where(np.isnan(x[:, :width]), -np.inf, x[:, :width]).argmax(-1)
    kernels = argmax(width)
    pieces = kernels[0].grid.columns
    memory = {"x": x, "out": np.full(6, -1, np.int32)}
    memory |= {"value": np.full((6, pieces), np.nan, np.float32), "index": np.full((6, pieces), -1, np.int32)}
    for kernel in kernels:
        interpret(kernel, {name: memory[name] for name, _ in kernel.arrays}, {"R": 6})
    assert (memory["out"] == expected).all()


def test_copies_of_blocks() -> None:
    """All spans of the blocks, and nothing else."""
    spans, blocks, words = 3, 7, 1500
    pool = np.random.default_rng(0).integers(0, 1 << 31, (spans, blocks, words)).astype(np.int32)
    expected = pool.copy()
    expected[:, [5, 6]] = pool[:, [1, 2]]
    copies = np.array([[1, 5], [2, 6]], np.int32)
    kernel = copy_blocks(spans, 4 * words)
    interpret(kernel, {"copies": copies, "blocks": np.array([blocks], np.int32), "pool": pool}, {"COPIES": 2})
    assert np.array_equal(pool, expected)


def test_tokens_that_the_step_before_chose_take_their_places() -> None:
    """Also those that are none; what is past the step's end stays as it is."""
    tokens = np.array([7, -1, -4, 3, -2, -3, 9, -1], np.int32)
    chosen = np.array([40, 99, -1, 12], np.int32)
    interpret(take_tokens(50, 64), {"tokens": tokens, "chosen": chosen}, {"T": 7})
    np.testing.assert_array_equal(tokens, [7, 40, 12, 3, 49, 0, 9, -1])
