"""The code behind a linear: what is done with its sums while they are in registers.

A fused.linear's body is the linear, perhaps slices of its two equal parts (they then lie side by side in
each register tile), and element-wise nodes. The code is one expression for a vector of the last value, in
terms of `acc` (the tile's sums), of other rows and of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagec.compiler.backends.cpu.rowwise import Code, Region
from pagec.compiler.dims import WORD_ELEMENTS
from pagec.compiler.ir import Graph, Node

# The row that a register tile's row m stands for; rows past the last repeat it.
ROW = "T.min(row + m, num_rows - 1)"


@dataclass(frozen=True, slots=True)
class Store:
    """The statement that stores vector j of row m of a tile, and the arrays that it reads."""

    line: str
    code: Code


class Epilogue(Region):
    """Writes the epilogue of a linear with tiles of `nt` columns, `parts` results in each."""

    def __init__(self, node: Node, graph: Graph, lanes: int, nt: int, bias: bool) -> None:
        super().__init__(node, graph, lanes)
        self.linear = next(inner for inner in node.body if inner.op == "linear")
        slices = [n for n in node.body if n.op == "slice" and n.inputs[0][1:] == self.linear.outputs[0]]
        self.parts = len(slices) or 1
        self.columns = nt // self.parts
        self.nt, self.bias = nt, bias
        self.slices = {n.outputs[0]: n for n in slices}

    def store(self) -> Store:
        """The whole epilogue."""
        own = set(self.linear.inputs[1:])
        for name in self.node.inputs:
            if name[0] == "$" and name not in own:
                self._weight(name[1:])
        for inner in self.node.body:
            if inner is not self.linear and inner.op not in ("slice", "take_rows"):
                self.expressions[inner.outputs[0]] = self._node(inner)
        (name,) = self.node.outputs
        t = self.graph.type(name)
        value = self.expressions[name]
        if self.width != self.stride:
            value = self._call("keep", value, f"{self.width} - ({{c}})")
        column = f"({ROW}) * {self.stride} + {{c}}"
        if WORD_ELEMENTS[t.dtype] == 1:
            line = f"out[T.ramp({column}, 1, {self.lanes})] = {value}"
        else:
            rounded = self._call("to_bf16", value, kind="int32x")
            line = f"out[T.ramp(({column}) // 2, 1, {self.lanes // 2})] = {rounded}"
        return Store(line.replace("{c}", f"(n * {self.columns} + j * {self.lanes})"), self.code)

    def _row(self, name: str) -> str:
        """A value from outside: the tile's sums, or another row in memory."""
        if name == self.linear.outputs[0]:
            return self._sum(0)
        if name in self.slices:
            start = self.slices[name].attrs["start"]
            assert isinstance(start, int)
            return self._sum(start)
        base, row, offset = self._place(name)
        at = ROW if row == "row" else f"rows0[{ROW}]"
        return self._load(f"value:{base}", self.graph.type(base), f"({at})", offset)

    def _sum(self, part: int) -> str:
        at = f"{part * self.columns} + j * {self.lanes}"
        total = f"acc[T.ramp(m * {self.nt} + {at}, 1, {self.lanes})]"
        if not self.bias:
            return total
        return f"({total} + bias[T.ramp(n * {self.nt} + {at}, 1, {self.lanes})])"


def plain_store(out_stride: int, lanes: int, nt: int, bias: bool) -> str:
    """The store of a linear without an epilogue."""
    value = f"acc[T.ramp(m * {nt} + j * {lanes}, 1, {lanes})]"
    if bias:
        value += f" + bias[T.ramp(n * {nt} + j * {lanes}, 1, {lanes})]"
    return f"out[T.ramp({ROW} * {out_stride} + n * {nt} + j * {lanes}, 1, {lanes})] = {value}"
