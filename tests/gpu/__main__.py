"""`python -m gpu quick|bench|tune`: see check.sh. Exits with 0, with 1 if something is wrong, with 2 if it
cannot run here, with 3 if there is more to do than there was time for."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from gpu.artifacts import BUILD, ROOT, TUNE, Artifacts
from gpu.results import Line, Results, source_hash
from pagec.compiler.errors import PagecError

RESULTS: Final = ROOT / "tests" / "gpu" / "results"
# Seconds, less than check.sh gives: what is under way comes to its end.
BUDGETS: Final = {"quick": 172.0, "bench": 290.0, "tune": 165.0}


def main(arguments: Sequence[str]) -> int:
    """Runs one of the three."""
    parser = argparse.ArgumentParser("check.sh", description="Checks and measures on a GPU.")
    parser.add_argument("mode", choices=BUDGETS)
    parser.add_argument("--artifacts", type=Path, default=BUILD, help="what make gpu-artifacts made")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a directory")
    parser.add_argument("--budget", type=float, help="seconds that it may take")
    parser.add_argument("--seed", type=int, help="of what quick computes on; another each day if not given")
    options = parser.parse_args(arguments)
    try:
        return MODES[options.mode](options)
    except PagecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _quick(options: argparse.Namespace) -> int:
    from gpu.quick import COLUMNS, run_quick

    seed = int(time.time()) // 86400 if options.seed is None else options.seed
    machine, artifacts, path, head = _setting(options)
    path.unlink(missing_ok=True)  # every run is a whole one
    results = Results(path, head | {"seed": seed})
    try:
        failed = run_quick(artifacts, machine, results, seed=seed, budget_s=_budget(options))
    finally:
        results.write_markdown(f"Checks on {head['gpu']}", COLUMNS)
    return 1 if failed else 0


def _bench(options: argparse.Namespace) -> int:
    from gpu.bench import COLUMNS, run_bench

    machine, artifacts, path, head = _setting(options)
    results = Results(path, head)
    try:
        left = run_bench(artifacts, machine, results, budget_s=_budget(options))
    finally:
        results.write_markdown(f"Times on {head['gpu']}", COLUMNS)
    print(f"{left} rows are left: run it again" if left else "all rows are measured")
    return 3 if left else 0


def _tune(options: argparse.Namespace) -> int:
    from pagec.autotune.bundle_run import run_bundle

    artifacts = Artifacts(options.artifacts)
    output = options.results / f"tune-{artifacts.target}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    left = run_bundle(options.artifacts / TUNE, output, _budget(options), say=print)
    print(f"{left} cases are left: run it again" if left else f"all cases are timed: {output}")
    return 3 if left else 0


MODES: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "quick": _quick,
    "bench": _bench,
    "tune": _tune,
}


def _budget(options: argparse.Namespace) -> float:
    return BUDGETS[options.mode] if options.budget is None else float(options.budget)


def _setting(options: argparse.Namespace) -> tuple[Any, Artifacts, Path, Line]:
    """The GPU, the artifacts, the file of results and its head."""
    import torch

    from gpu.device import Machine

    machine, artifacts = Machine(), Artifacts(options.artifacts)
    head = {
        "gpu": machine.gpu.name,
        "target": artifacts.target,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "sources": source_hash(ROOT, options.artifacts),
    }
    return machine, artifacts, options.results / f"{options.mode}-{artifacts.target}.jsonl", head


if __name__ == "__main__":
    # Where time is up, what was found is still written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    sys.exit(main(sys.argv[1:]))
