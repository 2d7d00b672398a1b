"""`pagec verify` passes what is right: its bounds hold where activations are near zero, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from pagec.compiler.driver import CompileOptions, compile_model
from pagec.runtime.cli.verify import verify_artifact


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
