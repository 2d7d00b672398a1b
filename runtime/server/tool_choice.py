"""Tools in a request: which functions there are, whether one must be called, and what the model is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling import checks
from pagec.runtime.sampling.params import StructuredOutputsParams
from pagec.runtime.server.tools import ToolFormat

MAX_TOOLS: Final = 128
MAX_DEPTH: Final = 64
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; `parameters` is a JSON schema of an object, `source` the request's own words."""

    name: str
    parameters: Mapping[str, Any]
    source: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The functions that may be called. `must`: one of them has to be."""

    tools: tuple[Tool, ...] = ()
    must: bool = False

    def for_template(self) -> list[Mapping[str, Any]] | None:
        """What the chat template is given; None without tools."""
        return [tool.source for tool in self.tools] or None

    def constraint(self, format: ToolFormat) -> StructuredOutputsParams | None:
        """What holds the answer to one call, if there must be one: a bare object, without the format's
        marker, which may be a token that no grammar can name. Read it with `stream(forced=True)`."""
        if not self.must:
            return None
        calls = [
            _call_schema(tool, format.arguments_key, f"#/anyOf/{i}") for i, tool in enumerate(self.tools)
        ]
        return StructuredOutputsParams(json={"anyOf": calls})


def check_tools(tools: object, tool_choice: object = None) -> ToolChoice:
    """A request's `tools` and `tool_choice`, checked; RequestError names the field.

    "none" offers no tool, "auto" leaves it to the model, "required" wants a call, a named function one of it.
    """
    found = _check_list(tools)
    if tool_choice is None:
        return ToolChoice(found)
    if isinstance(tool_choice, str):
        return _chosen_by_word(found, tool_choice)
    name = _named_function(tool_choice)
    named = tuple(tool for tool in found if tool.name == name)
    if not named:
        checks.bad("tool_choice.function.name", name, "the name of one of the tools")
    return ToolChoice(named, must=True)


# --------------------------------------------------------------------------------------- tools


def _check_list(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        checks.bad("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        checks.bad("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    found = tuple(_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names: set[str] = set()
    for i, tool in enumerate(found):
        if tool.name in names:
            checks.bad(f"tools[{i}].function.name", tool.name, "the only tool of this name")
        names.add(tool.name)
    return found


def _check_tool(tool: object, place: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        checks.bad(place, tool, 'a tool of type "function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        checks.bad(f"{place}.function", function, "a function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        checks.bad(f"{place}.function.name", name, "a name of 1 to 64 letters, digits, _ or -")
    for key, kind, expected in (("description", str, "a text"), ("strict", bool, "true or false")):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            checks.bad(f"{place}.function.{key}", value, expected)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        checks.bad(f"{place}.function.parameters", parameters, "a JSON schema of an object")
    if _is_deeper(parameters, MAX_DEPTH):
        checks.bad(f"{place}.function.parameters", parameters, f"a schema of at most {MAX_DEPTH} levels")
    return Tool(name, parameters, tool)


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in value)


# -------------------------------------------------------------------------------------- choice


def _chosen_by_word(tools: tuple[Tool, ...], word: str) -> ToolChoice:
    if word not in ("none", "auto", "required"):
        checks.bad("tool_choice", word, '"none", "auto", "required" or a function')
    if word == "none":
        return ToolChoice()
    if word == "required" and not tools:
        raise RequestError("needs tools", place="tool_choice", remedy="give tools, or leave tool_choice out")
    return ToolChoice(tools, must=word == "required")


def _named_function(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(name, str):
        checks.bad(
            "tool_choice", choice, '"none", "auto", "required" or {"type": "function", "function": {"name"}}'
        )
    return name


def _call_schema(tool: Tool, arguments_key: str, place: str) -> dict[str, Any]:
    """The schema of a call of this tool, which shall stand at `place` of another one."""
    parameters = _move_references(
        {"type": "object", **tool.parameters}, f"{place}/properties/{arguments_key}"
    )
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments_key: parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _move_references(schema: Any, place: str) -> Any:
    """The schema with references to its own parts still right when it stands at `place`."""
    if isinstance(schema, Mapping):
        return {
            key: f"{place}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _move_references(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_move_references(item, place) for item in schema]
    return schema


# ------------------------------------------------------------------------------------ messages
