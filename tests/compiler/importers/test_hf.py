"""Hugging Face checkpoints: the imported model computes what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers import WeightSource, import_model
from pagec.compiler.spec import build_graph, parse_spec

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 96, 40)]


def both(directory: Path, model: Any, run_graph: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the imported model and of transformers."""
    imported = import_model(directory)
    source = WeightSource(imported.spec, imported.checkpoint)
    source.check()
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    return run_graph(build_graph(imported.spec), source.get, TOKENS), theirs


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads 9 / 3": ("llama", {}),
    "heads 14 / 2": ("llama", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112}),
    "one kv head, odd width": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "rope base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3 rope": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e4, **LLAMA3}}),
    "window": ("mistral", {"sliding_window": 7}),
    "no window": ("mistral", {"sliding_window": None}),
    "window in some layers": (
        "ministral",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, save_model: Any, run_graph: Any) -> None:
    kind, changes = CONFIGS[name]
    ours, theirs = both(*save_model(kind, **changes), run_graph)
    assert theirs.std() > 0.5  # flat logits would agree whatever is wrong
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("scaling", [{"kind": "linear", "factor": 2.0}, {"kind": "llama3", **LLAMA3}])
def test_rope_scaling_under_older_spellings(
    spelling: str, scaling: dict[str, Any], save_model: Any, run_graph: Any, edit_json: Any
) -> None:
    rest = {key: value for key, value in scaling.items() if key != "kind"}
    directory, model = save_model(
        "llama", rope_parameters={"rope_type": scaling["kind"], "rope_theta": 3e4, **rest}
    )
    old = {spelling: scaling["kind"], **rest}
    edit_json(directory / "config.json", rope_parameters=None, rope_theta=3e4, rope_scaling=old)
    ours, theirs = both(directory, model, run_graph)
    assert (ours - theirs).abs().max() < 1e-4


def test_a_null_scaling_and_settings_of_other_kinds_are_left_out(save_model: Any, edit_json: Any) -> None:
    directory, _ = save_model("llama")
    config = directory / "config.json"
    edit_json(config, rope_parameters=None, rope_theta=3e4)
    data = json.loads(config.read_text()) | {"rope_scaling": None}
    config.write_text(json.dumps(data))
    assert import_model(directory).spec.params["rope"]["base"] == 3e4
    edit_json(config, rope_scaling={"type": "linear", "factor": 2.0, "low_freq_factor": 1.0})
    assert "low_freq_factor" not in import_model(directory).spec.params["rope"]


def test_a_mistral_that_does_not_mention_its_window_has_the_default(save_model: Any, edit_json: Any) -> None:
    directory, _ = save_model("mistral")
    edit_json(directory / "config.json", sliding_window=None)
    assert import_model(directory).spec.params["window"] == 4096


def test_a_llama_ignores_a_window_that_it_does_not_have(save_model: Any, edit_json: Any) -> None:
    directory, _ = save_model("llama")
    edit_json(directory / "config.json", sliding_window=4)
    assert import_model(directory).spec.params["window"] is None


def test_the_printed_spec_loads_to_the_same_model(save_model: Any) -> None:
    imported = import_model(save_model("llama")[0])
    assert imported.yaml_text.startswith("name: llama\nextends: llama\ncheckpoint: ")
    again = parse_spec(imported.yaml_text, "elsewhere.yaml")
    assert again == imported.spec
    assert again.checkpoint == imported.checkpoint.path.resolve()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_exactly(dtype: torch.dtype, save_model: Any, run_graph: Any) -> None:
    directory, model = save_model("llama", dtype=dtype)
    imported = import_model(directory)
    source = WeightSource(imported.spec, imported.checkpoint)
    found = source.get("l1.q")
    assert found.dtype == np.float32
    assert np.array_equal(found, model.model.layers[1].self_attn.q_proj.weight.detach().numpy())
    ours, theirs = both(directory, model, run_graph)
    assert (ours - theirs).abs().max() < 1e-4


def test_shards(save_model: Any, run_graph: Any) -> None:
    directory, model = save_model("llama", shard="20KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    ours, theirs = both(directory, model, run_graph)
    assert (ours - theirs).abs().max() < 1e-4
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"the index names files that are not there: {shards[1].name}"):
        import_model(directory)


def test_a_shard_without_a_tensor_that_the_index_promises(save_model: Any, edit_json: Any) -> None:
    directory, _ = save_model("llama", shard="20KB")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"ghost": next(iter(weight_map.values()))})
    with pytest.raises(CheckpointError, match="tensors that their files do not hold: ghost"):
        import_model(directory)


# ------------------------------------------------------------------ the tied flag and lm_head.weight


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_untied_and_present(save_model: Any) -> None:
    imported = import_model(save_model("llama")[0])
    assert imported.spec.aliases == {}
    assert "lm_head" in imported.spec.weights


def test_tied_and_absent(save_model: Any) -> None:
    imported = import_model(save_model("llama", tie_word_embeddings=True)[0])
    assert imported.spec.aliases == {"lm_head": "embed"}


def test_tied_and_present_and_equal(save_model: Any, run_graph: Any) -> None:
    directory, model = save_model("llama", tie_word_embeddings=True)
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert import_model(directory).spec.aliases == {"lm_head": "embed"}
    ours, theirs = both(directory, model, run_graph)
    assert (ours - theirs).abs().max() < 1e-4


def test_tied_and_present_and_different(save_model: Any, run_graph: Any) -> None:
    directory, model = save_model("llama", tie_word_embeddings=True)
    other = torch.randn(96, 36)
    change_tensors(directory, lambda t: t.update({"lm_head.weight": other}))
    model.lm_head.weight = torch.nn.Parameter(other)  # what transformers does, with a warning
    imported = import_model(directory)
    assert imported.spec.params["tied"] is False
    ours, theirs = both(directory, model, run_graph)
    assert (ours - theirs).abs().max() < 1e-4
    tied = parse_spec(imported.yaml_text.replace("tied: false", "tied: true"), "tied.yaml")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        WeightSource(tied, imported.checkpoint).check()


def test_tied_with_lm_head_alone(save_model: Any, run_graph: Any) -> None:
    directory, model = save_model("llama", tie_word_embeddings=True)
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    ours, theirs = both(directory, model, run_graph)
    assert (ours - theirs).abs().max() < 1e-4


def test_untied_and_absent(save_model: Any) -> None:
    directory, _ = save_model("llama")
    change_tensors(directory, lambda t: t.pop("lm_head.weight"))
    imported = import_model(directory)
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight .* meant to be the same as embed"):
        WeightSource(imported.spec, imported.checkpoint).check()


# -------------------------------------------------------------------------------------- mistakes


def check(directory: Path) -> None:
    imported = import_model(directory)
    WeightSource(imported.spec, imported.checkpoint).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "opt"},
            "model_type is 'opt', which no family knows; known: gemma2, gemma3_text, gpt2, llama, minis",
        ),
        (
            {"model_type": "opt"},
            "the nearest family is 'llama': it finds 1[0-9] of its 28 config keys and 12 of",
        ),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_size": None}, "params.hidden|the param 'hidden' is required"),
        ({"hidden_size": 37}, r"embed_tokens.weight is \[96, 36\], embed needs \[96, 37\]"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu', not an activation"),
        (
            {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1.0}},
            "there is no rope kind 'mrope'; known: def",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, family 'llama' is for 1.0"),
        ({"quantization_config": {"bits": 4}}, "the checkpoint is quantised"),
        ({"num_hidden_layers": "three"}, "params.layers"),
        ({"rms_norm_eps": float("nan")}, "not a finite number"),
    ],
)
def test_configurations_that_are_refused(
    changes: dict[str, Any], message: str, save_model: Any, edit_json: Any
) -> None:
    directory, _ = save_model("llama")
    edit_json(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        check(directory)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path, "there is no config.json and no GGUF file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_model(path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        import_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_model(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_model(tmp_path / "config.json")
