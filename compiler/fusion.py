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


# Why a value goes through memory: (what writes it, what reads it) -> reason. The first that fits is told.
_REASONS: Final = (
    ("linear", "linear", "each sum runs over all columns of the linear before, which all workers compute"),
    ("linear", "kv_write", "words of K lie 16 tokens apart: a register tile would store them one by one"),
    ("linear", "rowwise", "a row is more than the columns of a register tile"),
    ("linear", "argmax", "where only the index is wanted, the linear finds it and writes no logits"),
    ("rowwise", "kv_write", "no rule takes this row-wise work into a KV write"),
    ("kv_write", "attention", "attention waits for the keys that other workers write"),
    ("attention", "linear", "each sum of the linear runs over all heads, which all workers compute"),
    ("attention", "rowwise", "a row is more than the heads of an item"),
    ("rope", "", "rope is fused with a KV write alone"),
    ("embed", "", "no rule takes an embedding into what reads it"),
    ("", "grouped_linear", "rows are taken expert by expert"),
    ("grouped_linear", "", "rows are written expert by expert"),
)


def fusion_rows(graph: Graph, target: CpuTarget) -> dict[str, list[dict[str, Any]]]:
    """`taken` and `apart`, as JSON."""
    taken = Counter(_taken(graph))
    apart = Counter(_apart(graph, target))
    return {
        "taken": [asdict(Taken(kind, ops, n, saved)) for (kind, ops, saved), n in taken.items()],
        "apart": [asdict(Apart(a, b, n, size, reason)) for (a, b, size, reason), n in apart.items()],
    }


def format_fusion(graph: Graph, target: CpuTarget) -> str:
    """The same as text."""
    rows = fusion_rows(graph, target)
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


def _apart(graph: Graph, target: CpuTarget) -> Iterator[tuple[str, str, int, str]]:
    producers = graph.producers()
    found, refused = find_prologues(graph, target)
    itself = {p.node.outputs[0]: p.rows for p in found.values()}
    for node in graph.nodes:
        for name in dict.fromkeys(node.values()):
            writer = producers.get(name)
            if writer is None or isinstance(graph.types[name], CacheType):
                continue
            kinds = _kind(writer), _kind(node)
            linear = node.find("linear")
            if linear and f"%{name}" != linear.inputs[0]:
                reason = "a residual sum, which is read again later"
            elif kinds == ("rowwise", "linear"):
                reason = refused.get(writer.outputs[0]) or (
                    f"in steps of more than {itself.get(writer.outputs[0], 0)} rows, "
                    "which the workers share out; of fewer the linear does it itself"
                )
            else:
                reason = _reason(*kinds, node)
            yield *kinds, graph.row_bytes(name), reason


def _reason(writer: str, reader: str, node: Node) -> str:
    if reader == "rowwise" and not any(inner.op in REDUCTIONS for inner in node.body):
        return "several kernels read it, or its rows are others"
    for first, second, reason in _REASONS:
        if first in ("", writer) and second in ("", reader):
            return reason
    return "no rule puts these two together"
