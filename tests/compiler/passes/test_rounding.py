"""Where a GPU's programs round the residual stream."""

from __future__ import annotations

import pytest
from support.graphs import llama_graph

from pagec.compiler.dims import DType
from pagec.compiler.ir import Node
from pagec.compiler.passes import Numbers, run_passes, stages


@pytest.mark.parametrize("residual", ["f32", "bf16"])
def test_norms_and_sums_read_the_stream_as_it_is_rounded(residual: DType) -> None:
    numbers = Numbers("bf16", "bf16", residual)
    graph = next(g for name, g in stages(llama_graph(), numbers) if name == "round_inputs")
    norms = [node for node in graph.nodes if node.op == "rmsnorm"]
    sums = [node for node in graph.nodes if node.op == "add"]
    assert len(norms) == 5
    assert len(sums) == 4
    assert {graph.type(node.inputs[0][1:]).dtype for node in norms} == {residual}
    for node in sums:  # the stream, and what a layer adds to it
        assert sorted(graph.type(name).dtype for name in node.values()) == sorted(["f32", residual])


def test_rounding_the_stream_takes_no_kernel() -> None:
    def ops(residual: DType) -> list[tuple[str, int]]:
        graph = run_passes(llama_graph(), Numbers("bf16", "bf16", residual))
        return [(node.op, _casts(node)) for node in graph.nodes]

    plain, rounded = ops("f32"), ops("bf16")
    assert [op for op, _ in plain] == [op for op, _ in rounded]
    assert sum(n for _, n in rounded) == sum(n for _, n in plain) + 5  # the embedding's and each sum's


def _casts(node: Node) -> int:
    return sum(inner.op == "cast" for inner in node.body)
