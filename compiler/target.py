"""What a compilation is for: a CPU kind or a GPU, as an artifact records it.

The descriptions live in `configs/targets/*.yaml` (read by `backends.targets`); an artifact carries its
own copy, so that a serving host can tell whether it may run it without reading YAML.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagec.compiler.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A CPU kind. `requires` are flags as /proc/cpuinfo spells them; `llvm` goes to TVM as it is.

    `lanes`: float32 lanes of a vector register; `vector_registers`: how many there are;
    `bf16_dot`: the instruction for dot products of bf16 pairs exists; `launch_ns`: what a launch costs in a
    step, nearly all of it the wait for all workers; `row_bytes_per_ns`: how fast one core does row-wise work,
    by what it reads and writes; `run`: False where code has only
    ever been compiled, never run.
    """

    name: str
    machine: str
    requires: tuple[str, ...]
    llvm: Mapping[str, Any]
    lanes: int
    vector_registers: int
    bf16_dot: bool
    l1_bytes: int
    l2_bytes: int
    launch_ns: int
    row_bytes_per_ns: float
    run: bool = True

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "requires": list(self.requires), "llvm": dict(self.llvm)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CpuTarget:
        return CpuTarget(**{**data, "requires": tuple(data["requires"])})


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """An NVIDIA GPU. `sm`: compute capability (80: 8.0).

    Sizes per multiprocessor bound how many blocks of threads it holds at a time; rates (dense bf16, at
    `clock_mhz`) are for the cost model. `run`: False where code has only ever been compiled, never run.
    """

    name: str
    sm: int
    sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    clock_mhz: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_ns: float
    mma_flops_per_clock: int
    run: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CudaTarget:
        return CudaTarget(**data)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine at hand: its architecture and CPU flags."""

    machine: str
    flags: frozenset[str]


def host() -> Host:
    """This machine, from /proc/cpuinfo."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    return Host(platform.machine(), frozenset(flags))


def check_runs_on(target: CpuTarget, machine: Host) -> None:
    """Refuses code that this machine cannot execute (it would die by SIGILL)."""
    missing = [flag for flag in target.requires if flag not in machine.flags]
    if target.machine != machine.machine:
        what = f"made for {target.machine}, this machine is {machine.machine}"
    elif missing:
        what = f"made for {target.name}, this CPU lacks {', '.join(missing)}"
    else:
        return
    raise ArtifactError(what, place="target", remedy="compile the model again on this machine (--target cpu)")
