"""Tool calls in a model's text, found while it comes.

hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>
llama3   <|python_tag|>{"name": "f", "parameters": {...}}; {...}; at the beginning also without the tag
mistral  [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} once or more

A call is one as soon as its name is read and its arguments begin; they are given out as they come, as the
model wrote them: whether they fit the function is the caller's to check. What only looked like a call is
text. What comes out depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pagec.compiler.errors import RequestError

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text

SPACES: Final = " \t\r\n"
ARGUMENTS: Final = ("arguments", "parameters")
_NAME: Final = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index`: first one with its id and name, then its arguments in pieces."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in OpenAI's stream."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Delta = TextDelta | CallDelta


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    `marker` begins them; if `is_special` it is a token that decoding must not leave out (give
    skip_special_tokens=False). `arguments_key` is the family's word for them.
    """

    name: str
    marker: str
    is_special: bool
    arguments_key: str
    read_calls: Callable[[CallStream, int], Steps[None]]
    needs_marker: bool = True

    def stream(self, *, forced: bool = False) -> CallStream:
        """A reader of one answer. `forced`: the answer was made to be a call, without a marker."""
        return CallStream(self, forced)

    def parse(self, text: str, *, forced: bool = False) -> tuple[str, list[ToolCall]]:
        """A whole answer's text and calls: what a stream of it adds up to."""
        stream = self.stream(forced=forced)
        return collect([*stream.add(text), *stream.finish()])


def collect(deltas: list[Delta]) -> tuple[str, list[ToolCall]]:
    """The text and the calls that deltas add up to."""
    content: list[str] = []
    calls: list[ToolCall] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            content.append(delta.text)
        elif delta.name is not None:
            calls.append(ToolCall(delta.name, delta.arguments))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.name, call.arguments + delta.arguments)
    return "".join(content), calls


def make_tool_format(chat_template: str | None, name: str | None = None) -> ToolFormat:
    """The format of this name, or the one that the model's chat template speaks of.

    RequestError if there is no such name, or the template speaks of none.
    """
    known = ", ".join(FORMATS)
    if name is not None:
        if name not in FORMATS:
            raise RequestError(f"{name!r} is none of {known}", place="tool_format")
        return FORMATS[name]
    for found, signs in _SIGNS.items():
        if any(sign in (chat_template or "") for sign in signs):
            return FORMATS[found]
    raise RequestError(
        "this model's chat template knows no tools",
        place="tools",
        remedy=f"leave tools out, or say how the model writes calls: --tool-format, one of {known}",
    )


# ------------------------------------------------------------------------------------- reading


class _MalformedError(Exception):
    """What was to be a call is none; what stands before `end` is text."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class CallStream:
    """Reads one answer piece by piece.

    `_text` is what has been given out neither as text nor as part of a call. The reading itself is written
    as if the whole text were there; it is a generator that waits wherever it is not.
    """

    def __init__(self, format: ToolFormat, forced: bool) -> None:
        self._format = format
        self._text = ""
        self._ended = False
        self._deltas: list[Delta] = []
        self._behind_call = False  # the last thing given out is a call
        self.num_calls = 0
        self._steps = self._read(forced)

    def add(self, text: str) -> list[Delta]:
        """The next piece of the answer; what is certain now."""
        self._text += text
        next(self._steps)
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """The answer ends here; what was held back."""
        self._ended = True
        next(self._steps, None)
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self, forced: bool) -> Steps[None]:
        if forced or not self._format.needs_marker:
            at = yield from self.skip_spaces(0)
            if (yield from self.peek(at)) == "{":
                yield from self._try(_read_sequence, at)
        while True:
            at = yield from self._find_marker()
            if at < 0:
                return
            yield from self._try(self._format.read_calls, at)

    def _try(self, read: Callable[[CallStream, int], Steps[None]], at: int) -> Steps[None]:
        try:
            yield from read(self, at)
        except _MalformedError as error:
            self._give_text(error.end)

    def _find_marker(self) -> Steps[int]:
        """Gives text out up to the next marker; the place behind the marker, or -1 at the end.

        Spaces before a marker and behind the last call belong to neither text nor calls.
        """
        marker = self._format.marker
        while (at := self._text.find(marker)) < 0:
            if self._ended:
                if not self._behind_call or self._text.strip(SPACES):
                    self._give_text(len(self._text))
                return -1
            self._give_text(_sure_length(self._text, marker))
            yield
        self._give_text(len(self._text[:at].rstrip(SPACES)))
        return self._text.index(marker) + len(marker)

    # What the formats are read with. Places count from the beginning of `_text`.

    def peek(self, at: int) -> Steps[str]:
        """The character at a place; "" behind the end of the answer."""
        while at >= len(self._text) and not self._ended:
            yield
        return self._text[at : at + 1]

    def skip_spaces(self, at: int) -> Steps[int]:
        """The next place that holds something else."""
        while (char := (yield from self.peek(at))) and char in SPACES:
            at += 1
        return at

    def starts(self, at: int, literal: str) -> Steps[bool]:
        """Whether a text stands at a place."""
        for i, char in enumerate(literal):
            if (yield from self.peek(at + i)) != char:
                return False
        return True

    def value(self, at: int) -> Steps[int]:
        """Where the JSON value at a place ends; malformed if it does not."""
        first = yield from self.peek(at)
        if first and first in '"{[':
            scan, end = _Scan(), -1
            while (end := scan.feed(self._text, at)) < 0:
                at = len(self._text)
                if self._ended:
                    raise _MalformedError(at)
                yield
            return end
        while (char := (yield from self.peek(at))) and char not in f",]}}{SPACES}":
            at += 1
        return at

    def name(self, at: int) -> Steps[int]:
        """Where the name at a place ends."""
        while (char := (yield from self.peek(at))) and _NAME.fullmatch(char):
            at += 1
        return at

    def text(self, start: int, end: int) -> str:
        """What stands between two places."""
        return self._text[start:end]

    def drop(self, end: int) -> None:
        """What stands before a place has been understood."""
        self._text = self._text[end:]

    def begin_call(self, name: str, arguments: str = "") -> None:
        """Gives a call out."""
        self._deltas.append(CallDelta(self.num_calls, new_call_id(), name))
        self.num_calls += 1
        self._behind_call = True
        self._give_arguments(arguments)

    def stream_arguments(self) -> Steps[None]:
        """Gives out the object at the beginning as the last call's arguments, as it comes, and drops it."""
        scan = _Scan()
        while (end := scan.feed(self._text, 0)) < 0:
            self._give_arguments(self._text)
            self._text = ""
            if self._ended:
                return
            yield
        self._give_arguments(self._text[:end])
        self.drop(end)

    def _give_arguments(self, piece: str) -> None:
        if piece:
            self._deltas.append(CallDelta(self.num_calls - 1, arguments=piece))

    def _give_text(self, end: int) -> None:
        if piece := self._text[:end]:
            self._deltas.append(TextDelta(piece))
            self._behind_call = False
            self.drop(end)


def new_call_id() -> str:
    """An id for a call: letters and digits, nine of them, as Mistral's templates want it."""
    return secrets.token_hex(5)[:9]


def _sure_length(text: str, marker: str) -> int:
    """How much of a text can be no part of a marker still to come, or of the spaces before it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return len(text[:-size].rstrip(SPACES))
    return len(text.rstrip(SPACES))


class _Scan:
    """Finds where a JSON object, list or text ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Goes on from a place; the place behind the end, -1 if it is still to come."""
        for i in range(at, len(text)):
            char = text[i]
            if self._escaped:
                self._escaped = False
            elif self._quoted and char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = not self._quoted
            elif not self._quoted and char in "{[":
                self._depth += 1
            elif not self._quoted and char in "}]":
                self._depth -= 1
            else:
                continue
            if not (self._depth > 0 or self._quoted or self._escaped):
                return i + 1
        return -1


# ------------------------------------------------------------------------------------- formats


def _read_call(stream: CallStream, at: int) -> Steps[None]:
    """{"name": ..., "arguments": {...}} in either order, other members passed over; drops it."""
    name = arguments = None
    while True:
        key, at = yield from _read_key(stream, at)
        if key in ARGUMENTS and name is not None and (yield from stream.peek(at)) == "{":
            stream.drop(at)
            stream.begin_call(name)
            yield from stream.stream_arguments()
            yield from _drop_rest(stream)
            return
        end = yield from stream.value(at)
        value = _load(stream.text(at, end), end)
        if key == "name":
            name = _checked_name(value, end)
        elif key in ARGUMENTS:
            arguments = _whole_arguments(value, stream.text(at, end), end)
        at = yield from stream.skip_spaces(end)
        if (yield from stream.peek(at)) == "}":
            break
    at += 1
    if name is None:
        raise _MalformedError(at)
    stream.drop(at)
    stream.begin_call(name, arguments or "{}")


def _read_key(stream: CallStream, at: int) -> Steps[tuple[str, int]]:
    """The key behind the brace or comma at a place, and the place of its value."""
    if (yield from stream.peek(at)) not in ("{", ","):
        raise _MalformedError(at)
    at = yield from stream.skip_spaces(at + 1)
    if (yield from stream.peek(at)) != '"':
        raise _MalformedError(at)
    end = yield from stream.value(at)
    key = _load(stream.text(at, end), end)
    at = yield from stream.skip_spaces(end)
    if (yield from stream.peek(at)) != ":":
        raise _MalformedError(at)
    at = yield from stream.skip_spaces(at + 1)
    return key, at


def _drop_rest(stream: CallStream) -> Steps[None]:
    """Behind a call's arguments: other members and the closing brace. If they are not there, the call is
    none the worse."""
    try:
        at = yield from stream.skip_spaces(0)
        while (yield from stream.peek(at)) == ",":
            _, at = yield from _read_key(stream, at)
            at = yield from stream.value(at)
            at = yield from stream.skip_spaces(at)
        if (yield from stream.peek(at)) == "}":
            stream.drop(at + 1)
    except _MalformedError:
        return


def _load(text: str, end: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _MalformedError(end) from None


def _checked_name(value: object, end: int) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _MalformedError(end)
    return value


def _whole_arguments(value: object, text: str, end: int) -> str:
    """Arguments as JSON text: an object, one written into a text, or none at all."""
    if isinstance(value, str):
        text = value
        value = _load(text, end)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise _MalformedError(end)
    return text


def _read_hermes(stream: CallStream, at: int) -> Steps[None]:
    at = yield from stream.skip_spaces(at)
    yield from _read_call(stream, at)
    at = yield from stream.skip_spaces(0)
    if (yield from stream.starts(at, "</tool_call>")):
        stream.drop(at + len("</tool_call>"))


def _read_sequence(stream: CallStream, at: int) -> Steps[None]:
    """Calls one behind the other, with or without a semicolon between them."""
    while True:
        at = yield from stream.skip_spaces(at)
        yield from _read_call(stream, at)
        at = yield from stream.skip_spaces(0)
        if (yield from stream.peek(at)) == ";":
            at = yield from stream.skip_spaces(at + 1)
        char = yield from stream.peek(at)
        if char == "":
            stream.drop(at)
        if char != "{":
            return


def _read_mistral(stream: CallStream, at: int) -> Steps[None]:
    at = yield from stream.skip_spaces(at)
    if (yield from stream.peek(at)) == "[":
        yield from _read_list(stream, at)
        return
    end = yield from stream.name(at)
    name = _checked_name(stream.text(at, end), end)
    at = end
    if (yield from stream.starts(at, "[CALL_ID]")):
        at = yield from stream.name(at + len("[CALL_ID]"))
    if (yield from stream.starts(at, "[ARGS]")):
        at += len("[ARGS]")
    at = yield from stream.skip_spaces(at)
    if (yield from stream.peek(at)) != "{":
        raise _MalformedError(at)
    stream.drop(at)
    stream.begin_call(name)
    yield from stream.stream_arguments()


def _read_list(stream: CallStream, at: int) -> Steps[None]:
    """[call, call, ...]"""
    char = "["
    while char in ("[", ","):
        at = yield from stream.skip_spaces(at + 1)
        yield from _read_call(stream, at)
        at = yield from stream.skip_spaces(0)
        char = yield from stream.peek(at)
    if char == "]":
        stream.drop(at + 1)


FORMATS: Final[Mapping[str, ToolFormat]] = {
    format.name: format
    for format in (
        ToolFormat("hermes", "<tool_call>", False, "arguments", _read_hermes),
        ToolFormat("llama3", "<|python_tag|>", True, "parameters", _read_sequence, needs_marker=False),
        ToolFormat("mistral", "[TOOL_CALLS]", True, "arguments", _read_mistral),
    )
}
# Words in chat templates by which a format is known.
_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", "Environment: ipython"),
}
