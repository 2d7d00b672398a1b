"""Rope and the KV write in the q/k/v linear: the same bytes as in a kernel of their own.

Rows and weights are small integers: the linear's sums are exact, so that it does not matter in which order
the interpreter's matrix product takes them, which depends on a column's place. What follows them rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.graphs import llama_text
from support.interpret import KINDS, interpret

from pagec.compiler.backends.cuda.fuse_write import fuse_writes, refused_writes
from pagec.compiler.backends.cuda.knobs import Chooser
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape
from pagec.compiler.backends.cuda.lower import Lowering, Settings
from pagec.compiler.backends.targets import load_cuda_target
from pagec.compiler.dims import Capacity, row_stride
from pagec.compiler.ir import Graph, Type
from pagec.compiler.packing import pack, rows_to_buffer
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.plan import kv_layout
from pagec.compiler.rope import cos_sin_of
from pagec.compiler.spec import build_graph, parse_spec
from pagec.compiler.verifier import verify

ROWS, BUCKET, BLOCK, LENGTH = 21, 32, 16, 64
NARROW = LinearKnobs(BM=16, BN=16, BK=32, group_m=1)
WIDE = LinearKnobs(BM=32, BN=256, BK=64, group_m=2)
SPLIT = LinearKnobs(BM=16, BN=64, BK=32, group_m=1, splits=2)


class Fixed(Chooser):
    """Gives every linear these knobs."""

    def __init__(self, knobs: LinearKnobs) -> None:
        super().__init__(load_cuda_target("h100"), {})
        self._knobs = knobs

    def linear(self, shape: LinearShape, rows: int) -> tuple[LinearKnobs, None]:  # noqa: ARG002
        return self._knobs, None


def graphs(text: str) -> tuple[Graph, Graph]:
    """A model before the passes, and after those that both backends share."""
    source = build_graph(parse_spec(text, "model.yaml"))
    return source, run_passes(source, Numbers("f32", "bf16"))


def written(source: Graph, graph: Graph, knobs: LinearKnobs, dtype: str) -> tuple[bytes, bytes]:
    """What the first layer's launches from the q/k/v linear to the cache write leave of q and of the cache,
    both `dtype` instead of bf16, which the interpreter cannot do."""
    words = kv_layout(graph, "f32", BLOCK, "rows")
    kv: Any = replace(words, dtype=dtype)
    lowering = Lowering(graph, source, Settings(Capacity(BUCKET, 4, 4), LENGTH, kv, Fixed(knobs)))
    last = next(n for n, node in enumerate(graph.nodes) if node.find("kv_write"))
    nodes = [node for node in graph.nodes[: last + 1] if node.find("linear") or node.find("kv_write")]
    calls = [call for node in nodes for call in lowering.lower(node, BUCKET)]
    memory = step_memory(source, lowering, np.random.default_rng(0))
    memory["kv:0"] = np.full(4 * words.span_bytes // 4, np.nan, KINDS[dtype])
    rows = graph.type(next(nodes[0].values()))
    x = np.random.default_rng(1).integers(-9, 10, (ROWS, *rows.inner)).astype(np.float32)
    memory[f"value:{next(nodes[0].values())}"] = rows_to_buffer(x, "f32")
    for call in calls:
        for (_, element), arg in zip(call.kernel.arrays, call.args, strict=True):
            if arg not in memory:
                memory[arg] = np.full((ROWS, row_stride(graph.type(arg[6:]).inner)), np.nan, KINDS[element])
        arrays = {name: memory[a] for (name, _), a in zip(call.kernel.arrays, call.args, strict=True)}
        interpret(call.kernel, arrays, {"T": ROWS})
    query = next(name for name in graph.nodes[last].outputs if isinstance(graph.types[name], Type))
    return memory[f"value:{query}"].tobytes(), memory["kv:0"].tobytes()


def step_memory(source: Graph, lowering: Lowering, rng: np.random.Generator) -> dict[str, Any]:
    """Random weights as they are packed, tables, scratch memory, positions and slots in any order."""
    model = {name: rng.integers(-9, 10, t.inner).astype(np.float32) for name, t in source.weights.items()}
    memory: dict[str, Any] = {
        "step:positions": rng.permutation(LENGTH)[:ROWS].astype(np.int32),
        "step:slot_mapping.0": rng.permutation(4 * BLOCK)[:ROWS].astype(np.int32),
        "scratch:0": np.full(lowering.scratch_bytes // 4, np.nan, np.float32),
    }
    for weight in lowering.packer.weights.values():
        memory[f"weight:{weight.name}"] = pack(weight, [model[part] for part in weight.parts])
    for table in lowering.packer.tables.values():
        turns = np.array(table.frequencies, np.float32)
        memory[f"table:{table.name}"] = np.stack(cos_sin_of(turns, table.length, table.scale))
    return memory


def rope(dims: int, interleaved: bool = False) -> str:
    return (
        f"  rope: {{base: 10000.0, kind: default, dims: {dims}, interleaved: {str(interleaved).lower()}}}\n"
    )


MODELS = {
    "whole heads": llama_text(layers=1),
    "heads of 20, bias, a window": llama_text(
        layers=1, heads=3, kv_heads=1, head_dim=20, qkv_bias=True, window=9
    ),
    "heads of 80, one for each query": llama_text(layers=1, heads=2, kv_heads=2, head_dim=80),
    "heads of 96, of which 32 turn": llama_text(layers=1, heads=2, kv_heads=1, head_dim=96) + rope(32),
    "neighbours turn": llama_text(layers=1, heads=3, kv_heads=1, head_dim=16) + rope(16, True),
    "a part of neighbours turns": llama_text(layers=1, heads=4, kv_heads=2, head_dim=24) + rope(12, True),
}


@pytest.mark.parametrize(
    ("knobs", "dtype"),
    [(NARROW, "f32"), (WIDE, "f16"), (SPLIT, "f16")],
    ids=["16 columns", "256 columns", "splits"],
)
@pytest.mark.parametrize("name", MODELS)
def test_the_linear_writes_the_bytes_of_a_kernel_apart(name: str, knobs: LinearKnobs, dtype: str) -> None:
    """Of q, its padding too, and of the pool, where what no token owns stays NaN; rounded to float16."""
    source, apart = graphs(MODELS[name])
    together = fuse_writes(apart)
    assert not any(node.op == "fused.kv_write" for node in together.nodes)
    verify(together, "fuse_writes")
    assert written(source, together, knobs, dtype) == written(source, apart, knobs, dtype)


def layer(bias: str = "", rope: str = "q, k = rope(q, k, positions, rope)") -> str:
    """A llama's layer with other heads, to stand behind llama_text."""
    made = "linear(h, $q, $q_bias)", f"linear(h, $k{bias})", f"linear(h, $v{bias})"
    heads = [f"{name} = heads_of({y}, head_dim)" for name, y in zip("qkv", made, strict=True)]
    lines = ["h = rmsnorm(x, $attn_norm, eps=norm_eps)", *heads, *filter(None, [rope])]
    lines += ["a = attention(q, k, v, scale=attn_scale)", "x = x + linear(a, $o)"]
    lines += ["x = x + linear(activation(linear(x, $gate), act) * linear(x, $up), $down)"]
    return "graph:\n  layer:\n" + "".join(f"    - {line}\n" for line in lines)


def test_without_rope_heads_are_only_placed() -> None:
    """A layer that turns nothing: the linear's columns keep their order."""
    source, graph = graphs(llama_text(layers=1) + layer(", $k_bias", rope=""))
    together = fuse_writes(graph)
    assert not any(node.op == "fused.kv_write" for node in together.nodes)
    assert written(source, together, WIDE, "f16") == written(source, graph, WIDE, "f16")


LAYERS = "layers: 1, vocab: 256, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, max_len: 64, inter: 128"


def test_norms_of_heads_keep_the_write_apart() -> None:
    _, graph = graphs(f"extends: qwen3\nparams: {{{LAYERS}}}\n")
    assert fuse_writes(graph).nodes == graph.nodes
    (reason,) = refused_writes(graph).values()
    assert "norms of heads" in reason


def test_several_linears_keep_the_write_apart() -> None:
    """Only the query has a bias: it is a linear of its own."""
    _, graph = graphs(llama_text(layers=1, qkv_bias=True) + layer())
    assert fuse_writes(graph).nodes == graph.nodes
    assert set(refused_writes(graph).values()) == {"q, k and v do not come from one linear"}
