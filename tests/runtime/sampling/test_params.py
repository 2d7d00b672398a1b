"""Sampling parameters: every bad value is refused, naming the field and what may stand there."""

from __future__ import annotations

import math
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams

NAN, INF, HUGE = math.nan, math.inf, 10**400

# Texts that int() takes, and that name no token.
KEYS: list[Any] = ["1_0", " 5 ", "5\n", "05", "+5", "-1", "\u0665", "", "5.0", "9" * 5000]

# Field, values that are refused, and the range that the message states.
BAD: list[tuple[str, list[Any], str]] = [
    (
        "temperature",
        [-0.1, NAN, INF, -INF, HUGE, "1", None, True, 1j, 1e308],
        "a finite number of at least 0 and at most 3e+38",
    ),
    ("min_p", [-0.01, 1.01, NAN, INF, "0", False, None], "a number from 0 to 1"),
    ("top_p", [0, 0.0, -1, 1.0001, NAN, INF, True, "0.9", None], "a number above 0 and at most 1"),
    ("top_k", [-2, 1.5, 2.0, NAN, True, "3", None], "a whole number of at least 1, or 0 or -1"),
    ("repetition_penalty", [0, -1, 0.009, 100.5, NAN, INF, True, "1"], "a number from 0.01 to 100"),
    ("presence_penalty", [-2.01, 2.01, NAN, INF, False, None], "a number from -2 to 2"),
    ("frequency_penalty", [-2.01, 2.01, NAN, -INF, False, "0"], "a number from -2 to 2"),
    ("n", [0, -1, 1.0, True, "2", None], "a whole number of at least 1"),
    ("max_tokens", [0, -5, 16.0, True, INF, "16"], "a whole number of at least 1"),
    ("min_tokens", [-1, 1.0, True, None], "a whole number of at least 0"),
    ("seed", [2**64, -(2**63) - 1, 1.0, True, "7", NAN], "a whole number of at most 64 bits"),
    ("logprobs", [-1, 21, 5.0, True, "5"], "a whole number from 0 to 20"),
    ("prompt_logprobs", [-1, 21, 5.0, True], "a whole number from 0 to 20"),
    (
        "stop",
        ["", ["a", ""], [b"a"], [1], 5, b"a", {"a": 1}],
        "a text or a list of texts, none of them empty",
    ),
    ("bad_words", ["", ["a", ""], [1], 5], "a list of texts, none of them empty"),
    ("stop_token_ids", [5, "5", {5: 1}], "a list of token ids"),
    ("stop_token_ids[1]", [[1, -1], [1, 2.0], [1, True], [1, "2"], [1, None]], "a token id"),
    ("allowed_token_ids", [[], 5, "5"], "a list of"),
    ("allowed_token_ids[0]", [[-1], [1.0], [True]], "a token id"),
    ("logit_bias", [[1], "x", *({key: 1.0} for key in KEYS), {-1: 1.0}, {1.0: 1.0}, {True: 1.0}], "a"),
    ("logit_bias[5]", [{5: 101}, {5: -100.5}, {5: NAN}, {5: INF}, {5: "1"}, {5: True}], "a number from -100"),
    ("logits_processors", [5, [5], len, "f"], "a"),
    ("structured_outputs", [{"regex": "a"}, "a"], "StructuredOutputsParams"),
    *((name, [0, 1, None, "yes"], "true or false") for name in ("ignore_eos", "echo", "detokenize")),
    ("include_stop_str_in_output", [1, "no"], "true or false"),
    ("skip_special_tokens", [1, None], "true or false"),
]


@pytest.mark.parametrize(("place", "values", "expected"), BAD, ids=[place for place, _, _ in BAD])
def test_a_bad_value_is_refused(place: str, values: list[Any], expected: str) -> None:
    field = place.partition("[")[0]
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.place == place
        assert expected in caught.value.message, (value, caught.value.message)
        assert len(str(caught.value)) < 250


def test_every_field_has_a_test() -> None:
    assert {place.partition("[")[0] for place, _, _ in BAD} == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (0, 0.0, 1e-5, 1e-30, 2, 1e3, np.float32(0.5), Fraction(1, 2))),
        *(("top_k", value) for value in (1, 10**9, np.int64(5))),
        *(("top_p", value) for value in (1e-9, 1, 1.0)),
        *(("min_p", value) for value in (0, 1)),
        *(("seed", value) for value in (0, -1, 2**64 - 1, -(2**63))),
        *(("presence_penalty", value) for value in (-2, 2)),
        ("repetition_penalty", 0.01),
        ("max_tokens", None),
        ("logprobs", 0),
    ],
)
def test_limits_are_within(field: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{field: value}), field)
    assert kept == value
    assert type(kept) in (int, float, type(None))


def test_lists_become_tuples_and_top_k_has_one_word_for_all() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[2, 3], top_k=-1, logit_bias={np.int32(4): 1})
    assert (params.stop, params.stop_token_ids, params.top_k) == (("end",), (2, 3), 0)
    assert params.logit_bias == {4: 1.0}
    assert SamplingParams(logit_bias={"0": 1, "40": 2}).logit_bias == {0: 1.0, 40: 2.0}  # type: ignore[dict-item]
    assert SamplingParams(allowed_token_ids=[7, 3, 7, np.int64(3)]).allowed_token_ids == (7, 3)
    assert SamplingParams().stop == ()


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    with pytest.raises(RequestError, match="min_tokens: 6 is not at most max_tokens, 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {100: 1.0}), ("stop_token_ids", [3, 100]), ("allowed_token_ids", [99, 10**12])],
)
def test_tokens_beyond_the_vocabulary_are_refused(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    params.check(vocab=10**12 + 1, max_choices=1)
    with pytest.raises(RequestError, match=rf"{field}: 10+ is not a token id from 0 to 99"):
        params.check(vocab=100, max_choices=1)


def test_what_an_engine_cannot_hold_is_refused() -> None:
    SamplingParams(n=8).check(vocab=10, max_choices=8)
    with pytest.raises(RequestError, match="n: 9 is not at most 8"):
        SamplingParams(n=9).check(vocab=10, max_choices=8)
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)).check(vocab=5000, max_choices=1)
    for field, value in (
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("stop_token_ids", list(range(257))),
    ):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})  # type: ignore[arg-type]


class Unread(list[Any]):
    """As long as it says; none of its items may be looked at."""

    def __len__(self) -> int:
        return 10_000_000

    def __iter__(self) -> Any:
        raise AssertionError("was read")


class UnreadMap(dict[Any, Any]):
    """Likewise."""

    def __len__(self) -> int:
        return 10_000_000

    def items(self) -> Any:
        raise AssertionError("was read")


@pytest.mark.parametrize(
    ("field", "value"),
    [("allowed_token_ids", Unread()), ("stop_token_ids", Unread()), ("logit_bias", UnreadMap())],
)
def test_what_is_too_long_is_refused_unread(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{field}: '10000000 tokens' is not at most"):
        SamplingParams(**{field: value})


def test_a_token_has_one_bias() -> None:
    with pytest.raises(RequestError, match="logit_bias: '5' is not the only key"):
        SamplingParams(logit_bias={5: 1.0, "5": 2.0})  # type: ignore[dict-item]


def test_a_clone_has_the_changes_checked() -> None:
    params = SamplingParams(top_k=5, logit_bias={1: 2.0})
    assert params.clone() == params
    assert params.clone(top_k=7) == SamplingParams(top_k=7, logit_bias={1: 2.0})
    with pytest.raises(RequestError, match="n: 0"):
        params.clone(n=0)


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "json_object": True}),
        ("structured_outputs.regex", {"regex": 5}),
        ("structured_outputs.grammar", {"grammar": ["a"]}),
        ("structured_outputs.choice", {"choice": []}),
        ("structured_outputs.choice", {"choice": "yes"}),
        ("structured_outputs.choice", {"choice": ["yes", ""]}),
        ("structured_outputs.json_object", {"json_object": False}),
        ("structured_outputs.json", {"json": "{"}),
        ("structured_outputs.json", {"json": "[1]"}),
        ("structured_outputs.json", {"json": {"a": object()}}),
    ],
)
def test_a_bad_structure_is_refused(place: str, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.place == place


@pytest.mark.parametrize(
    "given", [{"json": '{"type": "object"}'}, {"json": {"type": "string"}}, {"choice": ["a", "b"]}]
)
def test_a_good_structure_is_kept(given: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    assert params.structured_outputs is not None
    assert params.needs_host


def test_what_is_more_than_the_argmax_needs_sampling() -> None:
    assert not SamplingParams(temperature=0, top_k=5, top_p=0.5, seed=3).needs_sampling
    for given in (
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {0: 1.0}},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"logits_processors": [max]},
    ):
        assert SamplingParams(**{"temperature": 0.0, **given}).needs_sampling  # type: ignore[arg-type]


def test_an_echoed_prompt_has_log_probabilities_like_the_output() -> None:
    found = [
        SamplingParams(logprobs=own, prompt_logprobs=prompt, echo=echo).num_prompt_logprobs
        for own, prompt, echo in (
            (3, None, False),
            (3, None, True),
            (None, 2, True),
            (0, 2, True),
            (4, 2, True),
        )
    ]
    assert found == [None, 3, 2, 2, 4]
