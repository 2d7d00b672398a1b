"""Bundles without a compiler or a GPU: float32 kernels of small problems, whose machine code is their key.

They run on FakeGpu and FakeLibrary: in Triton's interpreter (`run_interpreted`), or as `Emulated` linears
that take as long as a test says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pagec.autotune import bundle_prepare, bundle_run
from pagec.autotune.bundle import Bundle, Timed, read_bundle, read_results
from pagec.autotune.bundle_choice import attention_picks, linear_picks
from pagec.autotune.bundle_prepare import Subject
from pagec.autotune.problem import Decode, Linear, Prefill
from pagec.compiler.backends.cuda.build import CompileRequest, Cubin
from pagec.compiler.backends.cuda.resources import Mma, Resources
from pagec.compiler.backends.targets import load_cuda_target
from pagec.compiler.launch import COUNT_ALIGN, POINTER_ALIGN, LaunchMetadata
from support.fake_cuda import FakeEvent, FakeGpu, FakeLaunch, FakeLibrary

# Its L2 cache is overwritten before every launch.
H200 = replace(load_cuda_target("h200"), l2_bytes=4096)
ROWS, N, K = (8, 24), 64, 1024


def linear_subject(rows: Sequence[int] = ROWS) -> Subject:
    """A small linear in two buckets of rows, the second for any number."""
    buckets = [(0 if m == rows[-1] else m, Linear(m, N, K)) for m in rows]
    return Subject(lambda ranking, best: linear_picks(buckets, ranking, best))


def attention_subject() -> Subject:
    """Two prompts of 40 tokens; three sequences of 70, whose last blocks are not full."""
    prefills = [(0, Prefill(4, 2, 64, 40, 2))]
    decodes = [(1, Decode(4, 2, 64, 1, 300)), (0, Decode(4, 2, 64, 3, 70))]
    return Subject(lambda ranking, best: attention_picks(prefills, decodes, ranking, best))


def bundle_of(
    directory: Path,
    subjects: Sequence[Subject],
    best: int = 2,
    bad: Callable[[str], bool] = lambda _: False,
) -> Bundle:
    """Writes one in float32, compiled by nobody; kernels of which `bad` says so spill."""

    def compile_all(requests: Sequence[CompileRequest], *_: Any, **__: Any) -> dict[str, Cubin]:
        return {one.key: _cubin(one, 64 * bad(one.key)) for one in requests}

    with mock.patch.object(bundle_prepare, "compile_all", compile_all):
        return bundle_prepare.prepare(subjects, H200, directory, best=best, dtype="f32")


def _cubin(request: CompileRequest, stack_bytes: int) -> Cubin:
    names = [name for name, _ in request.signature]
    launch = LaunchMetadata(
        symbol=request.symbol,
        arguments=request.signature,
        align=tuple(POINTER_ALIGN if name in request.divisible else COUNT_ALIGN for name in names),
        warps=request.warps,
        shared_bytes=64 << 10,
        grid=request.grid,
        scratch_bytes=128,
        scratch_align=64,
    )
    mma: Mma = "HGMMA" if "_64x" in request.key or "_128x" in request.key else "HMMA"
    return Cubin(request.key.encode(), "", launch, Resources(64, stack_bytes, 64 << 10, mma))


# ---------------------------------------------------------------------------------------- runs


class TimedGpu(FakeGpu):
    """An H200 of host memory whose events tell the time that launches are said to take. `log`: what ran."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"sms": H200.sms, "total_bytes": 1 << 40, **options})
        self.name = "NVIDIA H200"
        self.now_us = 0.0
        self.log: list[str] = []
        self._times: dict[int, float] = {}

    def record(self, *, timed: bool = False) -> FakeEvent:
        """An event that notes the time when it happens."""
        position = super().record(timed=timed).position + 1
        self.begin(lambda: self._happened(position))
        return FakeEvent(position, timed)

    def _happened(self, position: int) -> None:
        self._times[position] = self.now_us
        self.log.append("event")

    def elapsed_us(self, before: FakeEvent, after: FakeEvent) -> float:
        return self._times[after.position] - self._times[before.position]

    def read(self, memory: Any) -> None:
        super().read(memory)
        self.begin(lambda: self.log.append(f"read {len(memory)}"))


class Emulated(FakeLibrary):
    """Linears computed by torch. `us`: how long a launch of a kernel takes; `spoilt` may change results."""

    def __init__(
        self,
        directory: Path,
        gpu: TimedGpu,
        us: Callable[[str], float] = lambda _: 10.0,
        spoilt: Callable[[str, Any], None] = lambda *_: None,
        execute: bool = False,
    ) -> None:
        kernels = {kernel.file: kernel for kernel in read_bundle(directory).kernels.values()}
        artifact: Any = SimpleNamespace(path=directory, kernels=kernels)
        super().__init__(artifact, gpu, execute=execute)
        self._us, self._spoilt = us, spoilt
        self._compute = self.on_run if execute else self._emulate
        self.on_run = self._run

    def _run(self, launch: FakeLaunch) -> None:
        assert isinstance(self.gpu, TimedGpu)
        self.gpu.log.append(launch.key)
        self.gpu.now_us += self._us(launch.key)
        self._compute(launch)

    def _emulate(self, launch: FakeLaunch) -> None:
        arrays = self.typed(launch)
        rows = int(arrays["count"][0])
        if "x" in arrays:
            x, w = arrays["x"][: rows * K].view(rows, K), arrays["w"][: N * K].view(N, K)
            if "out0" in arrays:
                arrays["out0"][: rows * N] = (x @ w.T).flatten()
            else:
                splits = len(arrays["partial"]) // (rows * N)
                pieces = zip(x.chunk(splits, 1), w.chunk(splits, 1), strict=True)
                arrays["partial"][: splits * rows * N] = torch.stack([a @ b.T for a, b in pieces]).flatten()
        else:
            splits = len(arrays["partial"]) // (rows * N)
            partial = arrays["partial"][: splits * rows * N].view(splits, rows * N)
            arrays["out0"][: rows * N] = partial.sum(0)
        if "out0" in arrays:
            self._spoilt(launch.key, arrays["out0"][: rows * N])


def run(directory: Path, output: Path, library: Emulated, budget_s: float = 0, **options: Any) -> int:
    """Times a bundle on the library's GPU; how many cases are left."""
    assert isinstance(library.gpu, TimedGpu)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products are so small that more would wait for each other
    try:
        return bundle_run.run_bundle(directory, output, budget_s, gpu=library.gpu, library=library, **options)
    finally:
        torch.set_num_threads(threads)


def run_interpreted(directory: Path, output: Path) -> None:
    """Runs every kernel's emitted source once, to have its numbers compared; for in_interpreter."""
    with mock.patch.object(bundle_run.Bench, "_rounds", lambda _, ready, __: [[1.0, 1.0]] * len(ready)):
        run(directory, output, Emulated(directory, TimedGpu(), execute=True))


def results(output: Path) -> Mapping[str, Timed]:
    """By case."""
    return read_results(output)[1]
