"""Params: named scalars and maps, evaluated when they are asked for.

A param is an expression over other params; inside a layer `i` is the layer's index, and the overrides of
the layer's type stand in for the params that they name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagec.compiler.errors import SpecError
from pagec.compiler.spec.expr import (
    WORDS,
    Evaluator,
    Expression,
    is_number,
    parse_expression,
    show,
    suggestion,
)
from pagec.compiler.spec.source import List, Map, Node, Place, Scalar

# Inside a map, these keys hold a word and not an expression.
WORD_KEYS: Final = ("kind",)
INDEX: Final = "i"
_MAX_ORIGINS: Final = 4
# Values that every step brings.
STEP_INPUTS: Final = ("tokens", "positions", "sequences")
RESERVED: Final = frozenset({INDEX, *WORDS, *STEP_INPUTS})


class LayerNeededError(SpecError):
    """A scalar depends on the layer index, and no layer is given."""


class Expressions:
    """Parses each scalar of a tree once. It keeps the scalars, so that their ids stay theirs."""

    def __init__(self) -> None:
        self._parsed: dict[int, tuple[Scalar, Expression]] = {}

    def of(self, scalar: Scalar) -> Expression:
        if id(scalar) not in self._parsed:
            self._parsed[id(scalar)] = (scalar, parse_expression(scalar))
        return self._parsed[id(scalar)][1]

    def inside(self, node: Node, key: str = "") -> Iterator[Expression]:
        """All expressions of a value."""
        if isinstance(node, Map):
            for name, entry in node.entries.items():
                yield from self.inside(entry, name)
        elif isinstance(node, List):
            for item in node.items:
                yield from self.inside(item)
        elif key not in WORD_KEYS:
            yield self.of(node)


class Scope:
    """Values of params, outside the layers (`layer` None) or in one of them.

    A value is None, a bool, a number, a word, a tuple of values, or a dict of values (a map param).
    """

    def __init__(
        self, params: Mapping[str, Node], expressions: Expressions, layer: int | None = None
    ) -> None:
        self._params = params
        self._expressions = expressions
        self._layer = layer
        self._values: dict[str, Any] = {}
        self._errors: dict[str, SpecError] = {}  # so that a mistake is reported in one way only
        self._open: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._params

    def names(self) -> set[str]:
        return set(self._params)

    def get(self, name: str, place: Place | None = None) -> Any:
        """The value of a param; `place` is where it is asked for."""
        if name in self._errors:
            raise self._errors[name]
        if name not in self._values:
            node = self._params.get(name)
            if node is None:
                raise (place or Place("", "", 0, 0)).error(
                    f"no param is named {name!r}", suggestion(name, self.names())
                )
            if name in self._open:
                loop = " -> ".join([*self._open[self._open.index(name) :], name])
                raise node.place.error(f"params depend on each other: {loop}", "give one of them a value")
            self._open.append(name)
            try:
                self._values[name] = self.evaluate(node)
            except SpecError as error:
                self._errors[name] = error
                raise
            finally:
                self._open.pop()
        return self._values[name]

    def evaluate(self, node: Node, key: str = "") -> Any:
        """The value of a node of the spec."""
        if isinstance(node, Map):
            return {name: self.evaluate(entry, name) for name, entry in node.entries.items()}
        if isinstance(node, List):
            return tuple(self.evaluate(item) for item in node.items)
        if key in WORD_KEYS:
            return node.value
        return Evaluator(self._expressions.of(node), self.lookup).run()

    def lookup(self, expression: Expression, name: ast.Name) -> Any:
        """The value of a name in an expression."""
        if name.id != INDEX:
            return self.get(name.id, expression.place(name))
        if self._layer is None:
            place = expression.place(name)
            raise LayerNeededError([place.problem("'i', the layer's index, has no value outside layers")])
        return self._layer

    def origin(self, part: ast.AST) -> str:
        """A remedy: the params that a part of an expression comes from, and where they stand."""
        found: dict[str, Place] = {}
        todo = [part]
        while todo:
            for name in (n.id for n in ast.walk(todo.pop(0)) if isinstance(n, ast.Name)):
                param = self._params.get(name)
                if param is None or name in found:
                    continue
                found[name] = param.place
                if isinstance(param, Scalar) and isinstance(param.value, str):
                    todo.append(self._expressions.of(param).tree)
        places = [f"{name} ({p.file}:{p.line}:{p.column})" for name, p in found.items() if p.line]
        return f"check {', '.join(places[:_MAX_ORIGINS])}" if places else "check what it comes from"

    def map_of(self, expression: Expression, part: ast.expr) -> Map | None:
        """The map param that a part of an expression names, through names and conditions."""
        if isinstance(part, ast.IfExp):
            holds = Evaluator(expression, self.lookup).condition(part.test)
            return self.map_of(expression, part.body if holds else part.orelse)
        param = self._params.get(part.id) if isinstance(part, ast.Name) else None
        if isinstance(param, Scalar) and isinstance(param.value, str):
            further = self._expressions.of(param)
            return self.map_of(further, further.tree)
        return param if isinstance(param, Map) else None

    def size(self, node: Node, what: str, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.evaluate(node)
        if isinstance(value, int) and is_number(value) and value >= least:
            return value
        remedy = "use // for whole division" if isinstance(value, float) else self._remedy(node)
        raise node.place.error(
            f"{what} must be a whole number of at least {least}, not {show(value)}", remedy
        )

    def _remedy(self, node: Node) -> str:
        return (
            self.origin(self._expressions.of(node).tree) if isinstance(node, Scalar) else "write one number"
        )

    def condition(self, node: Node, what: str) -> bool:
        """True or false; none is false."""
        value = self.evaluate(node)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise node.place.error(f"{what} is {show(value)}, not true or false", "write a condition, e.g. x > 0")


def overridden(params: Mapping[str, Node], override: Map | None) -> dict[str, Node]:
    """Params with a layer type's overrides; a map over a map param replaces only the keys that it has."""
    result = dict(params)
    for name, node in (override.entries if override else {}).items():
        base = params.get(name)
        if isinstance(node, Map) and isinstance(base, Map):
            entries, places = {**base.entries, **node.entries}, {**base.places, **node.places}
            result[name] = Map(entries, places, node.place)
        else:
            result[name] = node
    return result
