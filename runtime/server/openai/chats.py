"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import StructuredOutputsParams
from pagec.runtime.server.generation import Call, Generation, Update
from pagec.runtime.server.openai import answers
from pagec.runtime.server.openai.bodies import ChatBody
from pagec.runtime.server.openai.calls import (
    chat_params,
    check_model,
    encode_chat,
    make_call,
    response_format,
    structured_outputs,
)
from pagec.runtime.server.openai.failures import json_response
from pagec.runtime.server.openai.naming import named_as_sent
from pagec.runtime.server.openai.sending import DONE, EventStream, start_all
from pagec.runtime.server.service import Service, new_id
from pagec.runtime.server.tool_choice import ToolChoice, check_tools
from pagec.runtime.server.tools import (
    CallDelta,
    CallStream,
    Delta,
    TextDelta,
    ToolFormat,
    collect,
    make_tool_format,
    new_call_id,
)
from pagec.runtime.text.pieces import TokenTexts


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat, ready to be started. `format`: how its tool calls are written, if it has tools."""

    call: Call
    choice: ToolChoice
    format: ToolFormat | None

    def reader(self) -> CallStream | None:
        """Finds tool calls in one choice's text."""
        return self.format.stream(forced=self.choice.must) if self.format is not None else None


async def chat(service: Service, body: ChatBody, tool_format: str | None) -> Response:
    """The answer to a chat: whole, or a stream that has begun."""
    model = check_model(service.info, body.model)
    id = f"chatcmpl-{new_id()}"
    headers = {"x-request-id": id}
    async with AsyncExitStack() as stack:
        with named_as_sent(body):
            asked = await prepare(service, body, tool_format)
            (generation,) = await start_all(service, [asked.call], id, stack)
        writer = _Writer(service.texts, body, asked)
        if body.stream:
            head = answers.head(id, "chat.completion.chunk", model)
            return EventStream(_stream(writer, generation, head), stack.pop_all(), headers)
        head = answers.head(id, "chat.completion", model)
        return json_response(await _whole(writer, generation, head), headers=headers)
    raise AssertionError


async def prepare(service: Service, body: ChatBody, tool_format: str | None) -> Chat:
    """The call that a chat makes; RequestError for what is wrong with it."""
    choice = check_tools(body.tools, body.tool_choice)
    prompt = await encode_chat(service, body.messages, choice, body.chat_template_kwargs)
    own: dict[str, Any] = chat_params(body)
    format = None
    if choice.tools:
        format = make_tool_format(service.tokenizer.chat_template, tool_format)
        if format.is_special:
            own["skip_special_tokens"] = False
    own["structured_outputs"] = _constraint(body, choice, format)
    return Chat(make_call(body, prompt, **own), choice, format)


def _constraint(
    body: ChatBody, choice: ToolChoice, format: ToolFormat | None
) -> StructuredOutputsParams | None:
    """What the text must be, which only one field may say."""
    call = choice.constraint(format) if format is not None else None
    found = {
        "response_format": response_format(body.response_format),
        "structured_outputs": structured_outputs(body),
        "tool_choice": call,
    }
    given = [name for name, value in found.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"cannot stand beside {given[1]}", place=given[0], remedy="give one of the two")
    return found[given[0]] if given else None


async def _whole(writer: _Writer, generation: Generation, head: dict[str, Any]) -> dict[str, Any]:
    choices = [writer.choice(update) for update in await answers.whole_choices(generation)]
    found = {**head, "choices": choices, "usage": answers.usage([generation])}
    if writer.body.prompt_logprobs is not None:
        found["prompt_logprobs"] = writer.prompt_logprobs(generation)
    if writer.body.return_timings:
        found["timings"] = answers.timings([generation])
    return found


async def _stream(writer: _Writer, generation: Generation, head: dict[str, Any]) -> AsyncIterator[Any]:
    head = {**head, "usage": None} if answers.wants_usage(writer.body) else head
    for index in range(generation.call.params.n):
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**head, "choices": [choice]}
    owes_prompt = writer.body.prompt_logprobs is not None
    async for update in generation:
        for choice in writer.chunks(update):
            chunk = {**head, "choices": [choice]}
            if owes_prompt:
                chunk["prompt_logprobs"] = writer.prompt_logprobs(generation)
                owes_prompt = False
            yield chunk
    last = answers.last_chunk(writer.body, head, [generation])
    if last is not None:
        yield last
    yield DONE


@dataclass(slots=True)
class _Stream:
    """One choice of a stream. `calls`: whether any were found."""

    reader: CallStream | None
    has_calls: bool = False
    logprobs: list[Any] = field(default_factory=list)


class _Writer:
    """Writes updates as OpenAI's choices."""

    def __init__(self, texts: TokenTexts, body: ChatBody, asked: Chat) -> None:
        self.body = body
        self._texts = texts
        self._asked = asked
        self._streams: dict[int, _Stream] = {}

    def prompt_logprobs(self, generation: Generation) -> Any:
        return answers.prompt_logprobs(self._texts, generation.prompt_logprobs)

    def choice(self, update: Update) -> dict[str, Any]:
        """A whole choice."""
        reader = self._asked.reader()
        content: str | None = update.text
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        reason = update.finish_reason
        if reader is not None:
            text, calls = collect([*reader.add(update.text), *reader.finish()])
            content = text or (None if calls else "")
            if calls:
                message["tool_calls"] = [
                    {
                        "id": new_call_id(),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in calls
                ]
                reason = _reason(reason, True)
        message["content"] = content
        return {
            "index": update.index,
            "message": message,
            "logprobs": self._logprobs(update),
            "finish_reason": reason,
            **answers.extras(self.body, update),
        }

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The chunks that an update makes; log probabilities come with the first, its end with the last."""
        stream = self._streams.get(update.index)
        if stream is None:
            stream = self._streams[update.index] = _Stream(self._asked.reader())
        has_ended = update.finish_reason is not None
        deltas = [_delta(delta) for delta in self._deltas(stream, update.text, has_ended)]
        extras = answers.extras(self.body, update)
        if not deltas and (has_ended or update.logprobs or self.body.return_token_ids):
            deltas = [{}]
        plain: dict[str, Any] = {"index": update.index, "logprobs": None, "finish_reason": None}
        chunks = [{**plain, "delta": delta} for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = self._logprobs(update)
            chunks[-1] |= {"finish_reason": _reason(update.finish_reason, stream.has_calls), **extras}
        return chunks

    def _deltas(self, stream: _Stream, text: str, has_ended: bool) -> list[Delta]:
        if stream.reader is None:
            return [TextDelta(text)] if text else []
        deltas = stream.reader.add(text)
        if has_ended:
            deltas += stream.reader.finish()
        stream.has_calls |= any(isinstance(delta, CallDelta) for delta in deltas)
        return deltas

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return answers.chat_logprobs(self._texts, update.logprobs)


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    return {"tool_calls": [delta.to_json()]}


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason
