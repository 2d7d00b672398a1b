"""Every pass: its exact output, and that it means the same as its input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.goldens import Golden
from support.graphs import llama_graph

from pagec.compiler import reference
from pagec.compiler.ir import CacheType, Graph, Node, format_graph, from_json, to_json
from pagec.compiler.passes import PIPELINE, Numbers, run_passes, stages
from pagec.compiler.passes.fuse_rowwise import fuse_rowwise
from pagec.compiler.verifier import VerifierError, verify


def run(graph: Graph, prompts: list[list[int]], seed: int = 0) -> torch.Tensor:
    """Logits of every row, with weights that depend on their names only."""

    def weight(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        rows = graph_weights[name]
        return torch.randn(rows, generator=generator) * 0.2

    graph_weights = {name: t.inner for name, t in llama_graph(qkv_bias=True, window=5).weights.items()}
    inputs = reference.step_inputs(graph, prompts)
    inputs["logit_rows"] = torch.arange(sum(map(len, prompts)), dtype=torch.int32)
    for name in graph.inputs:
        t = graph.types[name]
        if isinstance(t, CacheType):
            inputs[name] = reference.empty_cache(t, len(prompts), max(map(len, prompts)))
    return reference.run(graph, inputs, weight)["logits"]


def test_every_stage_is_golden(golden: Golden) -> None:
    graph = llama_graph()
    golden.check("passes/0_spec.txt", format_graph(graph))
    for number, (name, stage) in enumerate(stages(graph, Numbers("bf16", "bf16")), 1):
        golden.check(f"passes/{number}_{name}.txt", format_graph(stage))


def test_no_stage_changes_what_a_graph_means() -> None:
    """In float32 there is no rounding: every stage computes the same, to summation order."""
    graph = llama_graph(qkv_bias=True, window=5)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7], [200, 3]]
    expected = run(graph, prompts)
    for name, stage in stages(graph, Numbers("f32", "f32")):
        assert torch.allclose(run(stage, prompts), expected, rtol=0, atol=1e-4), name


def test_fusing_moves_no_rounding() -> None:
    """From the rounding pass on, every stage gives the same bits."""
    graph = llama_graph(qkv_bias=True, window=5)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7]]
    results = {
        name: run(stage, prompts)
        for name, stage in stages(graph, Numbers("bf16", "bf16"))
        if name.startswith(("round", "fuse"))
    }
    assert len(results) == 5
    first = results.pop("round_inputs")
    assert all(torch.equal(first, other) for other in results.values())


def test_a_graph_survives_json() -> None:
    for _, stage in stages(llama_graph(), Numbers("bf16", "f32")):
        assert from_json(to_json(stage)) == stage


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_every_node_of_the_fused_graph_is_one_kernel(dtype: str) -> None:
    fused = run_passes(llama_graph(), Numbers(dtype, dtype))  # type: ignore[arg-type]
    kinds = {node.op for node in fused.nodes}
    assert kinds == {
        "embed",
        "linear",
        "fused.linear",
        "fused.rowwise",
        "fused.kv_write",
        "fused.attention",
        "argmax",
        "sample",
    }


def test_the_verifier_finds_broken_graphs() -> None:
    graph = llama_graph()
    first, second, *rest = graph.nodes
    broken = {
        "used before it is made": replace(graph, nodes=(second, first, *rest)),
        "defined twice": replace(graph, nodes=(first, first, second, *rest)),
        "the graph says": replace(graph, types={**graph.types, "x": graph.types["tokens"]}),
        "never made": replace(graph, outputs=("nothing",)),
    }
    for message, changed in broken.items():
        with pytest.raises(VerifierError, match=message):
            verify(changed, "a test")


def test_the_pipeline_is_what_its_names_say() -> None:
    assert [name for name, _ in PIPELINE] == [
        "split_heads",
        "merge_linears",
        "take_logit_rows",
        "add_argmax",
        "add_sample",
        "lower_attention",
        "group_experts",
        "round_inputs",
        "fuse_kv_write",
        "fuse_attention",
        "fuse_epilogue",
        "fuse_rowwise",
    ]


def test_regions_end_where_another_kernel_reads_between() -> None:
    """y is read by a linear between two row-wise nodes: they cannot be one kernel."""
    graph = llama_graph()
    x = graph.nodes[0].outputs[0]
    t = graph.types[x]
    nodes = (
        graph.nodes[0],
        Node("activation", (f"%{x}",), ("a",), {"name": "silu"}),
        Node("linear", ("%a", "$l0.o"), ("b",)),
        Node("add", ("%a", "%b"), ("c",)),
    )
    small = Graph(graph.inputs, ("c",), nodes, {**graph.types, "a": t, "b": t, "c": t}, graph.weights)
    fused = fuse_rowwise(small)
    assert [node.op for node in fused.nodes] == ["embed", "fused.rowwise", "linear", "fused.rowwise"]
    verify(fused, "a test")


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_what_a_linear_reads_lies_in_memory(dtype: str) -> None:
    """The rows whose logits are wanted are copied for the head's first linear, with and without rounding."""
    fused = run_passes(llama_graph(), Numbers(dtype, dtype))  # type: ignore[arg-type]
    made = {name for node in fused.nodes for name in node.outputs} | set(fused.inputs)
    for node in fused.nodes:
        for inner in node.body or (node,):
            if inner.op == "linear":
                assert inner.inputs[0][1:] in made
