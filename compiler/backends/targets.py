"""Targets by name, from configs/targets/*.yaml; "cpu" is the best of them that this machine can run."""

from __future__ import annotations

from pathlib import Path

import yaml

from pagec import configs
from pagec.compiler.errors import TargetError
from pagec.compiler.target import CpuTarget, host

HOST = "cpu"
# Tried in this order for "cpu".
PREFERENCE = ("cpu-avx512-bf16", "cpu-avx512", "cpu-avx2", "cpu-neon")


def load_target(name: str) -> CpuTarget:
    """A target by name."""
    return best_for_this_machine() if name == HOST else _read(name)


def best_for_this_machine() -> CpuTarget:
    """The first target of PREFERENCE whose flags this machine has."""
    machine = host()
    for name in PREFERENCE:
        target = _read(name)
        if target.machine == machine.machine and machine.flags.issuperset(target.requires):
            return target
    raise TargetError(
        f"no target fits this machine ({machine.machine})",
        remedy=f"pagec compiles for {', '.join(PREFERENCE)}; x86-64 needs at least AVX2 and FMA",
    )


def _read(name: str) -> CpuTarget:
    path = Path(configs.__file__).parent / "targets" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise TargetError(
            f"there is no target {name!r}", place="--target", remedy=f"use cpu, or one of {', '.join(known)}"
        )
    return CpuTarget.from_json({"name": name, **yaml.safe_load(path.read_text())})
