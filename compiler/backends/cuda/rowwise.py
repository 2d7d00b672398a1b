"""A row-wise region -> its kernel: norms, sums, activations, casts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pagec.compiler.backends.cuda.emit import CudaKernel, make_kernel
from pagec.compiler.backends.cuda.values import Values
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.ir import Graph, Node
from pagec.compiler.launch import Counts, GridRule
from pagec.compiler.verifier import VIEWS


@dataclass(frozen=True, slots=True)
class RowwiseKnobs:
    """RM rows of a program, in `warps` warps."""

    RM: int = 1
    warps: int = 4


class _Region(Values):
    """Rows of `groups` x `width`; a line is a group of a row."""

    def __init__(self, node: Node, graph: Graph) -> None:
        inner = graph.type(node.body[-1].outputs[0]).inner
        self.groups, self.padded = prod(inner[:-1]), padded_last(inner)
        self.stride = row_stride(inner)
        # What lies between a row's last group and the next row belongs to the last group.
        self.tail = self.stride - self.groups * self.padded
        self.block = 1 << (self.padded + self.tail - 1).bit_length()
        super().__init__(node, graph, masked=self.block != inner[-1])

    def place(self, stride: int, row: str, offset: int) -> str:
        group = f" + group * {self.padded}" if self.groups > 1 else ""
        return f"{row} * {stride}{f' + {offset}' if offset else ''}{group} + column"

    def weight_place(self, inner: tuple[int, ...]) -> str:
        if self.groups > 1 and inner == (self.groups, self.width):
            return f"group * {self.padded} + column"
        return super().weight_place(inner)

    def limit(self) -> str:
        """The columns that are stored; empty for all."""
        if self.block == self.padded + self.tail and (self.groups == 1 or not self.tail):
            return ""
        if self.groups == 1 or not self.tail:
            return str(self.padded + self.tail)
        return f"tl.where(group == {self.groups - 1}, {self.padded + self.tail}, {self.padded})"


def rowwise(node: Node, graph: Graph, knobs: RowwiseKnobs) -> tuple[CudaKernel, tuple[str, ...]]:
    """The kernel of a fused.rowwise node, and its arguments as program.py has them ("value:NAME", ...)."""
    region = _Region(node, graph)
    region.compute(node.body)
    limit = region.limit()
    for name in node.outputs:
        region.operand(f"%{name}")  # a view that is copied
        region.store(name, "stored" if limit else "")
    ops = list(dict.fromkeys(inner.op for inner in node.body if inner.op not in VIEWS)) or ["copy"]
    rows = graph.type(node.outputs[0]).rows
    assert rows is not None
    params = {
        "ops": ops,
        "groups": region.groups,
        "width": region.width,
        "block": region.block,
        "masked": region.masked,
        "limit": limit,
        "lines": region.lines,
        "RM": knobs.RM,
    }
    words = f"{'_'.join(ops)}_{region.groups}x{region.width}"
    grid = _grid(region.groups, knobs.RM)
    kernel = make_kernel("rowwise", words, params, tuple(region.arrays), Counts[rows], grid, knobs.warps)
    return kernel, tuple(region.args)


def _grid(groups: int, rm: int) -> GridRule:
    """Programs for lines; of groups that rm does not divide there are a few too many."""
    if groups == 1:
        return GridRule(rm, 1)
    return GridRule(1, -(-groups // rm))
