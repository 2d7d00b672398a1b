"""A plan's kernels, compiled and written into an artifact, and what the manifest says of their numbers.

A tuned choice that does not compile clean in a program (its table was made without the program's epilogues)
is refused, and the program planned anew without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from pagec.compiler.artifact import CompiledKernel, dump_json
from pagec.compiler.backends.cuda.attention import key_warps
from pagec.compiler.backends.cuda.build import Cubin, Progress, compile_all
from pagec.compiler.backends.cuda.knobs import Choice
from pagec.compiler.backends.cuda.plan import GpuPlan
from pagec.compiler.backends.cuda.resources import check
from pagec.compiler.errors import CompileError
from pagec.compiler.target import CudaTarget

# The oldest architecture: newer GPUs can compile its PTX when they load it.
OLDEST: Final = 80
# Matrix instructions of warp groups.
GROUP_MMA: Final = "HGMMA"
MakePlan = Callable[[frozenset[Choice]], GpuPlan]
Cubins = Mapping[str, Cubin]


def plan_and_compile(
    make_plan: MakePlan, directory: Path, target: CudaTarget, cache: Path, progress: Progress
) -> tuple[GpuPlan, Cubins]:
    """The plan and its compiled kernels, whose sources lie in `directory` then. `make_plan` plans without
    the choices that it is given."""
    refused = frozenset[Choice]()
    while True:
        plan = make_plan(refused)
        requests = [replace(kernel.write(directory), checked=False) for kernel in plan.kernels.values()]
        cubins = compile_all(requests, target, cache=cache, progress=progress)
        bad = _refused(plan, cubins, target)
        if not bad:
            break
        refused |= bad
    for file in directory.glob("*.py"):
        if file.stem not in plan.kernels:
            file.unlink()
    if plan.program.strict:
        _check_strict(plan, cubins)
    return plan, cubins


def _refused(plan: GpuPlan, cubins: Cubins, target: CudaTarget) -> frozenset[Choice]:
    """The choices whose kernels do not compile clean; CompileError for such a kernel that nobody chose."""
    bad: set[Choice] = set()
    for key, cubin in cubins.items():
        try:
            check(cubin.resources, cubin.launch.warps, target, key)
        except CompileError:
            if not plan.choices.get(key):
                raise
            bad |= plan.choices[key]
    return frozenset(bad)


def write_kernels(directory: Path, cubins: Cubins, target: CudaTarget) -> None:
    """Code and launch metadata beside the sources."""
    for key, cubin in cubins.items():
        (directory / f"{key}.cubin").write_bytes(cubin.binary)
        (directory / f"{key}.json").write_text(dump_json(compiled_kernel(cubin).to_json()))
        if target.sm == OLDEST:
            (directory / f"{key}.ptx").write_text(cubin.ptx)


def compiled_kernel(cubin: Cubin) -> CompiledKernel:
    """As an artifact holds it, code left out."""
    return CompiledKernel(cubin.launch, asdict(cubin.resources))


# -------------------------------------------------------------------------------------- numbers


def numeric_choices(plan: GpuPlan, cubins: Cubins) -> dict[str, list[dict[str, Any]]]:
    """What can change a bit, by what is computed: the order of sums, and the matrix instructions."""
    found: dict[str, list[dict[str, Any]]] = {}
    for group, choice in _numeric(plan, cubins):
        found.setdefault(group, [])
        if choice not in found[group]:
            found[group].append(choice)
    return found


def _numeric(plan: GpuPlan, cubins: Cubins) -> Iterator[tuple[str, dict[str, Any]]]:
    for kernel in plan.kernels.values():
        p, mma = kernel.params, cubins[kernel.key].resources.mma
        match kernel.template:
            case "linear":
                yield f"linear {p['NP']}x{p['KP']}", {"BK": p["BK"], "splits": p["splits"], "mma": mma}
            case "grouped_linear":
                yield f"experts {p['NP']}x{p['KP']}", {"BK": p["BK"], "mma": mma}
            case "attention_prefill" | "attention_decode":
                dealt = key_warps(p["BM"], p["BN"], kernel.warps, groups=mma == GROUP_MMA)
                yield "attention", {"BN": p["BN"], "split": p["split"], "mma": mma, "key_warps": dealt}


def _check_strict(plan: GpuPlan, cubins: Cubins) -> None:
    """One choice for all rows; of attention for prefill and decode together."""
    for group, choices in numeric_choices(plan, cubins).items():
        if len(choices) > 1:
            raise CompileError(
                f"not strict: {group} has {json.dumps(choices)}",
                place="--strict",
                remedy="compile without --strict, or with tables that hold one choice for all rows",
            )
