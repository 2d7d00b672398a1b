"""Whatever is done to a spec's text, the outcome is a model or a SpecError."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagec import configs
from pagec.compiler.errors import SpecError
from pagec.compiler.importers.mapping import import_map
from pagec.compiler.spec import build_graph, parse_spec, resolved_yaml
from pagec.compiler.spec.family import document_of
from pagec.compiler.spec.naming import Kind
from pagec.compiler.spec.source import to_plain
from pagec.compiler.spec.write import write

SIZES = {"vocab": 32, "hidden": 16, "inter": 24, "max_len": 64}  # whatever else is required is 2
FOLDERS = (configs.root() / "families", configs.root() / "models", Path(__file__).parents[2] / "families")


def complete(path: Path) -> str:
    """The text of a small model of a family; a model's own text with two layers."""
    data, tree = yaml.safe_load(path.read_text()), document_of(path.read_text(), str(path)).tree
    if "family" in data:
        required = {name: SIZES.get(name, 2) for name in to_plain(tree.entries["required"])}
        data["params"] = required | data.get("params", {})
    else:
        data["params"]["layers"] = 2
    if "types" in data:
        data["layer_types"] = list(data["types"])
    return write({"name": "fuzz"} | data)


BASES = {path.stem: complete(path) for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))}
LLAMA = BASES["llama"]
WORDS = sorted(
    {
        word
        for text in BASES.values()
        for word in text.replace("(", " ").replace(")", " ").replace(",", " ").split()
        if len(word) < 20
    }
)
PIECES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(
        ["null", "1e-5", "1.0e-5", "-1", "0", "1.5", "[", "]", "{", "}", ": ", "&a", "*a", "!!int ", "<<"]
    ),
    st.sampled_from(
        ["$", "_", "**", "//", "9" * 30, "1_0", "0x_", ".inf", ".nan", "none", "not ", " if ", "'", '"']
    ),
    st.sampled_from(
        ["\n", "  ", "- ", "i", "f(", "(" * 99, "-" * 99, "a.b", "a[0]", "lambda: 1", "x = y = ", "é", "|\n"]
    ),
    st.sampled_from(["true", "[3]", "{a: 1}", "{tensor: 3}", "''", "[]", "3", "'3'", "true if i else none"]),
    st.text(max_size=5),
)
PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from(WORDS), st.text(max_size=3)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A text with some pieces of it replaced."""
    text = draw(st.sampled_from(sorted(BASES.values())))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 2, 5, 20])))
        text = text[:start] + draw(PIECES) + text[end:]
    return text


@st.composite
def changed(draw: st.DrawFn) -> str:
    """Well-formed YAML with one of its values, somewhere, of another type."""
    data = yaml.safe_load(draw(st.sampled_from(sorted(BASES.values()))))
    node = data
    while True:
        key = draw(st.sampled_from(sorted(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1))
        if isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 5)):
            node = node[key]
            continue
        node[key] = draw(PLAIN)
        return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=10**6))


def attempt(text: str) -> None:
    """Reads a text as a family with import sections, and as a model."""
    for read in (imported, built):
        try:
            read(text)
        except SpecError as error:
            problems = error.problems
        else:
            continue
        assert problems
        assert all(problem.message for problem in problems)
        assert all(Path(p.file).suffix == ".yaml" or p.file == "fuzz" for p in problems)


def imported(text: str) -> None:
    document = document_of(text, "fuzz.yaml")
    for kind in get_args(Kind):
        import_map("fuzz", document, kind)


def built(text: str) -> None:
    spec = parse_spec(text, "fuzz.yaml")
    graph = build_graph(spec)
    again = parse_spec(resolved_yaml(spec), "fuzz.yaml")
    assert (again, build_graph(again)) == (spec, graph)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_only_spec_errors_come_out(text: str) -> None:
    attempt(text)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(changed())
def test_values_of_any_type_anywhere(text: str) -> None:
    attempt(text)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from("+-*/%()[]{}$_ abx019.,:='\"<>!\n#&|"), max_size=30))
def test_any_expression(text: str) -> None:
    quoted = "'" + text.replace("'", "''").replace("\n", " ") + "'"
    attempt(LLAMA.replace("norm_eps: 1.0e-06", f"norm_eps: {quoted}"))
    attempt(LLAMA.replace("- h = rmsnorm(x, $attn_norm, eps=norm_eps)", f"- {quoted}"))


@pytest.mark.parametrize("name", BASES)
def test_the_unchanged_text_is_a_model(name: str) -> None:
    built(BASES[name])
