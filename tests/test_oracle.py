"""Whole models with random weights, compiled and run, beside transformers on the same checkpoint.

float32: the largest difference of any logit. bf16: how far from float32, as a mean KL divergence, against how
far transformers' own bf16 run is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import oracle

from pagec.compiler.backends.cpu import build

Case = tuple[str, dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def every_kernel_is_parsed_once() -> Iterator[None]:
    """These models share most of their kernels, and TVM takes long to parse one."""
    parsed: dict[str, Any] = {}
    load_kernel = build.load_kernel

    def load_once(path: Path, symbol: str) -> Any:
        text = path.read_text()
        if text not in parsed:
            parsed[text] = load_kernel(path, symbol)
        return parsed[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_kernel", load_once)
        yield


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


# -------------------------------------------------------------- architectures by YAML alone

FAMILIES = Path(__file__).parent / "families"
PLAIN = {"vocab": 320, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "inter": 192, "max_len": 1024}
# The model type of transformers' and its settings; what the spec says beside PLAIN.
BY_YAML: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmo2": ("olmo2", {}, {"norm_eps": 1e-5, "rope": {"base": 10000.0}}),
    "olmo2, heads of 20": (
        "olmo2",
        {"hidden_size": 80, "rms_norm_eps": 1e-6},
        {"hidden": 80, "norm_eps": 1e-6},
    ),
    "phi": ("phi", {"num_key_value_heads": 4}, {"kv_heads": 4}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        {"embed_scale": 3.0, "attn_scale": 0.2, "residual_scale": 0.5, "logit_scale": 2.0},
    ),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": 0},
        {"layers": 4, "tied": True, "rope": {"base": 2000000.0}},
    ),
    "cohere": (
        "cohere",
        {"logit_scale": 0.5, "use_qk_norm": True, "pad_token_id": 0, "initializer_range": 0.2},
        {"norm_eps": 1e-5, "logit_scale": 0.5, "tied": True},
    ),
    "gpt-neox": ("gpt_neox", {}, {"kv_heads": 4}),
    "nemotron": ("nemotron", {}, {}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 80,
        },
        {
            "layers": 3,
            "dense_layers": 1,
            "experts": 6,
            "top_k": 2,
            "inter": 40,
            "shared_inter": 80,
            "dense_inter": 192,
        },
    ),
}


@pytest.mark.parametrize("name", BY_YAML)
def test_architectures_by_yaml_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tvm")
    kind, changes, params = BY_YAML[name]
    directory = oracle.save_random(tmp_path / "model", kind, **changes)
    spec = {"extends": str(FAMILIES / f"{name.split(',')[0]}.yaml"), "checkpoint": str(directory)}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(spec | {"params": PLAIN | params}))
    inputs = oracle.prompts(320)
    expected = oracle.theirs(oracle.load(directory, torch.float32), inputs)
    exact = oracle.ours(oracle.compiled(tmp_path / "m.yaml", tmp_path / "f32", "f32"), inputs)
    assert expected.std() > 0.5
    assert float((exact - expected).abs().max()) < 1e-3
    mine = oracle.ours(oracle.compiled(tmp_path / "m.yaml", tmp_path / "bf16", "bf16"), inputs)
    rounded = oracle.theirs(oracle.load(directory, torch.bfloat16), inputs)
    assert oracle.mean_kl(expected, mine) <= 1.5 * oracle.mean_kl(expected, rounded)
