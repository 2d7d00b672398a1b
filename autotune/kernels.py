"""What the cost model says of a program's kernels, at the sizes that they are launched with."""

from __future__ import annotations

from typing import Any, Final

from pagec.autotune.prediction import Point, Prediction
from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.autotune.search import judged
from pagec.autotune.space import BLOCK_SIZE
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.gpu_program import GpuKernel
from pagec.compiler.target import CudaTarget

# Tokens of a decoding sequence.
CONTEXT: Final = 2048


def problem_of(kernel: GpuKernel, rows: int) -> Problem | None:
    """Of a kernel launched for `rows` rows; None if there is no model of its kind."""
    p: Any = kernel.params
    match kernel.template:
        case "linear":
            return Linear(rows, p["NP"], p["KP"])
        case "attention_prefill":
            return Prefill(p["heads"], p["kv_heads"], p["DP"], rows)
        case "attention_decode":
            return Decode(p["heads"], p["kv_heads"], p["DP"], rows, CONTEXT)
    return None


def predicted(
    kernel: GpuKernel, rows: int, resources: Resources, target: CudaTarget
) -> tuple[Problem, Prediction] | None:
    """The time of a kernel with what the compiler says that it takes."""
    problem = problem_of(kernel, rows)
    if problem is None:
        return None
    found = judged(problem, _point(kernel), target, resources)
    return (problem, found.prediction) if found.prediction else None


def _point(kernel: GpuKernel) -> Point:
    names = ("BM", "BN", "BK", "group_m", "splits", "split")
    point = {name: int(kernel.params[name]) for name in names if name in kernel.params}
    point["block_size"] = int(kernel.params.get("block_size", BLOCK_SIZE))
    return {
        **point,
        "tma": int(bool(kernel.params.get("tma"))),
        "warps": kernel.warps,
        "stages": kernel.stages,
    }
