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
BOGUS = {"type": "bogus"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": BOGUS}}}
SCHEMA_PLACE = "response_format.json_schema.schema"
# What 2,048 tokens can have: the longest is "<pad>".
MOST_CHARS = LIMIT * 5


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
        ("logit_bias", {"x": 1}, "is not a token id"),
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
        ("n", 2**70, "sequences that run at once"),
        ("top_k", 2**70, "64 bits"),
        ("stop_token_ids", [2**70], "0 to 255"),
        ("max_tokens", 0, "at least 1"),
        ("seed", 2**64, "64 bits"),
        ("stop", [""], "none of them empty"),
        ("stop", ["\ud800"], "no Unicode"),
        ("cache_salt", "\udfff", "unicode"),
        ("structured_outputs", {"json": DEEP}, ""),
        ("stop", ["x"] * 65, "65 texts are more than 64"),
        ("stop", ["x" * 4000] * 5, "20000 characters are more than 16384"),
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
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, SCHEMA_PLACE),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": BOGUS}}}, SCHEMA_PLACE),
        ({"guided_json": BOGUS}, "guided_json"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"structured_outputs": {"json": BOGUS}}, "structured_outputs.json"),
        ({"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "response_format"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"functions": []}, "functions"),
    ],
)
def test_chats_that_are_wrong(server: RunningServer, more: dict[str, Any], param: str) -> None:
    assert server.refused("/v1/chat/completions", {**CHAT, **more})["param"] == param


@pytest.mark.parametrize("name", ["self", "template", "messages", "tools"])
def test_names_that_no_template_can_be_told(server: RunningServer, name: str) -> None:
    body = {**CHAT, "chat_template_kwargs": {name: []}}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = server.refused(path, body)
        assert error["param"] == "chat_template_kwargs"
        assert repr(name) in error["message"]


@pytest.mark.parametrize("number", [MOST_CHARS + 1, 15 << 20])
def test_texts_that_cannot_fit_are_not_tokenized(server: RunningServer, number: int) -> None:
    text = " " * number
    for path, body, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["x", text]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = server.refused(path, body)
        assert error["param"] == param
        assert f"characters are more than {MOST_CHARS}" in error["message"]


def test_texts_up_to_the_limit_are_tokenized(server: RunningServer) -> None:
    error = server.refused("/v1/completions", {"prompt": "x" * MOST_CHARS})
    assert f"{MOST_CHARS} " in error["message"]
    assert "characters" not in error["message"]


def test_texts_to_tokenize_have_a_limit_of_their_own(server: RunningServer) -> None:
    most = 1 << 20
    assert server.post("/tokenize", {"prompt": "x" * (MOST_CHARS + 1)})["count"] == MOST_CHARS + 1
    for more in ({"prompt": "x" * (most + 1)}, {"messages": [{"role": "user", "content": "x" * most}]}):
        error = server.refused("/tokenize", more)
        assert error["param"] == next(iter(more))
        assert f"characters are more than {most}" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/v1/completions", {"prompt": "x", "message": []}, None),
        ("/v1/completions", {"prompt": "x", "messages": []}, None),
        ("/v1/chat/completions", {**CHAT, "message": []}, "messages"),
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usages": True}}, "include_usage"),
        ("/v1/chat/completions", {**CHAT, "stream_options": {"top_logprob": 1}}, None),
        ("/detokenize", {"tokens": [5], "token": 5}, "tokens"),
    ],
)
def test_only_names_of_the_same_body_are_meant(
    server: RunningServer, path: str, body: dict[str, Any], meant: str | None
) -> None:
    message = server.refused(path, body)["message"]
    assert "is not a known field" in message
    assert ("did you mean" in message) == (meant is not None)
    if meant is not None:
        assert f"did you mean {meant}" in message


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
        for shown in (None, "Bearer fifth", "Bearer ", "Bearer", "first", "Basic first", "Bearerfirst", ""):
            headers = {} if shown is None else {"authorization": shown}
            status, answer, found = locked.request("GET", path, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert found["www-authenticate"] == "Bearer"
    for key in ("first", "second", "third", "fourth"):
        for scheme in ("Bearer", "bearer", "BEARER "):
            headers = {"authorization": f"{scheme} {key}"}
            assert locked.request("GET", "/v1/models", headers=headers)[0] == 200


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
