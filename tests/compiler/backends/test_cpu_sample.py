"""The sampling kernel against exact probabilities, and against its own draws in other company."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import KernelRun
from support.sampling import (
    is_plausible,
    probabilities,
    processed,
    run_inputs,
    run_sample,
    sample_graph,
)
from support.targets import RUNNABLE, targets

from pagec.compiler.ops.sampling import philox, sample, uniform
from pagec.compiler.sampling import Words
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Row, Sampler, sampling_inputs

VOCAB = 300  # two groups and a part of a third, which ends within a vector
DRAWS = 20_000
WIDTHS = (1, 5, 128, 300, 1000, 5000)


@functools.cache
def kernels(vocab: int = VOCAB, target: str = RUNNABLE[0]) -> KernelRun:
    return KernelRun(sample_graph(vocab), target=target)


def logits_of(vocab: int, seed: int = 0) -> Any:
    return (2.5 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def rows_at(params: SamplingParams, positions: Sequence[int], vocab: int = VOCAB, seed: int = 1) -> list[Row]:
    """The rows of one request at so many positions."""
    row = Sampler(params, [], vocab=vocab, seed=seed).row([])
    rows = []
    for position in positions:
        words = row.words.copy()
        words[Words.POSITION] = position
        rows.append(row._replace(words=words))
    return rows


PARAMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_k of many": {"top_k": 150},
    "top_p": {"top_p": 0.8},
    "narrow top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.02},
    "bias": {"logit_bias": {3: 5.0, 299: 8.0, 100: -100.0}},
    "allowed": {"allowed_token_ids": [0, 7, 31, 32, 63, 64, 150, 255, 256, 299]},
    "all": {
        "temperature": 1.4,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.005,
        "logit_bias": {5: 2.0, 6: -3.0},
        "allowed_token_ids": range(0, 300, 2),
    },
    "top_k and top_p": {"top_k": 20, "top_p": 0.7, "temperature": 2.0},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.95, "temperature": 2.0},
}


@targets
@pytest.mark.parametrize("name", PARAMS)
def test_frequencies_are_the_exact_probabilities(target: str, name: str) -> None:
    params, logits = SamplingParams(**PARAMS[name]), logits_of(VOCAB)
    tokens, _ = run_sample(kernels(target=target), logits, rows_at(params, range(DRAWS)))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert is_plausible(counts, probabilities(processed(logits, params), params))


def test_the_test_of_frequencies_finds_small_deviations() -> None:
    params, logits = SamplingParams(temperature=1.0), logits_of(VOCAB)
    tokens, _ = run_sample(kernels(), logits, rows_at(params, range(DRAWS)))
    other = SamplingParams(temperature=1.04)
    exact = probabilities(processed(logits, other), other)
    assert not is_plausible(np.bincount(tokens, minlength=VOCAB), exact)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty", "all"])
def test_frequencies_with_penalties(penalty: str) -> None:
    some = {"repetition_penalty": 1.7, "presence_penalty": 1.5, "frequency_penalty": -0.4}
    params = SamplingParams(**(some if penalty == "all" else {penalty: some[penalty]}))
    logits = logits_of(VOCAB)
    likely = np.argsort(-logits)[:40].tolist()
    prompt, output = likely[:25], [*likely[20:35], *likely[20:28], likely[20]]
    sampler = Sampler(params, prompt, vocab=VOCAB, seed=5)
    row = sampler.row([*prompt, *output])
    rows = [row._replace(words=words.words) for words in rows_at(params, range(DRAWS), seed=5)]
    tokens, _ = run_sample(kernels(), logits, rows)
    exact = probabilities(processed(logits, params, prompt, output), params)
    assert is_plausible(np.bincount(tokens, minlength=VOCAB), exact)
    plain = SamplingParams()
    changed = probabilities(processed(logits, plain), plain)
    assert not is_plausible(np.bincount(tokens, minlength=VOCAB), changed)


def random_params(rng: Any) -> SamplingParams:
    """Some filters, some off."""
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-5, 0.3, 1.0, 2.0, 50.0])),
        top_k=int(rng.choice([0, 1, 2, 10, 200, 100_000])),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.01])),
        min_p=float(rng.choice([0.0, 0.01, 0.3])),
        logprobs=0,
    )


@targets
@pytest.mark.parametrize("vocab", WIDTHS)
def test_each_token_lies_where_its_uniform_number_points(target: str, vocab: int) -> None:
    """The token's piece of the exact distribution holds the number, up to the rounding of float32 sums."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((60, vocab)) * rng.uniform(0.1, 6, (60, 1))).astype(np.float32)
    params = [random_params(rng) for _ in logits]
    rows = [rows_at(p, [i], vocab, seed=9)[0] for i, p in enumerate(params)]
    tokens, logprobs = run_sample(kernels(vocab, target), logits, rows)
    for row, token, words, asked, logprob in zip(logits, tokens, rows, params, logprobs, strict=True):
        exact = probabilities(processed(row, asked), asked)
        sums, u = exact.cumsum(), uniform(words.words.tolist())
        assert exact[token] > 0
        if not asked.is_greedy:
            # A weight has the error of exp, 2e-7, and that of its argument, 2^-24 of at most 50.
            assert sums[token] - exact[token] - 1e-5 <= u <= sums[token] + 1e-5
        x = row.astype(np.float64)
        expected = x[token] - x.max() - np.log(np.exp(x - x.max()).sum())
        assert abs(logprob - expected) < 1e-5


def test_the_meaning_is_the_same_by_another_way() -> None:
    """The op's meaning (torch) gives the tokens of the kernel; a number on a border is not among these."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((64, VOCAB)) * 3).astype(np.float32)
    logits[5] = -np.inf
    rows = []
    for i in range(64):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8, 2.0])),
            top_k=int(rng.choice([0, 30])),
            top_p=float(rng.choice([1.0, 0.8])),
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            logit_bias={i: 3.0},
            allowed_token_ids=range(i % 3, VOCAB, 3) if i % 2 else None,
            logprobs=0,
        )
        sampler = Sampler(params, [1, 2, 3], vocab=VOCAB, seed=i)
        rows.append(sampler.row([1, 2, 3, *rng.integers(0, VOCAB, 8).tolist()]))
    inputs = sampling_inputs(rows, VOCAB)
    arrays = (logits, inputs.settings, inputs.edits, inputs.masks)
    tokens, logprobs = sample(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))
    got, got_logprobs = run_inputs(kernels(), logits, inputs)
    assert got[5] == -1
    assert got.tolist() == tokens.tolist()
    assert np.allclose(got_logprobs, logprobs.numpy(), rtol=0, atol=1e-5)


@targets
def test_a_row_gives_the_same_bits_in_any_company(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a crowd, in another order, with one worker or two, and in chunks."""
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((40, 1000)) * 3).astype(np.float32)
    rows = []
    for i in range(40):
        params = SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.2, logprobs=0)
        allowed = range(i, 1000) if i % 4 == 0 else None
        sampler = Sampler(params, [i], vocab=1000, seed=i % 7, choice=i % 3)
        row = sampler.row([i, *rng.integers(0, 1000, i).tolist()])
        mask = Sampler(SamplingParams(allowed_token_ids=allowed), [], vocab=1000, seed=0).row([]).mask
        rows.append(row._replace(mask=mask))
    run = kernels(1000, target)
    tokens, logprobs = run_sample(run, logits, rows)
    for workers in (1, 2):
        monkeypatch.setattr(run.device, "num_workers", workers)
        order = rng.permutation(40)
        shuffled, shuffled_logprobs = run_sample(run, logits[order], [rows[i] for i in order])
        assert (shuffled == tokens[order]).all()
        assert shuffled_logprobs.tobytes() == logprobs[order].tobytes()
        for i in range(0, 40, 5):
            alone, alone_logprob = run_sample(run, logits[i : i + 1], rows[i : i + 1])
            assert (alone[0], alone_logprob.tobytes()) == (tokens[i], logprobs[i : i + 1].tobytes())
    inputs = sampling_inputs(rows, 1000)
    parts = [
        run_inputs(run, logits[i : i + 13], inputs.chunk(i, min(i + 13, 40)))[0] for i in range(0, 40, 13)
    ]
    assert np.concatenate(parts).tolist() == tokens.tolist()


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = np.full(VOCAB, -5.0, np.float32)
    logits[[10, 200]], logits[[20, 150, 299]] = 3.0, 2.0
    for params, kept in (
        ({"top_k": 1}, {10, 200}),
        ({"top_k": 3}, {10, 200, 20, 150, 299}),
        ({"top_p": 0.1}, {10, 200}),
        ({"top_p": 0.7}, {10, 200, 20, 150, 299}),
        ({"min_p": 0.3}, {10, 200, 20, 150, 299}),
        ({"min_p": 0.4}, {10, 200}),
    ):
        tokens, _ = run_sample(kernels(), logits, rows_at(SamplingParams(**params), range(500)))
        assert set(tokens.tolist()) == kept
    greedy, _ = run_sample(kernels(), logits, rows_at(SamplingParams(temperature=0), range(3)))
    assert greedy.tolist() == [10, 10, 10]


def test_a_tiny_temperature_is_exact() -> None:
    """At 1e-5 a difference of 1e-5 counts once, and what float32 holds of it is what matters."""
    logits = np.full(VOCAB, 10.0, np.float32)
    logits[[4, 250]] = 20.0, np.nextafter(np.float32(20.0), np.float32(0))
    params = SamplingParams(temperature=1e-5)
    tokens, _ = run_sample(kernels(), logits, rows_at(params, range(DRAWS)))
    exact = probabilities(processed(logits, params), params)
    assert 0.4 < exact[250] < 0.5
    assert is_plausible(np.bincount(tokens, minlength=VOCAB), exact)
    tokens, _ = run_sample(kernels(), logits, rows_at(SamplingParams(temperature=1e-30), range(50)))
    assert set(tokens.tolist()) == {4}
    tokens, _ = run_sample(kernels(), logits, rows_at(SamplingParams(temperature=1e30), range(500)))
    assert len(set(tokens.tolist())) > 200


def test_rows_without_a_choice_give_no_token() -> None:
    """-1 where all is masked or no number; single NaNs are never chosen; infinity wins when greedy."""
    logits = np.tile(logits_of(VOCAB), (6, 1))
    logits[0], logits[1], logits[2, ::2] = -np.inf, np.nan, np.nan
    logits[4, 77] = np.inf
    params = SamplingParams()
    rows = rows_at(params, range(6))
    rows[3] = rows[3]._replace(mask=np.zeros(10, np.int32))
    rows[4] = rows_at(SamplingParams(temperature=0.0), [4])[0]
    tokens, _ = run_sample(kernels(), logits, rows)
    assert tokens[[0, 1, 3]].tolist() == [-1, -1, -1]
    assert tokens[2] % 2 == 1
    assert tokens[4] == 77
    assert 0 <= tokens[5] < VOCAB


# Known answers of Random123's distribution (kat_vectors): counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_known_answers(counter: Any, key: Any, result: Any) -> None:
    assert philox(counter, key) == result


@targets
def test_the_kernels_philox_is_the_same(target: str) -> None:
    """Of 4096 equal logits the token is the number's first 12 bits."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(64):
        seed, choice, position = (0, 0, 0) if i == 0 else rng.integers(0, 2**31, 3).tolist()
        sampler = Sampler(SamplingParams(), [], vocab=4096, seed=seed * 2**33 + seed, choice=choice)
        row = sampler.row([])
        row.words[Words.POSITION] = position
        rows.append(row)
    tokens, _ = run_sample(kernels(4096, target), np.zeros((1, 4096)), rows)
    assert tokens[0] == 0x6627E8D5 >> 20
    assert tokens.tolist() == [int(uniform(row.words.tolist()) * 4096) for row in rows]
