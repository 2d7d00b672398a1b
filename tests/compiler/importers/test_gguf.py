"""GGUF files: a small one written here, and a real one beside what transformers reads from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers import WeightSource, import_model
from pagec.compiler.spec import build_graph, load_spec, parse_spec

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB = 2, 32, 4, 2, 8, 48, 64
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, VOCAB, 30)]


def paired(weight: np.ndarray) -> np.ndarray:
    """Rows as GGUF's llama stores q and k: of each head the halves interleaved."""
    return weight.reshape(-1, 2, HEAD_DIM // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: Any, *, arch: str = "llama", tensors: dict[str, Any] | None = None, **more: Any
) -> Path:
    """A llama of transformers' as a GGUF file in float32."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    for key, value in more.items():
        getattr(writer, key)(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, parameter in model.state_dict().items():
        array = parameter.numpy()
        is_qk = "q_proj" in name or "k_proj" in name
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(new, np.ascontiguousarray(paired(array) if is_qk else array))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_llama(save_model: Any, **changes: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 5000.0} | changes.pop("rope", {})
    return save_model(
        "llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rope_parameters=rope, **changes,
    )[1]  # fmt: skip


def logits_differ(path: Path, model: Any, run_graph: Any) -> float:
    imported = import_model(path)
    source = WeightSource(imported.spec, imported.checkpoint)
    source.check()
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    return float((run_graph(build_graph(imported.spec), source.get, TOKENS) - theirs).abs().max())


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_logits_equal_those_of_transformers(
    changes: dict[str, Any], tmp_path: Path, save_model: Any, run_graph: Any
) -> None:
    model = small_llama(save_model, **changes)
    assert logits_differ(write_gguf(tmp_path / "m.gguf", model), model, run_graph) < 1e-4


def test_linear_scaling(tmp_path: Path, save_model: Any, run_graph: Any) -> None:
    model = small_llama(save_model, rope={"rope_type": "linear", "factor": 4.0})
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        add_rope_scaling_type=gguf.RopeScalingType.LINEAR,
        add_rope_scaling_factor=4.0,
    )
    assert logits_differ(path, model, run_graph) < 1e-4


def test_llama3_scaling_is_a_tensor_of_factors(tmp_path: Path, save_model: Any, run_graph: Any) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = small_llama(save_model, rope={"rope_type": "llama3", **scaling})
    plain = 1 / 5000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 2
    path = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    assert logits_differ(path, model, run_graph) < 1e-4


def test_a_spec_of_ones_own_with_a_gguf_file(tmp_path: Path, save_model: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_llama(save_model))
    (tmp_path / "m.yaml").write_text(
        f"extends: llama\nparams: {{vocab: {VOCAB}, hidden: {HIDDEN}, layers: {LAYERS}, heads: {HEADS}, "
        f"kv_heads: {KV_HEADS}, inter: {INTER}, max_len: 128}}\n"
    )
    spec = load_spec(tmp_path / "m.yaml", path)
    imported = import_model(path)
    WeightSource(spec, imported.checkpoint).check()
    assert spec.weights["l0.q"] == imported.spec.weights["l0.q"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arch": "falcon"},
            "general.architecture is 'falcon', which no family knows; known: gemma2, gemma3, gpt2, llama",
        ),
        ({"arch": "qwen2", "add_expert_count": 4}, "expert_count is 4, family 'qwen2' is for 0"),
        ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "rope's factor is missing"),
        ({"add_feed_forward_length": [48, 64]}, "llama.feed_forward_length differs from layer to layer"),
    ],
)
def test_files_that_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, save_model: Any
) -> None:
    class Writer(gguf.GGUFWriter):  # a second value for a key replaces the first
        def add_key_value(self, *args: Any, **kwargs: Any) -> None:
            self.kv_data[0].pop(args[0], None)
            super().add_key_value(*args, **kwargs)

    original, gguf.GGUFWriter = gguf.GGUFWriter, Writer
    try:
        path = write_gguf(tmp_path / "m.gguf", small_llama(save_model), **changes)
    finally:
        gguf.GGUFWriter = original
    with pytest.raises(CheckpointError, match=message):
        import_model(path)


def test_damaged_files(tmp_path: Path, save_model: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_llama(save_model))
    data = path.read_bytes()
    for length in (0, 3, 20, 200, 400, len(data) - 1000):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="not a GGUF file that can be read"):
            import_model(path)


# --------------------------------------------------------------------------------- a real model


def test_smollm2_is_described_as_it_is_known(smollm2_gguf: Path) -> None:
    imported = import_model(smollm2_gguf)
    known = load_spec("smollm2-135m", smollm2_gguf)
    assert imported.spec.params == known.params
    assert imported.spec.weights == known.weights
    assert imported.spec.aliases == known.aliases
    assert "norm_eps: 1.0e-05\n" in imported.yaml_text
    assert parse_spec(imported.yaml_text, "s.yaml") == imported.spec
    WeightSource(imported.spec, imported.checkpoint).check()


@pytest.mark.slow
def test_smollm2_has_the_weights_that_transformers_reads(smollm2_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).state_dict()
    imported = import_model(smollm2_gguf)
    source = WeightSource(imported.spec, imported.checkpoint)
    names = {weight: spec.tensors[0] for weight, spec in load_spec("smollm2-135m").weights.items()}
    assert set(names) == set(imported.spec.weights)
    for weight, tensor in names.items():
        assert np.array_equal(source.get(weight), theirs[tensor].numpy()), weight
