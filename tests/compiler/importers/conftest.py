"""Small random models that transformers makes and saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
Saved = tuple[Path, Any]
SaveModel = Callable[..., Saved]


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """`save_model("llama", window=...)`: a directory, and transformers' model in float32."""

    def save(kind: str, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any) -> Saved:
        torch.manual_seed(7)
        config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:  # ones and zeros would hide a mistake
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.to(dtype).save_pretrained(tmp_path / kind, max_shard_size=shard)
        # Read again, since .to() also rounds the frequencies of the rotary embedding.
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / kind, dtype=torch.float32, attn_implementation="eager"
        )
        return tmp_path / kind, loaded.eval()

    return save


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """`edit_json(path, key=value, gone=None)` changes a JSON file; None removes a key."""

    def edit(path: Path, **changes: Any) -> None:
        data = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))

    return edit
