"""Whole models with random weights, compiled and run, beside transformers on the same checkpoint.

float32: the largest difference of any logit. bf16: how far from float32, as a mean KL divergence, against how
far transformers' own bf16 run is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle

Case = tuple[str, dict[str, Any]]

CASES: dict[str, Case] = {
    "heads 9 / 3 of 64": (
        "llama",
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "initializer_range": 0.1},
    ),
    "heads 14 / 2": (
        "llama",
        {"hidden_size": 168, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "heads 28 / 4, tied": (
        "llama",
        {
            "hidden_size": 168,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "head size 80, biases": ("llama", {"head_dim": 80, "attention_bias": True, "mlp_bias": True}),
    "head size 96": ("llama", {"head_dim": 96}),
    "head size 128": ("llama", {"head_dim": 128}),
    "head size 20": ("llama", {"head_dim": 20}),
    "window": ("mistral", {"sliding_window": 50}),
    "window and full layers": (
        "ministral",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 70,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 48}),
    "qwen3 with biases": ("qwen3", {"head_dim": 64, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {"num_hidden_layers": 3, "head_dim": 64, "sliding_window": 100, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024, "initializer_range": 0.1},
    ),
    "gpt2, other sizes": (
        "gpt2",
        {
            "n_embd": 160,
            "n_layer": 2,
            "n_head": 8,
            "n_inner": 200,
            "n_positions": 700,
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A checkpoint, prompts, and transformers' logits in float32."""
    pytest.importorskip("tvm")
    kind, changes = CASES[request.param]
    directory = oracle.save_random(tmp_path_factory.mktemp("oracle") / "model", kind, **changes)
    model = oracle.load(directory, torch.float32)
    inputs = oracle.prompts(model.config.vocab_size)
    return directory, inputs, oracle.theirs(model, inputs)


def test_float32(case: tuple[Path, Any, Any], tmp_path: Path) -> None:
    directory, inputs, expected = case
    mine = oracle.ours(oracle.compiled(directory, tmp_path / "f32", "f32"), inputs)
    assert expected.std() > 0.5  # flat logits would agree whatever is wrong
    assert float((mine - expected).abs().max()) < 1e-3


def test_bf16(case: tuple[Path, Any, Any], tmp_path: Path) -> None:
    directory, inputs, expected = case
    mine = oracle.ours(oracle.compiled(directory, tmp_path / "bf16", "bf16"), inputs)
    rounded = oracle.theirs(oracle.load(directory, torch.bfloat16), inputs)
    assert len(expected) >= 1000
    own, allowed = oracle.mean_kl(expected, mine), oracle.mean_kl(expected, rounded)
    assert allowed > 1e-6
    assert own <= 1.5 * allowed


# ----------------------------------------------------------------------------------- experts

EXPERTS: dict[str, Case] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 90}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe, sums as they are": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 72},
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, tmp_path: Path) -> None:
    """Positions whose chosen experts differ from float32's are counted, and left out of the divergence."""
    kind, changes = EXPERTS[name]
    directory = oracle.save_random(tmp_path / "model", kind, **changes)
    model = oracle.load(directory, torch.float32)
    inputs = oracle.prompts(model.config.vocab_size)
    expected, choices = oracle.theirs_with_choices(model, inputs)

    exact, exact_choices = oracle.ours_with_choices(
        oracle.compiled(directory, tmp_path / "f32", "f32"), inputs
    )
    same = oracle.same_choices(choices, exact_choices)
    assert expected.std() > 0.5
    assert int((~same).sum()) <= 2  # only ties
    assert float((exact - expected)[same].abs().max()) < 1e-3

    mine, my_choices = oracle.ours_with_choices(oracle.compiled(directory, tmp_path / "bf16", "bf16"), inputs)
    rounded, their_choices = oracle.theirs_with_choices(oracle.load(directory, torch.bfloat16), inputs)
    my_same, their_same = (oracle.same_choices(choices, other) for other in (my_choices, their_choices))
    assert int((~my_same).sum()) <= 1.5 * int((~their_same).sum())
    both = my_same & their_same
    assert int(both.sum()) > 100
    own, allowed = (oracle.mean_kl(expected[both], other[both]) for other in (mine, rounded))
    assert own <= 1.5 * allowed
