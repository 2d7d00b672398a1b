"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Response

from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import TokenLogprobs
from pagec.runtime.server.generation import Call, Generation, Update
from pagec.runtime.server.openai import answers
from pagec.runtime.server.openai.bodies import CompletionBody
from pagec.runtime.server.openai.calls import check_model, completion_calls
from pagec.runtime.server.openai.failures import json_response
from pagec.runtime.server.openai.naming import named_as_sent
from pagec.runtime.server.openai.sending import DONE, EventStream, merged, start_all
from pagec.runtime.server.service import Service, new_id
from pagec.runtime.text.choice import ChoiceText


async def complete(service: Service, body: CompletionBody) -> Response:
    """The answer to a completion: whole, or a stream that has begun."""
    model = check_model(service.info, body.model)
    id = f"cmpl-{new_id()}"
    headers = {"x-request-id": id}
    async with AsyncExitStack() as stack:
        with named_as_sent(body):
            calls = await completion_calls(service, body)
            generations = await start_all(service, calls, id, stack)
        writer = _Writer(service, body, generations)
        head = answers.head(id, "text_completion", model)
        if body.stream:
            return EventStream(_stream(writer, head), stack.pop_all(), headers)
        return json_response(await _whole(writer, head), headers=headers)
    raise AssertionError


async def _whole(writer: _Writer, head: dict[str, Any]) -> dict[str, Any]:
    choices = []
    for number, generation in enumerate(writer.generations):
        choices += [writer.choice(number, update) for update in await answers.whole_choices(generation)]
    found = {**head, "choices": choices, "usage": answers.usage(writer.generations)}
    if writer.body.return_timings:
        found["timings"] = answers.timings(writer.generations)
    return found


async def _stream(writer: _Writer, head: dict[str, Any]) -> AsyncIterator[Any]:
    null_usage = {"usage": None} if answers.wants_usage(writer.body) else {}
    async for number, update in merged(writer.generations):
        choice = writer.choice(number, update)
        if choice["text"] or choice["finish_reason"] or update.logprobs or writer.body.return_token_ids:
            yield {**head, "choices": [choice], **null_usage}
    last = answers.last_chunk(writer.body, head, writer.generations)
    if last is not None:
        yield last
    yield DONE


class _Writer:
    """Writes updates as OpenAI's choices. With `echo` the first one of each choice begins with the prompt."""

    def __init__(self, service: Service, body: CompletionBody, generations: Sequence[Generation]) -> None:
        self.body = body
        self.generations = generations
        self._tokenizer = service.tokenizer
        self._texts = service.texts
        self._begun: set[int] = set()

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """An update of a prompt's choice, as one of the answer's choices."""
        generation, body = self.generations[number], self.body
        index = number * generation.call.params.n + update.index
        is_first = index not in self._begun
        self._begun.add(index)
        text = self._prompt_text(generation.call) if body.echo and is_first else ""
        found = {"index": index, "text": text + update.text, "logprobs": None}
        found["finish_reason"] = update.finish_reason
        if body.logprobs is not None:
            found["logprobs"] = self._logprobs(generation, update, with_prompt=body.echo and is_first)
        if body.prompt_logprobs is not None and is_first:
            found["prompt_logprobs"] = answers.prompt_logprobs(self._texts, generation.prompt_logprobs)
        return found | answers.extras(body, update)

    def _prompt_text(self, call: Call) -> str:
        text = call.prompt_text
        return self._tokenizer.decode(call.prompt) if text is None else text

    def _logprobs(
        self, generation: Generation, update: Update, *, with_prompt: bool
    ) -> dict[str, Any] | None:
        tokens: list[int] = list(update.token_ids)
        found: list[TokenLogprobs | None] = list(update.logprobs)
        start = len(self._prompt_text(generation.call)) if self.body.echo else 0
        offsets = [start + offset for offset in update.offsets]
        if with_prompt:
            prompt = generation.call.prompt
            tokens[:0], offsets[:0] = prompt, self._prompt_offsets(prompt)
            found[:0] = generation.prompt_logprobs or [None] * len(prompt)
        if not tokens:
            return None
        return answers.completion_logprobs(self._texts, tokens, found, offsets)

    def _prompt_offsets(self, prompt: Sequence[int]) -> list[int]:
        """Where in the prompt's text the text of each token begins."""
        reader = ChoiceText(self._tokenizer, SamplingParams())
        return list(reader.add(prompt).offsets)
