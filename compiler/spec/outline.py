"""A spec's tree taken apart: params, types, weights, statements, each checked for its form.

What the names mean, and whether they are known at all, is checked in names.py; values in model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagec.compiler.spec.expr import Statement, parse_statement, suggestion
from pagec.compiler.spec.family import must_be_map, section_of, text_of, texts_of
from pagec.compiler.spec.scope import RESERVED, Expressions
from pagec.compiler.spec.source import List, Map, Node, Place, Problems
from pagec.compiler.spec.weights import Declaration, declaration

PARTS: Final = ("first", "layer", "last")


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of a spec. `layer_types` is not cycled yet; empty means that all layers are of one type."""

    tree: Map
    params: dict[str, Node]
    types: dict[str, Map]
    layer_types: tuple[str, ...]
    weights: dict[str, Declaration]
    first: tuple[Statement, ...]
    layer: tuple[Statement, ...]
    last: tuple[Statement, ...]
    required: dict[str, Place]
    ignore: tuple[str, ...]
    expressions: Expressions

    def statements(self) -> Iterator[Statement]:
        yield from self.first
        yield from self.layer
        yield from self.last


def outline(tree: Map) -> Outline:
    """Takes a merged tree apart; SpecError lists everything that has a wrong form."""
    problems = Problems()
    for key in ("params", "types", "weights", "graph", "import"):
        if key in tree.entries:
            with problems:
                must_be_map(tree.entries[key], tree.place, f"'{key}'")
    expressions = Expressions()
    params = _params(section_of(tree, "params"), expressions, problems)
    types = _types(section_of(tree, "types"), params, expressions, problems)
    weights = _weights(section_of(tree, "weights"), expressions, problems)
    graph = section_of(tree, "graph")
    _check_graph_keys(graph, tree.place, problems)
    first, layer, last = (_statements(graph, part, problems) for part in PARTS)
    cycle = _layer_types(tree, types, problems)
    required = _required(tree, problems)
    ignore = _texts(tree, "ignore", "a tensor's name", problems)
    problems.raise_if_any()
    return Outline(tree, params, types, cycle, weights, first, layer, last, required, ignore, expressions)


def _params(section: Map, expressions: Expressions, problems: Problems) -> dict[str, Node]:
    for name, node in section.entries.items():
        place = section.places[name]
        if not name.isidentifier() or name.startswith("_"):
            problems.add(
                place, f"{name!r} cannot be a param's name", "use letters, digits and _, not _ first"
            )
        elif name in RESERVED:
            problems.add(place, f"{name!r} has a meaning of its own", "choose another name")
        _parse_all(node, expressions, problems)
    return dict(section.entries)


def _parse_all(node: Node, expressions: Expressions, problems: Problems) -> None:
    with problems:
        for expression in expressions.inside(node):
            for reference in expression.weights():
                raise expression.error(
                    reference, "a weight cannot stand in a scalar", "use weights in the graph"
                )


def _types(
    section: Map, params: dict[str, Node], expressions: Expressions, problems: Problems
) -> dict[str, Map]:
    types = {}
    for name, node in section.entries.items():
        types[name] = Map({}, {}, section.places[name])
        with problems:
            types[name] = must_be_map(node, section.places[name], f"the type {name!r}")
            for param in types[name].entries.keys() - params.keys():
                place = types[name].places[param]
                raise place.error(f"there is no param {param!r} to override", suggestion(param, set(params)))
            _parse_all(node, expressions, problems)
    return types


def _layer_types(tree: Map, types: dict[str, Map], problems: Problems) -> tuple[str, ...]:
    node = tree.get("layer_types")
    if node is None:
        return ()
    if not isinstance(node, List) or not node.items:
        problems.add(node.place, "'layer_types' is a list of types", "write e.g. [local, global]")
        return ()
    names = _texts(tree, "layer_types", "a type's name", problems)
    for name, item in zip(names, node.items, strict=False):
        if name not in types:
            problems.add(item.place, f"no type is named {name!r}", suggestion(name, set(types)))
    return names


def _texts(tree: Map, key: str, what: str, problems: Problems) -> tuple[str, ...]:
    node = tree.get(key)
    if node is not None:
        with problems:
            return texts_of(node, what)
    return ()


def _required(tree: Map, problems: Problems) -> dict[str, Place]:
    node = tree.get("required")
    found: dict[str, Place] = {}
    if node is not None:
        with problems:
            for item in node.items if isinstance(node, List) else (node,):
                found[text_of(item, "a required param")] = item.place
    return found


def _weights(section: Map, expressions: Expressions, problems: Problems) -> dict[str, Declaration]:
    declared = {}
    for name, node in section.entries.items():
        place = section.places[name]
        if not name.isidentifier() or name.startswith("_"):
            problems.add(
                place, f"{name!r} cannot be a weight's name", "use letters, digits and _, not _ first"
            )
            continue
        with problems:
            declared[name] = declaration(name, node, place)
            for part in declared[name].expressions():
                _parse_all(part, expressions, problems)
    for weight in declared.values():
        for target in weight.targets():
            if target not in section.entries:
                same = weight.fields.entries["same_as"]
                problems.add(same.place, f"no weight is named {target!r}", suggestion(target, set(declared)))
    return declared


def _check_graph_keys(graph: Map, place: Place, problems: Problems) -> None:
    for key in graph.entries:
        if key not in PARTS:
            problems.add(
                graph.places[key], f"a graph has no part {key!r}", f"its parts are {', '.join(PARTS)}"
            )
    if "last" not in graph.entries:
        problems.add(
            graph.place if graph.entries else place,
            "there is no graph that ends in logits",
            "extend a family, or write graph: {first, layer, last}",
        )


def _statements(graph: Map, part: str, problems: Problems) -> tuple[Statement, ...]:
    node = graph.get(part)
    if node is None:
        return ()
    if not isinstance(node, List):
        problems.add(node.place, f"'{part}' is a list of statements", "write - name = expression")
        return ()
    found = []
    for item in node.items:
        with problems:
            if isinstance(item, (Map, List)):
                raise item.place.error(
                    "a statement is one line of text", "quote it if it holds ': ' or starts with [ or {"
                )
            found.append(parse_statement(item))
    return tuple(found)
