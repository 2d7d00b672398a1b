"""What `show plan` says of fusion."""

from __future__ import annotations

from support.graphs import llama_graph

from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.backends.targets import load_target
from pagec.compiler.fusion import format_fusion, fusion_rows
from pagec.compiler.ir import Graph
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.spec import build_graph, parse_spec

TARGET = load_target("cpu-avx512-bf16")


def fused(**sizes: object) -> Graph:
    return run_passes(llama_graph(**sizes), Numbers("bf16", "bf16"))


def test_what_was_taken_in_and_the_bytes_that_it_saves() -> None:
    rows = fusion_rows(fused(hidden=64, inter=128, layers=2), TARGET)["taken"]
    by_ops = {row["ops"]: row for row in rows}
    residual = by_ops["linear", "add"]
    assert residual["count"] == 4  # two in a layer
    assert residual["saved_bytes_per_row"] == 2 * 64 * 4
    gated = by_ops["linear", "activation", "mul", "cast"]
    # gate and up (2 x 128), the activation and the product, float32, each written and read once
    assert gated["saved_bytes_per_row"] == 2 * 4 * (2 * 128 + 128 + 128)
    assert gated["count"] == 2


def test_what_stays_apart_and_why() -> None:
    rows = fusion_rows(fused(), TARGET)["apart"]
    reasons = {(row["writer"], row["reader"]): row["reason"] for row in rows}
    assert "of fewer the linear does it itself" in reasons["rowwise", "linear"]
    assert "other workers write" in reasons["kv_write", "attention"]
    assert "writes no logits" in reasons["linear", "argmax"]
    assert all(row["count"] > 0 and row["bytes_per_row"] > 0 for row in rows)


def test_gpus_have_reasons_of_their_own() -> None:
    """Every edge has one, and none speaks of a CPU's workers."""
    rows = fusion_rows(fuse_writes(fused(layers=2)), load_target("h100"))["apart"]
    reasons = {(row["writer"], row["reader"]): row["reason"] for row in rows}
    assert "more than the columns of a tile" in reasons["linear", "argmax"]
    assert "other programs write" in reasons["linear", "attention"]
    assert not any("worker" in reason or "no rule puts" in reason for reason in reasons.values())


def test_a_norm_of_wide_rows_is_a_launch_of_its_own_and_says_so() -> None:
    rows = fusion_rows(fused(hidden=8192, heads=4, head_dim=16), TARGET)["apart"]
    (reason,) = {row["reason"] for row in rows if row["bytes_per_row"] == 8192 * 2}
    assert reason == "a row of 49,152 bytes costs more than the launch that it would save"


def test_every_edge_between_kernels_is_listed() -> None:
    graph = fused()
    producers = graph.producers()
    edges = sum(
        name in producers and name not in ("kv0.new", "kv1.new")
        for node in graph.nodes
        for name in dict.fromkeys(node.values())
    )
    rows = fusion_rows(graph, TARGET)["apart"]
    assert sum(row["count"] for row in rows) == edges
    text = format_fusion(graph, TARGET)
    assert all(row["reason"] in text for row in rows)


def test_on_gpus_the_linear_writes_the_cache_and_says_what_that_saves() -> None:
    rows = fusion_rows(fuse_writes(fused(layers=2)), load_target("h100"))
    write = next(row for row in rows["taken"] if "kv_write" in row["ops"])
    assert write["ops"] == ("linear", "rope", "cast", "cast", "cast", "kv_write")
    assert write["count"] == 2
    qkv, roped, stored = (4 + 2 + 2) * 16 * 4, (4 + 2) * 16 * 4, (2 + 2) * 16 * 2
    assert write["saved_bytes_per_row"] == 2 * (qkv + roped + stored)
    reasons = {(row["writer"], row["reader"]): row["reason"] for row in rows["apart"]}
    assert "other programs write" in reasons["linear", "attention"]
    assert ("linear", "kv_write") not in reasons


def test_on_gpus_a_write_that_is_apart_says_why() -> None:
    norms = "layers: 1, vocab: 256, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, max_len: 64, inter: 128"
    spec = parse_spec(f"extends: qwen3\nparams: {{{norms}}}\n", "model.yaml")
    graph = fuse_writes(run_passes(build_graph(spec), Numbers("bf16", "bf16")))
    rows = fusion_rows(graph, load_target("a100"))["apart"]
    (reason,) = [row["reason"] for row in rows if row["reader"] == "kv_write"]
    assert "norms of heads" in reason


def test_on_gpus_a_norm_says_for_how_many_rows_it_is_apart() -> None:
    rows = fusion_rows(fused(), load_target("h100"), {"l0.h.1.bf16": 8})["apart"]
    reasons = [row["reason"] for row in rows if (row["writer"], row["reader"]) == ("rowwise", "linear")]
    assert any("more than 8 rows" in reason for reason in reasons)
    assert any("more than a norm" in reason for reason in reasons)
