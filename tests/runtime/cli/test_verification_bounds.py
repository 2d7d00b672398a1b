"""How far a kernel may be off whose results are rounded to bf16 on the way: as GPUs do, which are not here.

A GPU's kernel is a node's own meaning with the sums of its linear made in another order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagec.compiler import reference
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.spec import build_graph, parse_spec
from pagec.runtime.cli.verification.bounds import BF16_ULP, Bounds, rounded_inside

# Norms behind attention and MLP: what is added is rounded and read again.
GEMMA = """\
extends: gemma2
params: {sliding_window: 32, vocab: 256, hidden: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 16,
         inter: 96, max_len: 128}
"""
LLAMA = GEMMA.replace("gemma2", "llama").replace("sliding_window: 32, ", "")
TOKENS = 24


def graphs(text: str) -> tuple[Graph, Graph]:
    """Before the passes, and after them as for a GPU."""
    source = build_graph(parse_spec(text, "model.yaml"))
    return source, run_passes(source, Numbers("bf16", "bf16", residual="bf16"))


def step(source: Graph, graph: Graph) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A prompt's values, and random weights."""
    rng = np.random.default_rng(0)
    weights = {
        name: torch.from_numpy(rng.standard_normal(t.inner, np.float32)).bfloat16().float()
        for name, t in source.weights.items()
    }
    weights = {name: w * 0.25 if w.ndim > 1 else w for name, w in weights.items()}
    inputs = reference.step_inputs(graph, [rng.integers(0, 256, TOKENS).tolist()])
    for name in graph.inputs:
        if name.startswith("kv"):
            inputs[name] = reference.empty_cache(graph.types[name], 1, TOKENS)  # type: ignore[arg-type]
    inputs["logit_rows"] = torch.arange(TOKENS, dtype=torch.int32)
    return reference.run(graph, inputs, weights.__getitem__), weights


def in_another_order(
    node: Node, values: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """A node's first result; its linear sums from the other end of K."""
    linear = node.find("linear")
    assert linear is not None
    name = linear.inputs[0][1:]
    turned = {**values, name: values[name].flatten(1).flip(-1).reshape(values[name].shape)}
    y = reference.run_node(linear, turned, lambda part: weights[part].flip(-1))[linear.outputs[0]]
    values = {**values, linear.outputs[0]: y}
    for inner in node.body:
        if inner is not linear:
            values.update(reference.run_node(inner, values, weights.__getitem__))
    return values[node.outputs[0]]


@pytest.mark.parametrize("text", [LLAMA, GEMMA], ids=["llama", "gemma2"])
def test_another_order_of_summation_is_within_bounds_and_a_lost_term_is_not(text: str) -> None:
    source, graph = graphs(text)
    values, weights = step(source, graph)
    bounds = Bounds(
        graph, values, weights.__getitem__, np.random.default_rng(0), keys=TOKENS, kv_dtype="bf16"
    )
    nodes = [node for node in graph.nodes if node.op == "fused.linear"]
    assert nodes
    for node in nodes:
        t, expected = graph.types[node.outputs[0]], values[node.outputs[0]]
        assert isinstance(t, Type)
        allowed = bounds.of(node, t, expected) + BF16_ULP * expected.abs()
        assert ((in_another_order(node, values, weights) - expected).abs() <= allowed).all()
        assert (0.1 * expected.abs().max() > allowed).any()


def test_what_is_rounded_and_read_again_is_found() -> None:
    """Gemma's sum of stream and norm is rounded, and the next norm reads it in the same kernel. A stream that
    is rounded as it comes in rounds alike everywhere."""
    found = [rounded_inside(node) for text in (LLAMA, GEMMA) for node in graphs(text)[1].nodes]
    assert any(found)
    assert not any(rounded_inside(node) for node in graphs(LLAMA)[1].nodes)
