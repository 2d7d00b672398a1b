"""Errors in OpenAI's form, with the HTTP status that each kind has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import Response
from fastapi.exceptions import RequestValidationError

from pagec.compiler.errors import PagecError, RequestError
from pagec.runtime.server.errors import Draining, EngineDead, Overloaded
from pagec.runtime.server.openai.bodies import Body, StreamOptions

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class NotFoundError(RequestError):
    """There is no such model."""


def failure(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, Any]]:
    """The body of an error; what no JSON can carry is escaped."""
    message = message.encode("utf-8", "backslashreplace").decode()
    param = param and param.encode("utf-8", "backslashreplace").decode()
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: PagecError) -> tuple[int, str | None]:
    """The status and the code of an error."""
    if isinstance(error, NotFoundError):
        return 404, "model_not_found"
    if isinstance(error, RequestError):
        return 400, None
    if isinstance(error, Overloaded):
        return 429, "queue_full"
    if isinstance(error, Draining):
        return 503, "shutting_down"
    if isinstance(error, EngineDead):
        return 503, "engine_dead"
    return 500, None


def describe(error: PagecError) -> dict[str, dict[str, Any]]:
    """The body of a PagecError."""
    status, code = status_of(error)
    text = f"{error.place}: {error.message}" if error.place else error.message
    message = f"{text}; {error.remedy}" if error.remedy else text
    return failure(status, message, param=error.place or None, code=code)


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Data as JSON; numbers that JSON lacks become null."""
    return Response(msgspec.json.encode(data), status, headers, "application/json")


def failure_response(error: PagecError) -> Response:
    """A PagecError as the whole answer."""
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Overloaded) else None
    return json_response(describe(error), status_of(error)[0], headers)


def invalid_response(error: RequestValidationError, body: type[Body] | None) -> Response:
    """A body that is not what it should be; of several mistakes the first one. `body`: what was expected, to
    find which of its fields was meant."""
    first: Mapping[str, Any] = error.errors()[0]
    place = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        known = StreamOptions if "stream_options" in first["loc"][:-1] else body
        near = difflib.get_close_matches(str(first["loc"][-1]), known.model_fields if known else (), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return json_response(failure(400, f"{place}: is not a known field{hint}", param=place), 400)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return json_response(failure(400, f"the body is not JSON: {reason}"), 400)
    message = str(first["msg"])
    return json_response(failure(400, f"{place}: {message}" if place else message, param=place or None), 400)


def _place(loc: Sequence[Any]) -> str:
    """A field's path as users write it, messages[0].role."""
    path = ""
    for part in loc[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")
