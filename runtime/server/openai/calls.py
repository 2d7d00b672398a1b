"""From the bodies of requests to calls that the service takes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams
from pagec.runtime.server.generation import Call
from pagec.runtime.server.openai.bodies import ChatBody, CompletionBody, GenerationBody
from pagec.runtime.server.openai.failures import NotFoundError
from pagec.runtime.server.service import Service, ServiceInfo
from pagec.runtime.server.tool_choice import ToolChoice
from pagec.runtime.text.messages import template_messages
from pagec.runtime.text.tokenizer import Tokenizer

# Texts of more characters are tokenized in a thread of their own.
LONG_TEXT: Final = 20_000
_SAMPLING: Final = tuple(
    field.name for field in fields(SamplingParams) if field.name in GenerationBody.model_fields
)
_BEAM: Final = ("n", "ignore_eos", "include_stop_str_in_output", "length_penalty", "early_stopping")
# What may stand beside a beam search.
_BESIDE_BEAMS: Final = frozenset({*_BEAM, "temperature", "skip_special_tokens", "structured_outputs"})
_GUIDED: Final = ("json", "regex", "choice", "grammar")


def check_model(info: ServiceInfo, name: str | None) -> str:
    """The name that answers carry; NotFoundError if another model is asked for."""
    if name is not None and name not in info.names:
        raise NotFoundError(
            f"{name!r} is not served here", place="model", remedy=f"served: {', '.join(info.names)}"
        )
    return name or info.model


def make_call(
    body: GenerationBody,
    prompt: Sequence[int],
    text: str | None = None,
    **own: Any,
) -> Call:
    """A call for one prompt; `own` are the sampling parameters that a body spells in its own way.
    RequestError for a value out of range."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING}
    given["structured_outputs"] = structured_outputs(body)
    given |= own
    beam = _beam(body, given) if body.use_beam_search else None
    return Call(
        prompt,
        SamplingParams(**given),
        beam,
        body.cache_salt,
        body.priority,
        body.ttft_s,
        body.token_s,
        text,
    )


def _beam(body: GenerationBody, given: dict[str, Any]) -> BeamSearchParams:
    """The beam search that is asked for; what would choose tokens otherwise is refused."""
    plain = SamplingParams(temperature=0.0)
    for name, value in given.items():
        default = getattr(plain, name)
        if name in _BESIDE_BEAMS or name == "max_tokens" or not value:
            continue
        if value != default:
            raise RequestError("means nothing to a beam search", place=name, remedy="leave it out")
    if given["structured_outputs"] is not None:
        raise RequestError("means nothing to a beam search", place="structured_outputs")
    temperature = body.temperature if "temperature" in body.model_fields_set else 0.0
    given["temperature"] = 0.0
    return BeamSearchParams(
        beam_width=body.n if body.beam_width is None else body.beam_width,
        max_tokens=given["max_tokens"],
        temperature=temperature,
        **{name: getattr(body, name) for name in _BEAM},
    )


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """What the text must be, by whichever field it is said."""
    wanted = body.structured_outputs
    if wanted is None:
        wanted = {}
    elif not isinstance(wanted, Mapping):
        raise RequestError("is not an object", place="structured_outputs")
    known = {field.name for field in fields(StructuredOutputsParams)}
    for name in wanted:
        if name not in known:
            raise RequestError(
                f"{name!r} is not one of {', '.join(sorted(known))}", place="structured_outputs"
            )
    guided = {name: getattr(body, f"guided_{name}") for name in _GUIDED}
    both = {**wanted, **{name: value for name, value in guided.items() if value is not None}}
    return StructuredOutputsParams(**both) if both else None


# ------------------------------------------------------------------------------ completions


async def completion_calls(service: Service, body: CompletionBody) -> list[Call]:
    """A call for each prompt of a completion."""
    if body.suffix:
        raise RequestError("is not supported", place="suffix", remedy="leave it out")
    if body.best_of is not None and body.best_of != body.n:
        raise RequestError(f"{body.best_of} is not n, {body.n}", place="best_of", remedy="leave it out")
    own = {
        "max_tokens": body.max_tokens,
        "logprobs": body.logprobs,
        "echo": body.echo,
        "logit_bias": body.logit_bias,
    }
    calls: list[Call] = []
    for prompt in _prompts(body.prompt, service.limits.max_prompts):
        text = prompt if isinstance(prompt, str) else None
        place = f"prompt[{len(calls)}]" if isinstance(body.prompt, list) else "prompt"
        ids = await encode(service, prompt, place=place) if isinstance(prompt, str) else prompt
        calls.append(make_call(body, ids, text, **own))
    if (len(calls) - 1) * calls[0].width >= service.most_open:
        raise RequestError(
            f"{len(calls)} prompts are more than the queue ever holds, {service.most_open} sequences",
            place="prompt",
            remedy="send them in several requests",
        )
    return calls


def _prompts(prompt: object, most: int) -> list[str | list[int]]:
    """The prompts of a body, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("is not a text, a list of token ids, or a list of these", place="prompt")
    if all(map(_is_token, prompt)):
        return [prompt]
    if len(prompt) > most:
        raise RequestError(f"{len(prompt)} prompts are more than {most}", place="prompt")
    for i, one in enumerate(prompt):
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_token, one))):
            raise RequestError("is neither a text nor a list of token ids", place=f"prompt[{i}]")
    return prompt


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer, vocab: int) -> int:
    """The characters of the longest piece, of which byte-level BPE has one for every byte: no text of more
    characters is one token."""
    return max(len(tokenizer.piece(token)) for token in range(vocab))


def check_length(service: Service, text: str, place: str, *, must_fit: bool) -> None:
    """RequestError for a text that is too long to be tokenized at all; `must_fit`: also for one that, as its
    length alone shows, has more tokens than the model takes."""
    if not must_fit:
        service.limits.check_text(text, place)
        return
    engine = service.info.engine
    longest = longest_token(service.tokenizer, engine.vocab)
    service.limits.check_prompt(text, place, engine.max_len, longest)


async def encode(service: Service, text: str, *, must_fit: bool = True, place: str = "prompt") -> list[int]:
    """A text's token ids; the event loop does not wait for a long one. RequestError: see check_length."""
    check_length(service, text, place, must_fit=must_fit)
    if len(text) < LONG_TEXT:
        return service.tokenizer.encode(text)
    return await asyncio.to_thread(service.tokenizer.encode, text)


async def encode_chat(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    names: Mapping[str, Any],
    *,
    must_fit: bool = True,
) -> list[int]:
    """A conversation's token ids, likewise; `names`: what else the template is told."""
    check_template_names(names)
    found = template_messages(messages)

    def work() -> list[int]:
        text = service.tokenizer.render_chat(found, tools=choice.for_template(), **names)
        check_length(service, text, "messages", must_fit=must_fit)
        return service.tokenizer.encode(text, add_special_tokens=False, place="messages")

    if sum(len(message.get("content") or "") for message in found) < LONG_TEXT:
        return work()
    return await asyncio.to_thread(work)


# ------------------------------------------------------------------------------------ chats


def chat_params(body: ChatBody) -> dict[str, Any]:
    """What a chat spells in its own way, as SamplingParams has it."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            f"{body.max_completion_tokens} is not max_tokens, {body.max_tokens}",
            place="max_completion_tokens",
            remedy="give one of the two",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("needs logprobs", place="top_logprobs", remedy='give "logprobs": true')
    if body.modalities not in (None, ["text"]):
        raise RequestError("this model writes text only", place="modalities")
    top = 0 if body.top_logprobs is None else body.top_logprobs
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return {
        "max_tokens": most,
        "logprobs": top if body.logprobs else None,
        "logit_bias": body.logit_bias,
    }


def response_format(value: object) -> StructuredOutputsParams | None:
    """OpenAI's way to ask for JSON."""
    if value is None:
        return None
    place = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise RequestError('type is none of "text", "json_object", "json_schema"', place=place)
    assert isinstance(value, Mapping)
    wrapped = value.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if schema is None:
        raise RequestError("there is no schema", place=f"{place}.json_schema.schema")
    return StructuredOutputsParams(json=schema)


def check_template_names(names: Mapping[str, Any]) -> None:
    """RequestError for what the template gets otherwise, and for what no template can be told."""
    for name in ("messages", "tools"):
        if name in names:
            raise RequestError(f"{name!r} has a field of its own", place="chat_template_kwargs")
    for name in ("self", "template"):  # arguments of those who render it
        if name in names:
            raise RequestError(f"{name!r} is no name for a template", place="chat_template_kwargs")
