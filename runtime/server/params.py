"""Sampling and beam parameters as plain data: on the socket and in records, only what is not a default."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams
from pagec.runtime.server.messages import Submit


def packed(params: Any) -> dict[str, Any]:
    """A dataclass's fields that differ from their defaults; JSON can hold them."""
    values = [(field, getattr(params, field.name)) for field in fields(params)]
    return {
        field.name: _plain(value)
        for field, value in values
        if value != field.default and not (field.default is None and value in ((), {}))
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return packed(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | Set):
        return [_plain(item) for item in value]
    return value


# What a message that no socket can carry raises: of large numbers, of halves of surrogate pairs, of depth.
UNFIT: Final = (OverflowError, UnicodeEncodeError, RecursionError)


def unfit(message: Submit) -> RequestError:
    """What to say of a request that raises one of these."""
    values = {**message.params, **(message.beam or {}), "prompt": message.prompt, "cache_salt": message.salt}
    for place, value in values.items():
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return RequestError("a number has more than 64 bits", place=place)
        except UnicodeEncodeError:
            return RequestError("a text has characters that are no Unicode", place=place)
        except RecursionError:
            return RequestError("is nested too deeply", place=place)
    return RequestError("the request has values that no message can carry")


def unpacked(data: Mapping[str, Any]) -> SamplingParams:
    """The parameters that were packed; RequestError as SamplingParams."""
    given = dict(data)
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)
