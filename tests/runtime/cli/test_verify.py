"""`pagec verify` passes what is right: its bounds hold where activations are near zero, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from pagec.compiler.driver import CompileOptions, compile_model
from pagec.runtime.cli.verify import verify_artifact

# Values and turned queries that something beside the attention reads, too.
READ_TWICE = """\
extends: llama
params: {vocab: 256, hidden: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 16, inter: 96, max_len: 128}
weights:
  v_out: {name: "model.layers.{i}.v_out.weight", shape: [hidden, kv_heads * head_dim]}
  q_out: {name: "model.layers.{i}.q_out.weight", shape: [hidden, heads * head_dim]}
graph:
  layer:
    - h = rmsnorm(x, $attn_norm, eps=norm_eps)
    - q = heads_of(linear(h, $q), head_dim)
    - k = heads_of(linear(h, $k), head_dim)
    - v = heads_of(linear(h, $v), head_dim)
    - q, k = rope(q, k, positions, rope)
    - x = x + linear(attention(q, k, v, scale=attn_scale), $o) + linear(v, $v_out) + linear(q, $q_out)
    - h = rmsnorm(x, $mlp_norm, eps=norm_eps)
    - x = x + linear(activation(linear(h, $gate), act) * linear(h, $up), $down)
"""


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_the_tail_of_an_activation_is_within_bounds(tmp_path: Path, activation: str) -> None:
    """GELU of -5 is 1e-6, the difference of numbers that are larger by far."""
    config = transformers.GPT2Config(
        vocab_size=320,
        n_positions=128,
        n_embd=64,
        n_layer=1,
        n_head=4,
        activation_function=activation,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    options = CompileOptions(str(tmp_path / "model"), dtype="f32", output=tmp_path / "out")
    artifact = compile_model(options, quiet).path
    for seed in (0, 1, 2):
        rows = verify_artifact(artifact, seed=seed, progress=quiet)
        assert len(rows) > 10
        assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_what_attention_reads_may_be_read_by_others(tmp_path: Path, dtype: str) -> None:
    """Each reader gets what it takes: the KV write float32, a linear its rounded copy."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(READ_TWICE)
    options = CompileOptions(str(spec), weights="random:1", dtype=dtype, output=tmp_path / "out")
    rows = verify_artifact(compile_model(options, quiet).path, seed=0, progress=quiet)
    assert any(row.subject.startswith("rope") for row in rows)
    assert [row for row in rows if not row.ok] == []
