"""The code of row-wise work, as lines of Triton: one tensor for each value of a region.

    x0 = tl.load(a0 + row * 576 + column).to(tl.float32)
    t0 = x0 + x1
    t1 = 1 / tl.sqrt_rn(tl.sum(t0 * t0, 1, keep_dims=True) / 576 + 1e-05)
    t2 = t0 * t1 * w0

Products and sums are fused nowhere (see build.py), so that a region's bits do not depend on where it was cut.
Who uses it gives the meaning of `row`, `column` and, where some columns are no elements, `inside`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagec.compiler.backends.cuda.emit import ELEMENTS
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import Graph, Node
from pagec.compiler.verifier import VIEWS

LOG2_E: Final = 1.4426950408889634

_ARITHMETIC: Final[Mapping[str, str]] = {
    "add": "{x} + {y}",
    "sub": "{x} - {y}",
    "mul": "{x} * {y}",
    "div": "{x} / {y}",
    "rsub": "{y} - {x}",
    "rdiv": "{y} / {x}",
}
# tanh x = (1 - e^-2|x|) / (1 + e^-2|x|), with x's sign.
_TANH: Final = "tl.where({x} < 0, {e} - 1, 1 - {e}) / (1 + {e})"
_SIGMOID: Final = f"1 / (1 + tl.exp2({{x}} * {-LOG2_E}))"
_GELU_INNER: Final = "0.7978845608028654 * ({x} + 0.044715 * {x} * {x} * {x})"


class Values:
    """Writes the lines of a fused node's body. `masked`: some columns are no elements."""

    def __init__(self, node: Node, graph: Graph, *, masked: bool) -> None:
        self.node, self.graph, self.masked = node, graph, masked
        self.lines: list[str] = []
        self.arrays: list[tuple[str, str]] = []
        self.args: list[str] = []
        self.known: dict[str, str] = {}
        self.num_temporaries = 0
        self.width = graph.type(node.outputs[0]).inner[-1]

    def compute(self, nodes: tuple[Node, ...]) -> None:
        """The lines of these nodes of the body."""
        for node in nodes:
            if node.op not in VIEWS:
                self.known[node.outputs[0]] = self._node(node)

    def store(self, name: str, limit: str = "") -> None:
        """Stores a value; `limit`: the mask of what is stored. Padding is stored as zero."""
        t = self.graph.type(name)
        array = self._array(f"value:{name}", "out", t.dtype)
        value = self.known[name]
        if self.masked:
            value = f"tl.where(inside, {value}, 0.0)"
        place = self.place(row_stride(t.inner), "row", 0)
        mask = f", mask={limit}" if limit else ""
        self.lines.append(f"tl.store({array} + {place}, {self._as(value, t.dtype)}{mask})")

    # ----------------------------------------------------------------------------- operands

    def place(self, stride: int, row: str, offset: int) -> str:
        """Where the elements lie in an array whose rows are `stride` apart."""
        return f"{row} * {stride}{f' + {offset}' if offset else ''} + column"

    def weight_place(self, inner: tuple[int, ...]) -> str:
        """Where the elements of a weight lie."""
        if inner != (self.width,):
            raise CompileError(
                f"a weight of {inner} is no vector of the last axis ({self.width} elements)",
                place=f"%{self.node.outputs[0]}",
            )
        return "column"

    def operand(self, reference: str) -> str:
        """The variable that holds a value or a weight."""
        name = reference if reference[0] == "$" else reference[1:]
        if name not in self.known:
            self.known[name] = self._weight(name[1:]) if name[0] == "$" else self._row(name)
        return self.known[name]

    def _array(self, argument: str, prefix: str, element: str) -> str:
        if argument in self.args:
            return self.arrays[self.args.index(argument)][0]
        name = f"{prefix}{sum(known.startswith(prefix) for known, _ in self.arrays)}"
        self.arrays.append((name, element))
        self.args.append(argument)
        return name

    def _weight(self, name: str) -> str:
        array = self._array(f"weight:{name}", "vector", "f32")
        return self._load(array, self.weight_place(self.graph.weights[name].inner), "f32")

    def _row(self, name: str) -> str:
        """A row in memory, read through its views."""
        base, row, offset = self._behind_views(name)
        t = self.graph.type(base)
        array = self._array(f"value:{base}", "from", t.dtype)
        return self._load(array, self.place(row_stride(t.inner), row, offset), t.dtype)

    def _behind_views(self, name: str) -> tuple[str, str, int]:
        """The value that lies in memory, which row of it, and where in the row."""
        row, offset = "row", 0
        views = {v.outputs[0]: v for v in self.node.body if v.op in VIEWS}
        while name in views:
            view = views[name]
            name = next(view.values())
            if view.op == "take_rows":
                rows = self._array(f"value:{view.inputs[1][1:]}", "taken", "i32")
                row = f"tl.load({rows} + row).to(tl.int64)"
            elif view.op == "slice":
                start = view.attrs["start"]
                assert isinstance(start, int)
                offset += start * padded_last(self.graph.type(name).inner)
        return name, row, offset

    def _load(self, array: str, place: str, element: str) -> str:
        mask = ", mask=inside, other=0.0" if self.masked else ""
        convert = "" if element == "f32" else ".to(tl.float32)"
        return self.keep(f"tl.load({array} + {place}{mask}){convert}")

    def keep(self, expression: str) -> str:
        """A variable that holds the expression."""
        name = f"t{self.num_temporaries}"
        self.num_temporaries += 1
        self.lines.append(f"{name} = {expression}")
        return name

    def _as(self, value: str, element: str) -> str:
        if element == "f32":
            return value
        whole = value if value.isidentifier() or value.endswith(")") else f"({value})"
        return f"{whole}.to({ELEMENTS[element]})"

    # -------------------------------------------------------------------------------- nodes

    def _node(self, node: Node) -> str:
        match node.op:
            case "weighted_sum":
                return self._weighted_sum(node)
            case "regroup":
                return self._regroup(node)
        x = self.operand(node.inputs[0])
        match node.op:
            case "rmsnorm" | "layernorm":
                return self._norm(node, x)
            case "softmax":
                return self._softmax(x)
            case "activation":
                return self._activation(x, str(node.attrs["name"]))
            case "softcap":
                cap = node.attrs["cap"]
                return self.keep(f"{cap} * {self._tanh(self.keep(f'{x} / {cap}'))}")
            case "cast":
                return self._cast(node, x)
        if node.op in _ARITHMETIC:
            y = self.operand(node.inputs[1]) if len(node.inputs) > 1 else str(node.attrs["scalar"])
            return self.keep(_ARITHMETIC[node.op].format(x=x, y=y))
        raise CompileError(
            f"the NVIDIA backend has no row-wise code for op {node.op!r}", place=f"%{node.outputs[0]}"
        )

    def _weighted_sum(self, node: Node) -> str:
        """y[row, 0] w[row, 0] + y[row, 1] w[row, 1] + ..., in this order."""
        (y, y_row, y_at), (w, w_row, w_at) = (self._behind_views(name[1:]) for name in node.inputs)
        y_type, w_type = self.graph.type(y), self.graph.type(w)
        y_array = self._array(f"value:{y}", "from", y_type.dtype)
        w_array = self._array(f"value:{w}", "from", w_type.dtype)
        total = ""
        for j in range(self.graph.type(node.inputs[0][1:]).inner[0]):
            at = y_at + j * padded_last(y_type.inner)
            part = self._load(y_array, self.place(row_stride(y_type.inner), y_row, at), y_type.dtype)
            weight = self.keep(f"tl.load({w_array} + {w_row} * {row_stride(w_type.inner)} + {w_at + j})")
            total = self.keep(f"{total} + {part} * {weight}" if total else f"{part} * {weight}")
        return total

    def _regroup(self, node: Node) -> str:
        """Groups that lie side by side in memory."""
        base, row, offset = self._behind_views(node.inputs[0][1:])
        t = self.graph.type(base)
        array = self._array(f"value:{base}", "from", t.dtype)
        start = f"{row} * {row_stride(t.inner)}{f' + {offset}' if offset else ''}"
        return self._load(array, f"{start} + group * {self.width} + column", t.dtype)

    def _cast(self, node: Node, x: str) -> str:
        """A rounded value, as float32; stores round again, which changes nothing."""
        dtype = str(node.attrs["dtype"])
        later = any(f"%{node.outputs[0]}" in n.inputs for n in self.node.body)
        return self.keep(f"{self._as(x, dtype)}.to(tl.float32)") if later and dtype != "f32" else x

    def _tanh(self, x: str) -> str:
        falling = self.keep(f"tl.exp2(tl.abs({x}) * {-2 * LOG2_E})")
        return self.keep(_TANH.format(x=x, e=falling))

    def _activation(self, x: str, name: str) -> str:
        match name:
            case "silu":
                return self.keep(f"{x} / (1 + tl.exp2({x} * {-LOG2_E}))")
            case "sigmoid":
                return self.keep(_SIGMOID.format(x=x))
            case "tanh":
                return self._tanh(x)
            case "gelu":
                return self.keep(f"0.5 * {x} * (1 + tl.erf({x} * 0.7071067811865476))")
            case "gelu_tanh":
                return self.keep(f"0.5 * {x} * (1 + {self._tanh(self.keep(_GELU_INNER.format(x=x)))})")
            case "relu":
                return self.keep(f"tl.maximum({x}, 0.0)")
            case "relu2":
                relu = self.keep(f"tl.maximum({x}, 0.0)")
                return self.keep(f"{relu} * {relu}")
        raise CompileError(f"the NVIDIA backend has no activation {name!r}", place=self.node.outputs[0])

    # --------------------------------------------------------------------------- reductions

    def _only(self, x: str, other: str = "0.0") -> str:
        return f"tl.where(inside, {x}, {other})" if self.masked else x

    def _mean(self, x: str) -> str:
        return f"tl.sum({x}, 1, keep_dims=True) / {self.width}"

    def _norm(self, node: Node, x: str) -> str:
        eps, offset = node.attrs["eps"], node.attrs.get("offset", 0)
        assert isinstance(eps, int | float)
        if self.masked:
            x = self.keep(self._only(x))
        if node.op == "layernorm":
            mean = self.keep(self._mean(x))
            x = self.keep(self._only(f"{x} - {mean}"))
        scale = self.keep(f"1 / tl.sqrt_rn({self._mean(f'{x} * {x}')} + {float(eps)!r})")
        y = f"{x} * {scale}"
        weights = [self.operand(name) for name in node.inputs[1:]]
        if weights:
            y += f" * ({weights[0]} + {float(offset)!r})" if offset else f" * {weights[0]}"  # type: ignore[arg-type]
        return self.keep(f"{y} + {weights[1]}" if len(weights) > 1 else y)

    def _softmax(self, x: str) -> str:
        x = self.keep(self._only(x, 'float("-inf")'))
        power = self.keep(f"tl.exp2(({x} - tl.max({x}, 1, keep_dims=True)) * {LOG2_E})")
        return self.keep(f"{power} / tl.sum({power}, 1, keep_dims=True)")
