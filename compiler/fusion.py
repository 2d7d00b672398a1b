"""What the passes put into one kernel, what they left apart and why: told from the fused graph itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from pagec.compiler.backends.cpu.prologue import find_prologues
from pagec.compiler.backends.cpu.rowwise import REDUCTIONS
from pagec.compiler.ir import CacheType, Graph, Node
from pagec.compiler.target import CpuTarget
from pagec.compiler.verifier import VIEWS


@dataclass(frozen=True, slots=True)
class Taken:
    """Kernels of one kind: `ops` run in one, which saves so many bytes a row of writing and reading."""

    kernel: str
    ops: tuple[str, ...]
    count: int
    saved_bytes_per_row: int


@dataclass(frozen=True, slots=True)
class Apart:
    """Kernels of which one reads what the other writes, and why they are two."""

    writer: str
    reader: str
    count: int
    bytes_per_row: int
    reason: str


Reasons = tuple[tuple[str, str, str], ...]
# Why a value goes through memory: (what writes it, what reads it) -> reason. The first that fits is told.
_EVERYWHERE: Final[Reasons] = (
    ("rowwise", "kv_write", "no rule takes this row-wise work into a KV write"),
    ("rowwise", "rowwise", "a residual sum, which is read again later"),
    ("rope", "", "rope is fused with a KV write alone"),
    ("embed", "", "no rule takes an embedding into what reads it"),
    ("", "top_k_of", "experts are chosen from whole rows"),
    ("", "expert_lists", "an expert's list is of all rows"),
    ("", "grouped_linear", "rows are taken expert by expert"),
    ("grouped_linear", "", "rows are written expert by expert"),
)
_ON_CPUS: Final[Reasons] = (
    ("linear", "linear", "each sum runs over all columns of the linear before, which all workers compute"),
    ("linear", "kv_write", "words of K lie 16 tokens apart: a register tile would store them one by one"),
    ("linear", "rowwise", "a row is more than the columns of a register tile"),
    ("linear", "argmax", "where only the index is wanted, the linear finds it and writes no logits"),
    ("kv_write", "attention", "attention waits for the keys that other workers write"),
    ("attention", "linear", "each sum of the linear runs over all heads, which all workers compute"),
    ("attention", "rowwise", "a row is more than the heads of an item"),
    *_EVERYWHERE,
)
_ON_GPUS: Final[Reasons] = (
    ("linear", "linear", "each sum runs over all columns of the linear before, tiles of many programs"),
    ("linear", "kv_write", "it would take registers of the linear's tiles, and is bound by memory alone"),
    ("linear", "rowwise", "a row is more than the columns of a tile"),
    ("rowwise", "linear", "each tile of columns would do the rows' work anew"),
    ("linear", "argmax", "a row's logits are tiles of many programs"),
    ("linear", "sample", "a row's logits are tiles of many programs"),
    ("kv_write", "attention", "attention waits for the keys that other programs write"),
    ("attention", "linear", "each sum of the linear runs over all heads, which other programs compute"),
    ("attention", "rowwise", "a row is more than the heads of an item"),
    *_EVERYWHERE,
)


def fusion_rows(graph: Graph, cpu: CpuTarget | None) -> dict[str, list[dict[str, Any]]]:
    """`taken` and `apart`, as JSON. `cpu`: what the graph is for; None: a GPU."""
    taken = Counter(_taken(graph))
    apart = Counter(_apart(graph, cpu))
    return {
        "taken": [asdict(Taken(kind, ops, n, saved)) for (kind, ops, saved), n in taken.items()],
        "apart": [asdict(Apart(a, b, n, size, reason)) for (a, b, size, reason), n in apart.items()],
    }


def format_fusion(graph: Graph, cpu: CpuTarget | None) -> str:
    """The same as text."""
    rows = fusion_rows(graph, cpu)
    lines = ["in one kernel, and bytes per row that are not written and read again"]
    lines += [
        f"  {row['count']:>4} x {row['kernel']:28} {row['saved_bytes_per_row']:>8,}  {' + '.join(row['ops'])}"
        for row in rows["taken"]
    ]
    lines += ["", "apart, bytes per row in between, and why"]
    for row in rows["apart"]:
        between = f"{row['writer']} -> {row['reader']}"
        lines.append(f"  {row['count']:>4} x {between:28} {row['bytes_per_row']:>8,}  {row['reason']}")
    return "\n".join(lines) + "\n"


def _kind(node: Node) -> str:
    return node.op.removeprefix("fused.")


def _taken(graph: Graph) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for node in graph.nodes:
        ops = tuple(inner.op for inner in node.body if inner.op not in VIEWS)
        if len(ops) > 1:
            made = [name for inner in node.body if inner.op not in VIEWS for name in inner.outputs]
            inside = [name for name in made if name not in node.outputs]
            yield _kind(node), ops, 2 * sum(graph.row_bytes(name) for name in inside)


def _apart(graph: Graph, cpu: CpuTarget | None) -> Iterator[tuple[str, str, int, str]]:
    producers = graph.producers()
    prologues = _prologues(graph, cpu) if cpu else {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.values()):
            writer = producers.get(name)
            if writer is None or isinstance(graph.types[name], CacheType):
                continue
            kinds = _kind(writer), _kind(node)
            linear = node.find("linear")
            if linear and f"%{name}" != linear.inputs[0]:
                reason = "a residual sum, which is read again later"
            elif kinds == ("rowwise", "linear") and name in prologues:
                reason = prologues[name]
            else:
                reason = _reason(*kinds, node, _ON_CPUS if cpu else _ON_GPUS)
            yield *kinds, graph.row_bytes(name), reason


def _prologues(graph: Graph, cpu: CpuTarget) -> dict[str, str]:
    """Why the linears of a CPU leave row-wise work before them to a kernel of its own, by its result."""
    found, refused = find_prologues(graph, cpu)
    rows = {p.node.outputs[0]: p.rows for p in found.values()}
    written = {node.outputs[0] for node in graph.nodes if _kind(node) == "rowwise"}
    shared = "in steps of more than {} rows, which the workers share out; of fewer the linear does it itself"
    return {name: refused.get(name) or shared.format(rows.get(name, 0)) for name in written}


def _reason(writer: str, reader: str, node: Node, reasons: Reasons) -> str:
    if reader == "rowwise" and not any(inner.op in REDUCTIONS for inner in node.body):
        return "several kernels read it, or its rows are others"
    for first, second, reason in reasons:
        if first in ("", writer) and second in ("", reader):
            return reason
    return "no rule puts these two together"
