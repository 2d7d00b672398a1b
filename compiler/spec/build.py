"""Builds a model's graph: statements over params and weights become nodes over typed values.

    layer:                                       nodes (layer 0 of two)
    - h = rmsnorm(x, $attn_norm, eps=norm_eps)   %l0.h = rmsnorm(%x, $l0.attn_norm, eps=1e-06)
    - q = heads_of(linear(h, $q), head_dim)      %l0.q.linear = linear(%l0.h, $l0.q)
                                                 %l0.q = heads_of(%l0.q.linear, head_dim=64)
    - x = x + linear(q, $o)                      %l0.x.linear = linear(%l0.q, $l0.o)
                                                 %l0.x = add(%x, %l0.x.linear)

A name that is bound again gets a suffix (.1, .2); a part of an expression is named after the statement's
value and the op. Arithmetic over scalars is done here; absent weights and none leave no trace.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pagec.compiler import ops
from pagec.compiler.errors import SpecError
from pagec.compiler.ir import Attr, Graph, Node, Type, ValueType
from pagec.compiler.rope import RopeError, checked_attrs
from pagec.compiler.spec.expr import Evaluator, Expression, Statement, is_number, show, weight_name
from pagec.compiler.spec.model import ModelSpec
from pagec.compiler.spec.names import RESULT
from pagec.compiler.spec.scope import STEP_INPUTS, Scope
from pagec.compiler.spec.source import Place, Problems

_ID: Final = Type("T", (), "i32")
# Op for `left ? right`, and for the same with the operands changed round.
_OPS: Final[Mapping[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("add", "add"),
    ast.Sub: ("sub", "rsub"),
    ast.Mult: ("mul", "mul"),
    ast.Div: ("div", "rdiv"),
}
# Ops that give their first operand where this scalar is none.
_IDENTITY_IF_NONE: Final = {"softcap": "cap"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value ("%x") or a weight ("$w") while the graph is built."""

    reference: str
    type: Type

    @property
    def is_weight(self) -> bool:
        return self.reference[0] == "$"


@dataclass(frozen=True, slots=True)
class Absent:
    """A weight whose `when` does not hold."""

    name: str

    def __repr__(self) -> str:
        return f"${self.name}, which is absent here"


class _Broken:
    """The value of a statement that has a mistake: what follows from it is not reported again."""


def build_graph(spec: ModelSpec) -> Graph:
    """The model as a graph over one step's tokens; SpecError lists every statement that does not fit.

    Inputs are tokens, positions, sequences [T]; the output is logits [T, vocab], float32.
    """
    builder = _Builder(spec)
    try:
        return builder.build()
    except RecursionError:
        raise Place(spec.name, "graph", 0, 0).error(
            "nested too deeply", "write plainer expressions"
        ) from None


class _Builder:
    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.problems = Problems()
        self.nodes: list[Node] = []
        self.types: dict[str, ValueType] = dict.fromkeys(STEP_INPUTS, _ID)
        self.weights: dict[str, Type] = {}
        self.bound: dict[str, Any] = {name: Tensor(f"%{name}", _ID) for name in STEP_INPUTS}
        self.taken: set[str] = set(STEP_INPUTS)
        self.choices: dict[str, int] = {}  # of how many experts each choice of top_k_of is
        self.layer: int | None = None
        self.scope = spec.scope()

    def build(self) -> Graph:
        parts = self.spec.outline
        self._statements(parts.first, None)
        for layer in range(self.spec.layers):
            self._statements(parts.layer, layer)
            if self.problems:
                break  # further layers would only repeat it
        self._statements(parts.last, None)
        self.problems.raise_if_any()
        self._check_result()
        result = self.bound[RESULT].reference[1:]
        graph = Graph(STEP_INPUTS, (RESULT,), _needed(self.nodes, result), self.types, self.weights)
        return _renamed(_pruned(graph), result)

    def _statements(self, statements: Sequence[Statement], layer: int | None) -> None:
        self.layer, self.scope = layer, self.spec.scope(layer)
        for statement in statements:
            values: Sequence[Any] = [_Broken()] * len(statement.targets)
            with self.problems:
                values = self._values(statement)
            self.bound.update(zip(statement.targets, values, strict=True))

    def _values(self, statement: Statement) -> Sequence[Any]:
        prefix = "" if self.layer is None else f"l{self.layer}."
        names = [self.new_name(prefix + target) for target in statement.targets]
        if len(statement.values) == len(names):
            values = [_Expression(e, self, [n]).run() for e, n in zip(statement.values, names, strict=True)]
        else:
            found = _Expression(statement.values[0], self, names).run()
            values = list(found) if isinstance(found, tuple) else [found]
            if found is None:  # in layers of this kind there is nothing of the sort
                values *= len(names)
            if len(values) != len(names):
                raise statement.values[0].error(
                    None, f"one value for {len(names)} names", "give each name a value of its own"
                )
        self.taken -= {name for name in names if name not in self.types}
        return values

    def new_name(self, base: str) -> str:
        """A name that no value has yet; it is taken from now on."""
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}.{count}"
        self.taken.add(name)
        return name

    def add(self, node: Node, types: Sequence[ValueType]) -> list[Tensor]:
        """Appends a node; its results."""
        self.nodes.append(node)
        self.types.update(zip(node.outputs, types, strict=True))
        return [Tensor(f"%{n}", t) for n, t in zip(node.outputs, types, strict=True) if isinstance(t, Type)]

    def weight(self, name: str) -> Tensor | Absent:
        found = self.spec.weight(name, self.layer)
        if found is None:
            return Absent(name)
        self.weights[found.name] = Type(None, found.shape, "f32")
        return Tensor(f"${found.name}", self.weights[found.name])

    def _check_result(self) -> None:
        last = self.spec.outline.last[-1].scalar.place
        found, wanted = self.bound[RESULT], Type("T", (self.spec.vocab,), "f32")
        if not isinstance(found, Tensor) or found.is_weight or found.type != wanted:
            what = str(found.type) if isinstance(found, Tensor) else show(found)
            raise last.error(
                f"the logits are {what}, not {wanted}", "end with a linear that gives vocab elements"
            )


def _needed(nodes: Sequence[Node], result: str) -> tuple[Node, ...]:
    """The nodes that the result is made from: a layer may bind values that only others use."""
    needed, kept = {result}, []
    for node in reversed(nodes):
        if needed & set(node.outputs):
            needed |= set(node.values())
            kept.append(node)
    return tuple(reversed(kept))


def _pruned(graph: Graph) -> Graph:
    """Without the types and weights of what is not there."""
    made = {name for node in graph.nodes for name in node.outputs} | set(graph.inputs)
    read = {name for node in graph.nodes for name in node.weights()}
    return replace(
        graph,
        types={name: t for name, t in graph.types.items() if name in made},
        weights={name: t for name, t in graph.weights.items() if name in read},
    )


def _renamed(graph: Graph, result: str) -> Graph:
    """The graph with its result named "logits"; another value of that name gives way."""
    if result == RESULT:
        return graph
    names = {result: RESULT, RESULT: result}

    def new(reference: str) -> str:
        return reference[0] + names.get(reference[1:], reference[1:]) if reference[0] == "%" else reference

    nodes = [
        replace(n, inputs=tuple(map(new, n.inputs)), outputs=tuple(names.get(o, o) for o in n.outputs))
        for n in graph.nodes
    ]
    types = {names.get(name, name): t for name, t in graph.types.items()}
    return replace(graph, nodes=tuple(nodes), types=types)


class _Expression(Evaluator):
    """Evaluates one expression into nodes; its result gets `names`."""

    def __init__(self, expression: Expression, builder: _Builder, names: list[str]) -> None:
        super().__init__(expression, partial(_lookup, builder.bound, builder.scope))
        self.builder = builder
        self.names = names
        self.top: ast.expr = expression.tree  # the part whose result is the statement's

    def weight(self, node: ast.Name) -> Tensor | Absent:
        return self.builder.weight(weight_name(node))

    def choose(self, node: ast.IfExp) -> Any:
        chosen = node.body if self.condition(node.test) else node.orelse
        return self.instead(node, chosen)

    def instead(self, node: ast.expr, other: ast.expr) -> Any:
        """The value of `other`, which takes the place of `node`."""
        if node is self.top:
            self.top = other
        return self.visit(other)

    def negative(self, node: ast.UnaryOp, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_weight:
            return self.emit(node, "mul", [value], {"scalar": -1.0})
        return super().negative(node, value)

    def shown(self, value: Any) -> str:
        return _describe(value) if isinstance(value, Tensor) else show(value)

    def number(self, node: ast.expr, value: Any) -> Any:
        if isinstance(value, Absent):
            raise self.error(
                node, f"${value.name} is absent here", "give it to an op that takes none, or mend 'when'"
            )
        if isinstance(value, Tensor):
            raise self.error(node, f"{_describe(value)} is not a number", "only + - * / take tensors")
        return super().number(node, value)

    def binary(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        tensors = [v for v in (left, right) if isinstance(v, Tensor)]
        if not tensors or type(node.op) not in _OPS:
            return super().binary(node, left, right)
        name, turned = _OPS[type(node.op)]
        if not isinstance(left, Tensor) or (left.is_weight and isinstance(right, Tensor)):
            name, left, right = turned, right, left
            where = node.left
        else:
            where = node.right
        if left.is_weight:
            raise self.error(node, "arithmetic over weights alone", "one operand must be a value")
        if isinstance(right, Tensor):
            if name == "mul" and not right.is_weight and left.type.rows == right.type.rows:
                left, right = sorted((left, right), key=lambda t: t.type.inner == (1,))
                if right.type.inner == (1,) != left.type.inner:
                    return self._weighed(node, left, right)
            return self.emit(node, name, [left, right], {})
        scalar = float(self.number(where, right))
        if name == "div" and scalar == 0:
            raise self.error(where, "a division by zero", "check the numbers")
        return self.emit(node, name, [left], {"scalar": scalar})

    def _weighed(self, node: ast.BinOp, x: Tensor, weight: Tensor) -> Any:
        """x[T,D] times weight[T,1]: the sum of x alone, weighted."""
        if len(x.type.inner) != 1:
            return self.emit(node, "mul", [x, weight], {})  # which says that the shapes differ
        group = self.emit(node.left, "heads_of", [x], {"head_dim": x.type.inner[0]})
        return self.emit(node, "weighted_sum", [group, weight], {})

    def call(self, node: ast.Call) -> Any:
        assert isinstance(node.func, ast.Name)
        op = ops.OPS[node.func.id]
        given = self._arguments(node, op)
        identity = _IDENTITY_IF_NONE.get(op.name)
        if identity is not None and self.visit(given[identity]) is None:
            return self.instead(node, given[op.params[0].name])
        if op.name == "rope" and self.visit(given["rope"]) is None:  # a layer without positions
            return tuple(self._tensor(given[p.name], op, p) for p in op.params[:2])
        inputs = self._inputs(node, op, given)
        attrs: dict[str, Attr] = {}
        for param in op.params:
            if param.kind == "rope":
                attrs |= self._rope(given[param.name])
            elif param.kind == "scalar" and param.name in given:
                value = self._scalar(given[param.name], param)
                if value != param.default:
                    attrs[param.name] = value
        if op.name == "expert_linear":
            self._check_choice(node, *inputs[1:3])
        result = self.emit(node, op.name, inputs, attrs)
        if op.name == "top_k_of":
            self.builder.choices[result[1].reference] = inputs[0].type.inner[0]
        return result

    def _check_choice(self, node: ast.Call, weight: Tensor, choice: Tensor) -> None:
        """A choice among more experts than there are would read past them."""
        count = self.builder.choices.get(choice.reference)
        if count is not None and len(weight.type.inner) == 3 and weight.type.inner[0] != count:
            raise self.error(
                node,
                f"expert_linear: {weight.reference} has {weight.type.inner[0]} experts, "
                f"the choice is among {count}",
                "let 'stack' and the router's shape agree",
            )

    def _arguments(self, node: ast.Call, op: ops.Op) -> dict[str, ast.expr]:
        """The arguments by their parameters' names."""
        params = [p for p in op.params if p.kind != "step"]
        form = f"{op.name}({', '.join(p.name + ('' if p.default is ops.REQUIRED else '?') for p in params)})"
        if len(node.args) > len(params):
            raise self.error(
                node, f"{op.name} takes at most {len(params)} arguments, not {len(node.args)}", form
            )
        given = {param.name: value for param, value in zip(params, node.args, strict=False)}
        for keyword in node.keywords:
            if keyword.arg not in {p.name for p in params}:
                raise self.error(keyword.value, f"{op.name} has no parameter {keyword.arg!r}", form)
            if keyword.arg in given:
                raise self.error(keyword.value, f"{keyword.arg!r} is given twice", form)
            given[keyword.arg] = keyword.value
        missing = [p.name for p in params if p.default is ops.REQUIRED and p.name not in given]
        if missing:
            raise self.error(node, f"{op.name} needs {', '.join(missing)}", form)
        return given

    def _inputs(self, node: ast.Call, op: ops.Op, given: Mapping[str, ast.expr]) -> list[Tensor]:
        """The tensors in the op's order; absent ones may only come last."""
        found: list[Tensor | None] = []
        for param in op.tensor_params():
            if param.kind == "step":
                found.append(self.builder.bound[param.name])
            else:
                found.append(self._tensor(given[param.name], op, param) if param.name in given else None)
        while found and found[-1] is None:
            found.pop()
        tensors = [tensor for tensor in found if tensor is not None]
        if len(tensors) != len(found):
            param = op.tensor_params()[found.index(None)]
            raise self.error(
                node,
                f"{op.name}'s {param.name} is absent, and a later one is given",
                "give it, or leave out both",
            )
        return tensors

    def _tensor(self, node: ast.expr, op: ops.Op, param: ops.Param) -> Tensor | None:
        value = self.visit(node)
        if value is None or isinstance(value, Absent):
            if param.default is None:
                return None
            what = f"${value.name} is absent here" if value else "none"
            raise self.error(
                node, f"{op.name} needs its {param.name}: {what}", "give a tensor, or mend 'when'"
            )
        if not isinstance(value, Tensor):
            raise self.error(
                node, f"{op.name}'s {param.name} is {show(value)}, not a tensor", "give a tensor"
            )
        if param.kind != "either" and value.is_weight != (param.kind == "weight"):
            wanted = "a weight, written $name" if param.kind == "weight" else "a value, not a weight"
            raise self.error(node, f"{op.name}'s {param.name} is {_describe(value)}", f"give {wanted}")
        return value

    def _scalar(self, node: ast.expr, param: ops.Param) -> Attr:
        value = self.visit(node)
        if value is None and param.default is None:
            return None
        if param.type == "activation" and isinstance(value, str) and value in ops.ACTIVATIONS:
            return ops.ACTIVATIONS[value]
        if (
            param.type in ("number", "positive")
            and is_number(value)
            and (param.type == "number" or value > 0)
        ):
            return float(value)
        fits = {
            "size": isinstance(value, int) and is_number(value) and value > 0,
            "flag": isinstance(value, bool),
            "word": isinstance(value, str),
            "any": value is None or isinstance(value, (bool, int, float, str)),
        }
        if fits.get(param.type):
            assert value is None or isinstance(value, (bool, int, float, str))
            return value
        raise self.error(
            node,
            f"{param.name} is {self.shown(value)}, not {_WANTED[param.type]}",
            self.builder.scope.origin(node),
        )

    def _rope(self, node: ast.expr) -> dict[str, Attr]:
        value = self.visit(node)
        if not isinstance(value, dict):
            raise self.error(
                node, "rope's settings must be a map", "give a param like {base: 10000.0, dims: head_dim}"
            )
        try:
            return checked_attrs(value, self.builder.spec.max_len, self.builder.scope.get("max_len"))
        except RopeError as error:
            settings = self.builder.scope.map_of(self.expression, node)
            if settings is None:
                raise self.error(node, str(error), error.remedy) from None
            place = settings.places.get(error.key) or settings.places.get("kind") or settings.place
            raise place.error(str(error), error.remedy) from None

    def emit(self, node: ast.expr, op: str, inputs: Sequence[Tensor], attrs: Mapping[str, Attr]) -> Any:
        """Appends a node; its result, or a tuple of results."""
        types = self._types(node, op, [tensor.type for tensor in inputs], attrs)
        is_top = node is self.top
        if len(types) != (len(self.names) if is_top else 1):
            count = len(self.names) if is_top else 1
            raise self.error(
                node, f"{op} gives {len(types)} values, not {count}", "bind each of them to a name"
            )
        names = self.names if is_top else [self.builder.new_name(f"{self.names[0]}.{op}")]
        results = self.builder.add(Node(op, tuple(t.reference for t in inputs), tuple(names), attrs), types)
        return results[0] if len(results) == 1 else tuple(results)

    def _types(
        self, node: ast.expr, op: str, types: Sequence[ValueType], attrs: Mapping[str, Attr]
    ) -> Sequence[ValueType]:
        try:
            found = ops.infer(op, types, attrs)
        except ops.ShapeError as error:
            raise self.error(node, f"{op}: {error}", "make the shapes of weights and values agree") from None
        except Exception as error:
            if op in ops.BUILT_IN:
                raise
            what = f"{op}: its shape rule fails: {type(error).__name__}: {error}"
            raise self.error(node, what, "mend the file of --ops") from error
        if not all(isinstance(t, Type) for t in found):
            raise self.error(node, f"{op}: its shape rule gives {found!r:.80}", "give a list of Type")
        return found


_WANTED: Final = {
    "number": "a number",
    "positive": "a number above zero",
    "size": "a positive whole number",
    "flag": "true or false",
    "word": "a word",
    "activation": f"an activation ({', '.join(ops.ACTIVATIONS)})",
    "any": "a scalar",
}


def _describe(tensor: Tensor) -> str:
    return f"{'the weight' if tensor.is_weight else 'a value of'} {tensor.type}"


def _lookup(bound: Mapping[str, Any], scope: Scope, expression: Expression, name: ast.Name) -> Any:
    if name.id not in bound:
        return scope.lookup(expression, name)
    value = bound[name.id]
    if isinstance(value, _Broken):
        raise SpecError([])
    return value
