"""`check.sh bench`: times, row by row, beside peers on the same GPU and beside what its memory allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from gpu import peers
from gpu.artifacts import Artifacts
from gpu.device import DTYPES, Loaded, Machine
from gpu.results import Line, Results
from gpu.rows import Bench, Row, Sizes, all_rows
from gpu.timing import Timer
from pagec.compiler.errors import DeviceError

# A row takes less, loading its model included; later ones would not end in time.
ROW_S: Final = 15.0


class LoadedModels:
    """Those that the row at hand wants; others are dropped first."""

    def __init__(self, artifacts: Artifacts, machine: Machine, pool_tokens: int) -> None:
        self._artifacts, self._machine, self._pool_tokens = artifacts, machine, pool_tokens
        self._loaded: dict[str, Loaded] = {}

    def keep(self, names: tuple[str, ...]) -> None:
        """Drops all but these."""
        dropped = self._loaded.keys() - set(names)
        for name in dropped:
            del self._loaded[name]
        if dropped:
            self._machine.free()

    def load(self, name: str) -> Loaded:
        """The model, loaded now or before; its keys and values are random."""
        if name not in self._loaded:
            artifact = self._artifacts.open(name)
            kv = artifact.program.kv
            tokens = min(self._pool_tokens, artifact.program.max_len * artifact.program.capacity.S)
            blocks = 1 + len(kv.groups) * (-(-tokens // kv.block_size) + artifact.program.capacity.S)
            loaded = self._machine.load(artifact, num_blocks=blocks)
            loaded.runner.memory.kv.view(DTYPES[kv.dtype]).normal_()
            self._loaded[name] = loaded
        return self._loaded[name]


def run_bench(
    artifacts: Artifacts,
    machine: Machine,
    results: Results,
    *,
    budget_s: float,
    sizes: Sizes | None = None,
    rows: list[Row] | None = None,
    timer: Timer | None = None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measures rows that have no result yet, as long as there is time; how many are left. What a GPU's error
    ends is noted, and ends the run: afterwards the GPU does nothing more for this process."""
    sizes = sizes or Sizes()
    rows = all_rows(sizes) if rows is None else rows
    by_name, ends = {row.name: row for row in rows}, clock() + budget_s
    pending = results.pending(by_name)
    if not pending:
        return 0
    models = LoadedModels(artifacts, machine, sizes.pool_tokens)
    timer = timer or Timer(machine.gpu, artifacts.open(rows[0].models[0]).target.l2_bytes)
    bench = Bench(models.load, timer, copy_speed(timer, machine))
    speed = round(bench.copy_bytes_per_us / 1e3, 1)
    for number, name in enumerate(pending):
        if clock() + ROW_S > ends:
            return len(pending) - number
        row = by_name[name]
        models.keep(row.models)
        began = clock()
        line: Line = {"name": name, "goal": row.goal, "copy_gb_per_s": speed}
        try:
            line |= row.measure(bench)
        except DeviceError as error:
            results.add({**line, "error": str(error)})
            raise
        except Exception as error:  # one row's failure leaves the others to be measured
            line["error"] = str(error) or type(error).__name__
        results.add({**line, "seconds": round(clock() - began, 1)})
        say(f"{name}: {summary(line)}")
    return len(results.pending(by_name))


def copy_speed(timer: Timer, machine: Machine) -> float:
    """Bytes per microsecond of a large copy, those read and those written."""
    device: torch.device = machine.gpu.allocate(1).device
    nbytes = min(peers.COPY_BYTES, machine.gpu.memory()[0] // 8)
    samples, _ = timer.time({"copy": peers.copy(device, nbytes)})
    return 2 * nbytes / samples["copy"].median_us


def summary(line: Line) -> str:
    """For people, on one line."""
    if "error" in line:
        return f"failed: {line['error']}"
    beside = "".join(f", {name} {value:g}" for name, value in line.get("peers", {}).items())
    return f"{line['ours']:g} {line['unit']}{beside}{judged(line)}"


def judged(line: Line) -> str:
    """The ratio and whether it reaches its goal."""
    ratio, goal = line.get("ratio"), line.get("goal")
    if ratio is None:
        return ""
    verdict = f" ({'reached' if ratio >= goal else 'MISSED'}: {goal:g})" if goal else ""
    return f", ratio {ratio:.3f}{verdict}"


def _ours(line: Line) -> str:
    return f"{line['ours']:,g} {line['unit']}" if "ours" in line else f"failed: {line['error']}"


COLUMNS: Final[dict[str, Callable[[Line], str]]] = {
    "row": lambda line: line["name"],
    "ours": _ours,
    "beside": lambda line: ", ".join(f"{name} {value:,g}" for name, value in line.get("peers", {}).items()),
    "ratio": lambda line: f"{line['ratio']:.3f}" if "ratio" in line else "",
    "goal": lambda line: f"{line['goal']:g}" if line.get("goal") else "",
    "spread": lambda line: f"{line['spread']:.1%}" if "spread" in line else "",
    "n": lambda line: str(line.get("n", "")),
}
