"""The oracle: small random models made by transformers, saved, and run by it and by pagec side by side.

transformers reads the checkpoint by itself; nothing of pagec's importer has a part in what is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from pagec.compiler.driver import CompileOptions, compile_model
from pagec.runtime.engine import Engine

LENGTHS = (1, 15, 16, 17, 600, 600)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
}


def save_random(path: Path, kind: str, seed: int = 7, **changes: Any) -> Path:
    """A random model in bf16; norms and biases are random too, since ones and zeros would hide a mistake."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype, **more: Any) -> Any:
    """transformers' model; read again from the file, since casting a live one also rounds its rope."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", **more
    )
    return model.eval()


def prompts(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random tokens, the same in every run."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def theirs(model: Any, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """transformers' logits of all positions, float64."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokens])).logits[0].double() for tokens in inputs])


def compiled(model: Path | str, output: Path, dtype: str, **options: Any) -> Path:
    """An artifact of the model."""
    options = {"max_step_tokens": 256, "max_seqs": 8} | options
    chosen = CompileOptions(model=str(model), dtype=dtype, output=output, **options)
    return compile_model(chosen, lambda *_: None).path


def ours(artifact: Path, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """pagec's logits of all positions, float64; the pool holds NaN before each request."""
    engine = Engine(artifact, num_blocks=2000)
    found = []
    for tokens in inputs:
        engine.runner.fill_kv_with_nan()
        request = engine.add_request(list(tokens), 1, prompt_logits=True, ignore_eos=True)
        for _ in engine.stream():
            pass
        if request.error is not None:
            raise request.error
        found.append(np.concatenate(request.logits))
    return torch.from_numpy(np.concatenate(found)).double()


def mean_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """Mean over positions of KL(p || q), float64."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
