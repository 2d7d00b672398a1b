"""What a compiled kernel occupies of a multiprocessor, and whether a target can run it at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from pagec.compiler.dims import round_up
from pagec.compiler.errors import CompileError
from pagec.compiler.target import CudaTarget

# Matrix instructions: of warp groups (sm_90), of a warp, or none.
Mma = Literal["HGMMA", "HMMA", ""]

WARP: Final = 32
# Registers are handed out to warps in granules; each block of threads takes some shared memory for itself.
REGISTER_GRANULE: Final = 256
RESERVED_SHARED: Final = 1024
# A multiprocessor's registers and warps are divided among four schedulers.
SCHEDULERS: Final = 4


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers and stack (where spilled registers go) per thread, shared memory per block of threads, and
    which matrix instruction it uses."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    mma: Mma


def parse_usage(text: str) -> tuple[int, int, int]:
    """(registers, stack, static shared memory) out of what `cuobjdump --dump-resource-usage` prints."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found is not None, text
    registers, stack, shared = map(int, found.groups())
    return registers, stack, shared


def mma_kind(ptx: str) -> Mma:
    """Which matrix instruction a kernel's PTX uses."""
    if "wgmma.mma_async" in ptx:
        return "HGMMA"
    return "HMMA" if "mma.sync" in ptx else ""


def occupancy(resources: Resources, warps: int, target: CudaTarget) -> int:
    """Blocks of threads that a multiprocessor holds at a time."""
    per_warp = round_up(max(resources.registers, 1) * WARP, REGISTER_GRANULE)
    by_registers = target.registers_per_sm // SCHEDULERS // per_warp * SCHEDULERS // warps
    by_shared = target.shared_bytes_per_sm // (resources.shared_bytes + RESERVED_SHARED)
    return min(by_registers, by_shared, target.warps_per_sm // warps, target.blocks_per_sm)


def check(resources: Resources, warps: int, target: CudaTarget, key: str) -> None:
    """Refuses a kernel that the target cannot hold, or that keeps registers in memory."""
    if resources.shared_bytes > target.shared_bytes_per_block:
        what = (
            f"takes {resources.shared_bytes:,} bytes of shared memory, "
            f"{target.name} has {target.shared_bytes_per_block:,}"
        )
    elif resources.stack_bytes:
        what = f"spills: {resources.stack_bytes} bytes of stack beside {resources.registers} registers"
    elif occupancy(resources, warps, target) == 0:
        what = f"takes {resources.registers} registers in {warps} warps, more than {target.name} has"
    else:
        return
    raise CompileError(what, place=key, remedy="choose a smaller tile, fewer stages or more warps")
