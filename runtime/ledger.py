"""Where the memory goes, and how large the KV pool becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pagec.compiler.errors import CapacityError
from pagec.compiler.program import KvLayout, Memory

# The KV pool's part of what is free if no size is given: other processes want some, too.
KV_SHARE: Final = 0.5
# Kernels of CPUs address one layer's slice of the pool with 32-bit indices of 16-bit elements.
MAX_SLICE_BYTES: Final = (1 << 32) - (1 << 12)
# Those of GPUs number its lines, one for each token, KV head, and K or V, by 32 bits.
MAX_LINES: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes of each area of device memory. `graphs_bytes`: recorded steps, where a device records any.
    `kv_tiers`: limits of the tiers below the KV pool, by name; they are no part of the total."""

    weights_bytes: int
    tables_bytes: int
    workspace_bytes: int
    step_bytes: int
    kv_bytes: int
    kv_blocks: int
    kv_tokens: int
    weights_memory: str
    graphs_bytes: int = 0
    kv_tiers: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.tables_bytes + self._working_bytes + self.kv_bytes

    @property
    def _working_bytes(self) -> int:
        return self.workspace_bytes + self.step_bytes + self.graphs_bytes

    @property
    def fixed_bytes(self) -> int:
        """What must be allocated whatever the pool's size. Mapped weights are the page cache's."""
        weights = 0 if self.weights_memory == "mmap" else self.weights_bytes
        return weights + self.tables_bytes + self._working_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}

    def lines(self) -> list[str]:
        """For people: one line per area."""
        how = {"copy": "copied into huge pages", "mmap": "mapped from the file"}
        areas = [
            ("weights", self.weights_bytes, how.get(self.weights_memory, "")),
            ("tables", self.tables_bytes, ""),
            ("workspace", self.workspace_bytes, ""),
            ("step arrays", self.step_bytes, ""),
            *([("graphs", self.graphs_bytes, "")] if self.graphs_bytes else []),
            ("KV pool", self.kv_bytes, f"{self.kv_blocks} blocks, {self.kv_tokens} tokens"),
            ("total", self.total_bytes, ""),
            *((f"KV on {name}", size, "at most") for name, size in self.kv_tiers.items()),
        ]
        return [f"{name:11} {size / 1e6:>10,.1f} MB  {note}".rstrip() for name, size, note in areas]


def check_fits(ledger: Ledger, free_bytes: int) -> None:
    """Refuses a program whose fixed areas are larger than what is free: better now than the system later."""
    if ledger.fixed_bytes <= free_bytes:
        return
    mapped = ledger.weights_memory == "mmap"
    areas = {
        "weights": 0 if mapped else ledger.weights_bytes,
        "tables": ledger.tables_bytes,
        "workspace": ledger.workspace_bytes,
        "step arrays": ledger.step_bytes,
    }
    parts = " + ".join(f"{size} bytes of {name}" for name, size in areas.items() if size)
    raise CapacityError(
        f"{parts} = {ledger.fixed_bytes} bytes; {free_bytes} are free",
        place="memory",
        remedy="compile with a smaller --max-step-tokens"
        + ("" if mapped else ", or use --weights-memory mmap"),
    )


def kv_blocks(
    program: Memory,
    *,
    num_blocks: int | None,
    kv_bytes: int | None,
    free_bytes: int,
    share: float = KV_SHARE,
) -> int:
    """The number of blocks of the pool: as asked, or a `share` of what is free but no more than is of use."""
    kv = program.kv
    most = _addressable(kv)
    if num_blocks is None and kv_bytes is None:
        useful = program.capacity.S * program.max_blocks * len(kv.groups) + 1
        affordable = int(free_bytes * share) // max(kv.block_bytes, 1)
        num_blocks = min(useful, affordable, most)
    elif num_blocks is None:
        assert kv_bytes is not None
        num_blocks = kv_bytes // max(kv.block_bytes, 1)
    least = len(kv.groups) + 1
    if num_blocks < least:
        raise CapacityError(
            f"{num_blocks} blocks ({num_blocks * kv.block_bytes} bytes) hold no sequence: "
            f"{least} blocks ({least * kv.block_bytes} bytes) are needed at least",
            place="KV pool",
            remedy="give the KV pool more memory (kv_bytes)",
        )
    if num_blocks > most:
        raise CapacityError(
            f"{num_blocks} blocks are more than kernels can address, {most}",
            place="KV pool",
            remedy=f"ask for {most * kv.block_bytes} bytes at most",
        )
    if num_blocks * kv.block_bytes > free_bytes:
        raise CapacityError(
            f"{num_blocks} blocks are {num_blocks * kv.block_bytes} bytes; {free_bytes} are free",
            place="KV pool",
            remedy="give the KV pool less memory (kv_bytes)",
        )
    return num_blocks


def _addressable(kv: KvLayout) -> int:
    """The most blocks that kernels can number."""
    if kv.kind == "rows":
        return MAX_LINES // (2 * kv.kv_heads * kv.block_size)
    return MAX_SLICE_BYTES // max(kv.span_bytes, 1)
