"""Expressions and statements: parsed by Python's own parser, never run by it.

    statement : NAME {"," NAME} "=" expr {"," expr}
    expr      : + - * / // % **, - and not, comparisons, and/or, x if c else y, NAME, constants,
                CALL(args, name=args), "$" NAME

"$w" becomes "_w" before parsing: the same width, so that columns in errors stay right. Names of users may
not begin with "_". `Evaluator` computes scalars; the graph builder extends it by tensors.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from pagec.compiler.errors import SpecError
from pagec.compiler.spec.source import Place, Scalar, almost_float

MAX_TEXT: Final = 2000
MAX_DEPTH: Final = 60
MAX_INT: Final = 2**63 - 1
WORDS: Final[Mapping[str, bool | None]] = {"none": None, "true": True, "false": False}

_WEIGHT: Final = re.compile(r"""('[^']*'|"[^"]*")|\$(?=[A-Za-z_])""")


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression and the scalar that it was written as."""

    tree: ast.expr
    scalar: Scalar

    def place(self, node: ast.AST | None = None) -> Place:
        """Where a part of the expression stands."""
        return _place(self.scalar, node)

    def error(self, node: ast.AST | None, message: str, remedy: str = "") -> SpecError:
        return self.place(node).error(message, remedy)

    def names(self) -> Iterator[ast.Name]:
        """Names of values and params in it (not those of weights and ops)."""
        called = {id(n.func) for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id[0] != "_" and id(node) not in called:
                yield node

    def weights(self) -> Iterator[ast.Name]:
        """References `$w` in it; `weight_name` gives the name."""
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id[0] == "_")


@dataclass(frozen=True, slots=True)
class Statement:
    """`targets` = `values`: one value each, or one call with as many results."""

    targets: tuple[str, ...]
    values: tuple[Expression, ...]
    scalar: Scalar


def weight_name(node: ast.Name) -> str:
    return node.id[1:]


def parse_expression(scalar: Scalar) -> Expression:
    """The expression that a scalar holds; a number, true, null stand for themselves."""
    if not isinstance(scalar.value, str):
        return Expression(ast.Constant(scalar.value), scalar)
    better = almost_float(scalar.value)
    if better:
        raise scalar.place.error(f"YAML reads {scalar.value} as a string, not as a number", f"write {better}")
    tree = _parse(scalar, "eval")
    assert isinstance(tree, ast.Expression)
    return Expression(tree.body, scalar)


def parse_statement(scalar: Scalar) -> Statement:
    """The statement that a scalar holds."""
    remedy = "write it as: name = expression"
    if not isinstance(scalar.value, str):
        raise scalar.place.error(f"{scalar.value!r} is not a statement", remedy)
    tree = _parse(scalar, "exec")
    assert isinstance(tree, ast.Module)
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assign) or len(tree.body[0].targets) != 1:
        raise scalar.place.error("a statement is one assignment", remedy)
    left, right = tree.body[0].targets[0], tree.body[0].value
    targets = left.elts if isinstance(left, ast.Tuple) else [left]
    names = []
    for target in targets:
        if not isinstance(target, ast.Name) or target.id.startswith("_"):
            raise _place(scalar, target).error("only names can be assigned to", remedy)
        names.append(target.id)
    if len(set(names)) != len(names):
        raise scalar.place.error("a name is assigned twice in one statement", "use different names")
    values = right.elts if isinstance(right, ast.Tuple) else [right]
    if len(values) not in (1, len(names)):
        raise _place(scalar, right).error(f"{len(values)} values for {len(names)} names", remedy)
    return Statement(tuple(names), tuple(Expression(v, scalar) for v in values), scalar)


def _place(scalar: Scalar, node: ast.AST | None) -> Place:
    if not isinstance(scalar.value, str) or getattr(node, "lineno", 2) != 1:
        return scalar.place
    assert isinstance(node, ast.expr)
    before = scalar.value.encode(errors="replace")[: node.col_offset]  # Python counts bytes
    return scalar.at(len(before.decode(errors="ignore")))


def _parse(scalar: Scalar, mode: str) -> ast.AST:
    text = str(scalar.value)
    if len(text) > MAX_TEXT:
        raise scalar.place.error(f"{len(text)} characters in one expression", "split it into several")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(_WEIGHT.sub(lambda m: m[1] or "_", text), mode=mode)
    except SyntaxError as error:
        offset = max((error.offset or 1) - 1, 0) if error.lineno == 1 else 0
        message = f"cannot be read: {(error.msg or 'invalid syntax').split('. Perhaps')[0]}"
        raise scalar.at(offset).error(
            message, "see the spec language for what an expression may hold"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise scalar.place.error(f"cannot be read: {error}", "write a plain, shorter expression") from None
    _check_depth(tree, scalar)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id[0] == "_" and not _is_weight(scalar, node):
            raise _place(scalar, node).error(
                f"the name {node.id!r} begins with '_'",
                "names begin with a letter; a weight is written $name",
            )
    return tree


def _check_depth(tree: ast.AST, scalar: Scalar) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise scalar.place.error("nested too deeply", "split it into several")


def _is_weight(scalar: Scalar, node: ast.Name) -> bool:
    lines = str(scalar.value).encode(errors="replace").splitlines()
    return node.lineno <= len(lines) and lines[node.lineno - 1][node.col_offset :][:1] == b"$"


def suggestion(name: str, known: Iterator[str] | list[str] | set[str]) -> str:
    """A remedy for an unknown name."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}" if names else ""


# ------------------------------------------------------------------------------------ evaluation

_ARITHMETIC: Final[Mapping[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", lambda a, b: _power(a, b)),
}
_ORDER: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def is_number(value: object) -> bool:
    """Whether a scalar is a number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def show(value: object) -> str:
    """A value as a spec would write it, for messages."""
    return f"{_written(value):.80}"


def _written(value: object) -> str:
    words = {None: "none", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_written(entry)}' for key, entry in value.items())}}}"
    return repr(value)


def _power(a: float, b: float) -> Any:
    # Whole powers stay whole; others are floats at once, so that no huge integer is ever formed.
    if isinstance(a, int) and isinstance(b, int) and 0 <= b <= 64:
        return a**b
    return float(a) ** float(b)


class Evaluator:
    """Computes one expression over scalars. `lookup` gives the value of a name, or raises SpecError.

    Subclasses add weights, calls and arithmetic over other kinds of values.
    """

    def __init__(self, expression: Expression, lookup: Callable[[Expression, ast.Name], Any]) -> None:
        self.expression = expression
        self.lookup = lookup

    def run(self) -> Any:
        return self.visit(self.expression.tree)

    def error(self, node: ast.AST, message: str, remedy: str = "") -> SpecError:
        return self.expression.error(node, message, remedy)

    def visit(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return self.constant(node)
            case ast.Name():
                return self.weight(node) if node.id[0] == "_" else self.name(node)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return self.binary(node, self.visit(node.left), self.visit(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return self.negative(node, self.visit(node.operand))
            case ast.UnaryOp(op=ast.Not()):
                return not self.condition(node.operand)
            case ast.Compare():
                return self.compare(node)
            case ast.BoolOp(op=ast.And()):
                return all(self.condition(value) for value in node.values)
            case ast.BoolOp():
                return any(self.condition(value) for value in node.values)
            case ast.IfExp():
                return self.choose(node)
            case ast.Call():
                return self.call(node)
        raise self.error(
            node,
            f"{_kind(node)} is not part of an expression",
            "use + - * / // % **, comparisons, and, or, not, x if c else y, and calls of ops",
        )

    def constant(self, node: ast.Constant) -> Any:
        value = node.value
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            return self.checked(node, value)
        raise self.error(node, f"{value!r:.40} is not a scalar", "use a number, 'text', true, false or none")

    def name(self, node: ast.Name) -> Any:
        return WORDS[node.id] if node.id in WORDS else self.lookup(self.expression, node)

    def weight(self, node: ast.Name) -> Any:
        raise self.error(node, f"${weight_name(node)} cannot stand in a scalar", "use weights in the graph")

    def call(self, node: ast.Call) -> Any:
        raise self.error(node, "nothing can be called in a scalar", "use ops in the graph")

    def choose(self, node: ast.IfExp) -> Any:
        return self.visit(node.body if self.condition(node.test) else node.orelse)

    def condition(self, node: ast.expr) -> bool:
        """A condition is true, false, or none (false)."""
        value = self.visit(node)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.error(
            node, f"{self.shown(value)} is not true or false", "compare it, e.g. x > 0 or x != none"
        )

    def shown(self, value: Any) -> str:
        """A value as messages call it."""
        return show(value)

    def negative(self, node: ast.UnaryOp, value: Any) -> Any:
        return self.checked(node, -self.number(node.operand, value))

    def binary(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        symbol, function = _ARITHMETIC[type(node.op)]
        a, b = self.number(node.left, left), self.number(node.right, right)
        try:
            return self.checked(node, function(a, b))
        except (ArithmeticError, ValueError) as error:
            why = "too large" if isinstance(error, OverflowError) else str(error)
            raise self.error(node, f"{show(a)} {symbol} {show(b)}: {why}", "check the numbers") from None

    def number(self, node: ast.expr, value: Any) -> Any:
        if is_number(value):
            return value
        raise self.error(node, f"{show(value)} is not a number", "arithmetic takes numbers")

    def checked(self, node: ast.AST, value: Any) -> Any:
        """A result that is a finite number of ordinary size."""
        if isinstance(value, complex):
            raise self.error(node, "a root of a negative number", "check the numbers")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(node, "not a finite number", "check the numbers")
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise self.error(node, "a whole number beyond 64 bits", "check the numbers")
        return value

    def compare(self, node: ast.Compare) -> bool:
        operands = [node.left, *node.comparators]
        values = [self.visit(operand) for operand in operands]
        return all(
            self._compare_two(op, operands[i : i + 2], values[i : i + 2]) for i, op in enumerate(node.ops)
        )

    def _compare_two(self, op: ast.cmpop, nodes: list[ast.expr], values: list[Any]) -> bool:
        for node, value in zip(nodes, values, strict=True):
            if value is not None and not isinstance(value, (bool, int, float, str)):
                raise self.error(node, "only scalars can be compared", "compare numbers, words or none")
        if isinstance(op, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
            return bool(values[0] == values[1]) == isinstance(op, (ast.Eq, ast.Is))
        if type(op) not in _ORDER:
            raise self.error(nodes[0], "this comparison is not part of the language", "use == != < <= > >=")
        return bool(_ORDER[type(op)](*(self.number(n, v) for n, v in zip(nodes, values, strict=True))))


def _kind(node: ast.AST) -> str:
    names = {
        "Attribute": "x.y",
        "Subscript": "x[y]",
        "Lambda": "lambda",
        "Tuple": "a tuple",
        "List": "a list",
        "Dict": "a map",
        "Starred": "*x",
        "JoinedStr": "an f-string",
    }
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return f"the operator {type(node.op).__name__}"
    return names.get(type(node).__name__, type(node).__name__)
