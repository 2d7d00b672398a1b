"""What lowering shares: calls, and how a kernel is made from a template and its parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagec.compiler.backends.cpu.knobs import Chooser
from pagec.compiler.backends.cpu.prologue import find_prologues
from pagec.compiler.backends.cpu.rowwise import Code
from pagec.compiler.backends.cpu.tiles import linear_columns
from pagec.compiler.backends.tuned import Tuned
from pagec.compiler.dims import Capacity
from pagec.compiler.ir import Graph, Node
from pagec.compiler.packer import Layout, Packer
from pagec.compiler.program import Kernel, KvLayout, RowCount
from pagec.compiler.target import CpuTarget

# Floating-point operations per element of row-wise work; what is not here takes one.
ELEMENT_FLOPS = {
    "slice": 0,
    "take_rows": 0,
    "cast": 0,
    "rmsnorm": 4,
    "layernorm": 7,
    "activation": 16,
    "softcap": 18,
    "softmax": 13,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A node lowered: one kernel per bucket of rows, and arguments that name values, weights, ...

    `args` are as program.py has them, but "value:NAME" where a buffer is not chosen yet. A variant without
    a kernel: for so few rows there is nothing to do. `more_values`: what it reads beside its node's inputs.
    `tuned`: the key of the tuned choice that its tiles come from, if they do.
    """

    node: Node
    rows: RowCount
    variants: tuple[tuple[int, Kernel | None], ...]
    args: tuple[str, ...]
    suffix: str = ""
    more_values: tuple[str, ...] = ()
    tuned: str = ""

    def kernels(self) -> list[Kernel]:
        """The kernels of all variants."""
        return [kernel for _, kernel in self.variants if kernel]

    def values(self) -> list[str]:
        """The values that it reads."""
        return list(dict.fromkeys((*self.node.values(), *self.more_values)))

    @property
    def name(self) -> str:
        """The launch's name: the node's first result, and what tells several launches of a node apart."""
        return self.node.outputs[0] + self.suffix


@dataclass(frozen=True, slots=True)
class Settings:
    """What lowering needs to know beside the graph."""

    target: CpuTarget
    capacity: Capacity
    max_len: int
    query_tile: int
    kv: KvLayout
    tuned: Tuned = field(default_factory=dict)


def kernel_name(template: str, words: str, params: Mapping[str, Any]) -> str:
    """The key of a kernel: readable, and different for different parameters."""
    text = json.dumps(params, sort_keys=True)
    template = template.replace(":", "_")
    return f"{template}_{words}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


class KernelMaker:
    """Makes kernels for the nodes of a fused graph; `source` is the graph before the passes.

    Collects packed weights and rope tables in `packer`.
    """

    def __init__(self, graph: Graph, source: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.target = settings.target
        self.chooser = Chooser(settings.target, settings.tuned)
        self.packer = Packer(graph, source.weights, linear_columns(settings.target))
        self.scratch_bytes = 0  # kernels that need scratch memory share one area
        self.prologues, _ = find_prologues(graph, settings.target)
        self.logits = _chosen_from(graph)
        # The first result of row-wise work, and up to how many rows the linear behind it does it itself.
        self.done_by_linear = {p.node.outputs[0]: p.rows for p in self.prologues.values()}

    def _kernel(
        self,
        template: str,
        words: str,
        params: dict[str, Any],
        arrays: list[tuple[str, str]],
        *,
        flops: int = 0,
        bytes_per_row: int = 0,
        bytes_fixed: int = 0,
        shares: int = 1,
    ) -> Kernel:
        params = {**params, "arrays": [list(a) for a in arrays]}
        key = kernel_name(template, words, {**params, "L": self.target.lanes})
        return Kernel(
            key=key,
            symbol=key,
            template=template,
            params=params,
            signature=tuple(dtype for _, dtype in arrays),
            flops_per_row=flops,
            bytes_per_row=bytes_per_row,
            bytes_fixed=bytes_fixed,
            shares=shares,
        )

    def _arguments(self, code: Code) -> tuple[str, ...]:
        """The arguments behind a region's arrays."""
        return tuple(self._row_weight(arg[7:]) if arg.startswith("weight:") else arg for arg in code.args)

    def _rows(self, node: Node) -> RowCount:
        return "R" if self.graph.type(node.outputs[0]).rows == "R" else "T"

    def _values(self, *references: str) -> tuple[str, ...]:
        """Arguments for values, given as "%name" or by name."""
        return tuple(f"value:{name.removeprefix('%')}" for name in references)

    def _row_weight(self, name: str) -> str:
        inner = self.graph.weights[name].inner
        packed = self.packer.vector(name, Layout(inner)) if len(inner) == 1 else self.packer.groups(name)
        return f"weight:{packed}"


def _chosen_from(graph: Graph) -> str:
    """The logits, if a linear makes them for nothing but their argmax, sampling and the caller."""
    producers, users = graph.producers(), graph.users()
    for node in graph.nodes:
        if node.op == "argmax":
            name = node.inputs[0][1:]
            t = graph.type(name)
            maker = producers.get(name)
            others = [user for user in users[name] if user.op not in ("argmax", "sample")]
            if maker and maker.op in ("linear", "fused.linear") and t.rows == "R" and not others:
                return name if t.dtype == "f32" and len(t.inner) == 1 else ""
    return ""
