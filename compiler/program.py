"""The program: what the runtime executes, as plain data.

    weights   packed tensors and how they come from the model's own (see packing.py)
    tables    constants computed at load (rope cosines and sines)
    slots     workspace areas, `bytes_per_row` x the capacity of their row dimension; buffers share them
    kv        how keys and values lie in the pool
    body      launches over the step's T tokens, first layer to last
    head      launches after the last layer, run in chunks of at most R rows

A launch names a kernel by its number of rows: `variants` are (max_rows, key), ascending, the last one
unbounded (max_rows 0). Its arguments are resolved once, at load:

    buffer:NAME   workspace          kv:LAYER   one layer's slice of the pool
    weight:NAME   packed tensor      table:NAME
    scratch:      memory for within a launch and the one after it
    step:NAME     an integer array of the step: tokens[T], positions[T], logit_rows[R], query_start[S+1],
                  seq_lens[S], slot_mapping.G[T], block_tables.G[S, max_blocks], tiles[T, 2], and
                  sampling.settings[R], .edits, .masks (see sampling.py)

All are flat arrays of the element type that the kernel's `signature` names (int32 words, or float32);
after them every kernel takes three int32: its number of rows, and which share of how many it is to compute
(share, num_shares). A step passes only numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pagec.compiler.dims import (
    BYTE_ALIGN,
    ITEM_BYTES,
    Capacity,
    DType,
    Rows,
    padded_last,
    round_up,
    row_stride,
)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in the workspace; rows lie `row_stride(inner)` elements apart."""

    name: str
    rows: Rows
    inner: tuple[int, ...]
    dtype: DType
    slot: int

    @property
    def stride(self) -> int:
        """Elements from one row to the next."""
        return row_stride(self.inner)


@dataclass(frozen=True, slots=True)
class Slot:
    """A workspace area that buffers with disjoint lives share."""

    rows: Rows
    bytes_per_row: int


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A tensor as kernels read it: `parts` name the model's weights that it is made of, in order.

    `steps` are (name, arguments) of packing.py, each with an exact inverse; `part_rows` how many rows
    each part brings (0: the parts are vectors' elements).
    """

    name: str
    parts: tuple[str, ...]
    part_shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines, then sines: float32 [2, length, pairs], from `frequencies` (radians per position), times
    `scale`."""

    name: str
    frequencies: tuple[float, ...]
    length: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table. `window`: keys further back are never read."""

    layers: tuple[int, ...]
    window: int | None


KvKind = Literal["words", "rows"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the KV pool is laid out.

    A block holds `block_size` tokens of the layers of one group: one *span* of `span_bytes` per layer.
    Spans of a layer's index within its group lie together, block after block, so that a run of blocks is
    contiguous memory for each layer:  pool[layer_in_group][block][span_bytes].

    Inside a span, head_dim padded to 16:

    words (CPUs)  per 16 tokens and KV head K as words [head_dim / unit][16] and V as words
                  [16 / unit][head_dim], a 32-bit word being `unit` elements (2 of bf16: neighbouring dims
                  of K, neighbouring tokens of V; 1 of float32)
    rows (GPUs)   [K, V][kv_head][token][head_dim]
    """

    dtype: DType
    block_size: int
    kv_heads: int
    head_dim: int
    groups: tuple[KvGroup, ...]
    kind: KvKind = "words"

    @property
    def span_bytes(self) -> int:
        return 2 * self.block_size * self.kv_heads * padded_last((self.head_dim,)) * ITEM_BYTES[self.dtype]

    @property
    def spans(self) -> int:
        """Spans of a block: layers of the largest group."""
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def block_bytes(self) -> int:
        return self.spans * self.span_bytes

    @property
    def layout_id(self) -> str:
        """Names this layout: bytes of blocks may be exchanged only between equal ids."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def place(self, layer: int) -> tuple[int, int]:
        """(group, index in the group) of a layer."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KeyError(layer)

    def to_json(self) -> dict[str, Any]:
        """Words go without saying: what CPUs have stored keeps its id."""
        data = asdict(self)
        if self.kind == "words":
            del data["kind"]
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KvLayout:
        groups = tuple(KvGroup(tuple(g["layers"]), g["window"]) for g in data["groups"])
        return KvLayout(**{**data, "groups": groups})


# T: tokens. R: logit rows. tiles: attention's work items. merges: tiles whose splits are computed apart, or
# 0. logits, greedy: R where the logits are wanted, and 0 where only their argmax is; or the other way round.
# sampled: R where some row is to be sampled, else 0.
RowCount = Literal["T", "R", "tiles", "merges", "logits", "greedy", "sampled"]
HEAD_COUNTS: Final = ("R", "logits", "greedy", "sampled")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call of a step: `rows` says which count it takes, `variants` which kernel for how many."""

    name: str
    rows: RowCount
    variants: tuple[tuple[int, str], ...]
    args: tuple[str, ...]

    def key_for(self, num_rows: int) -> str:
        """The kernel for this many rows; empty if there is nothing to do for so few."""
        for limit, key in self.variants:
            if num_rows <= limit or limit == 0:
                return key
        raise AssertionError("the last variant is unbounded")


@dataclass(frozen=True, slots=True)
class Kernel:
    """An emitted kernel: its template, the template's parameters, and what one row costs.

    `symbol` is the function's name in kernels.so, `signature` the element type of each array argument.
    It is called for a share of the work at a time, (share, num_shares), `shares` times for each worker.
    `flops_per_row` and `bytes_per_row` scale with the rows; `bytes_fixed` (weights) does not. Attention's
    cost depends on the context and is not counted here.
    """

    key: str
    symbol: str
    template: str
    params: Mapping[str, Any]
    signature: tuple[str, ...]
    flops_per_row: int
    bytes_per_row: int
    bytes_fixed: int
    shares: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a program of any target asks of memory, and whose outputs it gives."""

    model: str
    vocab: int
    max_len: int
    capacity: Capacity
    kv: KvLayout
    slots: tuple[Slot, ...]
    buffers: tuple[Buffer, ...]
    weights: tuple[PackedWeight, ...]
    tables: tuple[RopeTable, ...]
    scratch_bytes: int
    outputs: Mapping[str, str]

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence of the greatest length."""
        return -(-self.max_len // self.kv.block_size)

    def slot_offsets(self) -> tuple[list[int], int]:
        """Byte offset of each workspace slot, and the size of all of them."""
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end += round_up(slot.bytes_per_row * self.capacity.rows(slot.rows), BYTE_ALIGN)
        return offsets, end

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kv": self.kv.to_json()}


def memory_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Memory."""
    return {
        "model": data["model"],
        "vocab": data["vocab"],
        "max_len": data["max_len"],
        "capacity": Capacity(**data["capacity"]),
        "kv": KvLayout.from_json(data["kv"]),
        "slots": tuple(Slot(**s) for s in data["slots"]),
        "buffers": tuple(Buffer(**{**b, "inner": tuple(b["inner"])}) for b in data["buffers"]),
        "weights": tuple(_weight_from_json(w) for w in data["weights"]),
        "tables": tuple(
            RopeTable(t["name"], tuple(t["frequencies"]), t["length"], t["scale"]) for t in data["tables"]
        ),
        "scratch_bytes": data["scratch_bytes"],
        "outputs": dict(data["outputs"]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Memory):
    """Everything a runner on a CPU needs beside the kernels' binary and the weights' bytes.

    `query_tile`: tokens of an attention tile. In a step of up to `few_tiles` tiles, each `key_split` keys of
    a decoding sequence are work of their own, to be merged.
    """

    query_tile: int
    few_tiles: int
    key_split: int
    kernels: tuple[Kernel, ...]
    body: tuple[Launch, ...]
    head: tuple[Launch, ...]

    def merges(self, num_tiles: int, longest: int) -> int:
        """Tiles whose splits have to be merged, in a step whose longest sequence has `longest` tokens."""
        return num_tiles if num_tiles <= self.few_tiles and longest > self.key_split else 0

    def to_json(self) -> dict[str, Any]:
        """Sizes first, then memory, then the launches."""
        data = Memory.to_json(self)
        sizes = ("model", "vocab", "max_len", "capacity", "query_tile", "few_tiles", "key_split")
        launches = ("kernels", "body", "head", "outputs")
        memory = (name for name in data if name not in launches)
        return {name: data[name] for name in dict.fromkeys((*sizes, *memory, *launches))}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Program:
        return Program(
            **memory_from_json(data),
            query_tile=data["query_tile"],
            few_tiles=data["few_tiles"],
            key_split=data["key_split"],
            kernels=tuple(Kernel(**{**k, "signature": tuple(k["signature"])}) for k in data["kernels"]),
            body=_launches_from_json(data["body"]),
            head=_launches_from_json(data["head"]),
        )


def _weight_from_json(data: Mapping[str, Any]) -> PackedWeight:
    return PackedWeight(
        data["name"],
        tuple(data["parts"]),
        tuple(tuple(s) for s in data["part_shapes"]),
        tuple((name, tuple(args)) for name, args in data["steps"]),
        data["dtype"],
        tuple(data["shape"]),
    )


def _launches_from_json(items: Sequence[Mapping[str, Any]]) -> tuple[Launch, ...]:
    return tuple(
        Launch(d["name"], d["rows"], tuple((n, key) for n, key in d["variants"]), tuple(d["args"]))
        for d in items
    )
