"""What keeps a multiprocessor from holding more blocks of threads, and what no block may exceed.

How many it holds says `compiler.backends.cuda.resources`, by the rules of NVIDIA's occupancy calculator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from pagec.compiler.backends.cuda.resources import Mma, Resources, occupancy
from pagec.compiler.target import CudaTarget

Limit = Literal["registers", "shared memory", "warps"]
# Registers that a thread can name.
MAX_REGISTERS: Final = 255
THREADS_PER_WARP: Final = 32


def limit_of(held: Resources, warps: int, target: CudaTarget) -> Limit:
    """What there would have to be more of for another block of `warps` warps."""
    blocks = occupancy(held, warps, target)
    if occupancy(replace(held, registers=1), warps, target) > blocks:
        return "registers"
    if occupancy(replace(held, shared_bytes=0), warps, target) > blocks:
        return "shared memory"
    both = replace(held, registers=1, shared_bytes=0)
    return "registers" if occupancy(both, warps, target) > blocks else "warps"


def resources(registers: float, shared_bytes: int, mma: Mma) -> Resources:
    """An estimate as the compiler would report it: what registers cannot hold lies on the stack."""
    over = max(0, round(registers) - MAX_REGISTERS)
    return Resources(min(round(registers), MAX_REGISTERS), 4 * over, shared_bytes, mma)


def why_not(held: Resources, warps: int, target: CudaTarget) -> str:
    """Why a kernel cannot run on the target or had better not; empty if it can."""
    if held.shared_bytes > target.shared_bytes_per_block:
        return (
            f"{held.shared_bytes:,} bytes of shared memory, "
            f"{target.name} has {target.shared_bytes_per_block:,}"
        )
    if held.stack_bytes:
        return f"spills {held.stack_bytes:,} bytes"
    if held.registers > MAX_REGISTERS:
        return f"{held.registers} registers, a thread has {MAX_REGISTERS}"
    if occupancy(held, warps, target) == 0:
        return f"{held.registers} registers in {warps} warps, more than {target.name} has"
    return ""
