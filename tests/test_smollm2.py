"""The real SmolLM2-135M-Instruct beside transformers, which reads the GGUF by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle
from transformers import AutoModelForCausalLM, GgufConfig

from pagec.runtime.text.tokenizer import Tokenizer

TEXT = Path(__file__).parent.parent / "LICENSE"


def their_model(gguf: Path, dtype: torch.dtype) -> Any:
    """transformers' model. It reads the norms' epsilon from the file's float32, where 1e-5 is meant."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.rms_norm_eps = 1e-5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    return model.eval()


def widened(model: Any) -> Any:
    """The same weights in a model that computes in float32."""
    wide = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").float()
    wide.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    return wide.eval()


@pytest.fixture(scope="module")
def inputs(smollm2: Path) -> list[list[int]]:
    """Real text, cut into prompts."""
    ids = Tokenizer.open(smollm2).encode(TEXT.read_text())
    assert len(ids) > sum(oracle.LENGTHS)
    ends = [sum(oracle.LENGTHS[: n + 1]) for n in range(len(oracle.LENGTHS))]
    return [ids[end - length : end] for end, length in zip(ends, oracle.LENGTHS, strict=True)]


def test_bf16(smollm2: Path, smollm2_gguf: Path, inputs: list[list[int]]) -> None:
    """KL divergence from float32 on the same bf16 weights, beside that of transformers' own bf16 run."""
    model = their_model(smollm2_gguf, torch.bfloat16)
    expected = oracle.theirs(widened(model), inputs)
    allowed = oracle.mean_kl(expected, oracle.theirs(model, inputs))
    assert len(expected) >= 1000
    assert allowed > 1e-4
    assert oracle.mean_kl(expected, oracle.ours(smollm2, inputs)) <= 1.5 * allowed


def test_float32(smollm2_gguf: Path, inputs: list[list[int]], tmp_path: Path) -> None:
    expected = oracle.theirs(their_model(smollm2_gguf, torch.float32), inputs)
    mine = oracle.ours(oracle.compiled(smollm2_gguf, tmp_path / "f32", "f32"), inputs)
    assert float((mine - expected).abs().max()) < 1e-3
