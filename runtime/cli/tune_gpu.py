"""Timing kernels on a GPU, for `pagec tune`: what is compiled, where it runs, what becomes of the results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagec.compiler.errors import DeviceError, TargetError
from pagec.runtime.cli.console import progress_display, stderr

if TYPE_CHECKING:
    from pagec.autotune.table import Table
    from pagec.compiler.target import CudaTarget

# Points of each bucket that the cost model finds best, and that are compiled and timed, by effort.
BEST: Final = {"quick": 3, "normal": 6, "full": 12}


def gpu_target(name: str) -> CudaTarget:
    """A GPU by name; TargetError for anything else."""
    from pagec.compiler.backends.targets import GPUS, load_cuda_target

    if name not in GPUS:
        raise TargetError(
            f"kernels of {name} are not timed in a bundle",
            place="--target",
            remedy=f"name one of {', '.join(GPUS)}; a CPU's are timed by pagec tune MODEL",
        )
    return load_cuda_target(name)


def prepare(models: Sequence[str], target: str, directory: Path, best: int, ops: Sequence[Path] = ()) -> None:
    """Writes a bundle of what the models have, or of a part of what pagec ships tables for."""
    from pagec.autotune import bundle_prepare
    from pagec.autotune.model import shapes_of_model
    from pagec.compiler.driver import CompileOptions, cache_root

    gpu = gpu_target(target)
    options = [CompileOptions(model=model, weights="none", target=target, ops=tuple(ops)) for model in models]
    subjects = (
        bundle_prepare.subjects_of(map(shapes_of_model, options))
        if options
        else bundle_prepare.shipped_subjects()
    )
    with progress_display() as progress:
        made = bundle_prepare.prepare(
            subjects, gpu, directory, best=best, cache=cache_root() / "cubins", progress=progress
        )
    nbytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    trials = sum(len(case.trials) for case in made.cases)
    stderr().print(
        f"[dim]{len(made.cases)} cases, {trials} trials, {len(made.kernels)} kernels, "
        f"{nbytes / 1e6:.1f} MB: {directory}[/]"
    )


def merged(results: Path, tables: Path | None = None) -> list[Table]:
    """Measured entries, of results, beside those below `tables` (None: the user's own and the shipped)."""
    from pagec.autotune.bundle import read_results
    from pagec.autotune.bundle_merge import tables_of
    from pagec.autotune.database import Database
    from pagec.compiler.driver import cache_root

    head, found = read_results(results)
    target = gpu_target(head.target)
    if tables is None:
        database = Database(head.target, "cuda", cache=cache_root())
    else:
        database = Database(head.target, "cuda", shipped=tables)
    return tables_of(head, found, database, target)


def measured(model: str, target: str, budget: float, effort: str, ops: Sequence[Path]) -> list[Table]:
    """Tables of a model's kernels, timed on this machine's GPU: prepared, run and merged as a bundle is.

    TargetError if there is no such GPU. `budget`: seconds for all of it (0: any).
    """
    gpu = gpu_target(target)
    begun = time.monotonic()
    _check_here(gpu)
    from pagec.autotune.bundle_run import LEAST_S, run_bundle

    with tempfile.TemporaryDirectory() as scratch:
        bundle, results = Path(scratch) / "bundle", Path(scratch) / "results.jsonl"
        prepare([model], target, bundle, BEST[effort], ops)
        left = max(budget - (time.monotonic() - begun), LEAST_S) if budget else 0
        run_bundle(bundle, results, left, say=lambda text: stderr().print(f"[dim]{text}[/]"))
        return merged(results)


def _check_here(target: CudaTarget) -> None:
    """Before anything is compiled for it."""
    from pagec.autotune.bundle_run import check_gpu
    from pagec.compiler.errors import ArtifactError
    from pagec.runtime.device.cuda.gpu import TorchGpu

    try:
        check_gpu(target, TorchGpu(), "--measure")
    except (DeviceError, ArtifactError) as error:
        raise TargetError(
            f"{target.name} cannot be measured here: {error.message}",
            place="--measure",
            remedy="leave it out: the cost model ranks without a GPU; or take a bundle to one "
            f"(pagec tune prepare --target {target.name} -o DIR)",
        ) from error
