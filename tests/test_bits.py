"""The numbers contract on the real model: logits are the same bytes whatever happens beside a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagec.runtime.engine import Engine

NUM_BLOCKS = 400
LENGTHS = (1, 15, 16, 17, 600)


def prompt_of(length: int, vocab: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(0, vocab, length)]


def logits_of(engine: Engine, length: int, companions: int = 0) -> bytes:
    """All logits of a prompt and of the three tokens after it, the pool poisoned before. `companions` other
    requests are decoding when it arrives, and go on beside it."""
    engine.runner.fill_kv_with_nan()
    others = [
        engine.add_request(prompt_of(40 + 13 * n, engine.program.vocab), 500, ignore_eos=True)
        for n in range(companions)
    ]
    for _ in range(4 if companions else 0):
        engine.step()
    assert all(other.output for other in others)
    prompt = prompt_of(length, engine.program.vocab)
    request = engine.add_request(prompt, 3, ignore_eos=True, prompt_logits=True)
    while not request.is_finished:
        engine.step()
    for other in others:
        assert not other.is_finished
        engine.abort(other)
    logits = np.concatenate(request.logits)
    assert len(logits) == length + 2
    assert np.isfinite(logits).all()
    return logits.tobytes()


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> dict[int, bytes]:
    """Each prompt alone, in as few steps as possible, with two threads."""
    engine = Engine(smollm2, num_blocks=NUM_BLOCKS, threads=2)
    return {length: logits_of(engine, length) for length in LENGTHS}


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 1},
        {"prefill_chunk": 1},
        {"prefill_chunk": 16},
        {"prefill_chunk": 33},
        {"prefill_chunk": 512},
        {"companions": 7},
        {"companions": 7, "prefill_chunk": 33, "threads": 1},
    ],
    ids=lambda change: "-".join(f"{key}{value}" for key, value in change.items()),
)
def test_logits_are_the_same_bytes(smollm2: Path, alone: dict[int, bytes], change: dict[str, Any]) -> None:
    companions = change.pop("companions", 0)
    engine = Engine(smollm2, num_blocks=NUM_BLOCKS, **{"threads": 2, **change})
    for length in LENGTHS:
        assert logits_of(engine, length, companions) == alone[length], length
