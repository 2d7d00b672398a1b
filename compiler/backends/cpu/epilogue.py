"""The code behind a linear: what is done with its sums while they are in registers.

A fused.linear's body is the linear, perhaps slices of its two equal parts (they then lie side by side in
each register tile), and element-wise nodes. The code is one expression for a vector of the last value, in
terms of `acc` (the tile's sums), of other rows and of vectors.
"""

from __future__ import annotations

from pagec.compiler.backends.cpu.rowwise import Region
from pagec.compiler.backends.cpu.tiles import LINE
from pagec.compiler.dims import WORD_ELEMENTS, row_stride
from pagec.compiler.ir import Graph, Node

# The row that a register tile's row m stands for; rows past the last repeat it.
ROW = "T.min(row + m, num_rows - 1)"


class Epilogue(Region):
    """Writes the epilogue of a linear with tiles of `nt` columns, `parts` results in each."""

    def __init__(self, node: Node, graph: Graph, lanes: int, nt: int, bias: bool) -> None:
        super().__init__(node, graph, lanes)
        self.linear = node.find("linear") or node
        slices = [n for n in node.body if n.op == "slice" and n.inputs[0][1:] == self.linear.outputs[0]]
        self.parts = len(slices) or 1
        self.columns = nt // self.parts
        self.nt, self.bias = nt, bias
        self.slices = {n.outputs[0]: n for n in slices}
        # Where the rows lie that it reads beside the sums (line_of).
        self.read: list[str] = []

    def value(self) -> str:
        """The whole epilogue: vector j of row m of the last value, at column {c}."""
        own = set(self.linear.inputs[1:])
        for name in self.node.inputs:
            if name[0] == "$" and name not in own:
                self._weight(name[1:])
        for inner in self.node.body:
            if inner is not self.linear and inner.op not in ("slice", "take_rows"):
                self.expressions[inner.outputs[0]] = self._node(inner)
        value = self.expressions[self.node.outputs[0]]
        return value if self.width == self.stride else self._call("keep", value, f"{self.width} - ({{c}})")

    def _row(self, name: str) -> str:
        """A value from outside: the tile's sums, or another row in memory."""
        if name == self.linear.outputs[0]:
            return self._sum(0)
        if name in self.slices:
            start = self.slices[name].attrs["start"]
            assert isinstance(start, int)
            return self._sum(start)
        base, row, offset = self._place(name)
        t = self.graph.type(base)
        at = ROW if row == "row" else f"{self.code.gathers}[{ROW}]"
        value = self._load(f"value:{base}", t, f"({at})", offset)
        if row == "row":
            array = self.array_of[f"value:{base}"]
            self.read.append(
                line_of(array, row_stride(t.inner), offset, self.columns, WORD_ELEMENTS[t.dtype])
            )
        return value

    def _sum(self, part: int) -> str:
        at = f"{part * self.columns} + j * {self.lanes}"
        total = f"acc[T.ramp(m * {self.nt} + {at}, 1, {self.lanes})]"
        if not self.bias:
            return total
        return f"({total} + bias[T.ramp(n * {self.nt} + {at}, 1, {self.lanes})])"


def line_of(array: str, stride: int, offset: int, columns: int, unit: int) -> str:
    """Line j of what row m of a tile of so many columns has in an array; all but `unit` in elements."""
    start = f" + {offset // unit}" if offset else ""
    return f"{array}[({ROW}) * {stride // unit}{start} + n * {columns // unit} + j * {LINE}]"


def plain_value(lanes: int, nt: int, bias: bool) -> str:
    """Vector j of row m of a linear without an epilogue."""
    value = f"acc[T.ramp(m * {nt} + j * {lanes}, 1, {lanes})]"
    return f"{value} + bias[T.ramp({{c}}, 1, {lanes})]" if bias else value


def store_line(value: str, stride: int, unit: int, columns: int, lanes: int) -> str:
    """The statement that stores it; `columns` of a tile, rows of `stride` elements, `unit` in a word."""
    column = f"({ROW}) * {stride} + {{c}}"
    if unit == 1:
        line = f"out[T.ramp({column}, 1, {lanes})] = {value}"
    else:
        rounded = f'T.call_pure_extern("int32x{lanes // 2}", "pagec_to_bf16", {value})'
        line = f"out[T.ramp(({column}) // 2, 1, {lanes // 2})] = {rounded}"
    return line.replace("{c}", f"(n * {columns} + j * {lanes})")
