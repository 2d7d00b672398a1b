"""What points take according to the compiler: from a problem and its knobs to a kernel and its resources."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pagec.autotune.prediction import Point
from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.autotune.space import BLOCK_SIZE, MAX_LEN, SPACES
from pagec.compiler.backends.cuda.attention import AttentionShape, DecodeKnobs, PrefillKnobs, decode, prefill
from pagec.compiler.backends.cuda.build import Progress, compile_all
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape, linear, plain
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.target import CudaTarget


def kernel_of(problem: Problem, point: Point) -> CudaKernel:
    """The kernel of a point: bf16, a linear without epilogue."""
    if isinstance(problem, Linear):
        shape = LinearShape(problem.N, problem.K, "bf16")
        return linear(shape, plain(shape, "bf16"), LinearKnobs.of(_own(problem, point)))[0]
    attention = attention_shape(problem, point.get("block_size", BLOCK_SIZE))
    if isinstance(problem, Decode):
        taken = {knob: value for knob, value in _own(problem, point).items() if knob != "block_size"}
        return decode(attention, DecodeKnobs(**taken))
    return prefill(attention, PrefillKnobs(**_own(problem, point)))


def attention_shape(problem: Prefill | Decode, block_size: int = BLOCK_SIZE) -> AttentionShape:
    """A problem's attention over cache blocks of `block_size` tokens."""
    sizes = problem.heads, problem.kv_heads, problem.head_dim
    return AttentionShape(*sizes, "bf16", "bf16", problem.head_dim**-0.5, block_size, MAX_LEN)


def _own(problem: Problem, point: Point) -> dict[str, int]:
    return {knob: point[knob] for knob in SPACES[problem.kind].knobs}


class PointCompiler:
    """Compiles points, each once, for at most `budget_s` seconds (0: as long as it takes); compiled kernels
    stay in `cache`."""

    def __init__(self, target: CudaTarget, cache: Path, budget_s: float, progress: Progress) -> None:
        self._target, self._cache, self._progress = target, cache, progress
        self._ends = time.monotonic() + budget_s if budget_s else float("inf")
        self._seen: set[str] = set()

    def resources(self, asked: Sequence[tuple[Problem, Point]]) -> list[tuple[Problem, Point, Resources]]:
        """What those that it has not compiled before take."""
        if time.monotonic() > self._ends:
            return []
        with tempfile.TemporaryDirectory() as directory:
            kernels = [(problem, point, kernel_of(problem, point)) for problem, point in asked]
            fresh = {kernel.key: kernel for _, _, kernel in kernels if kernel.key not in self._seen}
            requests = [replace(kernel.write(Path(directory)), checked=False) for kernel in fresh.values()]
            cubins = compile_all(requests, self._target, cache=self._cache, progress=self._progress)
        self._seen |= cubins.keys()
        first = {kernel.key: (problem, point) for problem, point, kernel in reversed(kernels)}
        return [(*first[key], cubin.resources) for key, cubin in cubins.items()]
