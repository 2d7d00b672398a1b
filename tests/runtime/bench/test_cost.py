"""What a model needs, against counting by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs import llama_graph

from pagec.compiler.artifact import Artifact
from pagec.runtime.bench.cost import AttentionCost, ModelCost, model_cost

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTER = 256, 64, 2, 4, 2, 16, 128


def cost(dtype: str = "bf16", **sizes: Any) -> ModelCost:
    graph = llama_graph(**sizes)
    manifest = {"numerics": {"dtype": dtype, "kv_dtype": dtype}}
    artifact: Any = SimpleNamespace(graph=lambda: graph, manifest=manifest)
    return model_cost(artifact)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (3, 1), (3, 9), (40, 2)])
def test_pairs_are_those_of_the_mask(window: int | None, start: int, count: int) -> None:
    attention = AttentionCost(HEADS, KV_HEADS, HEAD_DIM, window)
    seen = [
        range(max(0, position + 1 - (window or position + 1)), position + 1)
        for position in range(start, start + count)
    ]
    assert attention.pairs(start, count) == sum(map(len, seen))
    keys = {key for keys in seen for key in keys}
    assert attention.keys(start, count) == len(keys)
    assert attention.flops(start, count) == sum(map(len, seen)) * HEADS * 2 * 2 * HEAD_DIM
    assert attention.kv_bytes(start, count, 2) == len(keys) * 2 * KV_HEADS * HEAD_DIM * 2


def layer_elements() -> tuple[int, int]:
    """Elements of a layer's matrices up to attention, and after it."""
    before = HIDDEN * HEAD_DIM * (HEADS + 2 * KV_HEADS)
    return before, HIDDEN * HEADS * HEAD_DIM + 3 * HIDDEN * INTER


def test_flops_of_tokens_and_of_logit_rows() -> None:
    """What follows the last attention is needed for rows with logits only."""
    before, after = layer_elements()
    found = cost()
    assert found.token_flops == 2 * (LAYERS * before + (LAYERS - 1) * after)
    assert found.logit_flops == 2 * (after + VOCAB * HIDDEN)
    chunks = [(0, 3), (7, 1)]
    attention = LAYERS * (1 + 2 + 3 + 8) * HEADS * 4 * HEAD_DIM
    assert found.flops(chunks, 2) == 4 * found.token_flops + 2 * found.logit_flops + attention


@pytest.mark.parametrize(("dtype", "item"), [("bf16", 2), ("f32", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_counts_once_and_an_embedding_not(dtype: str, item: int, tied: bool) -> None:
    matrices = LAYERS * sum(layer_elements()) + VOCAB * HIDDEN
    norms = (2 * LAYERS + 1) * HIDDEN
    found = cost(dtype, tied=tied)
    assert found.weights_bytes == matrices * item + norms * 4
    read = found.decode_bytes(9) - found.weights_bytes
    assert read == LAYERS * 10 * 2 * KV_HEADS * HEAD_DIM * item


def test_a_window_limits_what_decoding_reads() -> None:
    found = cost(window=8)
    assert found.decode_bytes(7) == found.decode_bytes(700)


def test_costs_of_an_artifact(small: Path) -> None:
    found = model_cost(Artifact.open(small))
    assert found.weights_bytes == cost(tied=False).weights_bytes
    assert found.kv_item_bytes == 2
