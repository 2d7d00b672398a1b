"""Drafts for architectures that no family knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers import import_model
from pagec.compiler.importers.draft import draft
from pagec.compiler.spec import build_graph, parse_spec


def saved(kind: str, path: Path, **changes: Any) -> Path:
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **changes,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_a_near_relative_is_nearly_done(tmp_path: Path) -> None:
    path = saved("granite", tmp_path, residual_multiplier=0.5)
    with pytest.raises(CheckpointError, match="--draft"):
        import_model(path)
    text = draft(path)
    assert "extends: llama\n" in text
    assert "#   residual_multiplier: 0.5\n" in text
    assert "#     - x = x + linear(m, $down, $down_bias)\n" in text
    assert build_graph(parse_spec(text, "draft.yaml")).outputs == ("logits",)


def test_tensors_that_differ_are_listed(tmp_path: Path) -> None:
    text = draft(saved("olmo2", tmp_path))
    assert "#   missing: model.layers.{i}.input_layernorm.weight for l{i}.attn_norm\n" in text
    assert "#   model.layers.{i}.self_attn.q_norm.weight [32]\n" in text
    assert text.count("q_norm") == 1


def test_a_distant_one_says_what_is_wrong(tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
        word_embed_proj_dim=32,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    text = draft(tmp_path)
    assert "#   ffn_dim: 48\n" in text
    assert "decoder.layers.{i}.fc1.weight [48, 32]" in text


def test_keys_of_nested_maps_are_listed(tmp_path: Path) -> None:
    text = draft(saved("stablelm", tmp_path))
    assert "#   rope_parameters.partial_rotary_factor: 0.25\n" in text
    assert "rope_theta" not in text.split("Keys that no param reads:")[1]
