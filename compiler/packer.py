"""Which packed tensors a program needs: kernels ask for a weight in a layout, equal requests share one."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from pagec.compiler.dims import WORD_ELEMENTS, DType, padded_last, row_stride
from pagec.compiler.ir import Graph, Type
from pagec.compiler.packing import Step, joined_shape, shape_after
from pagec.compiler.program import PackedWeight, RopeTable
from pagec.compiler.reference import MERGE_MARK


class Packer:
    """Collects packed weights (`weights`) and rope tables (`tables`) in the order of first use.

    `source` has the model's own weights (those of the graph before any were merged); `nt` is the number
    of columns of a linear's register tile.
    """

    def __init__(self, graph: Graph, source: Mapping[str, Type], nt: int) -> None:
        self.graph, self.source, self.nt = graph, source, nt
        self.weights: dict[str, PackedWeight] = {}
        self.tables: dict[str, RopeTable] = {}
        self._matrices = {
            node.inputs[1][1:]: node for node in graph.nodes if node.op == "linear" and len(node.inputs) > 1
        }

    def matrix(self, name: str, out: tuple[int, ...], x: tuple[int, ...], dtype: DType) -> str:
        """A linear's weight [N, K] for results of shape `out` from rows of shape `x`."""
        steps = [*_axis(0, out), *_axis(1, x)]
        if dtype == "bf16":
            steps.append(("round", ()))
        steps.append(("tile", (self.nt, WORD_ELEMENTS[dtype])))
        return self._add(name, steps, dtype)

    def vector(self, name: str, inner: tuple[int, ...]) -> str:
        """A bias or norm weight, padded as rows of shape `inner` are."""
        return self._add(name, _axis(0, inner), "f32")

    def table(self, name: str) -> tuple[str, bool]:
        """An embedding table [V, H], and whether it lies tiled because a linear reads it too."""
        dtype = self.graph.weights[name].dtype
        linear = self._matrices.get(name)
        if linear is not None:
            out, x = self.graph.type(linear.outputs[0]), self.graph.type(linear.inputs[0][1:])
            return self.matrix(name, out.inner, x.inner, dtype), True
        steps = _axis(1, self.graph.weights[name].inner[1:])
        return self._add(name, [*steps, ("round", ())] if dtype == "bf16" else steps, dtype), False

    def rope_table(self, frequencies: tuple[float, ...], length: int) -> str:
        """Cosines and sines for these frequencies."""
        for table in self.tables.values():
            if table.frequencies == frequencies:
                return table.name
        name = f"rope{len(self.tables)}"
        self.tables[name] = RopeTable(name, frequencies, length)
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


def _axis(axis: int, inner: tuple[int, ...]) -> list[Step]:
    """Steps that lay an axis out as rows of shape `inner` lie in memory."""
    steps: list[Step] = []
    count, size, padded = prod(inner[:-1]), inner[-1], padded_last(inner)
    if padded != size:
        steps.append(("groups", (axis, count, size, padded)))
    if row_stride(inner) != count * padded:
        steps.append(("pad", (axis, row_stride(inner))))
    return steps
