"""A conversation's messages in OpenAI's form, made what chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling import checks

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: parts of text joined, a developer's words as the system's, the
    arguments of earlier calls as objects instead of JSON texts, and beside calls an empty content instead of
    none. RequestError names the message that is wrong, as messages[i]."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        checks.bad(place, message, "a message: a map with a role and a content")
    role, calls = message.get("role"), message.get("tool_calls")
    if role not in ROLES:
        raise RequestError(f"is none of {', '.join(ROLES)}", place=f"{place}.role")
    content = _content(message.get("content"), role == "assistant", f"{place}.content")
    found = {**message, "role": "system" if role == "developer" else role, "content": content}
    if calls is None:
        found.pop("tool_calls", None)
        return found
    if isinstance(calls, str | bytes) or not isinstance(calls, Sequence):
        checks.bad(f"{place}.tool_calls", calls, "a list of calls")
    found["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    found["content"] = content or ""
    return found


def _content(content: object, may_lack: bool, place: str) -> str | None:
    if isinstance(content, str):
        return content
    if content is None:
        if may_lack:
            return None
        raise RequestError("is missing", place=place)
    if not isinstance(content, list | tuple):
        raise RequestError("is neither a text nor a list of parts", place=place)
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise RequestError(f"a part of type {kind!r} is not supported", place=place)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError("is not a text", place=f"{place}.text")
    return text


def _call(call: object, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        checks.bad(place, call, "a call of a function")
    if not isinstance(function.get("name"), str):
        checks.bad(f"{place}.function.name", function.get("name"), "a name")
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, Mapping):
        checks.bad(f"{place}.function.arguments", arguments, "a JSON object as text")
    return {**call, "function": {**function, "arguments": parsed}}
