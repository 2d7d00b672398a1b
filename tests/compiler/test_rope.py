"""Rope tables beside those of transformers, for all kinds under all spellings of their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from pagec.compiler.importers.hf import HfFacts
from pagec.compiler.importers.mapping import imported_params, known_maps
from pagec.compiler.ops.frequencies import frequencies
from pagec.compiler.rope import RopeConfig, checked_attrs, cos_sin_of

MODEL_LENGTH, HEAD_DIM = 131072, 96
LONG = [1.0 + i * 0.37 for i in range(HEAD_DIM // 2)]
SHORT = [1.0 + i * 0.01 for i in range(HEAD_DIM // 2)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with all": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096},
    "longrope with a factor": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 4096,
        "factor": 16.0,
        "attention_factor": 1.25,
    },
}


def theirs(kind: str, base: float, length: int) -> tuple[Any, Any]:
    """cos and sin of transformers' rotary embedding for a sequence of this length."""
    rope = {"rope_type": kind.split()[0], "rope_theta": base, **KINDS[kind]}
    config = transformers.LlamaConfig(
        hidden_size=384,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096 if kind == "dynamic" else MODEL_LENGTH,
        rope_parameters=rope,
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    return cos[0, :, : HEAD_DIM // 2].numpy(), sin[0, :, : HEAD_DIM // 2].numpy()


def table(settings: dict[str, Any], length: int, model_length: int) -> tuple[Any, Any]:
    config = RopeConfig.from_attrs(checked_attrs(settings, length, model_length))
    return cos_sin_of(frequencies(config), length, config.scale)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("length", [2000, 120000])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_those_of_transformers(kind: str, length: int, base: float) -> None:
    if kind == "dynamic":
        length = min(length, 10000)
    settings = {"kind": kind.split()[0], "base": base, "dims": HEAD_DIM, **KINDS[kind]}
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if kind == "dynamic":
        settings["original_max_position_embeddings"] = 4096
    for mine, expected in zip(table(settings, length, MODEL_LENGTH), theirs(kind, base, length), strict=True):
        assert np.abs(mine - expected).max() <= 1e-6


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dynamic"])
def test_frequencies_are_those_of_transformers_to_the_bit(kind: str, base: float) -> None:
    """Of 128 dims, which torch takes alike on all x86. A dynamic base transformers rounds on its way."""
    kinds = {key: value * 2 if isinstance(value, list) else value for key, value in KINDS[kind].items()}
    kinds = {key: value[:64] if isinstance(value, list) else value for key, value in kinds.items()}
    rope = {"rope_type": kind.split()[0], "rope_theta": base, **kinds}
    config = transformers.LlamaConfig(
        head_dim=128, max_position_embeddings=MODEL_LENGTH, rope_parameters=rope
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in kinds.items()}
    attrs = checked_attrs({"kind": kind.split()[0], "base": base, "dims": 128, **settings}, 100, MODEL_LENGTH)
    assert frequencies(RopeConfig.from_attrs(attrs)).tobytes() == rotary.inv_freq.numpy().tobytes()


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "default"])
def test_every_spelling_is_read(kind: str, spelling: str, place: str, tmp_path: Path) -> None:
    scaling = {spelling: kind.split()[0], **KINDS[kind]}
    config: dict[str, Any] = {
        "model_type": "llama",
        "max_position_embeddings": MODEL_LENGTH,
        place: scaling,
        "head_dim": HEAD_DIM,
    }
    (config[place] if place == "rope_parameters" else config)["rope_theta"] = 5e5
    facts = facts_of(config, tmp_path)
    mapping = next(m for m in known_maps("hf") if m.family == "llama")
    rope = imported_params(mapping, facts)["rope"]
    rope = {k: tuple(v) if isinstance(v, list) else v for k, v in rope.items()}
    expected = {"kind": kind.split()[0], "base": 5e5, **KINDS[kind]}
    expected = {k: tuple(v) if isinstance(v, list) else v for k, v in expected.items()}
    if kind == "dynamic":
        expected["original_max_position_embeddings"] = MODEL_LENGTH
    assert rope == expected


def facts_of(config: dict[str, Any], directory: Path) -> HfFacts:
    import json

    (directory / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return HfFacts(directory)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "yarn", "factor": 2.0}, "original_max_position_embeddings is missing"),
        ({"kind": "yarn", "factor": 2.0, "short_factor": (1.0,)}, "rope of kind yarn takes no short_factor"),
        ({"kind": "longrope", "short_factor": (1.0,)}, "short_factor must be a list of 4 numbers"),
        ({"kind": "mrope"}, "there is no rope kind 'mrope'; known: default"),
        ({"dims": 3.5}, "dims must be a positive even number"),
        ({"interleaved": 1}, "interleaved must be true or false"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_attrs({"base": 10000.0, "dims": 8} | settings, 100, 100)


def test_a_share_of_a_head_is_a_whole_number() -> None:
    assert checked_attrs({"base": 1.0, "dims": 64 * 0.25}, 1, 1)["dims"] == 16
