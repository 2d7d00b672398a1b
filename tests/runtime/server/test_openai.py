"""OpenAI's own client, and curl, at a live server; what comes is what the engine gives in this process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
from support.serving import TEMPLATE, RunningServer, bytes_of, token_of, tokens_of

from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sequence import Request

Run = Callable[[Sequence[int], SamplingParams], Request]
LETTERS = [token_of(ord(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(tokens: list[int]) -> str:
    return bytes_of(tokens).decode("utf-8", "replace")


def chat_tokens(content: str) -> list[int]:
    assert TEMPLATE.endswith("<assistant>")
    return tokens_of(f"<user>{content}\n<assistant>")


# --------------------------------------------------------------------------------- completions


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "alias"]
    assert client.models.retrieve("alias").owned_by == "pagec"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_a_greedy_completion_is_what_the_engine_gives(client: openai.OpenAI, run: Run) -> None:
    found = client.completions.create(model="alias", prompt="Hello", max_tokens=40, temperature=0)
    expected = run(tokens_of("Hello"), SamplingParams(temperature=0, max_tokens=40)).output
    assert found.choices[0].text == text_of(expected)
    assert found.model == "alias"
    assert found._request_id == found.id
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 40, 45)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_adds_up_to_the_whole_text(client: openai.OpenAI, seed: int) -> None:
    """Most of these tokens are parts of characters, or of none."""
    asked: dict[str, Any] = {"model": "small", "prompt": "Ünder", "max_tokens": 60, "seed": seed, "n": 2}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_several_choices_of_several_prompts(client: openai.OpenAI, run: Run) -> None:
    """Case 11: indices, one finish reason each, usage summed, streaming or not."""
    prompts = ["first", "the second one"]
    asked: dict[str, Any] = {"model": "small", "prompt": prompts, "n": 3, "seed": 7, "max_tokens": 12}
    requests = [run(tokens_of(prompt), SamplingParams(n=3, seed=7, max_tokens=12)) for prompt in prompts]
    expected = [text_of(sequence.output) for request in requests for sequence in request.sequences]
    assert len(set(expected)) == 6
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == expected
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 5 + 14
    assert whole.usage.completion_tokens == sum(len(s.output) for r in requests for s in r.sequences)
    texts, reasons, usage = [""] * 6, [[] for _ in range(6)], None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == expected
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert usage == whole.usage


def test_token_ids_are_prompts_too(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "max_tokens": 10, "temperature": 0}
    texts = [client.completions.create(prompt=p, **asked).choices[0].text for p in ("abc", tokens_of("abc"))]
    assert texts[0] == texts[1]
    both = client.completions.create(prompt=[tokens_of("abc"), tokens_of("x")], **asked)
    assert len(both.choices) == 2
    assert both.choices[0].text == texts[0]


def test_echo_and_log_probabilities(client: openai.OpenAI, run: Run) -> None:
    found = client.completions.create(
        model="small", prompt="Why", max_tokens=6, temperature=0, echo=True, logprobs=3
    )
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=3)
    expected = run(tokens_of("Why"), params)
    choice = found.choices[0]
    assert choice.text == "Why" + text_of(expected.output)
    of = choice.logprobs
    assert of is not None
    assert of.tokens is not None
    assert of.tokens[:3] == ["W", "h", "y"]
    assert len(of.tokens) == len(of.top_logprobs or ()) == len(of.text_offset or ()) == 9
    known = [*expected.prompt_logprobs[1:], *expected.sequences[0].logprobs]
    assert (of.token_logprobs or [])[0] is None
    assert (of.token_logprobs or [])[1:] == [one.own.logprob for one in known if one is not None]
    assert (of.text_offset or [])[:4] == [0, 1, 2, 3]


def test_text_offsets_point_at_the_tokens(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="small", prompt="x", max_tokens=20, logprobs=0, extra_body={"allowed_token_ids": LETTERS}
    )
    of = found.choices[0].logprobs
    assert of is not None
    pairs = list(zip(of.text_offset or (), of.tokens or (), strict=True))
    assert [found.choices[0].text[offset] for offset, _ in pairs] == [token for _, token in pairs]


def test_stop_strings(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "x", "max_tokens": 40, "seed": 3}
    extra = {"allowed_token_ids": LETTERS}
    text = client.completions.create(**asked, extra_body=extra).choices[0].text
    stop = text[20:23]
    before = text[: text.index(stop)]
    found = client.completions.create(**asked, stop=["none of it", stop], extra_body=extra)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (before, "stop")
    assert found.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    assert found.usage is not None
    assert found.usage.completion_tokens == len(before) + 3
    pieces = list(client.completions.create(**asked, stop=stop, extra_body=extra, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == before
    assert pieces[-1].choices[0].finish_reason == "stop"
    kept = client.completions.create(
        **asked, stop=stop, extra_body={**extra, "include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == before + stop


def test_a_stop_ends_its_own_choice_only(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "x", "max_tokens": 60, "seed": 3, "n": 4}
    extra = {"allowed_token_ids": LETTERS[:12]}
    texts = [choice.text for choice in client.completions.create(**asked, extra_body=extra).choices]
    stop = texts[1][10:13]
    expected = [text.partition(stop)[0] for text in texts]
    assert expected[1] != texts[1]
    assert expected != [text[: len(expected[1])] for text in texts]
    found = client.completions.create(**asked, stop=stop, extra_body=extra)
    assert [choice.text for choice in found.choices] == expected
    reasons = ["stop" if stop in text else "length" for text in texts]
    assert [choice.finish_reason for choice in found.choices] == reasons


# ----------------------------------------------------------------------------------------- chats


def test_a_chat_is_what_the_engine_gives(client: openai.OpenAI, run: Run) -> None:
    found = client.chat.completions.create(
        model="small",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
        ],
        max_completion_tokens=20,
        temperature=0,
    )
    expected = run(chat_tokens("Hello"), SamplingParams(temperature=0, max_tokens=20)).output
    assert found.choices[0].message.content == text_of(expected)
    assert found.choices[0].message.role == "assistant"


def test_a_chat_goes_on_to_the_models_length(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "x" * 1980}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert found.usage is not None
    assert found.usage.total_tokens == 2048
    assert found.choices[0].finish_reason == "length"


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "small",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 15,
        "n": 3,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    texts, found, reasons, roles = [""] * 3, [[] for _ in range(3)], [None] * 3, [None] * 3
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = choice.delta.role or roles[choice.index]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            found[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    assert roles == ["assistant"] * 3
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert found == [choice.logprobs.content for choice in whole.choices if choice.logprobs]
    assert usage is not None
    assert whole.usage is not None
    prompt = tokens_of("<system>Be brief.\n<user>Hi\n<assistant>")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), whole.usage.completion_tokens)


def test_bytes_of_tokens_that_are_no_text(client: openai.OpenAI) -> None:
    """Case 7: JSON holds, and the bytes add up to those that were generated."""
    found = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=80,
        seed=5,
        logprobs=True,
        top_logprobs=20,
        extra_body={"allowed_token_ids": list(range(3, 256))},
    )
    of = found.choices[0].logprobs
    assert of is not None
    assert of.content is not None
    assert len(of.content) == 80
    whole = b"".join(bytes(one.bytes or ()) for one in of.content)
    assert whole.decode("utf-8", "replace") == found.choices[0].message.content
    assert any(one.token.startswith("bytes:\\x") for one in of.content)
    assert all(len(one.top_logprobs) == 20 for one in of.content)


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z]{3,6}$"}, "age": {"enum": [1, 2, 3]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(3):
        found = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "Who?"}],
            seed=seed,
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        )
        value = json.loads(found.choices[0].message.content or "")
        assert 3 <= len(value["name"]) <= 6
        assert value["age"] in (1, 2, 3)
        assert found.choices[0].finish_reason == "stop"


def test_a_malformed_grammar_fails_alone(client: openai.OpenAI, server: RunningServer) -> None:
    """Case 12."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    stream = client.chat.completions.create(model="small", messages=messages, max_tokens=300, stream=True)
    first = next(iter(stream))
    for wanted in ({"regex": "("}, {"grammar": "start: nowhere"}, {"json": '{"type": "no such type"}'}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="small", messages=messages, extra_body={"structured_outputs": wanted}
            )
        assert refused.value.param is not None
        assert refused.value.param.startswith("structured_outputs")
    assert first.choices
    assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
    assert server.get("/health") == {"status": "ok"}


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string", "pattern": "^[a-z]{2,5}$"}},
                "required": ["what"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "small",
        "messages": [{"role": "user", "content": "Find it"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "find"}},
        "seed": 2,
        "max_tokens": 300,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "find"
    assert 2 <= len(json.loads(call.function.arguments)["what"]) <= 5
    arguments, names, reasons = "", [], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
    assert (names, arguments, reasons) == (["find"], call.function.arguments, ["tool_calls"])


def test_beams(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "abc", "max_tokens": 6, "n": 3}
    extra = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "ignore_eos": True}
    found = client.completions.create(**asked, extra_body=extra)
    scores = [choice.score for choice in found.choices]  # type: ignore[attr-defined]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(openai.BadRequestError, match="min_p: means nothing to a beam search"):
        client.completions.create(**asked, extra_body={**extra, "min_p": 0.5})


# --------------------------------------------------------------------------------- pagec's own


def test_timings_and_the_cache(server: RunningServer) -> None:
    asked = {"prompt": "a prompt of more than sixteen tokens, so that blocks are cached", "max_tokens": 4}
    server.post("/v1/completions", {**asked, "cache_salt": "timings"})
    found = server.post("/v1/completions", {**asked, "cache_salt": "timings", "return_timings": True})
    timings = found["timings"]
    assert set(timings) == {"queue_s", "prefill_s", "decode_s", "cached_tokens", "preemptions"}
    assert all(timings[name] > 0 for name in ("prefill_s", "decode_s"))
    assert timings["cached_tokens"] == 48
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    other = server.post("/v1/completions", {**asked, "cache_salt": "another", "return_timings": True})
    assert other["timings"]["cached_tokens"] == 0
    *_, last = server.events("/v1/completions", {**asked, "stream": True, "return_timings": True})
    assert last["choices"] == []
    assert last["timings"]["preemptions"] == 0


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    found = server.post("/tokenize", {"prompt": "Grüße"})
    assert found == {"count": 7, "max_model_len": 2048, "tokens": tokens_of("Grüße")}
    assert server.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "Grüße"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert chat["tokens"] == chat_tokens("Hi")
    assert server.refused("/detokenize", {"tokens": [1, 256]})["param"] == "tokens[1]"
    assert server.refused("/tokenize", {})["param"] == "prompt"


def test_curl(server: RunningServer) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": True, "temperature": 0})
    words = [curl, "-sSN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
