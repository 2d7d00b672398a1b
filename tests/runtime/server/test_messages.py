"""Messages survive the socket however it cuts them; parameters survive msgpack and JSON."""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams
from pagec.runtime.sampling.sampler import Logprob, TokenLogprobs
from pagec.runtime.server.limits import RequestLimits
from pagec.runtime.server.messages import (
    Abort,
    AskSnapshot,
    Frames,
    News,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    Tokens,
    frame,
)
from pagec.runtime.server.params import UNFIT, packed, unfit, unpacked

messages = st.one_of(
    st.builds(Abort, st.text(), st.none() | st.integers(0, 9)),
    st.just(AskSnapshot()),
    st.just(Stop()),
    st.builds(
        Submit,
        st.text(),
        st.lists(st.integers(-5, 2**40), max_size=50),
        st.dictionaries(st.text(), st.floats(allow_nan=False) | st.text() | st.booleans(), max_size=3),
        ttft_s=st.none() | st.floats(allow_nan=False),
        bad_words=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
    ),
)


@given(st.lists(messages, max_size=8), st.data())
def test_messages_come_out_as_they_went_in(sent: list[ToEngine], data: st.DataObject) -> None:
    stream = b"".join(map(frame, sent))
    frames: Frames[ToEngine] = Frames(ToEngine)
    found: list[ToEngine] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
    assert found == sent


def test_log_probabilities_keep_every_bit() -> None:
    own = Logprob(-0.1 - 2**-55, 3)
    top = {7: Logprob(float("-inf"), 1), 9: Logprob(-1e-300, None)}
    tokens = Tokens("r", 0, (7,), None, None, (TokenLogprobs(7, own, top),))
    news = News([], [], [], [tokens], [])
    (found,) = Frames[ToFront](ToFront).feed(frame(news))
    assert found == news


DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"not": inner}, range(5000), {})
bias = st.dictionaries(st.integers(0, 10), st.floats(-100, 100), max_size=4)
structured = st.sampled_from(
    [
        None,
        StructuredOutputsParams(regex="[a-z]+"),
        StructuredOutputsParams(choice=["a", "b"]),
        StructuredOutputsParams(json={"type": "object", "properties": {"n": {"type": "integer"}}}),
        StructuredOutputsParams(json_object=True),
    ]
)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 5),
    top_k=st.integers(-1, 50),
    logit_bias=st.none() | bias,
    allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2),
    max_tokens=st.none() | st.integers(1, 2**40),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    structured_outputs=structured,
)


@given(params)
def test_parameters_come_back(given: SamplingParams) -> None:
    data = packed(given)
    assert unpacked(data) == given
    assert unpacked(json.loads(json.dumps(data))) == given
    assert unpacked(msgspec.msgpack.decode(msgspec.msgpack.encode(data))) == given


def test_beams_come_back() -> None:
    beam = BeamSearchParams(beam_width=4, n=2, max_tokens=None, length_penalty=0.5, early_stopping="never")
    assert BeamSearchParams(**json.loads(json.dumps(packed(beam)))) == beam


@pytest.mark.parametrize(
    ("prompt", "params", "place"),
    [
        ([2**70], {}, "prompt"),
        ([1], {"top_k": 2**64}, "top_k"),
        ([1], {"stop_token_ids": [0, 2**65]}, "stop_token_ids"),
        ([1], {"stop": ["fine", "\ud800"]}, "stop"),
        ([1], {"structured_outputs": {"json": DEEP}}, "structured_outputs"),
    ],
)
def test_what_no_message_can_carry(prompt: list[int], params: dict[str, Any], place: str) -> None:
    message = Submit("r", prompt, params)
    with pytest.raises(UNFIT):
        frame(message)
    assert unfit(message).place == place


def test_limits_of_texts() -> None:
    limits = RequestLimits(max_stops=2, max_bad_words=1, max_word_chars=3)
    limits.check(SamplingParams(stop=["abc", "d"], bad_words=["abc"]))
    for name, texts in (("stop", ["a", "b", "c"]), ("stop", ["abcd"]), ("bad_words", ["a", "b"])):
        with pytest.raises(RequestError) as refused:
            limits.check(SamplingParams(**{name: texts}))
        assert refused.value.place == name
