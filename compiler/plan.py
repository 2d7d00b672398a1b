"""The plan: a fused graph lowered, its values given room in the workspace, as a Program.

Buffers are planned by liveness: a value's slot is free again after its last reader, for values with rows of
the same length. Values that the head reads live until the step ends, for the head runs several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagec.compiler.backends.cpu.lower import Call, Lowering, Settings
from pagec.compiler.backends.cpu.tiles import FEW_TILES, KEY_SPLIT, query_tile
from pagec.compiler.backends.tuned import Tuned
from pagec.compiler.dims import ITEM_BYTES, Capacity, DType, round_up, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Graph, Type
from pagec.compiler.program import (
    HEAD_COUNTS,
    Buffer,
    Kernel,
    KvGroup,
    KvKind,
    KvLayout,
    Launch,
    Program,
    Slot,
)
from pagec.compiler.target import CpuTarget

# Logits of a head chunk take at most this much: it bounds R.
MAX_LOGIT_BYTES = 64 << 20


def derive_logit_rows(vocab: int, max_seqs: int, most_bytes: int = MAX_LOGIT_BYTES) -> int:
    """R: as many rows as sequences, as far as their float32 logits fit in `most_bytes`."""
    return max(1, min(max_seqs, most_bytes // (4 * row_stride((vocab,)))))


def kv_layout(graph: Graph, dtype: DType, block_size: int, kind: KvKind = "words") -> KvLayout:
    """The layout of a fused graph's caches: layers grouped by window, groups of one size.

    Every group has as many layers as the rarest window has (the last group of a window may have fewer), so
    that blocks of all groups have the same bytes and one pool serves them all.
    """
    caches = [t for name in graph.inputs if isinstance(t := graph.types[name], CacheType)]
    shapes = {(cache.kv_heads, cache.head_dim) for cache in caches}
    if len(shapes) > 1:
        raise CompileError(f"layers differ in KV heads or head size: {sorted(shapes)}")
    by_window: dict[int | None, list[int]] = {}
    for cache in caches:
        by_window.setdefault(cache.window, []).append(cache.layer)
    size = min((len(layers) for layers in by_window.values()), default=1)
    groups = tuple(
        KvGroup(tuple(layers[start : start + size]), window)
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    )
    kv_heads, head_dim = next(iter(shapes), (1, 1))
    return KvLayout(dtype, block_size, kv_heads, head_dim, groups, kind)


@dataclass(frozen=True, slots=True)
class Plan:
    """A program, and the node behind each of its launches (what `show plan` and verify need).

    `tuned`: the choices of tables that its kernels took.
    """

    program: Program
    graph: Graph
    body: tuple[Call, ...]
    head: tuple[Call, ...]
    tuned: Tuned


def make_plan(
    source: Graph,
    fused: Graph,
    *,
    model: str,
    max_len: int,
    capacity: Capacity,
    kv_dtype: DType,
    block_size: int,
    target: CpuTarget,
    tuned: Tuned,
) -> Plan:
    """The program of a fused graph; `source` is the same graph before the passes. `tuned`: what there is to
    choose from; where it has nothing for a shape, the defaults are taken."""
    kv = kv_layout(fused, kv_dtype, block_size)
    settings = Settings(target, capacity, max_len, query_tile(_widest_group(fused, kv)), kv, tuned)
    lowering = Lowering(fused, source, settings)
    calls = [call for node in fused.nodes for call in lowering.lower(node)]
    body = tuple(call for call in calls if call.rows not in HEAD_COUNTS)
    head = tuple(call for call in calls if call.rows in HEAD_COUNTS)
    buffers, slots = assign_slots(
        fused,
        [(call.values(), call.node.outputs) for call in body],
        [(call.values(), call.node.outputs) for call in head],
    )
    kernels: dict[str, Kernel] = {}
    for call in (*body, *head):
        for kernel in call.kernels():
            kernels.setdefault(kernel.key, kernel)
    program = Program(
        model=model,
        vocab=fused.type("logits").inner[0],
        max_len=max_len,
        capacity=capacity,
        query_tile=settings.query_tile,
        few_tiles=FEW_TILES,
        key_split=KEY_SPLIT,
        kv=kv,
        slots=slots,
        buffers=buffers,
        weights=tuple(lowering.packer.weights.values()),
        tables=tuple(lowering.packer.tables.values()),
        scratch_bytes=lowering.scratch_bytes,
        kernels=tuple(kernels.values()),
        body=tuple(_launch(call, fused) for call in body),
        head=tuple(_launch(call, fused) for call in head),
        outputs={name: name for name in fused.outputs},
    )
    taken = {call.tuned: tuned[call.tuned] for call in (*body, *head) if call.tuned}
    return Plan(program, fused, body, head, taken)


def _widest_group(graph: Graph, kv: KvLayout) -> int:
    heads = [graph.type(n.outputs[0]).inner[0] for n in graph.nodes if n.op == "fused.attention"]
    return max(heads, default=1) // kv.kv_heads


def _launch(call: Call, graph: Graph) -> Launch:
    variants = tuple((limit, kernel.key if kernel else "") for limit, kernel in call.variants)
    return Launch(call.name, call.rows, variants, place_args(call.args, graph))


def place_args(args: Sequence[str], graph: Graph) -> tuple[str, ...]:
    """Arguments with where values lie in place of "value:NAME"."""

    def place(arg: str) -> str:
        kind, _, name = arg.partition(":")
        if kind != "value":
            return arg
        return f"step:{name}" if name in graph.inputs else f"buffer:{name}"

    return tuple(map(place, args))


# ------------------------------------------------------------------------------------- liveness


@dataclass(slots=True)
class _Slots:
    """Workspace slots while they are handed out."""

    slots: list[Slot] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def take(self, rows: str, size: int) -> int:
        """A free slot of such rows, or a new one. Not one of longer rows: a row would lie where others were,
        which another worker has in its cache."""
        assert rows in ("T", "S", "R")
        wanted = Slot(rows, size)  # type: ignore[arg-type]
        for slot in self.free:
            if self.slots[slot] == wanted:
                self.free.remove(slot)
                return slot
        self.slots.append(wanted)
        return len(self.slots) - 1


# Values that a launch, or a node's launches, read and make.
Use = tuple[Sequence[str], Sequence[str]]


def assign_slots(
    graph: Graph, body: Sequence[Use], head: Sequence[Use]
) -> tuple[tuple[Buffer, ...], tuple[Slot, ...]]:
    """Room for all values that are made, in the order of making."""
    order = [*body, *head]
    last_use = {name: at for at, (read, _) in enumerate(order) for name in read}
    made_in_body = {name for _, made in body for name in made}
    for read, _ in head:
        for name in read:
            if name in made_in_body:
                last_use[name] = len(order)
    for name in graph.outputs:
        last_use[name] = len(order)
    slots, place, buffers = _Slots(), dict[str, int](), list[Buffer]()
    for at, (read, made) in enumerate(order):
        for name in made:
            t = graph.types[name]
            if not isinstance(t, Type) or name in place:
                continue
            assert t.rows is not None
            size = round_up(row_stride(t.inner) * ITEM_BYTES[t.dtype], 4)
            place[name] = slots.take(t.rows, size)
            buffers.append(Buffer(name, t.rows, t.inner, t.dtype, place[name]))
        ending = [n for n in (*read, *made) if n in place]
        slots.free += [place[n] for n in dict.fromkeys(ending) if last_use.get(n, at) <= at]
    return tuple(buffers), tuple(slots.slots)
