"""Tool calls in scripted texts of three families, whole and in pieces cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagec.compiler.errors import RequestError
from pagec.runtime.server.tool_choice import ToolChoice, check_tools
from pagec.runtime.server.tools import (
    FORMATS,
    CallDelta,
    Delta,
    TextDelta,
    ToolCall,
    ToolFormat,
    collect,
    make_tool_format,
)
from pagec.runtime.text.messages import template_messages

HERMES, LLAMA3, MISTRAL = (FORMATS[name] for name in ("hermes", "llama3", "mistral"))
ODD = '{"a": "} ] { \\" <tool_call> </tool_call>", "b": {"c": [1, {"d": "\\\\"}]}, "Ü": "日本🦊"}'

# format, text, its content, its calls
WHOLE: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "No call at all.\n", "No call at all.\n", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {ODD}}}</tool_call>', "", [("f", ODD)]),
    (
        HERMES,
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": [2]}, "name": "g"}\n</tool_call>\n',
        "Let me see.",
        [("f", "{}"), ("g", '{"x": [2]}')],
    ),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>\nDone. ', "\nDone. ", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": {}, "z": [1]}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, f'\n<|python_tag|>{{"name": "f", "parameters": {ODD}}}', "", [("f", ODD)]),
    (
        LLAMA3,
        '{"name": "f", "parameters": {}}; {"type": "function", "name": "g", "parameters": {"b": ";"}} ;',
        "",
        [("f", "{}"), ("g", '{"b": ";"}')],
    ),
    (LLAMA3, 'Well: {"name": "f", "parameters": {}}', 'Well: {"name": "f", "parameters": {}}', []),
    (LLAMA3, 'Well. <|python_tag|>{"name": "f", "parameters": {}}', "Well.", [("f", "{}")]),
    (LLAMA3, '{"name": "f", "parameters": {}}; and so on', "; and so on", [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "f", "arguments": {ODD}}}, {{"name": "g", "arguments": {{}}}}]',
        "",
        [("f", ODD), ("g", "{}")],
    ),
    (MISTRAL, f"So: [TOOL_CALLS]f{ODD}[TOOL_CALLS]g.h-2{{}}", "So:", [("f", ODD), ("g.h-2", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
]
# What only looks like a call comes out as text, every character of it.
NO_CALLS = [
    (HERMES, "<tool_call>"),
    (HERMES, "a < b, <tool, <tool_cal"),
    (HERMES, "<tool_call>f(1)</tool_call>"),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f g", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": }, "name": "f"}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>"),
    (HERMES, '<tool_call>{"name": "f'),
    (HERMES, '<tool_call>{"name": "f", "argum'),
    (HERMES, '<tool_call>{"arguments": {"a": {'),
    (LLAMA3, '{"answer": 42}'),
    (LLAMA3, '<|python_tag|>search.call(query="x")'),
    (LLAMA3, " {"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS] no"),
    (MISTRAL, "[TOOL_CALLS][1, 2]"),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]"),
]
# Cut off within the arguments, or with arguments that are no JSON: they are the call's, as far as they go.
BROKEN = [
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "", [("f", '{"a": }')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} <tool_call> x', " <tool_call> x", [("f", "{}")]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name"', '; {"name"', [("f", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]', ", 5]", [("f", "{}")]),
]
TEXTS = [(f, text) for f, text, *_ in [*WHOLE, *BROKEN]] + NO_CALLS


@pytest.mark.parametrize(("format", "text", "content", "calls"), [*WHOLE, *BROKEN])
def test_calls_and_text_around_them(
    format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert format.parse(text) == (content, [ToolCall(*call) for call in calls])


@pytest.mark.parametrize(("format", "text"), NO_CALLS)
def test_what_is_no_call_is_text(format: ToolFormat, text: str) -> None:
    assert format.parse(text) == (text, [])


def streamed(format: ToolFormat, pieces: list[str], *, forced: bool = False) -> list[Delta]:
    stream = format.stream(forced=forced)
    return [delta for piece in pieces for delta in stream.add(piece)] + stream.finish()


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def well_formed(deltas: list[Delta]) -> bool:
    """Calls are numbered in order; each begins with id and name, once."""
    begun = 0
    for delta in deltas:
        if isinstance(delta, CallDelta):
            begun += delta.name is not None
            if delta.index != begun - 1 or (delta.name is None) != (delta.id is None):
                return False
    return True


@pytest.mark.parametrize(("format", "text"), TEXTS)
def test_a_stream_by_characters_adds_up_to_the_whole(format: ToolFormat, text: str) -> None:
    deltas = streamed(format, list(text))
    assert well_formed(deltas)
    assert collect(deltas) == format.parse(text)


PARTS = [text for _, text in TEXTS] + [
    '{"',
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    ";",
    "\n ",
    "x",
    "é🦊",
    *"<[",
]


@given(
    format=st.sampled_from(list(FORMATS.values())),
    parts=st.lists(st.sampled_from(PARTS), max_size=6),
    places=st.lists(st.integers(0, 2000), max_size=12),
    forced=st.booleans(),
)
@example(
    format=HERMES,
    parts=['<tool_call>{"name": "f", "arguments": {', "\\", '"', "}"],
    places=[40],
    forced=False,
)
@settings(max_examples=300, deadline=None)
def test_a_stream_cut_anywhere_adds_up_to_the_whole(
    format: ToolFormat, parts: list[str], places: list[int], forced: bool
) -> None:
    text = "".join(parts)
    deltas = streamed(format, cut(text, places), forced=forced)
    assert well_formed(deltas)
    assert collect(deltas) == format.parse(text, forced=forced)


@given(format=st.sampled_from(list(FORMATS.values())), parts=st.lists(st.sampled_from(PARTS), max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_word_is_lost(format: ToolFormat, parts: list[str]) -> None:
    """What the parts of a text hold comes out in this order; only the form around calls is left out."""
    text = "".join(parts)
    content, calls = format.parse(text)
    if not calls:
        assert content == text
    left = iter(text)
    assert all(char in left for char in content)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3), min_size=1, max_size=3),
    ascii_only=st.booleans(),
    places=st.lists(st.integers(0, 2000), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_any_arguments_come_through_every_format(
    arguments: list[dict[str, Any]], ascii_only: bool, places: list[int]
) -> None:
    texts = [json.dumps(a, ensure_ascii=ascii_only) for a in arguments]
    writings = {
        "hermes": "".join(f'<tool_call>{{"name": "f", "arguments": {t}}}</tool_call>\n' for t in texts),
        "llama3": "; ".join(f'{{"name": "f", "parameters": {t}}}' for t in texts),
        "mistral": "".join(f"[TOOL_CALLS]f{t}" for t in texts),
    }
    for name, text in writings.items():
        content, calls = collect(streamed(FORMATS[name], cut(text, places)))
        assert content == ""
        assert [json.loads(call.arguments) for call in calls] == arguments


def test_nothing_is_held_back_without_need() -> None:
    """Text comes at once but for what may begin a marker; arguments come as they are written."""
    stream = HERMES.stream()
    assert stream.add("One, two") == [TextDelta("One, two")]
    assert stream.add(" <") == []
    assert stream.add("3 <tool") == [TextDelta(" <3")]
    assert stream.add('_call>{"name": "f", ') == []
    first, *rest = stream.add('"arguments": {"a"')
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, rest) == (0, "f", [CallDelta(0, arguments='{"a"')])
    assert stream.add(": 1") == [CallDelta(0, arguments=": 1")]
    assert stream.add("}}</tool_call>") == [CallDelta(0, arguments="}")]
    assert stream.finish() == []
    assert stream.num_calls == 1


def test_deltas_are_openais() -> None:
    first, second = HERMES.stream().add('<tool_call>{"name": "f", "arguments": {}')
    assert isinstance(first, CallDelta)
    assert isinstance(second, CallDelta)
    assert first.id is not None
    assert len(first.id) == 9
    assert first.id.isalnum()
    assert first.to_json() == {
        "index": 0,
        "id": first.id,
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert second.to_json() == {"index": 0, "function": {"arguments": "{}"}}


def test_a_long_text_of_broken_calls_is_read_once() -> None:
    """Reading does not start again behind each marker: time would be quadratic in what a model writes."""
    text = '<tool_call>{"a": [' * 4000
    assert HERMES.parse(text) == (text, [])


def test_a_forced_call_needs_no_marker() -> None:
    text = '{"name": "f", "arguments": {"a": 1}}'
    for format in FORMATS.values():
        assert format.parse(text, forced=True) == ("", [ToolCall("f", '{"a": 1}')])
    assert HERMES.parse(text) == (text, [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{%- if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{{- '<|python_tag|>' }}", "llama3"),
        ("Environment: ipython", "llama3"),
    ],
)
def test_a_template_tells_the_format(template: str, name: str) -> None:
    assert make_tool_format(template).name == name
    assert make_tool_format(None, name) == make_tool_format(template)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^tools: .*knows no tools"):
        make_tool_format("{{ messages }}")
    with pytest.raises(RequestError, match=r"^tool_format: 'xml' is none of hermes, llama3, mistral"):
        make_tool_format("<tool_call>", "xml")


# ------------------------------------------------------------------------------ tools in a request

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [function("weather", CITY, description="Of a city."), function("walk", TREE), function("now")]


@pytest.mark.parametrize(
    ("choice", "names", "must"),
    [
        (None, ["weather", "walk", "now"], False),
        ("auto", ["weather", "walk", "now"], False),
        ("none", [], False),
        ("required", ["weather", "walk", "now"], True),
        ({"type": "function", "function": {"name": "walk"}}, ["walk"], True),
    ],
)
def test_choices(choice: object, names: list[str], must: bool) -> None:
    found = check_tools(TOOLS, choice)
    assert [tool.name for tool in found.tools] == names
    assert found.must == must
    assert found.for_template() == ([t for t in TOOLS if t["function"]["name"] in names] or None)
    assert (found.constraint(HERMES) is not None) == must


def test_no_tools() -> None:
    assert check_tools(None) == check_tools([]) == ToolChoice()


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("tools", "choice", "place"),
    [
        ("f", None, "tools"),
        ({}, None, "tools"),
        ([function(f"f{i}") for i in range(129)], None, "tools"),
        ([1], None, r"tools\[0\]"),
        ([function("f"), {"type": "web_search"}], None, r"tools\[1\]"),
        ([{"type": "function"}], None, r"tools\[0\]\.function"),
        ([function("a b")], None, r"tools\[0\]\.function\.name"),
        ([function("f" * 65)], None, r"tools\[0\]\.function\.name"),
        ([function("f"), function("f")], None, r"tools\[1\]\.function\.name"),
        ([function("f", description=3)], None, r"tools\[0\]\.function\.description"),
        ([function("f", strict="yes")], None, r"tools\[0\]\.function\.strict"),
        ([function("f", [])], None, r"tools\[0\]\.function\.parameters"),
        ([function("f", {"type": "string"})], None, r"tools\[0\]\.function\.parameters"),
        ([function("f", DEEP)], None, r"tools\[0\]\.function\.parameters"),
        (TOOLS, "maybe", "tool_choice"),
        (TOOLS, 3, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "fly"}}, r"tool_choice\.function\.name"),
        (None, "required", "tool_choice"),
        (None, {"type": "function", "function": {"name": "f"}}, r"tool_choice\.function\.name"),
    ],
)
def test_bad_tools_are_refused_by_field(tools: object, choice: object, place: str) -> None:
    with pytest.raises(RequestError, match=f"^{place}: "):
        check_tools(tools, choice)


def allowed(choice: ToolChoice, format: ToolFormat, text: str) -> bool:
    """Whether the grammar library lets a text of single bytes through to its end."""
    llguidance = pytest.importorskip("llguidance")
    wanted = choice.constraint(format)
    assert wanted is not None
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(wanted.json)
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_a_required_call_fits_a_function_and_is_read_back(format: ToolFormat) -> None:
    any_of, walk = check_tools(TOOLS, "required"), check_tools(TOOLS[1:2], "required")
    key = format.arguments_key
    tree = {"root": {"value": 1, "next": {"value": 2, "next": {"value": 3}}}}
    right = json.dumps({"name": "walk", key: tree})
    assert allowed(any_of, format, right)
    assert allowed(walk, format, right)
    assert format.parse(right, forced=True) == ("", [ToolCall("walk", json.dumps(tree))])
    assert allowed(any_of, format, json.dumps({"name": "weather", key: {"city": "Ulm"}}))
    assert not allowed(walk, format, json.dumps({"name": "weather", key: {"city": "Ulm"}}))
    assert not allowed(any_of, format, json.dumps({"name": "weather", key: {"city": 3}}))
    bad = {"root": {"value": 1, "next": {"value": "2"}}}
    assert not allowed(any_of, format, json.dumps({"name": "walk", key: bad}))
    assert not allowed(any_of, format, json.dumps({"name": "walk", key: tree, "more": 1}))


def test_earlier_calls_become_what_templates_read() -> None:
    call: dict[str, Any] = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": [1]}'},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
        {"role": "assistant", "content": "2", "tool_calls": None},
    ]
    found = template_messages(messages)
    assert found[0] == messages[0]
    assert found[1]["content"] == ""
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert found[2] == messages[2]
    assert found[3] == {"role": "assistant", "content": "2"}
    assert call["function"]["arguments"] == '{"a": [1]}'


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ("f", r"messages\[0\]\.tool_calls"),
        ([3], r"messages\[0\]\.tool_calls\[0\]"),
        ([{"function": {}}], r"messages\[0\]\.tool_calls\[0\]\.function\.name"),
        (
            [{"function": {"name": "f", "arguments": "{"}}],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments",
        ),
        (
            [{"function": {"name": "f", "arguments": "[]"}}],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments",
        ),
    ],
)
def test_bad_earlier_calls_are_refused_by_field(calls: object, place: str) -> None:
    with pytest.raises(RequestError, match=f"^{place}: "):
        template_messages([{"role": "assistant", "tool_calls": calls}])


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    """Else a forced call could have any."""
    plain, described = ({"name": "now"}, {"name": "any", "parameters": {"type": "object"}})
    tools = [{"type": "function", "function": function} for function in (plain, described)]
    first, second = check_tools(tools).tools
    assert first.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert second.parameters == {"type": "object"}
