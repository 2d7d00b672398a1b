"""Sampling by the engine: seeds decide, company and restarts do not; frequencies are those of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sampling import is_plausible, probabilities, processed
from support.small import small_artifact

from pagec.compiler.errors import RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.sampling.params import SamplingParams

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 10, "min_p": 0.01},
    {"repetition_penalty": 1.3, "temperature": 0.8},
    {"frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
]


@pytest.fixture(scope="module")
def artifact() -> Path:
    return small_artifact()


def jobs() -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(0)
    return [
        (rng.integers(0, 256, 3 + 9 * i).tolist(), SamplingParams(seed=i, **KINDS[i % len(KINDS)]))
        for i in range(12)
    ]


def generate(engine: Engine, wanted: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    requests = [engine.add_request(p, 20, ignore_eos=True, params=params) for p, params in wanted]
    for _ in engine.stream():
        pass
    for request in requests:
        assert request.error is None
    return [request.output for request in requests]


def test_a_seed_gives_the_same_text_in_any_company(artifact: Path) -> None:
    alone = [generate(Engine(artifact, num_blocks=200), [job])[0] for job in jobs()]
    assert len({tuple(output) for output in alone}) == len(alone)
    assert generate(Engine(artifact, num_blocks=200), jobs()) == alone
    chunked = Engine(artifact, num_blocks=40, prefill_chunk=16, prefix_cache=False, max_seqs=3)
    assert generate(chunked, jobs()) == alone
    assert generate(Engine(artifact, num_blocks=200, depth=2), jobs()) == alone


def test_frequencies_are_those_of_the_models_logits(artifact: Path) -> None:
    engine, prompt = Engine(artifact, num_blocks=200), [5, 6, 7]
    seen = engine.add_request(prompt, 1, want_logits=True)
    for _ in engine.stream():
        pass
    asked = [SamplingParams(seed=seed, temperature=1.2, top_p=0.9) for seed in range(1500)]
    requests = [engine.add_request(prompt, 1, params=params) for params in asked]
    for _ in engine.stream():
        pass
    counts = np.bincount([request.output[0] for request in requests], minlength=256)
    exact = probabilities(processed(seen.logits[0][0], asked[0]), asked[0])
    assert is_plausible(counts, exact)


def test_a_token_beyond_the_vocabulary_is_refused(artifact: Path) -> None:
    engine = Engine(artifact, num_blocks=20)
    with pytest.raises(RequestError, match="logit_bias: 256 is not a token id from 0 to 255"):
        engine.add_request([1], 1, params=SamplingParams(logit_bias={256: 1.0}))
    assert not engine.has_work
