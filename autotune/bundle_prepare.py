"""Makes a bundle: picks what is worth timing, compiles it, and picks again by what the compiler reports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from pagec.autotune import search
from pagec.autotune.bundle import KERNELS, MANIFEST, Bundle, BundleKernel, Case, Trial
from pagec.autotune.bundle_choice import (
    Pick,
    Ranking,
    attention_picks,
    kernels_of,
    launched,
    linear_picks,
)
from pagec.autotune.entries import decode_buckets, linear_buckets, prefill_buckets
from pagec.autotune.fingerprint import template_hash
from pagec.autotune.model import Attention, Shapes
from pagec.autotune.occupancy import why_not
from pagec.autotune.problem import Decode, Kind, Linear, Problem
from pagec.autotune.shipped import DECODE_KV_HEADS, HEAD_DIMS, LINEARS, PREFILL_HEADS
from pagec.autotune.space import SPACES
from pagec.compiler.backends.cuda.build import Cubin, Progress, compile_all, triton_version
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.resources import Resources, occupancy
from pagec.compiler.gpu_program import GpuLaunch
from pagec.compiler.target import CudaTarget

# Of what pagec ships tables for, what is timed in three minutes.
TIMED_GROUPS: Final = (1, 4, 8)
TIMED_LINEARS: Final = "Llama 8B"
# What of a kernel's parameters decides the arrays that it reads.
SIZES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "attention_prefill": ("block_size", "max_blocks", "query_tile"),
    "attention_decode": ("block_size", "max_blocks", "split"),
    "linear": ("splits",),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """Entries whose points are picked together; `picks` asks for them."""

    picks: Callable[[Ranking, int], list[Pick]]


def shipped_subjects() -> list[Subject]:
    """A part of the shipped tables: attention by head size and group, the linears of Llama 8B."""
    attention = [
        attention_subject(
            Attention(PREFILL_HEADS, PREFILL_HEADS // group, head_dim),
            Attention(DECODE_KV_HEADS * group, DECODE_KV_HEADS, head_dim),
        )
        for head_dim in HEAD_DIMS
        for group in TIMED_GROUPS
    ]
    return [*attention, *(linear_subject(n, k) for n, k in LINEARS[TIMED_LINEARS])]


def subjects_of(models: Iterable[Shapes]) -> list[Subject]:
    """Each shape of the models once."""
    shapes = list(models)
    attention = dict.fromkeys(one for shape in shapes for one in shape.attention)
    linears = dict.fromkeys(one for shape in shapes for one in shape.linears)
    return [*(attention_subject(one, one) for one in attention), *(linear_subject(n, k) for n, k in linears)]


def linear_subject(n: int, k: int) -> Subject:
    """All buckets of a linear."""
    buckets = linear_buckets(n, k)
    return Subject(lambda ranking, best: linear_picks(buckets, ranking, best))


def attention_subject(prefill: Attention, decode: Attention) -> Subject:
    """Prefill and decode, which have one key."""
    first = prefill_buckets(prefill.heads, prefill.kv_heads, prefill.head_dim)
    second = decode_buckets(decode.heads, decode.kv_heads, decode.head_dim)
    return Subject(lambda ranking, best: attention_picks(first, second, ranking, best))


class Kernels:
    """Compiles kernels, each once; they stay in `cache`."""

    def __init__(self, target: CudaTarget, cache: Path | None, progress: Progress, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        self._cache, self._progress = cache, progress
        self.cubins: dict[str, Cubin] = {}
        self.sources: dict[str, str] = {}

    def of(self, pick: Pick) -> tuple[CudaKernel, ...]:
        """A pick's kernels, compiled or not."""
        return kernels_of(pick, self.dtype)

    def compile(self, picks: Iterable[Pick]) -> bool:
        """Whether there was anything to compile."""
        fresh = {
            kernel.key: kernel for pick in picks for kernel in self.of(pick) if kernel.key not in self.cubins
        }
        with tempfile.TemporaryDirectory() as directory:
            requests = [replace(kernel.write(Path(directory)), checked=False) for kernel in fresh.values()]
            if requests:
                self.cubins |= compile_all(requests, self.target, cache=self._cache, progress=self._progress)
        self.sources |= {key: kernel.source() for key, kernel in fresh.items()}
        return bool(fresh)

    def resources(self, pick: Pick) -> Resources:
        """Of the kernel that the knobs are of."""
        return self.cubins[self.of(pick)[0].key].resources

    def why_not(self, pick: Pick) -> str:
        """Why a pick cannot run or had better not; empty if it can."""
        return why_not(self.resources(pick), pick.knobs["warps"], self.target)


def settled(subjects: Sequence[Subject], kernels: Kernels, best: int) -> list[list[Pick]]:
    """By subject what is picked once the compiler has seen all of it; what cannot run is left out."""
    ranking = Ranking(kernels.target)
    while True:
        picks = [subject.picks(ranking, best) for subject in subjects]
        if not kernels.compile(pick for found in picks for pick in found):
            return [[pick for pick in found if not kernels.why_not(pick)] for found in picks]
        compiled: dict[Problem, list[tuple[Mapping[str, int], Resources]]] = {}
        for pick in (pick for found in picks for pick in found):
            # Strict programs launch some points with other knobs than they are ranked by.
            if (
                pick.point is not None
                and pick.point.items() <= {**pick.knobs, "block_size": pick.block_size}.items()
            ):
                compiled.setdefault(pick.problem, []).append((pick.point, kernels.resources(pick)))
        for problem, found in compiled.items():
            ranking.judge(problem, found)


def prepare(
    subjects: Sequence[Subject],
    target: CudaTarget,
    directory: Path,
    *,
    best: int,
    cache: Path | None = None,
    progress: Progress = lambda *_: None,
    dtype: str = "bf16",
) -> Bundle:
    """Writes a bundle into a directory, in place of one that is there."""
    kernels = Kernels(target, cache, progress, dtype)
    used: dict[str, BundleKernel] = {}
    cases = [case for picks in settled(subjects, kernels, best) for case in _cases(picks, kernels, used)]
    versions = {"triton": triton_version()}
    templates: dict[str, str] = {kind: template_hash("cuda", kind) for kind in SPACES}
    bundle = Bundle(target, versions, templates, dtype, tuple(cases), used)
    shutil.rmtree(directory / KERNELS, ignore_errors=True)
    (directory / KERNELS).mkdir(parents=True)
    for key in sorted({kernel.file for kernel in used.values()}):
        (directory / KERNELS / f"{key}.cubin").write_bytes(kernels.cubins[key].binary)
        (directory / KERNELS / f"{key}.py").write_text(kernels.sources[key])
    (directory / MANIFEST).write_text(bundle.text())
    return bundle


def _cases(picks: Sequence[Pick], kernels: Kernels, used: dict[str, BundleKernel]) -> list[Case]:
    """A case for each bucket; picks with the same launches are one trial."""
    found: dict[tuple[Problem, int], dict[tuple[GpuLaunch, ...], Trial]] = {}
    for pick in picks:
        trial = _trial(pick, kernels, used)
        trials = found.setdefault((pick.problem, pick.rows), {})
        known = trials.get(trial.launches)
        if known is not None:
            trial = replace(
                known,
                modes=tuple(dict.fromkeys((*known.modes, *trial.modes))),
                untuned=tuple(dict.fromkeys((*known.untuned, *trial.untuned))),
            )
        trials[trial.launches] = trial
    return [
        Case(problem.kind, problem.key, rows, problem.to_json(), tuple(trials.values()))
        for (problem, rows), trials in found.items()
    ]


def _trial(pick: Pick, kernels: Kernels, used: dict[str, BundleKernel]) -> Trial:
    made, held = kernels.of(pick), kernels.resources(pick)
    knobs = {**pick.knobs, "per_sm": per_sm} if (per_sm := _programs(pick, kernels)) else pick.knobs
    point = knobs if isinstance(pick.problem, Linear) else {"block_size": pick.block_size, **knobs}
    launches = []
    for number, kernel in enumerate(made):
        cubin, name = kernels.cubins[kernel.key], kernel.key
        launch = cubin.launch
        if number == 0 and knobs != pick.knobs:
            # The grid alone is another: it takes no other machine code.
            launch = replace(launch, grid=replace(launch.grid, per_sm=knobs["per_sm"]))
            name = f"{name}_x{knobs['per_sm']}"
        used[name] = BundleKernel(kernel.key, sha256(cubin.binary).hexdigest(), launch)
        names = tuple(array for array, _ in kernel.arrays)
        launches.append(GpuLaunch(kernel.template, name, kernel.rows.name, names))
    params = {"block_size": pick.block_size, **made[0].params}
    predicted = search.judged(pick.problem, point, kernels.target, held)
    return Trial(
        point=point,
        modes=(pick.mode,),
        untuned=(pick.mode,) if pick.point is None else (),
        mma=held.mma,
        registers=held.registers,
        shared_bytes=held.shared_bytes,
        predicted_us=round(predicted.us, 3) if predicted.prediction else None,
        sizes={name: int(params[name]) for name in SIZES[pick.problem.kind]},
        launches=tuple(launches),
    )


def _programs(pick: Pick, kernels: Kernels) -> int:
    """Programs to a multiprocessor of decode attention, as tables have it: as many as it holds; 0: as is."""
    if not isinstance(pick.problem, Decode) or pick.point is None:
        return 0
    holds = occupancy(kernels.resources(pick), pick.knobs["warps"], kernels.target)
    return launched(pick.problem, {**pick.point, "per_sm": holds}, pick.mode, kernels.target)["per_sm"]
