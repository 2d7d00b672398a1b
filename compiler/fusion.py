"""What the passes put into one kernel, what they left apart and why: told from the fused graph itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from pagec.compiler.backends.cpu.prologue import find_prologues
from pagec.compiler.backends.cpu.rowwise import REDUCTIONS
from pagec.compiler.backends.cuda.fuse_write import refused_writes
from pagec.compiler.ir import CacheType, Graph, Node
from pagec.compiler.target import CpuTarget, CudaTarget
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


NOTHING: Final[Mapping[str, int]] = {}
# Why a value goes through memory: (what writes it, what reads it) -> reason. The first that fits is told.
_Reasons = tuple[tuple[str, str, str], ...]
_EVERYWHERE: Final[_Reasons] = (
    ("rowwise", "kv_write", "no rule takes this row-wise work into a KV write"),
    ("rowwise", "rowwise", "a residual sum, which is read again later"),
    ("rope", "", "rope is fused with a KV write alone"),
    ("embed", "", "no rule takes an embedding into what reads it"),
    ("attention", "rowwise", "a row is more than the heads of an item"),
    ("", "top_k_of", "experts are chosen from whole rows"),
    ("", "expert_lists", "an expert's list is of all rows"),
    ("", "grouped_linear", "rows are taken expert by expert"),
    ("grouped_linear", "", "rows are written expert by expert"),
)
_OF_CPUS: Final[_Reasons] = (
    ("linear", "linear", "each sum runs over all columns of the linear before, which all workers compute"),
    ("linear", "kv_write", "words of K lie 16 tokens apart: a register tile would store them one by one"),
    ("linear", "rowwise", "a row is more than the columns of a register tile"),
    ("linear", "argmax", "where only the index is wanted, the linear finds it and writes no logits"),
    ("kv_write", "attention", "attention waits for the keys that other workers write"),
    ("attention", "linear", "each sum of the linear runs over all heads, which all workers compute"),
    *_EVERYWHERE,
)
_OF_GPUS: Final[_Reasons] = (
    ("linear", "linear", "each sum runs over all columns of the linear before, which other programs compute"),
    ("linear", "attention", "attention waits for the keys that other programs write"),
    ("linear", "rowwise", "a row is more than the columns of a tile"),
    ("linear", "argmax", "a row is more than the columns of a tile"),
    ("linear", "sample", "a row is more than the columns of a tile"),
    ("rowwise", "linear", "it is more than a norm and its rounding, or others read it too"),
    ("kv_write", "attention", "attention waits for the keys that other programs write"),
    ("attention", "linear", "each sum of the linear runs over all heads, which other programs compute"),
    *_EVERYWHERE,
)


def fusion_rows(
    graph: Graph, target: CpuTarget | CudaTarget, few: Mapping[str, int] = NOTHING
) -> dict[str, list[dict[str, Any]]]:
    """`taken` and `apart`, as JSON. `few`: of norms that linears may do themselves on a GPU, up to how many
    rows they do (see fuse_norm.py)."""
    taken = Counter(_taken(graph))
    apart = Counter(_apart(graph, target, few))
    return {
        "taken": [asdict(Taken(kind, ops, n, saved)) for (kind, ops, saved), n in taken.items()],
        "apart": [asdict(Apart(a, b, n, size, reason)) for (a, b, size, reason), n in apart.items()],
    }


def format_fusion(graph: Graph, target: CpuTarget | CudaTarget, few: Mapping[str, int] = NOTHING) -> str:
    """The same as text."""
    rows = fusion_rows(graph, target, few)
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


# Why a reader does not do what a writer does itself, from (writer, reader).
Why = Callable[[Node, Node], str]


def _apart(
    graph: Graph, target: CpuTarget | CudaTarget, few: Mapping[str, int]
) -> Iterator[tuple[str, str, int, str]]:
    producers = graph.producers()
    why = _why_on_cpus(graph, target) if isinstance(target, CpuTarget) else _why_on_gpus(graph, few)
    for node in graph.nodes:
        for name in dict.fromkeys(node.values()):
            writer = producers.get(name)
            if writer is None or isinstance(graph.types[name], CacheType):
                continue
            linear = node.find("linear")
            if linear and f"%{name}" != linear.inputs[0]:
                reason = "a residual sum, which is read again later"
            else:
                reason = why(writer, node)
            yield _kind(writer), _kind(node), graph.row_bytes(name), reason


def _why_on_cpus(graph: Graph, target: CpuTarget) -> Why:
    found, refused = find_prologues(graph, target)
    itself = {p.node.outputs[0]: p.rows for p in found.values()}

    def why(writer: Node, reader: Node) -> str:
        if (_kind(writer), _kind(reader)) == ("rowwise", "linear"):
            return refused.get(writer.outputs[0]) or (
                f"in steps of more than {itself.get(writer.outputs[0], 0)} rows, "
                "which the workers share out; of fewer the linear does it itself"
            )
        return _reason(writer, reader, _OF_CPUS)

    return why


def _why_on_gpus(graph: Graph, few: Mapping[str, int]) -> Why:
    refused = refused_writes(graph)

    def why(writer: Node, reader: Node) -> str:
        rows = few.get(writer.outputs[0]) if reader.find("linear") else None
        if rows is not None:
            return (
                f"in steps of more than {rows} rows, which too many programs would norm again; "
                "of fewer the linear does it itself"
            )
        return refused.get(reader.outputs[0]) or _reason(writer, reader, _OF_GPUS)

    return why


def _reason(writer: Node, reader: Node, reasons: _Reasons) -> str:
    if _kind(reader) == "rowwise" and not any(inner.op in REDUCTIONS for inner in reader.body):
        return "several kernels read it, or its rows are others"
    for first, second, reason in reasons:
        if first in ("", _kind(writer)) and second in ("", _kind(reader)):
            return reason
    return "no rule puts these two together"
