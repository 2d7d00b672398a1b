"""Runs the nodes of a small fused graph as compiled kernels, one by one, outside of any artifact.

Everything is padded and laid out as in an artifact, results are poisoned with NaN first, and arrays that
the step would give (tiles, slots, ...) are passed in by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagec.compiler.backends.cpu.build import build_library
from pagec.compiler.backends.cpu.emit import emit_all
from pagec.compiler.backends.cpu.lower import Call, Lowering, Settings
from pagec.compiler.backends.targets import load_cpu_target
from pagec.compiler.backends.tuned import Tuned
from pagec.compiler.dims import ITEM_BYTES, Capacity, DType, row_stride
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.packing import buffer_to_rows, pack, rows_to_buffer
from pagec.compiler.program import Kernel, KvGroup, KvLayout
from pagec.compiler.rope import cos_sin_of
from pagec.compiler.target import CpuTarget
from pagec.runtime.device import KernelCall
from pagec.runtime.device.cpu import CpuDevice

RAW: Mapping[DType, Any] = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32}

# By the sources' texts: many tests want the same kernels for other data, or for other threads.
_BUILT: dict[tuple[str, ...], tempfile.TemporaryDirectory[str]] = {}


def _built(kernels: tuple[Kernel, ...], target: CpuTarget) -> Path:
    """A directory with the library of these kernels."""
    sources = emit_all(kernels, target)
    key = (target.name, *sources.values())
    if key not in _BUILT:
        directory = tempfile.TemporaryDirectory()
        path = Path(directory.name)
        for name, text in sources.items():
            (path / name).write_text(text)
        build_library(kernels, path, target, path, lambda *_: None)
        _BUILT[key] = directory
    return Path(_BUILT[key].name)


@dataclass
class KernelRun:
    """The kernels of a fused graph, compiled. `weights` are the model's own, float32."""

    graph: Graph
    weights: Mapping[str, Any] = field(default_factory=dict)
    source: Graph | None = None
    kv: KvLayout = field(default_factory=lambda: KvLayout("bf16", 16, 1, 16, (KvGroup((0,), None),)))
    max_len: int = 1024
    query_tile: int = 8
    target: str = "cpu"
    threads: int = 2
    tuned: Tuned = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = load_cpu_target(self.target)
        capacity = Capacity(512, 64, 64)
        settings = Settings(target, capacity, self.max_len, self.query_tile, self.kv, self.tuned)
        self.lowering = Lowering(self.graph, self.source or self.graph, settings)
        self.calls = [call for node in self.graph.nodes for call in self.lowering.lower(node)]
        kernels: dict[str, Kernel] = {k.key: k for call in self.calls for k in call.kernels()}
        self.device = CpuDevice(_built(tuple(kernels.values()), target), self.threads)
        self._memory = {f"weight:{w.name}": self._upload(self._packed(w)) for w in self._weights()}
        self._memory["scratch:"] = self.device.allocate(self.lowering.scratch_bytes)
        for table in self.lowering.packer.tables.values():
            turns = np.array(table.frequencies, np.float32)
            both = np.stack(cos_sin_of(turns, table.length, table.scale))
            self._memory[f"table:{table.name}"] = self._upload(both)

    def _weights(self) -> Any:
        return self.lowering.packer.weights.values()

    def _packed(self, weight: Any) -> Any:
        return pack(weight, [np.asarray(self.weights[part], np.float32) for part in weight.parts])

    def _upload(self, array: Any) -> Any:
        memory = self.device.allocate(array.nbytes)
        self.device.upload(memory, np.ascontiguousarray(array))
        return memory

    def run(
        self, values: Mapping[str, Any], step: Mapping[str, Any] | None = None, rows: int | None = None
    ) -> dict[str, Any]:
        """All results by name, float32 (rows as the graph has them); `step` has pools and step arrays by
        argument name ("kv:0", "step:tiles", ...), pools are written in place."""
        memory = dict(self._memory)
        for name, array in (step or {}).items():
            memory[name] = self._upload(array)
        for name, value in values.items():
            t = self.graph.type(name)
            memory[f"value:{name}"] = self._upload(rows_to_buffer(np.asarray(value), t.dtype))
        num_rows = rows if rows is not None else len(next(iter(values.values())))
        for call in self.calls:
            self._launch(call, memory, step or {}, num_rows)
        for name, array in (step or {}).items():
            if name.startswith("kv:"):
                array[...] = self.device.download(memory[name], array.dtype.type).reshape(array.shape)
        results = {name: self.graph.types[name] for call in self.calls for name in call.node.outputs}
        return {
            name: self._rows(memory[f"value:{name}"], t, num_rows)
            for name, t in results.items()
            if isinstance(t, Type)
        }

    def _launch(self, call: Call, memory: dict[str, Any], step: Mapping[str, Any], num_rows: int) -> None:
        for name in call.node.outputs if not call.suffix else ():
            t = self.graph.types[name]
            if isinstance(t, Type):
                nbytes = num_rows * row_stride(t.inner) * ITEM_BYTES[t.dtype]
                memory[f"value:{name}"] = self.device.allocate(nbytes)
                self.device.fill_nan(memory[f"value:{name}"])
        count = len(step["step:tiles"]) if call.rows in ("tiles", "merges") else num_rows
        kernel = next(kernel for limit, kernel in call.variants if limit == 0 or count <= limit)
        if kernel is None:
            return
        symbol, signature = kernel.symbol, kernel.signature
        tensors = [
            self.device.tensor(memory[arg], dtype) for arg, dtype in zip(call.args, signature, strict=True)
        ]
        self.device.prepare([KernelCall(call.name, 0, ((0, symbol),), tuple(tensors))]).run(count)

    def _rows(self, memory: Any, t: Type, num_rows: int) -> Any:
        raw = self.device.download(memory, RAW[t.dtype])
        if not t.inner:
            return raw
        raw = raw.reshape(num_rows, row_stride(t.inner))
        padding = buffer_to_rows(raw, (row_stride(t.inner),), t.dtype)
        # A value that no kernel made for so few rows is NaN throughout.
        assert np.isfinite(padding).all() or np.isnan(padding).all(), "padding holds stale bytes"
        return buffer_to_rows(raw, t.inner, t.dtype)


def one_node_graph(op: str, inputs: Mapping[str, Type], out: Mapping[str, Type], **attrs: Any) -> Graph:
    """A graph of one node; inputs without rows are weights."""
    weights = {name: t for name, t in inputs.items() if t.rows is None}
    values = {name: t for name, t in inputs.items() if t.rows is not None}
    references = tuple(f"{'$' if t.rows is None else '%'}{name}" for name, t in inputs.items())
    node = Node(op, references, tuple(out), attrs)
    return Graph(tuple(values), tuple(out), (node,), {**values, **out}, weights)


def normed_linear(dtype: DType, residual: bool) -> Graph:
    """A norm, rounded if need be, and the linear (K = 70) behind it; a residual sum behind that."""
    wide, rows = Type("T", (100,), "f32"), Type("T", (70,), "f32")
    types: dict[str, Any] = {"x": rows, "h": rows, "h.c": Type("T", (70,), dtype), "y": wide}
    weights = {"n": Type(None, (70,), "f32"), "w": Type(None, (100, 70), dtype)}
    nodes = [Node("rmsnorm", ("%x", "$n"), ("h",), {"eps": 1e-5})]
    if dtype == "bf16":
        nodes.append(Node("cast", ("%h",), ("h.c",), {"dtype": "bf16"}))
    source = nodes[-1].outputs[0]
    if dtype == "f32":
        del types["h.c"]
    nodes.append(Node("linear", (f"%{source}", "$w"), ("y",)))
    if residual:
        types |= {"r": wide, "o": wide}
        nodes.append(Node("add", ("%r", "%y"), ("o",)))
    return Graph(("x", "r") if residual else ("x",), nodes[-1].outputs, tuple(nodes), types, weights)
