"""The code of a row-wise region, as lines of TVMScript.

A region's values all have the shape [rows, *groups, D]. For each row and group the columns are walked in
vectors, once per reduction and once more for what is left:

    walk 0      t0[c] = x0[c] + x1[c]; sum += t0[c]^2         up to the first norm
    stat[0] = 1 / sqrt(sum / D + eps)
    walk 1      out[c] = round(t0[c] * stat[0] * w[c])        what the norm's result is used for

Expressions are strings with `{c}` for the column. Every multiplication is a call that LLVM does not fuse
with an addition (see vector.ll), so that a region's bits do not depend on where it was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from pagec.compiler import ops
from pagec.compiler.backends.cpu.scalar import vector_code
from pagec.compiler.dims import WORD_ELEMENTS, padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.verifier import VIEWS

REDUCTIONS = frozenset({"rmsnorm", "layernorm", "softmax"})


@dataclass(slots=True)
class Walk:
    """One walk over a row's columns: `reset` before it, `lines` per vector, `after` it."""

    reset: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Code:
    """What the template needs: arrays in argument order, the walks, and the names behind the arrays.

    `gathers`: the array that says which row of another value a row reads, if any.
    """

    arrays: list[tuple[str, str]]
    args: list[str]
    walks: list[Walk]
    num_temporaries: int
    num_stats: int
    gathers: str
    pads: list[str]


class Region:
    """Writes the code of one fused.rowwise node for vectors of `lanes`; names of arrays get the prefix."""

    def __init__(self, node: Node, graph: Graph, lanes: int, prefix: str = "") -> None:
        self.node, self.graph, self.lanes, self.prefix = node, graph, lanes, prefix
        shape = graph.type(node.body[-1].outputs[0])
        self.inner = shape.inner
        self.width, self.padded = shape.inner[-1], padded_last(shape.inner)
        self.groups = prod(shape.inner[:-1])
        self.stride = row_stride(shape.inner)
        self.expressions: dict[str, str] = {}
        self.stored: set[str] = set()
        self.code = Code([], [], [Walk()], 0, 0, "", [])
        self.array_of: dict[str, str] = {}

    def build(self) -> Code:
        """The whole region's code."""
        for name in self.node.inputs:
            if name[0] == "$":
                self._weight(name[1:])
        for inner in self.node.body:
            if inner.op in VIEWS:
                continue
            self.expressions[inner.outputs[0]] = self._node(inner)
        for name in self.node.outputs:
            if name not in self.expressions:  # a view that is copied
                self.expressions[name] = self._row(name)
            if name not in self.stored:
                self._store(name)
        return self.code

    def params(self) -> dict[str, Any]:
        """The code as templates/cpu/rowwise.jinja takes it."""
        return {
            "groups": self.groups,
            "width": self.width,
            "padded": self.padded,
            "num_temporaries": self.code.num_temporaries,
            "num_stats": self.code.num_stats,
            "gathers": self.code.gathers,
            "walks": [asdict(walk) for walk in self.code.walks],
            "pads": self.code.pads,
        }

    # ------------------------------------------------------------------------------ operands

    def _array(self, argument: str, prefix: str, element: str) -> str:
        if argument not in self.array_of:
            prefix = self.prefix + prefix
            name = f"{prefix}{sum(n.startswith(prefix) for n, _ in self.code.arrays)}"
            self.array_of[argument] = name
            self.code.arrays.append((name, element))
            self.code.args.append(argument)
        return self.array_of[argument]

    def _weight(self, name: str) -> None:
        inner = self.graph.weights[name].inner
        if inner != (self.width,) and (inner != self.inner or len(inner) != 2):
            raise CompileError(
                f"is {self.graph.weights[name]}, not a vector of the last axis ({self.width} elements)",
                place=f"${name}",
            )
        array = self._array(f"weight:{name}", "w", "float32")
        group = f"g * {self.padded} + " if len(inner) == 2 and self.groups > 1 else ""
        self.expressions["$" + name] = f"{array}[T.ramp({group}{{c}}, 1, {self.lanes})]"

    def _operand(self, reference: str) -> str:
        name = reference if reference[0] == "$" else reference[1:]
        if name not in self.expressions:
            self.expressions[name] = self._row(name)
        return self.expressions[name]

    def _row(self, name: str) -> str:
        """A row that lies in memory, read in place through its views."""
        base, row, offset = self._place(name)
        return self._load(f"value:{base}", self.graph.type(base), row, offset)

    def _place(self, name: str) -> tuple[str, str, int]:
        """Behind views: the value that lies in memory, which row of it, and where in the row."""
        row, offset = "row", 0
        views = {v.outputs[0]: v for v in self.node.body if v.op in VIEWS}
        while name in views:
            view = views[name]
            name = next(view.values())
            if view.op == "take_rows":
                self.code.gathers = self._array(f"value:{view.inputs[1][1:]}", "rows", "int32")
                row = "source"
            elif view.op == "slice":
                start = view.attrs["start"]
                assert isinstance(start, int)
                offset += start * padded_last(self.graph.type(name).inner)
        return name, row, offset

    def _load(self, argument: str, t: Type, row: str, offset: int) -> str:
        unit = WORD_ELEMENTS[t.dtype]
        array = self._array(argument, "x", "float32" if unit == 1 else "int32")
        column = self._column(row_stride(t.inner), row, offset)
        if unit == 1:
            return f"{array}[T.ramp({column}, 1, {self.lanes})]"
        return self._call("from_bf16", f"{array}[T.ramp(({column}) // 2, 1, {self.lanes // 2})]")

    def _column(self, stride: int, row: str, offset: int = 0) -> str:
        group = f" + g * {self.padded}" if self.groups > 1 else ""
        return f"{row} * {stride}{f' + {offset}' if offset else ''}{group} + {{c}}"

    # ---------------------------------------------------------------------------- expressions

    def _call(self, name: str, *args: str, kind: str = "float32x") -> str:
        lanes = self.lanes // 2 if name == "to_bf16" else self.lanes
        return f'T.call_pure_extern("{kind}{lanes}", "pagec_{name}", {", ".join(args)})'

    def _splat(self, value: float) -> str:
        return f"T.broadcast(T.float32({value!r}), {self.lanes})"

    def _keep(self, expression: str) -> str:
        """With the padding past the last element held at zero."""
        if self.width == self.padded:
            return expression
        return self._call("keep", expression, f"{self.width} - ({{c}})")

    def _node(self, node: Node) -> str:
        match node.op:
            case "softmax":
                return self._softmax(node)
            case "rmsnorm" | "layernorm":
                return self._norm(node)
            case "regroup":
                return self._regroup(node)
            case "weighted_sum":
                return self._weighted_sum(node)
        op = ops.OPS.get(node.op)
        if op is not None and op.scalar:
            return self._scalar(node, op)
        x = self._operand(node.inputs[0])
        match node.op:
            case "activation":
                return self._activation(x, str(node.attrs["name"]))
            case "softcap":
                cap = node.attrs["cap"]
                assert isinstance(cap, int | float)
                return self._call("mul", self._splat(cap), self._call("tanh", f"{x} / {self._splat(cap)}"))
            case "cast":
                return x if node.attrs["dtype"] == "f32" else self._rounded(node, x)
        if node.op in _ARITHMETIC:
            return self._arithmetic(node, x)
        raise CompileError(
            f"the CPU backend has no row-wise code for op {node.op!r}", remedy="give the op a template"
        )

    def _scalar(self, node: Node, op: ops.Op) -> str:
        """The scalar expression of a user's op."""
        operands = {p.name: self._operand(r) for p, r in zip(op.tensor_params(), node.inputs, strict=False)}
        for param in op.params:
            value = node.attrs.get(param.name, param.default)
            if param.kind == "scalar" and isinstance(value, int | float):
                operands[param.name] = self._splat(float(value))
        return vector_code(op.scalar, operands, self._call, self._splat, op.name)

    def _rounded(self, node: Node, x: str) -> str:
        """A rounded value, as float32; stores round again, which changes nothing."""
        later = [n for n in self.node.body if f"%{node.outputs[0]}" in n.inputs]
        return self._call("from_bf16", self._call("to_bf16", x, kind="int32x")) if later else x

    def _arithmetic(self, node: Node, x: str) -> str:
        if len(node.inputs) > 1:
            y = self._operand(node.inputs[1])
        else:
            scalar = node.attrs["scalar"]
            assert isinstance(scalar, int | float)
            y = self._splat(scalar)
        return _ARITHMETIC[node.op](self, x, y)

    def _activation(self, x: str, name: str) -> str:
        relu = self._call("max", x, self._splat(0.0))
        match name:
            case "relu":
                return relu
            case "relu2":
                return self._call("mul", relu, relu)
        return self._call(name, x)

    # ---------------------------------------------------------------------- rows of other shapes

    def _regroup(self, node: Node) -> str:
        """Groups that lie side by side in memory; what is read past a group's end is not kept."""
        base, row, offset = self._place(node.inputs[0][1:])
        t = self.graph.type(base)
        assert t.dtype == "f32"
        array = self._array(f"value:{base}", "x", "float32")
        column = f"{row} * {row_stride(t.inner)} + {offset} + g * {self.width} + {{c}}"
        return f"{array}[T.ramp({column}, 1, {self.lanes})]"

    def _weighted_sum(self, node: Node) -> str:
        """y[row, 0] w[row, 0] + y[row, 1] w[row, 1] + ..., in this order."""
        (y, y_row, y_at), (w, w_row, w_at) = (self._place(name[1:]) for name in node.inputs)
        y_inner = self.graph.type(y).inner
        y_array = self._array(f"value:{y}", "x", "float32")
        w_array = self._array(f"value:{w}", "x", "float32")
        w_start = f"{w_row} * {row_stride(self.graph.type(w).inner)} + {w_at}"
        total = ""
        for j in range(self.graph.type(node.inputs[0][1:]).inner[0]):
            column = f"{y_row} * {row_stride(y_inner)} + {y_at + j * padded_last(y_inner)} + {{c}}"
            part = f"{y_array}[T.ramp({column}, 1, {self.lanes})]"
            weight = f"T.broadcast({w_array}[{w_start} + {j}], {self.lanes})"
            total = self._call("fma", part, weight, total) if total else self._call("mul", part, weight)
        return total

    # ------------------------------------------------------------------------------ reductions

    def _softmax(self, node: Node) -> str:
        """e^(x - max) / sum, in three walks."""
        x = self._materialise(node.inputs[0][1:])
        top = self._reduced(
            "max", self._call("mask", x, "{c}", "0", str(self.width - 1)), "T.float32('-inf')"
        )
        shifted = f"({x} - T.broadcast(stat[{top}], {self.lanes}))"
        power = self._temporary(self._call("exp", shifted))
        total = self._reduced("add", self._keep(power), "T.float32(0)")
        return f"({power} / T.broadcast(stat[{total}], {self.lanes}))"

    def _temporary(self, expression: str) -> str:
        """A scratch row that holds the expression from this walk on."""
        place = f"t{self.code.num_temporaries}[T.ramp({{c}}, 1, {self.lanes})]"
        self.code.num_temporaries += 1
        self.code.walks[-1].lines.append(f"{place} = {expression}")
        return place

    def _reduced(self, how: str, x: str, first: str) -> int:
        """The sum or the greatest of x over the row; it is in stat[returned index] in the next walk."""
        index = self.code.num_stats
        self.code.num_stats += 1
        walk = self.code.walks[-1]
        total = f"sum[T.ramp({index * self.lanes}, 1, {self.lanes})]"
        walk.reset.append(f"{total} = T.broadcast({first}, {self.lanes})")
        walk.lines.append(f"{total} = {f'{total} + {x}' if how == 'add' else self._call(how, total, x)}")
        walk.after.append(f'stat[{index}] = T.call_pure_extern("float32", "pagec_reduce_{how}", {total})')
        self.code.walks.append(Walk())
        return index

    def _norm(self, node: Node) -> str:
        x = self._materialise(node.inputs[0][1:])
        weights = [self._operand(name) for name in node.inputs[1:]]
        eps, offset = node.attrs["eps"], node.attrs.get("offset", 0)
        assert isinstance(eps, int | float)
        assert isinstance(offset, int | float)
        if node.op == "layernorm":
            mean = self._mean(x)
            x = f"({x} - T.broadcast(stat[{mean}], {self.lanes}))"
        scale = self._mean(x, squared=True, inverse_root=repr(float(eps)))
        y = self._call("mul", x, f"T.broadcast(stat[{scale}], {self.lanes})")
        if weights:
            w = f"({weights[0]} + {self._splat(float(offset))})" if offset else weights[0]
            y = self._call("mul", y, w)
        return f"({y} + {weights[1]})" if len(weights) > 1 else y

    def _materialise(self, name: str) -> str:
        """A value that is walked more than once: computed once, kept in an output or a scratch row."""
        expression = self._operand("%" + name)
        if "pagec_" not in expression and "(" not in expression.replace("T.ramp(", ""):
            return expression  # already in memory
        if name in self.node.outputs and self.graph.type(name).dtype == "f32":
            self._store(name)
            self.expressions[name] = self._load(f"value:{name}", self.graph.type(name), "row", 0)
        else:
            self.expressions[name] = self._temporary(expression)
        return self.expressions[name]

    def _mean(self, x: str, *, squared: bool = False, inverse_root: str = "") -> int:
        """The mean of x (or x^2) over the row's D elements; it is in stat[returned index] afterwards.

        `inverse_root`: 1 / sqrt(mean + this) instead.
        """
        index = self.code.num_stats
        self.code.num_stats += 1
        walk = self.code.walks[-1]
        total = f"sum[T.ramp({index * self.lanes}, 1, {self.lanes})]"
        kept = self._keep(x)
        walk.reset.append(f"{total} = {self._splat(0.0)}")
        walk.lines.append(
            f"{total} = {self._call('fma', kept, kept, total) if squared else f'{total} + {kept}'}"
        )
        mean = f'T.call_pure_extern("float32", "pagec_reduce_add", {total}) / T.float32({self.width})'
        if inverse_root:
            mean = f"T.float32(1) / T.sqrt({mean} + T.float32({inverse_root}))"
        walk.after.append(f"stat[{index}] = {mean}")
        self.code.walks.append(Walk())
        return index

    # ---------------------------------------------------------------------------------- stores

    def _store(self, name: str) -> None:
        t = self.graph.type(name)
        unit = WORD_ELEMENTS[t.dtype]
        array = self._array(f"value:{name}", "x", "float32" if unit == 1 else "int32")
        column = self._column(self.stride, "row")
        value = self._keep(self.expressions[name])
        if unit == 1:
            line = f"{array}[T.ramp({column}, 1, {self.lanes})] = {value}"
        else:
            rounded = self._call("to_bf16", value, kind="int32x")
            line = f"{array}[T.ramp(({column}) // 2, 1, {self.lanes // 2})] = {rounded}"
        self.code.walks[-1].lines.append(line)
        self.stored.add(name)
        if self.groups * self.padded < self.stride:
            zero = "T.float32(0)" if unit == 1 else "0"
            words = (self.stride - self.groups * self.padded) // unit
            start = f"row * {self.stride // unit} + {self.groups * self.padded // unit}"
            self.code.pads.append(f"for c in range({words}):")
            self.code.pads.append(f"    {array}[{start} + c] = {zero}")


_ARITHMETIC: dict[str, Callable[[Any, str, str], str]] = {
    "add": lambda _, x, y: f"({x} + {y})",
    "sub": lambda _, x, y: f"({x} - {y})",
    "mul": lambda region, x, y: region._call("mul", x, y),
    "div": lambda _, x, y: f"({x} / {y})",
    "rsub": lambda _, x, y: f"({y} - {x})",
    "rdiv": lambda _, x, y: f"({y} / {x})",
}
