"""The pool's block size is chosen when a model is compiled; no bit depends on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.graphs import llama_text

from pagec.compiler.driver import CompileOptions, compile_model
from pagec.compiler.errors import CompileError
from pagec.runtime.engine import Engine


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


def answers(path: Path, block_size: int | None) -> list[bytes]:
    """Tokens and logits of prompts around block boundaries, two of them with a common beginning."""
    artifact = compile_model(
        CompileOptions(
            str(path / "spec.yaml"),
            weights="random:1",
            output=path / f"out{block_size}",
            block_size=block_size,
        ),
        quiet,
    ).path
    engine = Engine(artifact, threads=1, num_blocks=60, prefill_chunk=20)
    assert engine.program.kv.block_size == (block_size or 16)
    rng = np.random.default_rng(0)
    start = rng.integers(0, 256, 70).tolist()
    prompts = [
        start,
        start[:50] + rng.integers(0, 256, 9).tolist(),
        *(start[:n] for n in (1, 31, 32, 33, 48)),
    ]
    requests = [engine.add_request(p, 8, want_logits=True, ignore_eos=True) for p in prompts]
    for _ in engine.stream():
        pass
    return [np.array(r.output).tobytes() + np.concatenate(r.logits).tobytes() for r in requests]


@pytest.mark.parametrize(("window", "block_size"), [(None, 32), (24, 48)])
def test_no_bit_depends_on_the_block_size(tmp_path: Path, window: int | None, block_size: int) -> None:
    (tmp_path / "spec.yaml").write_text(llama_text(window=window, max_len=128))
    assert answers(tmp_path, block_size) == answers(tmp_path, None)


def test_a_block_holds_a_multiple_of_16_tokens(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(llama_text())
    with pytest.raises(CompileError, match=r"--block-size: 20 is no multiple of 16(?s:.)*use 32"):
        answers(tmp_path, 20)
