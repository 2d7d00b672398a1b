"""Names in a spec: every one that is read must exist, every one that a file introduces must be read."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pagec.compiler.ops import OPS
from pagec.compiler.spec.expr import Expression, Statement, suggestion, weight_name
from pagec.compiler.spec.family import Document, section_of
from pagec.compiler.spec.outline import Outline
from pagec.compiler.spec.scope import INDEX, RESERVED, STEP_INPUTS
from pagec.compiler.spec.source import Node, Place, Problems, Scalar

# Params that the compiler itself reads.
SIZES: Final = ("vocab", "layers", "max_len")
RESULT: Final = "logits"


@dataclass(frozen=True, slots=True)
class Reach:
    """What the graph and the compiler use, directly or through other names."""

    params: frozenset[str]
    weights: frozenset[str]
    types: frozenset[str]


def reach(parts: Outline) -> Reach:
    """Follows names from the statements and from what the compiler reads."""
    weights = _reached_weights(parts)
    todo: list[str] = [*SIZES]
    for statement in parts.statements():
        todo += [name.id for value in statement.values for name in value.names()]
    for weight in weights:
        declared = parts.weights[weight]
        for node in declared.expressions():
            todo += _names(parts, node)
        if "stored" in declared.fields.entries:
            todo.append("head_dim")
    types = frozenset(parts.layer_types)
    params: set[str] = set()
    while todo:
        name = todo.pop()
        if name in params or name not in parts.params:
            continue
        params.add(name)
        todo += _names(parts, parts.params[name])
        for kind in types:
            if name in parts.types[kind].entries:
                todo += _names(parts, parts.types[kind].entries[name])
    return Reach(frozenset(params), frozenset(weights), types)


def _reached_weights(parts: Outline) -> set[str]:
    todo = [weight_name(w) for s in parts.statements() for value in s.values for w in value.weights()]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found and name in parts.weights:
            found.add(name)
            todo += parts.weights[name].targets()
    return found


def _names(parts: Outline, node: Node) -> list[str]:
    return [name.id for expression in parts.expressions.inside(node) for name in expression.names()]


def check_names(document: Document, parts: Outline, used: Reach) -> None:
    """SpecError lists all names that are read but unknown, required but missing, or introduced in vain."""
    problems = Problems()
    _check_required(parts, problems)
    for node in _scalar_parts(parts):
        for expression in parts.expressions.inside(node):
            _check_known(expression, parts, {*parts.params, INDEX}, problems)
    _check_statements(parts, problems)
    if not problems:
        _check_used(document, parts, used, problems)
    problems.raise_if_any()


def _check_required(parts: Outline, problems: Problems) -> None:
    section = section_of(parts.tree, "params")
    for name in [*dict.fromkeys((*parts.required, *SIZES))]:
        node = parts.params.get(name)
        if node is None or (isinstance(node, Scalar) and node.value is None):
            place = section.place if section.entries else parts.tree.place
            problems.add(place, f"the param {name!r} is required", f"add {name}: ... to params")


def _scalar_parts(parts: Outline) -> Iterable[Node]:
    yield from parts.params.values()
    yield from parts.types.values()
    for declared in parts.weights.values():
        yield from declared.expressions()


def _check_known(expression: Expression, parts: Outline, known: set[str], problems: Problems) -> None:
    for name in expression.names():
        if name.id not in known and name.id not in ("none", "true", "false"):
            problems.add(
                expression.place(name),
                f"{name.id!r} is not defined",
                suggestion(name.id, known | set(parts.params)),
            )


def _check_statements(parts: Outline, problems: Problems) -> None:
    known = {*parts.params, *STEP_INPUTS}
    bound: dict[str, Place] = {}
    read: set[str] = {RESULT}
    for statements, extra in ((parts.first, ()), (parts.layer, (INDEX,)), (parts.last, ())):
        for statement in statements:
            for value in statement.values:
                _check_known(value, parts, {*known, *extra}, problems)
                _check_weights_and_ops(value, parts, statements is parts.layer, problems)
                read |= {name.id for name in value.names()}
            _check_targets(statement, parts, problems)
            known |= set(statement.targets)
            bound.update(dict.fromkeys(statement.targets, statement.scalar.place))
    for statement in parts.statements():
        if not read & set(statement.targets):
            name = statement.targets[0]
            problems.add(statement.scalar.place, f"nothing uses {name!r}", "remove the statement, or use it")
    if RESULT not in {t for s in parts.last for t in s.targets}:
        place = parts.last[-1].scalar.place if parts.last else parts.tree.place
        problems.add(place, f"the graph gives no {RESULT!r}", f"end 'last' with {RESULT} = ...")


def _check_targets(statement: Statement, parts: Outline, problems: Problems) -> None:
    for name in statement.targets:
        if name in parts.params or name in RESERVED:
            what = "is a param" if name in parts.params else "has a meaning of its own"
            problems.add(statement.scalar.place, f"{name!r} {what}", "choose another name for the value")


def _check_weights_and_ops(
    expression: Expression, parts: Outline, in_layer: bool, problems: Problems
) -> None:
    for reference in expression.weights():
        name = weight_name(reference)
        if name not in parts.weights:
            problems.add(
                expression.place(reference),
                f"no weight is named {name!r}",
                suggestion(name, set(parts.weights)),
            )
        elif parts.weights[name].per_layer and not in_layer:
            problems.add(
                expression.place(reference),
                f"${name} belongs to the layers: its tensor's name has {{i}}",
                "use it in 'layer', or name one tensor",
            )
    known = {op.name for op in OPS.values() if not op.internal}
    for node in ast.walk(expression.tree):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name):
                problems.add(expression.place(node), "only ops can be called", "write op(arguments)")
            elif node.func.id not in known:
                problems.add(
                    expression.place(node.func),
                    f"no op is named {node.func.id!r}",
                    suggestion(node.func.id, known),
                )


def _check_used(document: Document, parts: Outline, used: Reach, problems: Problems) -> None:
    for section, names in (("params", used.params), ("weights", used.weights), ("types", used.types)):
        for name in section_of(parts.tree, section).entries:
            if name not in names and document.declares(section, name):
                place = section_of(document.own, section).places[name]
                others = set(section_of(parts.tree, section).entries) - {name}
                near = suggestion(name, others)
                remedy = near if near.startswith("did") else "remove it, or use it"
                problems.add(place, f"nothing uses the {section[:-1]} {name!r}", remedy)
