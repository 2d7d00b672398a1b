"""Whatever is done to a spec's text, the outcome is a model or a SpecError."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagec import configs
from pagec.compiler.errors import SpecError
from pagec.compiler.spec import build_graph, parse_spec, resolved_yaml

LLAMA = (configs.root() / "families" / "llama.yaml").read_text()
BASE = "name: fuzz\n" + LLAMA.replace(
    "params: #", "params:\n  vocab: 32\n  hidden: 16\n  layers: 2\n  heads: 2\n  inter: 24\n  max_len: 64 #"
)
WORDS = sorted({w for w in BASE.replace("(", " ").replace(")", " ").replace(",", " ").split() if len(w) < 20})
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
    st.text(max_size=5),
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = BASE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 2, 5, 20])))
        text = text[:start] + draw(PIECES) + text[end:]
    return text


def attempt(text: str) -> None:
    try:
        spec = parse_spec(text, "fuzz.yaml")
        graph = build_graph(spec)
    except SpecError as error:
        for problem in error.problems:
            assert problem.message
            assert Path(problem.file).suffix == ".yaml" or problem.file == "fuzz"
        return
    again = parse_spec(resolved_yaml(spec), "fuzz.yaml")
    assert (again, build_graph(again)) == (spec, graph)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_only_spec_errors_come_out(text: str) -> None:
    attempt(text)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from("+-*/%()[]{}$_ abx019.,:='\"<>!\n#&|"), max_size=30))
def test_any_expression(text: str) -> None:
    quoted = "'" + text.replace("'", "''").replace("\n", " ") + "'"
    attempt(BASE.replace("norm_eps: 1.0e-6", f"norm_eps: {quoted}"))
    attempt(BASE.replace("- h = rmsnorm(x, $attn_norm, eps=norm_eps)", f"- {quoted}"))


def test_the_unchanged_text_is_a_model() -> None:
    assert build_graph(parse_spec(BASE, "fuzz.yaml")).nodes
