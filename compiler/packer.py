"""Which packed tensors a program needs: kernels ask for a weight in a layout, equal requests share one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pagec.compiler.dims import WORD_ELEMENTS, DType, padded_last, row_stride
from pagec.compiler.ir import Graph, Type
from pagec.compiler.packing import Step, joined_shape, shape_after
from pagec.compiler.program import PackedWeight, RopeTable
from pagec.compiler.reference import MERGE_MARK


@dataclass(frozen=True, slots=True)
class Layout:
    """How an axis of a weight follows rows of shape `inner`: padded as they are.

    `side_by_side`: columns that each of inner[0] equal parts has in a register tile; the parts take turns.
    `turned`: so many elements of each group, two halves, take turns one by one.
    """

    inner: tuple[int, ...]
    side_by_side: int = 0
    turned: int = 0

    @property
    def width(self) -> int:
        """The length of the axis."""
        return self.inner[0] * row_stride(self.inner[1:]) if self.side_by_side else row_stride(self.inner)

    def steps(self, axis: int) -> list[Step]:
        """The packing steps of the axis."""
        count, size, padded = prod(self.inner[:-1]), self.inner[-1], padded_last(self.inner)
        if self.side_by_side:
            padded = row_stride(self.inner[1:])
        steps: list[Step] = []
        if padded != size:
            steps.append(("groups", (axis, count, size, padded)))
        if self.turned:
            steps.append(("pairs", (axis, padded, self.turned)))
        if self.width != count * padded:
            steps.append(("pad", (axis, self.width)))
        if self.side_by_side:
            steps.append(("interleave", (axis, count, self.side_by_side)))
        return steps


class Packer:
    """Collects packed weights (`weights`) and rope tables (`tables`) in the order of first use.

    `source` has the model's own weights (those of the graph before any were merged); `nt` is the number
    of columns of a linear's register tile.
    """

    def __init__(self, graph: Graph, source: Mapping[str, Type], nt: int) -> None:
        self.graph, self.source, self.nt = graph, source, nt
        self.weights: dict[str, PackedWeight] = {}
        self.tables: dict[str, RopeTable] = {}
        every = [inner for node in graph.nodes for inner in (node, *node.body)]
        self._matrices = {node.inputs[1][1:]: node for node in every if node.op == "linear"}

    def matrix(self, name: str, out: Layout, x: tuple[int, ...], dtype: DType) -> str:
        """A linear's weight [N, K] for results laid out as `out` from rows of shape `x`."""
        steps = [*out.steps(0), *Layout(x).steps(1)]
        if dtype == "bf16":
            steps.append(("round", ()))
        steps.append(("tile", (self.nt, WORD_ELEMENTS[dtype])))
        return self._add(name, steps, dtype)

    def vector(self, name: str, layout: Layout) -> str:
        """A bias or norm weight, laid out as rows are."""
        return self._add(name, layout.steps(0), "f32")

    def groups(self, name: str) -> str:
        """A weight [groups, width] of row-wise work, each group padded."""
        width = self.source[name].inner[-1]
        padded = padded_last((width,))
        return self._add(name, [("groups", (1, 1, width, padded))] if padded != width else [], "f32")

    def experts(self, name: str, length: int, dtype: DType) -> str:
        """Stacked matrices [E, N, K], each as a linear's: N padded as rows are, K to `length`."""
        _, n, k = self.source[name].inner
        steps: list[Step] = Layout((n,)).steps(1)
        if length != k:
            steps.append(("pad", (2, length)))
        if dtype == "bf16":
            steps.append(("round", ()))
        return self._add(name, [*steps, ("tile", (self.nt, WORD_ELEMENTS[dtype]))], dtype)

    def expert_vectors(self, name: str) -> str:
        """Stacked biases [E, N], N padded as rows are."""
        return self._add(name, Layout(self.source[name].inner[1:]).steps(1), "f32")

    def table(self, name: str) -> tuple[str, bool]:
        """An embedding table [V, H], and whether it lies tiled because a linear reads it too."""
        dtype = self.graph.weights[name].dtype
        linear = self._matrices.get(name)
        if linear is not None:
            out, x = self.graph.type(linear.outputs[0]), self.graph.type(linear.inputs[0][1:])
            return self.matrix(name, Layout(out.inner), x.inner, dtype), True
        steps = Layout(self.graph.weights[name].inner[1:]).steps(1)
        return self._add(name, [*steps, ("round", ())] if dtype == "bf16" else steps, dtype), False

    def rope_table(self, frequencies: tuple[float, ...], length: int, scale: float) -> str:
        """Cosines and sines for these frequencies, times `scale`."""
        for table in self.tables.values():
            if (table.frequencies, table.scale) == (frequencies, scale):
                return table.name
        name = f"rope{len(self.tables)}"
        self.tables[name] = RopeTable(name, frequencies, length, scale)
        return name

    def _add(self, name: str, steps: list[Step], dtype: DType) -> str:
        parts = tuple(name.split(MERGE_MARK))
        shapes = tuple(self.source[part].inner for part in parts)
        shape = joined_shape(shapes)
        for step in steps:
            shape = shape_after(shape, step)
        packed = PackedWeight(name, parts, shapes, tuple(steps), dtype, shape)
        same = [n for n, w in self.weights.items() if w.parts == parts]
        for other in same:
            if self.weights[other].steps == packed.steps:
                return other
        unique = f"{name}#{len(same)}" if same else name
        self.weights[unique] = PackedWeight(unique, parts, shapes, tuple(steps), dtype, shape)
        return unique
