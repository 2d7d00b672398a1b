"""What is refused, with which status, in which words; and that nothing of it hurts the server."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.serving import RunningServer

from pagec.runtime.server.openai.bodies import ChatBody, CompletionBody

LIMIT = 2048
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"not": inner}, range(400), {})
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("tokens", "most", "fits"),
    [
        (LIMIT - 2, 1, True),
        (LIMIT - 1, 1, True),
        (LIMIT, 1, False),
        (LIMIT + 1, 1, False),
        (LIMIT - 5, 5, True),
        (LIMIT - 5, 6, False),
        (1, LIMIT, False),
    ],
)
def test_the_longest_sequence(server: RunningServer, tokens: int, most: int, fits: bool) -> None:
    """Case 8: the limit counts prompt and output together; the message has all numbers."""
    body = {"prompt": [5] * tokens, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    if fits:
        assert server.post("/v1/completions", body)["usage"]["total_tokens"] == tokens + most
        return
    error = server.refused("/v1/completions", body)
    assert error["param"] == ("max_tokens" if tokens < LIMIT else "prompt")
    for number in (tokens, most, tokens + most, LIMIT):
        assert str(number) in error["message"]


def test_a_chat_longer_than_the_model(server: RunningServer) -> None:
    error = server.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]})
    assert "3019" in error["message"]
    assert "2048" in error["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [[1], []], ["", "x"], [256], [-1], [1, "x"], [2**70], None, 7, [True]]
)
def test_prompts_that_are_none(server: RunningServer, prompt: Any) -> None:
    """Case 8."""
    assert server.refused("/v1/completions", {"prompt": prompt})["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("logit_bias", {"256": 1}, "256 is not a token id from 0 to 255"),
        ("logit_bias", {"x": 1}, "no token id"),
        ("logit_bias", {"1": 101}, "from -100 to 100"),
        ("temperature", float("nan"), "finite number"),
        ("temperature", float("inf"), "finite number"),
        ("temperature", -1, "at least 0"),
        ("temperature", "1", "number"),
        ("temperature", True, "number"),
        ("top_p", 0, "above 0"),
        ("top_p", float("nan"), "above 0"),
        ("min_p", 1.5, "0 to 1"),
        ("repetition_penalty", 0, "0.01 to 100"),
        ("presence_penalty", 3, "-2 to 2"),
        ("n", 0, "at least 1"),
        ("n", 1000, "sequences that run at once"),
        ("n", 2**70, "64 bits"),
        ("top_k", 2**70, "64 bits"),
        ("stop_token_ids", [2**70], "64 bits"),
        ("max_tokens", 0, "at least 1"),
        ("seed", 2**64, "64 bits"),
        ("stop", [""], "none of them empty"),
        ("stop", ["\ud800"], "no Unicode"),
        ("cache_salt", "\udfff", "unicode"),
        ("structured_outputs", {"json": DEEP}, ""),
        ("stop", ["x"] * 65, "65 texts are more than 64"),
        ("stop_token_ids", [256], "0 to 255"),
        ("min_tokens", 17, "max_tokens, 16"),
        ("structured_outputs", {"rex": "x"}, "'rex' is not one of"),
        ("ttft_s", 0, "no number of seconds"),
        ("token_s", [1], "valid number"),
        ("priority", 2**40, "less than"),
        ("best_of", 2, "not n"),
        ("suffix", "x", "not supported"),
        ("stream", "yes", "boolean"),
        ("cache_salt", "x" * 300, "256"),
    ],
)
def test_values_out_of_range(server: RunningServer, field: str, value: Any, words: str) -> None:
    """Case 9: the field is named, and what it may be."""
    error = server.refused("/v1/completions", {"prompt": "x", field: value})
    assert error["type"] == "invalid_request_error"
    assert re.split(r"[.\[]", error["param"] or "")[0] == field
    assert words in error["message"]


def test_a_tiny_temperature_is_exact(server: RunningServer) -> None:
    """Case 9."""
    texts = [
        server.post("/v1/completions", {"prompt": "abc", "max_tokens": 12, "temperature": t})["choices"][0][
            "text"
        ]
        for t in (0, 1e-5, 1e-300)
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "response_format"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"functions": []}, "functions"),
    ],
)
def test_chats_that_are_wrong(server: RunningServer, more: dict[str, Any], param: str) -> None:
    assert server.refused("/v1/chat/completions", {**CHAT, **more})["param"] == param


def test_unknown_fields(server: RunningServer) -> None:
    error = server.refused("/v1/completions", {"prompt": "x", "max_token": 5})
    assert error["param"] == "max_token"
    assert "did you mean max_tokens" in error["message"]
    server.refused("/v1/completions", {"prompt": "x", "\ud800": 1})
    ignored = {
        "user": "me",
        "metadata": {},
        "store": True,
        "service_tier": "auto",
        "seed": None,
        "stop": None,
    }
    server.post("/v1/chat/completions", {**CHAT, **ignored, "max_tokens": 1})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "body"),
        (b"[1]", "dictionary"),
        (b"", "required"),
        (b"[" * 100_000, "body"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "body"),
    ],
)
def test_bodies_that_are_none(server: RunningServer, body: bytes, words: str) -> None:
    status, answer, _ = server.request("POST", "/v1/completions", body)
    assert status == 400
    assert words in answer["error"]["message"]


def test_other_errors_have_the_same_form(server: RunningServer) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ):
        found, answer, _ = server.request(method, path)
        assert (found, set(answer["error"])) == (status, {"message", "type", "param", "code"})
    error = server.refused("/v1/completions", {"prompt": "x", "model": "other"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_prompts_without_number(server: RunningServer) -> None:
    error = server.refused("/v1/completions", {"prompt": ["x"] * 257})
    assert "257 prompts are more than 256" in error["message"]


def test_one_bad_prompt_refuses_all(server: RunningServer) -> None:
    server.refused("/v1/completions", {"prompt": [[5], [6], [300]], "max_tokens": 2000})
    stats = server.get("/stats")
    assert (stats["running"], stats["waiting"]) == ([], [])


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-5, 300), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5), st.sampled_from(["completions", "chat"]))
def test_nothing_is_the_servers_fault(server: RunningServer, body: dict[str, Any], kind: str) -> None:
    plain: dict[str, Any] = {"prompt": "x"} if kind == "completions" else CHAT
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    status, answer, _ = server.request("POST", path, {**plain, "max_tokens": 2, **body})
    assert status in (200, 400, 404), answer
    if status != 200:
        assert answer["error"]["message"]


# ------------------------------------------------------------------------------ keys and sizes


@pytest.fixture(scope="module")
def locked(artifact: Path) -> Iterator[RunningServer]:
    options = ("--api-key", "first", "--api-key", "second", "--max-body-bytes", "2000")
    with RunningServer(artifact, *options, env={"PAGEC_API_KEY": "third, fourth"}) as running:
        yield running


def test_keys(locked: RunningServer) -> None:
    assert locked.request("GET", "/health")[0] == 200
    assert locked.request("GET", "/")[0] == 200
    for path in ("/v1/models", "/metrics", "/stats", "/version", "/openapi.json", "/nowhere"):
        for headers in ({}, {"authorization": "Bearer fifth"}, {"authorization": "Bearer "}):
            status, answer, found = locked.request("GET", path, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert found["www-authenticate"] == "Bearer"
    for key in ("first", "second", "third", "fourth"):
        assert locked.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})[0] == 200


def test_large_bodies(locked: RunningServer) -> None:
    headers = {"authorization": "Bearer first"}
    body = {"prompt": "x" * 3000}
    status, answer, _ = locked.request("POST", "/v1/completions", body, headers)
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert "2000" in answer["error"]["message"]
    connection = locked.connect()  # in chunks, without a length
    data = json.dumps(body).encode()
    pieces = (data[start : start + 500] for start in range(0, len(data), 500))
    kinds = {**headers, "content-type": "application/json"}
    connection.request("POST", "/v1/completions", pieces, kinds, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
