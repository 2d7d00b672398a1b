"""What completions and chats have in common: usage, timings, log probabilities, the ends of streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from pagec.runtime.sampling.sampler import Logprob, TokenLogprobs
from pagec.runtime.server.generation import Generation, Update
from pagec.runtime.server.openai.bodies import GenerationBody
from pagec.runtime.text.pieces import TokenTexts

LEAST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON lacks


def head(id: str, kind: str, model: str) -> dict[str, Any]:
    """How an answer or a chunk begins."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of all prompts and choices of an answer."""
    parts = [generation.usage for generation in generations]
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in parts)},
    }


def timings(generations: Sequence[Generation]) -> Any:
    """Where the time of an answer went; a list if it had several prompts."""
    found = [msgspec.structs.asdict(g.timings) for g in generations if g.timings is not None]
    return found[0] if len(generations) == 1 and found else found


def wants_usage(body: GenerationBody) -> bool:
    """Whether a stream shall tell its usage."""
    return body.stream_options is not None and body.stream_options.include_usage


def last_chunk(
    body: GenerationBody, first: dict[str, Any], generations: Sequence[Generation]
) -> dict[str, Any] | None:
    """What a stream tells behind its choices, if anything is wanted."""
    more: dict[str, Any] = {}
    if wants_usage(body):
        more["usage"] = usage(generations)
    if body.return_timings:
        more["timings"] = timings(generations)
    return {**first, "choices": [], **more} if more else None


def extras(body: GenerationBody, update: Update) -> dict[str, Any]:
    """What of an update only pagec's fields ask for."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["token_ids"] = list(update.token_ids)
    if update.finish_reason is not None:
        found["stop_reason"] = update.stop_reason
    if update.score is not None:
        found["score"] = update.score
    return found


class WholeChoice:
    """One choice of an answer that is sent at once: the sum of its updates."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.last: Update | None = None

    def add(self, update: Update) -> None:
        """The next one."""
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.offsets += update.offsets
        self.last = update

    def whole(self, index: int) -> Update:
        """All as one update."""
        assert self.last is not None
        last = self.last
        return Update(
            index,
            self.text,
            tuple(self.token_ids),
            tuple(self.logprobs),
            last.finish_reason,
            last.stop_reason,
            last.score,
            tuple(self.offsets),
        )


async def whole_choices(generation: Generation) -> list[Update]:
    """All choices of a generation, each as one update."""
    found: dict[int, WholeChoice] = {}
    async for update in generation:
        found.setdefault(update.index, WholeChoice()).add(update)
    return [found[index].whole(index) for index in sorted(found)]


# --------------------------------------------------------------------------- log probabilities


def prompt_logprobs(
    texts: TokenTexts, found: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """Those of a prompt, as vLLM gives them: for each position token id -> log probability, rank, text."""
    if found is None:
        return None
    return [None if one is None else _by_id(texts, one) for one in found]


def _by_id(texts: TokenTexts, found: TokenLogprobs) -> dict[str, Any]:
    tokens = {**found.top, found.token: found.own}
    return {
        str(token): {"logprob": number(of), "rank": of.rank, "decoded_token": texts.text(token)}
        for token, of in tokens.items()
    }


def number(of: Logprob) -> float:
    """A log probability that JSON can hold."""
    return max(of.logprob, LEAST_LOGPROB)


def chat_logprobs(texts: TokenTexts, found: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """As chats give them."""
    return {
        "content": [
            {
                **_chat_token(texts, one.token, one.own),
                "top_logprobs": [_chat_token(texts, token, of) for token, of in one.top.items()],
            }
            for one in found
        ],
        "refusal": None,
    }


def _chat_token(texts: TokenTexts, token: int, of: Logprob) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": number(of), "bytes": list(texts.bytes(token))}


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[int], found: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """As completions give them; None where there is no log probability."""
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": [None if one is None else number(one.own) for one in found],
        "top_logprobs": [None if one is None else _top(texts, one) for one in found],
        "text_offset": list(offsets),
    }


def _top(texts: TokenTexts, found: TokenLogprobs) -> dict[str, float]:
    """Of texts that several tokens have, the likeliest token's."""
    top: dict[str, float] = {}
    for token, of in found.top.items():
        top.setdefault(texts.text(token), number(of))
    top.setdefault(texts.text(found.token), number(found.own))
    return top
