"""`LLM` with a real model: stop strings, chats, bad words, structured outputs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagec.compiler.errors import RequestError
from pagec.runtime import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams
from pagec.runtime.llm.outputs import CompletionOutput

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "Describe a person as JSON: a name and an age."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, num_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm: LLM) -> CompletionOutput:
    """What the model says if nothing ends it."""
    return answer(llm)


def answer(llm: LLM, prompt: Any = PROMPT, **more: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **more})
    return llm.generate(prompt, params)[0].outputs[0]


def test_text_is_that_of_the_tokens_and_goes_on_from_the_prompt(llm: LLM, plain: CompletionOutput) -> None:
    tokenizer = llm.get_tokenizer()
    assert plain.text == tokenizer.decode(plain.token_ids)
    assert plain.text.startswith(" Paris")
    by_ids = answer(llm, tokenizer.encode(PROMPT))
    assert (by_ids.text, by_ids.token_ids) == (plain.text, plain.token_ids)


def test_a_stop_string_ends_the_text(llm: LLM, plain: CompletionOutput) -> None:
    stop = plain.text[9:13]  # lies across tokens, and begins and ends within them
    begin = plain.text.index(stop)
    for include, text in ((False, plain.text[:begin]), (True, plain.text[: begin + len(stop)])):
        found = answer(llm, stop=["never", stop], include_stop_str_in_output=include)
        assert (found.text, found.finish_reason, found.stop_reason) == (text, "stop", stop)
        assert found.token_ids == plain.token_ids[: len(found.token_ids)]
        assert stop in llm.get_tokenizer().decode(found.token_ids)
        assert stop not in llm.get_tokenizer().decode(found.token_ids[:-1])


def test_a_stop_string_ends_one_choice_of_several(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=4, max_tokens=20, ignore_eos=True)
    free = llm.generate(PROMPT, params)[0].outputs
    stop = free[2].text[8:12]
    stopped = llm.generate(PROMPT, SamplingParams(n=4, seed=4, max_tokens=20, ignore_eos=True, stop=stop))[
        0
    ].outputs
    for before, after in zip(free, stopped, strict=True):
        expected = before.text.partition(stop)
        assert after.text == expected[0]
        assert after.finish_reason == ("stop" if expected[1] else "length")


def test_min_tokens_pass_a_stop_string_over(llm: LLM, plain: CompletionOutput) -> None:
    stop = llm.get_tokenizer().decode(plain.token_ids[:2])[1:]
    assert answer(llm, stop=stop).finish_reason == "stop"
    assert answer(llm, stop=stop, min_tokens=2).text.startswith(plain.text[: len(stop) + 1])


def test_a_stream_leaks_no_part_of_a_stop(llm: LLM, plain: CompletionOutput) -> None:
    stop = plain.text[9:30]

    async def main() -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop=stop)
        return [output async for output in llm.stream(PROMPT, params, delta=True)]

    outputs = asyncio.run(main())
    assert "".join(output.outputs[0].text for output in outputs) == plain.text.partition(stop)[0]
    assert outputs[-1].outputs[0].stop_reason == stop


def test_special_tokens_and_no_text(llm: LLM, plain: CompletionOutput) -> None:
    shown = answer(llm, allowed_token_ids=[1, 2], max_tokens=4, skip_special_tokens=False)
    assert re.fullmatch(r"(<\|im_(start|end)\|>){4}", shown.text)
    assert answer(llm, allowed_token_ids=[1, 2], max_tokens=4).text == ""
    without = answer(llm, detokenize=False)
    assert (without.text, without.token_ids) == ("", plain.token_ids)


def test_what_is_shown_of_tokens(llm: LLM, plain: CompletionOutput) -> None:
    found = answer(llm, logprobs=2)
    assert found.logprobs is not None
    texts = [of[token].decoded_token for token, of in zip(found.token_ids, found.logprobs, strict=True) if of]
    assert "".join(map(str, texts)) == plain.text


def test_echo_is_text_too(llm: LLM, plain: CompletionOutput) -> None:
    assert answer(llm, echo=True).text == PROMPT + plain.text
    assert answer(llm, llm.get_tokenizer().encode(PROMPT), echo=True).text == PROMPT + plain.text


def test_bad_words_do_not_come(llm: LLM, plain: CompletionOutput) -> None:
    assert "Paris" in plain.text
    found = answer(llm, bad_words=["Paris", "paris"])
    assert "paris" not in found.text.lower()
    assert found.finish_reason == "length"


# ---------------------------------------------------------------------- structured outputs


def test_a_schema_gives_json(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=1, max_tokens=200, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    output = llm.chat(CHAT, params)[0]
    for choice in output.outputs:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.text)
        assert set(found) == {"name", "age"}
        assert isinstance(found["name"], str)
        assert isinstance(found["age"], int)


def test_choices_and_patterns(llm: LLM) -> None:
    wanted = [
        StructuredOutputsParams(choice=["London", "Rome", "Paris"]),
        StructuredOutputsParams(regex=" ?[A-Z]{3}[0-9]{2}"),
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=w) for w in wanted]
    outputs = llm.generate([f"{PROMPT} ", PROMPT], params)
    assert outputs[0].outputs[0].text in ("London", "Rome", "Paris")
    assert re.fullmatch(" ?[A-Z]{3}[0-9]{2}", outputs[1].outputs[0].text)
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_a_malformed_grammar_is_named_before_anything_runs(llm: LLM) -> None:
    good = SamplingParams(max_tokens=4)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(RequestError, match="unclosed") as refused:
        llm.generate([PROMPT, PROMPT], [good, bad])
    assert refused.value.place == "prompts[1].structured_outputs.regex"
    assert not llm.engine.has_work


# ------------------------------------------------------------------------------------ chats


def test_a_chat_is_its_template_filled_in(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.chat([CHAT, other], params)
    for output, chat in zip(outputs, (CHAT, other), strict=True):
        assert output.prompt == tokenizer.render_chat(chat)
        assert output.prompt_token_ids == tokenizer.encode_chat(chat)
        assert output.prompt.endswith("<|im_start|>assistant\n")
    single = llm.chat(CHAT, params)
    assert [output.outputs[0].text for output in single] == [outputs[0].outputs[0].text]


def test_a_chat_takes_openais_messages_as_the_server_does(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat: list[dict[str, Any]] = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a + 1 }}{% endfor %};{% endfor %}"
    )
    output = llm.chat(chat, SamplingParams(max_tokens=1), chat_template=template)[0]
    assert output.prompt == "system:Be brief.;assistant:2;tool:2;"
    assert chat[1]["tool_calls"] == [call]


def test_a_message_that_is_wrong_is_named(llm: LLM) -> None:
    function = {"name": "f", "arguments": "[1"}
    wrong: list[tuple[Any, str]] = [
        ({"role": "nobody", "content": "a"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text"),
        ({"role": "assistant", "tool_calls": "f"}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, ".tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": function}]}, ".tool_calls[0].function.arguments"),
        ("Hi", ""),
    ]
    for message, place in wrong:
        with pytest.raises(RequestError) as refused:
            llm.chat([CHAT, [*CHAT, message]])
        assert refused.value.place == f"messages[1][1]{place}"


def test_the_tokenizer_has_hugging_faces_names(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True) == tokenizer.encode_chat(CHAT)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == tokenizer.render_chat(CHAT, add_generation_prompt=False)
    assert text != tokenizer.render_chat(CHAT)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, chat_template="{{ x }}", x="y") == "y"
    assert tokenizer.eos_token_id in tokenizer.defaults.eos_token_ids
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False) == "<|im_end|>"


def test_another_template(llm: LLM) -> None:
    template = "{{ messages[0].content }}{{ tools[0].name }}{{ mood }}{{ '!' if add_generation_prompt }}"
    output = llm.chat(
        CHAT,
        SamplingParams(max_tokens=1),
        chat_template=template,
        add_generation_prompt=False,
        tools=[{"name": " look_up"}],
        chat_template_kwargs={"mood": " happily"},
    )[0]
    assert output.prompt == CHAT[0]["content"] + " look_up happily"
    with pytest.raises(RequestError) as refused:
        llm.chat(CHAT, chat_template="{% if")
    assert refused.value.place == "chat_template"


def test_a_chat_that_the_template_refuses_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="refuses") as refused:
        llm.chat([CHAT, CHAT], chat_template="{{ raise_exception('no') }}")
    assert refused.value.place == "messages[0]"


def test_a_text_that_is_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Unicode") as refused:
        llm.generate(["good", "\ud800"])
    assert refused.value.place == "prompts[1]"


def test_beams_have_text(llm: LLM) -> None:
    output = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4))[0]
    assert len({beam.text for beam in output.sequences}) == 2
    assert all(beam.text is not None and beam.text.startswith(PROMPT) for beam in output.sequences)
