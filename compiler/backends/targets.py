"""Targets by name, from configs/targets/*.yaml; "cpu" is the best of them that this machine can run."""

from __future__ import annotations

from typing import Any

import yaml

from pagec import configs
from pagec.compiler.errors import TargetError
from pagec.compiler.target import CpuTarget, CudaTarget, host

HOST = "cpu"
# Tried in this order for "cpu".
PREFERENCE = ("cpu-avx512-bf16", "cpu-avx512", "cpu-avx2", "cpu-neon")
GPUS = ("a100", "h100", "h200")


def load_target(name: str) -> CpuTarget | CudaTarget:
    """A target by name."""
    if name == HOST:
        return best_for_this_machine()
    data = _read(name)
    return CudaTarget.from_json(data) if "sm" in data else CpuTarget.from_json(data)


def load_cpu_target(name: str) -> CpuTarget:
    """A CPU by name."""
    target = load_target(name)
    if isinstance(target, CudaTarget):
        raise TargetError(
            f"{name} is a GPU", place="--target", remedy=f"use cpu, or one of {', '.join(PREFERENCE)}"
        )
    return target


def load_cuda_target(name: str) -> CudaTarget:
    """A GPU by name."""
    target = load_target(name)
    if isinstance(target, CpuTarget):
        raise TargetError(f"{name} is no GPU", place="--target", remedy=f"use one of {', '.join(GPUS)}")
    return target


def best_for_this_machine() -> CpuTarget:
    """The first target of PREFERENCE whose flags this machine has."""
    machine = host()
    for name in PREFERENCE:
        target = CpuTarget.from_json(_read(name))
        if target.machine == machine.machine and machine.flags.issuperset(target.requires):
            return target
    raise TargetError(
        f"no target fits this machine ({machine.machine})",
        remedy=f"pagec compiles for {', '.join(PREFERENCE)}; x86-64 needs at least AVX2 and FMA",
    )


def _read(name: str) -> dict[str, Any]:
    path = configs.find("targets", name)
    if path is None:
        known = ", ".join(configs.names("targets"))
        raise TargetError(
            f"there is no target {name!r}", place="--target", remedy=f"use cpu, or one of {known}"
        )
    return {"name": name, **yaml.safe_load(path.read_text())}
