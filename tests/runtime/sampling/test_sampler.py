"""From parameters and tokens to what the kernel reads; log probabilities on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagec.compiler.errors import RequestError
from pagec.compiler.sampling import Words
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import (
    GREEDY,
    Row,
    Sampler,
    SamplingInputs,
    draw_seed,
    pack_mask,
    process_logits,
    sampling_inputs,
    token_logprobs,
)

VOCAB = 100


def sampler(prompt: list[int], eos: set[int] = frozenset(), **params: Any) -> Sampler:  # type: ignore[assignment]
    return Sampler(SamplingParams(**params), prompt, vocab=VOCAB, seed=1, eos_token_ids=eos)


def banned(row: Row) -> set[int]:
    return {int(t) for t, bits in row.biases if bits == np.float32(-np.inf).view(np.int32)}


def counts(row: Row) -> dict[int, int]:
    return {int(t): int(n) for t, n in row.seen}


def test_words_hold_what_was_asked() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        logprobs=0,
    )
    words = Sampler(params, [1], vocab=VOCAB, seed=-1, choice=2).row([1, 2, 3]).words
    reals = words.view(np.float32)
    assert reals[Words.INVERSE_TEMPERATURE] == 2.0
    assert reals[[Words.TOP_P, Words.MIN_P]].tolist() == [np.float32(0.9), np.float32(0.1)]
    assert reals[[Words.REPETITION, Words.PRESENCE, Words.FREQUENCY]].tolist() == [1.5, -1.0, 0.25]
    whole = [Words.TOP_K, Words.CHOICE, Words.POSITION, Words.MASK, Words.FLAGS]
    assert words[whole].tolist() == [7, 2, 3, 0, 1]
    assert words[[Words.SEED, Words.SEED_HIGH]].tolist() == [-1, -1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5, 1.0, 1e30, 2e38])
def test_no_temperature_becomes_greedy_or_infinite(temperature: float) -> None:
    words = sampler([], temperature=temperature).row([]).words
    assert 0 < words.view(np.float32)[Words.INVERSE_TEMPERATURE] < np.inf
    assert GREEDY.words.view(np.float32)[Words.INVERSE_TEMPERATURE] == 0


def test_before_min_tokens_no_end_is_allowed() -> None:
    """All ends of text and all stop tokens, up to and not beyond; without those that are ignored anyway."""
    chosen = sampler([5, 6], {90, 91}, min_tokens=2, stop_token_ids=[7, 8])
    assert banned(chosen.row([5, 6])) == {90, 91, 7, 8}
    assert banned(chosen.row([5, 6, 1])) == {90, 91, 7, 8}
    assert banned(chosen.row([5, 6, 1, 2])) == set()
    beyond = sampler([5], {90, 100, -1}, min_tokens=2)
    assert banned(beyond.row([5])) == {90}, "the kernel has no room for tokens that no logit stands for"
    ignoring = sampler([5], {90, 91}, min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    assert banned(ignoring.row([5])) == {7}


def test_bad_words_lose_their_last_token_only() -> None:
    params = SamplingParams(bad_words=["x", "y"])
    chosen = Sampler(params, [1, 2], vocab=VOCAB, seed=0, bad_words=[[9], [2, 3], [4, 5, 6]])
    assert banned(chosen.row([1, 2])) == {9}, "the prompt does not begin a word"
    assert banned(chosen.row([1, 2, 2])) == {9, 3}
    assert banned(chosen.row([1, 2, 4])) == {9}
    assert banned(chosen.row([1, 2, 4, 5])) == {9, 6}
    assert banned(chosen.row([1, 2, 4, 5, 0])) == {9}
    assert banned(chosen.row([1, 2, 4, 5, -1], 4)) == {9, 6}, "what stands at the position is no matter"


def test_biases_and_bans_are_limited_together() -> None:
    with pytest.raises(RequestError, match="bad_words"):
        Sampler(SamplingParams(), [], vocab=VOCAB, seed=0, bad_words=[[1]] * 2049)


@given(
    prompt=st.lists(st.integers(0, 99), max_size=40),
    output=st.lists(st.integers(0, 99), max_size=60),
    steps=st.lists(st.integers(0, 60)),
    repetition=st.sampled_from([1.0, 1.2]),
)
def test_seen_tokens_are_counted_step_by_step(
    prompt: list[int], output: list[int], steps: list[int], repetition: float
) -> None:
    chosen = sampler(prompt, repetition_penalty=repetition, frequency_penalty=0.5)
    for end in sorted({min(step, len(output)) for step in [*steps, len(output)]}):
        known = output[:end]
        expected = {token: known.count(token) for token in known}
        if repetition != 1.0:
            expected = dict.fromkeys(prompt, 0) | expected
        assert counts(chosen.row([*prompt, *output], len(prompt) + end)) == expected


def test_without_penalties_tokens_need_not_be_known() -> None:
    row = sampler([1], min_tokens=9, logit_bias={3: 1.0}).row([1, -1, -4])
    assert len(row.seen) == 0
    assert row.words[Words.POSITION] == 3


@given(st.sets(st.integers(0, VOCAB - 1)))
def test_masks_are_packed_by_words(allowed: set[int]) -> None:
    mask = pack_mask(allowed, VOCAB)
    assert mask.dtype == np.int32
    assert {t for t in range(VOCAB) if mask[t // 32] >> (t % 32) & 1} == allowed


class Alternating:
    """A grammar of 2, then 3, then the end."""

    def __init__(self) -> None:
        self.next = [2, 3]

    @property
    def is_done(self) -> bool:
        return not self.next

    def mask(self) -> Any:
        return pack_mask([*self.next[:1], 4], VOCAB)

    def accept(self, token: int) -> None:
        if token != self.next.pop(0):
            raise RequestError(f"{token} may not come")


def test_a_grammars_mask_narrows_the_allowed_tokens() -> None:
    params = SamplingParams(allowed_token_ids=[1, 2, 3])
    chosen = Sampler(params, [], vocab=VOCAB, seed=0, grammar=Alternating())
    assert (chosen.row([]).mask == pack_mask([2], VOCAB)).all()
    assert not chosen.accept(2)
    assert (chosen.row([2]).mask == pack_mask([3], VOCAB)).all()
    with pytest.raises(RequestError):
        chosen.accept(2)
    assert not Sampler(params, [], vocab=VOCAB, seed=0).accept(5)


def rows_of(inputs: SamplingInputs) -> list[tuple[Any, ...]]:
    """What each row says once its edits and its mask are looked up."""
    found = []
    for words in inputs.settings:
        bias, seen, end = words[[Words.BIAS_START, Words.COUNT_START, Words.COUNT_END]]
        mask = inputs.masks[words[Words.MASK] - 1].tolist() if words[Words.MASK] > 0 else None
        rest = np.delete(words, [Words.BIAS_START, Words.COUNT_START, Words.COUNT_END, Words.MASK]).tolist()
        found.append((inputs.edits[bias:seen].tolist(), inputs.edits[seen:end].tolist(), mask, rest))
    return found


PARTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=12)


@given(PARTS, st.data())
def test_a_chunk_holds_its_rows(parts: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    rows = [
        Row(
            GREEDY.words + np.int32(0),
            rng.integers(0, 99, (biases, 2)).astype(np.int32),
            rng.integers(0, 99, (seen, 2)).astype(np.int32),
            rng.integers(0, 99, 4).astype(np.int32) if has_mask else None,
        )
        for biases, seen, has_mask in parts
    ]
    inputs = sampling_inputs(rows, VOCAB)
    expected = rows_of(inputs)
    for row, (biases, seen, mask, _) in zip(rows, expected, strict=True):
        assert (biases, seen) == (row.biases.tolist(), row.seen.tolist())
        assert mask == (None if row.mask is None else row.mask.tolist())
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    assert rows_of(inputs.chunk(start, stop)) == expected[start:stop]


def test_drawn_seeds_differ_and_are_valid() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)


def test_a_processors_fault_is_its_rows_own() -> None:
    logits = np.zeros((4, 5), np.float32)
    seen: list[list[int]] = []

    def bias(output: list[int], row: Any) -> Any:
        seen.append(output)
        return row + 1

    def broken(output: list[int], row: Any) -> Any:
        row[:] = 9
        raise KeyError(output)

    jobs: Any = {
        0: ([bias, bias], [1, 2]),
        1: ([broken], []),
        2: ([lambda _, row: row[:2]], []),
        3: ([bias, broken], [3]),
    }
    errors = process_logits(jobs, logits)
    assert sorted(errors) == [1, 2, 3]
    assert isinstance(errors[1], KeyError)
    assert isinstance(errors[2], RequestError)
    assert logits.tolist() == [[2.0] * 5, [0.0] * 5, [0.0] * 5, [0.0] * 5]
    assert seen == [[1, 2], [1, 2], [3]]


@pytest.mark.parametrize("count", [0, 1, 5, 20, 99, 200])
def test_log_probabilities_are_those_of_the_logits(count: int) -> None:
    rng = np.random.default_rng(0)
    logits = (4 * rng.standard_normal((6, VOCAB))).astype(np.float32)
    logits[2] = np.round(logits[2])  # with equals
    logits[3, ::2] = -np.inf
    tokens = rng.integers(0, VOCAB // 2, 6).astype(np.int32) * 2 + 1
    for row, token, found in zip(logits, tokens, token_logprobs(logits, tokens, count), strict=True):
        x = row.astype(np.float64)
        exact = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert found.token == token
        assert found.own.logprob == pytest.approx(exact[token], abs=1e-5)
        assert found.own.rank == 1 + (x > x[token]).sum()
        order = np.argsort(-x, kind="stable")[:count]
        assert list(found.top) == order.tolist()
        assert [p.rank for p in found.top.values()] == list(range(1, len(order) + 1))
        for t, p in found.top.items():
            assert p.logprob == pytest.approx(exact[t], abs=1e-5)


def test_tokens_beyond_the_vocabulary_reach_no_kernel() -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        sampler([], logit_bias={VOCAB: 1.0})
    chosen = Sampler(SamplingParams(), [], vocab=VOCAB, seed=0, bad_words=[[VOCAB], [3, VOCAB], [4]])
    assert banned(chosen.row([])) == {4}
