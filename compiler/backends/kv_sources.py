"""Where a KV write's q, k and v lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.ir import Graph, Node


@dataclass(frozen=True, slots=True)
class Source:
    """Where heads lie: a value, its row stride and an offset, in elements; and the norm that they take."""

    name: str
    stride: int
    offset: int
    norm: Node | None


class KvSources:
    """Traces q, k and v of a kv_write region back to the buffers that hold them."""

    def __init__(self, node: Node, graph: Graph) -> None:
        self.graph = graph
        self.body = {name: inner for inner in node.body for name in inner.outputs}
        self.node = node

    def find(self) -> tuple[Source | None, Source, Source]:
        """(q, k, v); q is None if the region only writes the cache."""
        write = next(n for n in self.node.body if n.op == "kv_write")
        outs = [name for name in self.node.outputs if name not in write.outputs]
        q = self._trace(outs[0]) if outs else None
        return q, self._trace(write.inputs[1][1:]), self._trace(write.inputs[2][1:])

    def _trace(self, name: str) -> Source:
        offset, norm = 0, None
        while name in self.body:
            inner = self.body[name]
            if inner.op == "slice":
                start = inner.attrs["start"]
                assert isinstance(start, int)
                offset += start * padded_last(self.graph.type(inner.inputs[0][1:]).inner)
            norm = inner if inner.op == "rmsnorm" else norm
            place = inner.outputs.index(name) if inner.op == "rope" else 0
            name = inner.inputs[place][1:]
        return Source(name, row_stride(self.graph.type(name).inner), offset, norm)
