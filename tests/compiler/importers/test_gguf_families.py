"""Each family's GGUF files, written as llama.cpp's converter writes them, beside the model they come from.

The names of tensors are those of the `gguf` package; what the converter does to values is written out here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pagec.compiler.importers import Imported, WeightSource, import_model
from pagec.compiler.spec import build_graph

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB, EXPERTS = 2, 32, 4, 2, 16, 48, 64, 4
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, VOCAB, 30)]
Tensors = dict[str, np.ndarray]


def paired(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head with the halves interleaved, as llama's q and k are stored."""
    return weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama_like(name: str, x: np.ndarray) -> np.ndarray:
    is_qk = "q_proj" in name or "k_proj" in name
    return paired(x, HIDDEN // HEADS) if is_qk else x


def gemma_like(name: str, x: np.ndarray) -> np.ndarray:
    return x + 1 if name.endswith("norm.weight") else x


def gpt2_like(name: str, x: np.ndarray) -> np.ndarray:
    fused = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return x.T if name.endswith(fused) else x


@dataclass(frozen=True)
class Family:
    """A model of transformers' and how it is converted; `keys` are the writer's methods and their values."""

    kind: str
    arch: gguf.MODEL_ARCH
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[str, np.ndarray], np.ndarray] = lambda _, x: x


EXPERT_KEYS = {"add_expert_count": EXPERTS, "add_expert_used_count": 2}
HEAD_KEYS = {"add_key_length": HEAD_DIM, "add_value_length": HEAD_DIM}
FAMILIES = {
    "qwen2": Family("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen2, tied": Family("qwen2", gguf.MODEL_ARCH.QWEN2, {"tie_word_embeddings": True}),
    "qwen3": Family("qwen3", gguf.MODEL_ARCH.QWEN3, {"head_dim": HEAD_DIM}, HEAD_KEYS),
    "gemma2": Family(
        "gemma2",
        gguf.MODEL_ARCH.GEMMA2,
        {
            "hidden_size": 2304,
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 8,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
            "initializer_range": 0.03,
        },
        HEAD_KEYS
        | {
            "add_embedding_length": 2304,
            "add_sliding_window": 8,
            "add_attn_logit_softcapping": 20.0,
            "add_final_logit_softcapping": 10.0,
        },
        gemma_like,
    ),
    "gemma3": Family(
        "gemma3_text",
        gguf.MODEL_ARCH.GEMMA3,
        {
            "hidden_size": 640,
            "num_hidden_layers": 7,
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 8,
            "rope_theta": 1000000.0,
            "initializer_range": 0.06,
        },
        HEAD_KEYS
        | {
            "add_embedding_length": 640,
            "add_block_count": 7,
            "add_sliding_window": 8,
            "add_rope_freq_base": 1000000.0,
        },
        gemma_like,
    ),
    "gpt2": Family(
        "gpt2",
        gguf.MODEL_ARCH.GPT2,
        {
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 128,
            "layer_norm_epsilon": 1e-5,
        },
        {"add_feed_forward_length": 4 * HIDDEN, "add_layer_norm_eps": 1e-5},
        gpt2_like,
    ),
    "mixtral": Family(
        "mixtral",
        gguf.MODEL_ARCH.LLAMA,
        {"num_local_experts": EXPERTS, "sliding_window": None},
        EXPERT_KEYS | {"add_rope_dimension_count": HIDDEN // HEADS},
        llama_like,
    ),
    "qwen3-moe": Family(
        "qwen3_moe",
        gguf.MODEL_ARCH.QWEN3MOE,
        {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": HEAD_DIM,
            "norm_topk_prob": True,
        },
        EXPERT_KEYS | HEAD_KEYS | {"add_expert_feed_forward_length": 24},
    ),
}
COMMON = {
    "add_context_length": 128,
    "add_embedding_length": HIDDEN,
    "add_block_count": LAYERS,
    "add_feed_forward_length": INTER,
    "add_head_count": HEADS,
    "add_head_count_kv": KV_HEADS,
    "add_layer_norm_rms_eps": 1e-5,
    "add_rope_freq_base": 10000.0,
}
# What the experts' matrices are called: in Mixtral's and in Qwen's checkpoints, and in GGUF files.
EXPERT_PARTS = {
    "w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up",
}  # fmt: skip


def stacked(tensors: Tensors) -> Tensors:
    """The tensors with those of experts in one: model.layers.0.mlp.experts.3.up_proj.weight, ..."""
    found: dict[str, dict[int, np.ndarray]] = {}
    rest = {}
    for name, x in tensors.items():
        parts = name.split(".")
        if "experts" in parts:
            key = f"blk.{parts[2]}.ffn_{EXPERT_PARTS[parts[-2]]}_exps.weight"
            found.setdefault(key, {})[int(parts[parts.index("experts") + 1])] = x
        else:
            rest[name] = x
    return rest | {key: np.stack([of[e] for e in sorted(of)]) for key, of in found.items()}


def converted(directory: Path, family: Family, path: Path) -> Path:
    """The checkpoint of a directory as a GGUF file."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family.arch])
    for method, value in (COMMON | family.keys).items():
        getattr(writer, method)(value)
    tensors = {name: x.float().numpy() for name, x in load_file(directory / "model.safetensors").items()}
    names = gguf.get_tensor_name_map(family.arch, family.config.get("num_hidden_layers", LAYERS))
    for name, x in stacked(tensors).items():
        new = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, np.ascontiguousarray(family.change(name, x)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights_of(imported: Imported) -> WeightSource:
    source = WeightSource(imported.spec, imported.checkpoint)
    source.check()
    return source


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_logits(name: str, tmp_path: Path, save_model: Any, run_graph: Any) -> None:
    family = FAMILIES[name]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rope_theta": 10000.0,
    }
    directory, model = save_model(family.kind, **(sizes | dict(family.config)))
    theirs, mine = import_model(directory), import_model(converted(directory, family, tmp_path / "m.gguf"))
    expected, found = weights_of(theirs), weights_of(mine)
    assert set(mine.spec.weights) == set(theirs.spec.weights)
    assert mine.spec.aliases == theirs.spec.aliases
    for weight in mine.spec.weights:
        assert np.allclose(found.get(weight), expected.get(weight), rtol=0, atol=1e-6), weight
    logits = run_graph(build_graph(mine.spec), found.get, TOKENS)
    with torch.no_grad():
        exact = model(torch.tensor([TOKENS])).logits[0]
    assert exact.std() > 0.3
    assert float((logits - exact).abs().max()) < 1e-4 * max(1.0, float(exact.abs().max()))
