"""Errors name the field that was sent, though it became a parameter of another name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagec.compiler.errors import RequestError
from pagec.runtime.server.openai.bodies import ChatBody, GenerationBody


@contextmanager
def named_as_sent(body: GenerationBody) -> Iterator[None]:
    """RequestErrors from within get the place that the body has for it."""
    try:
        yield
    except RequestError as error:
        error.place = sent_place(body, error.place)
        raise


def sent_place(body: GenerationBody, place: str) -> str:
    """Where in the body a parameter comes from; the place itself if it is a field of the body."""
    name, _, kind = place.partition(".")
    if name == "structured_outputs":
        return _constraint_place(body, kind) or place
    if isinstance(body, ChatBody):
        if name == "logprobs" and body.top_logprobs is not None:
            return "top_logprobs"
        if name == "max_tokens" and body.max_tokens is None and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    return place


def _constraint_place(body: GenerationBody, kind: str) -> str | None:
    guided = f"guided_{kind}"
    if getattr(body, guided, None) is not None:
        return guided
    if body.structured_outputs is not None or not isinstance(body, ChatBody):
        return None
    if body.response_format is not None and body.response_format.get("type") != "text":
        return "response_format.json_schema.schema" if kind == "json" else "response_format"
    return "tools" if body.tools is not None else None
