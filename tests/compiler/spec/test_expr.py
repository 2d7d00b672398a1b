"""Scalars: what expressions give, and where they stand."""

from __future__ import annotations

from typing import Any

import pytest

from pagec.compiler.errors import SpecError
from pagec.compiler.spec.expr import parse_expression, parse_statement
from pagec.compiler.spec.scope import Expressions, Scope
from pagec.compiler.spec.source import Place, Scalar, almost_float, from_plain

PLACE = Place("f.yaml", "x", 3, 5)


def value(text: Any, layer: int | None = None, **params: Any) -> Any:
    scope = Scope({k: from_plain(v, PLACE) for k, v in params.items()}, Expressions(), layer)
    return scope.evaluate(Scalar(text, PLACE, 5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (3, 3),
        (1.5, 1.5),
        (True, True),
        (None, None),
        ("2 + 3 * 4", 14),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("7 / 2", 3.5),
        ("2 ** 10", 1024),
        ("64 ** -0.5", 0.125),
        ("-3 + 1", -2),
        ("'silu'", "silu"),
        ("none", None),
        ("true", True),
        ("not false", True),
        ("1 < 2 <= 2", True),
        ("1 == 1.0 and 2 != 3", True),
        ("'a' == 'b' or none == none", True),
        ("x is none", False),
        ("5 if x > 1 else 1 // 0", 5),
        ("(x + 1) / ((i + 1) if flag else 1)", 1.0),
    ],
)
def test_scalars(text: Any, expected: Any) -> None:
    found = value(text, layer=2, x=2, flag=True)
    assert found == expected
    assert type(found) is type(expected)


def test_params_are_evaluated_when_they_are_asked_for() -> None:
    assert value("a", a="b * 2", b="c + 1", c=3, broken="1 // 0") == 8
    assert value("rope", rope={"base": "2 * b", "kind": "llama3", "factors": ["b", 1]}, b=4) == {
        "base": 8,
        "kind": "llama3",
        "factors": (4, 1),
    }


@pytest.mark.parametrize(
    "text",
    ["1 +", "a.b", "[1]", "x[0]", "lambda: 1", "f(x)", "1 and 2", "true + 1", "'a' * 3", "1 < none", "1j",
     "b'a'", "10 ** 300 * 10 ** 300", "2 ** 64 * 9", "x in y", "~1", "1 << 2", "f'{x}'", "...",
     "(1, 2)", "x := 1"],
)  # fmt: skip
def test_what_is_not_part_of_the_language(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        value(text, x=1, y=2)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == ("f.yaml", 3)
    assert problem.column >= 5


def test_statements() -> None:
    statement = parse_statement(Scalar("q, k = rope(q, k, positions, $w)", PLACE, 5))
    assert statement.targets == ("q", "k")
    assert [n.id for n in statement.values[0].names()] == ["q", "k", "positions"]
    assert len(parse_statement(Scalar("a, b = b, a", PLACE)).values) == 2


@pytest.mark.parametrize(
    "text",
    ["x", "x = 1; y = 2", "x += 1", "x = y = 1", "x.a = 1", "_x = 1", "a, a = b", "a, b = 1, 2, 3", "$w = 1"],
)
def test_what_is_no_statement(text: str) -> None:
    with pytest.raises(SpecError):
        parse_statement(Scalar(text, PLACE, 5))


def test_a_dollar_inside_a_word_stays() -> None:
    assert value("'a$b'") == "a$b"
    with pytest.raises(SpecError, match="begins with '_'"):
        parse_expression(Scalar("_w", PLACE, 5))


@pytest.mark.parametrize(
    ("text", "better"),
    [
        ("1e-5", "1.0e-5"),
        ("1.5e5", "1.5e+5"),
        ("-2.E3", "-2.0e+3"),
        (".5e-1", ".5e-1"),
        ("abc", None),
        ("1.5", None),
    ],
)
def test_numbers_that_yaml_does_not_see(text: str, better: str | None) -> None:
    assert almost_float(text) == better
