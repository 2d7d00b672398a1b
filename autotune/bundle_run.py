"""Times a bundle on a GPU: `python -m pagec.autotune.bundle_run DIRECTORY -o results.jsonl --budget 180`.

Needs the standard library, numpy and torch, neither Triton nor TVM. Each trial runs once and its numbers are
compared with torch's; then all trials of a case take turns, round after round, each after the L2 cache was
overwritten and over inputs that change. The lines of results say medians and spreads of the first and of the
second half of the rounds. A file that is there already is gone on with: what it has is not timed again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from pagec.autotune.bundle import (
    Bundle,
    BundleKernel,
    Case,
    Head,
    Timed,
    Timing,
    Trial,
    read_bundle,
    read_image,
    read_results,
)
from pagec.autotune.bundle_arrays import Arrays, Inputs, inputs_of
from pagec.autotune.gpu_rounds import timed_rounds
from pagec.autotune.measure import sample
from pagec.compiler.errors import ArtifactError, CapacityError, DeviceError, PagecError
from pagec.compiler.launch import Counts
from pagec.compiler.target import CudaTarget
from pagec.runtime.device.cuda.driver import Driver, open_library
from pagec.runtime.device.cuda.gpu import TorchGpu
from pagec.runtime.device.cuda.kernels import LoadedKernel
from pagec.runtime.device.cuda.launch import GpuCall, GpuCalls, scratch_bytes

# Of the L2 cache, what is read before each timed launch.
FLUSHED: Final = 2
# Sets of inputs that take turns; the numbers of the first are compared.
SETS: Final = 2
LEAST_ROUNDS: Final = 8
MOST_ROUNDS: Final = 60
# No budget, and the least that is worth starting for.
ANYTHING_S: Final = 3600.0
LEAST_S: Final = 10.0
WORD_BYTES: Final = 4
QUERY: Final = ("driver_version", "clocks.current.sm", "clocks.max.sm", "clocks.current.memory")
Say = Callable[[str], None]


def check_gpu(target: CudaTarget, gpu: TorchGpu, place: str) -> None:
    """Refuses a GPU of which the target's tables would say something wrong."""
    major, minor = gpu.capability
    same = (10 * major + minor, gpu.sms) == (target.sm, target.sms) and target.name in gpu.name.lower()
    if not same:
        raise ArtifactError(
            f"made for {target.name} (sm_{target.sm}, {target.sms} multiprocessors), "
            f"this GPU is a {gpu.name} (sm_{10 * major + minor}, {gpu.sms})",
            place=place,
            remedy="run it on such a GPU, or prepare one for this GPU (pagec tune prepare --target)",
        )


def run_bundle(
    directory: Path,
    output: Path,
    budget_s: float = 0,
    *,
    gpu: TorchGpu | None = None,
    library: Any = None,
    clock: Callable[[], float] = time.monotonic,
    say: Say = lambda _: None,
) -> int:
    """Times the cases that `output` does not hold yet, for `budget_s` seconds (0: as long as it takes); how
    many are left. A case that the GPU fails at is noted as such and ends the run with the GPU's error."""
    ends = clock() + (budget_s or ANYTHING_S)
    bundle = read_bundle(directory)
    gpu = gpu or TorchGpu()
    check_gpu(bundle.target, gpu, str(directory))
    head = Head(bundle.digest, bundle.target.name, bundle.versions, bundle.templates, device_facts(gpu))
    done = resumed(output, head)
    todo = [case for case in bundle.cases if case.name not in done]
    bench = Bench(directory, bundle, gpu, Driver(library or open_library(), gpu.ordinal), clock)
    with output.open("a") as lines:
        if not done and output.stat().st_size == 0:
            _write(lines, head.to_json())
        for number, case in enumerate(todo):
            now = clock()
            if now >= ends:
                return len(todo) - number
            # What a case leaves of its share is the others'.
            timed = _timed(bench, case, now + (ends - now) / (len(todo) - number), lines)
            _write(lines, timed.to_json())
            say(f"{number + 1}/{len(todo)} {case.name}: {summary(timed)}")
    return 0


def _timed(bench: Bench, case: Case, ends: float, lines: TextIO) -> Timed:
    try:
        return bench.time(case, ends)
    except CapacityError as error:
        return Timed(case, (), failed=error.message)
    except DeviceError as error:
        # After an error of a kernel the GPU does nothing more for this process.
        _write(lines, Timed(case, (), failed=error.message).to_json())
        raise


def _write(lines: TextIO, data: Any) -> None:
    lines.write(json.dumps(data) + "\n")
    lines.flush()


def resumed(output: Path, head: Head) -> dict[str, Timed]:
    """What a file has, which ends with a whole line afterwards; ArtifactError if it is of another bundle."""
    if not output.is_file() or output.stat().st_size == 0:
        return {}
    other, done = read_results(output)
    if (other.bundle, other.device.get("name")) != (head.bundle, head.device["name"]):
        raise ArtifactError(
            "holds results of another bundle or GPU", place=str(output), remedy="name another file"
        )
    text = output.read_text()
    output.write_text(text[: text.rindex("\n") + 1])
    return done


def device_facts(gpu: TorchGpu) -> dict[str, str]:
    """The GPU's name; its driver and clocks where nvidia-smi tells."""
    facts = {"name": gpu.name, "sms": str(gpu.sms)}
    if tool := shutil.which("nvidia-smi"):
        command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", f"--id={gpu.ordinal}"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        values = [value.strip() for value in told.stdout.strip().split(",")]
        if told.returncode == 0 and len(values) == len(QUERY):
            facts |= dict(zip(QUERY, values, strict=True))
    return facts


def summary(timed: Timed) -> str:
    """For people, on one line."""
    found = [one for one in timed.timings if one.halves]
    if not found:
        return timed.failed or "no trial computed the right numbers"
    best = min(found, key=lambda one: one.halves[1].median_us if one.halves else 0.0)
    untuned = next((one for one in found if "default" in one.trial.untuned), None)
    assert best.halves is not None
    text = f"best {best.halves[1].median_us:.4g} us"
    if untuned is not None and untuned.halves is not None:
        text += f", untuned {untuned.halves[1].median_us:.4g} us"
    wrong = sum(bool(one.wrong) for one in timed.timings)
    return text + f", {timed.rounds} rounds of {len(found)}" + (f", {wrong} wrong" if wrong else "")


# ------------------------------------------------------------------------------------- timing


@dataclass(frozen=True, slots=True)
class Ready:
    """A trial's launches over one set of inputs."""

    calls: GpuCalls
    counts: Sequence[int]
    arrays: dict[str, Any]

    def run(self) -> None:
        self.calls.run(self.counts)


class Bench:
    """Runs the trials of a bundle on a GPU."""

    def __init__(
        self, directory: Path, bundle: Bundle, gpu: TorchGpu, driver: Driver, clock: Callable[[], float]
    ) -> None:
        self._directory, self._bundle = directory, bundle
        self._gpu, self._driver, self._clock = gpu, driver, clock
        self._kernels: dict[str, LoadedKernel] = {}
        self._functions: dict[str, Any] = {}
        self._flush = gpu.allocate(FLUSHED * bundle.target.l2_bytes)

    def time(self, case: Case, ends: float) -> Timed:
        """Checks all trials' numbers, then times the right ones until `ends`, a few rounds at least."""
        sets = [inputs_of(case.problem, Arrays(self._gpu, self._bundle.dtype, seed)) for seed in range(SETS)]
        ready: list[list[Ready]] = []
        wrong: list[str] = []
        for trial in case.trials:
            try:
                runs = [self._prepare(trial, inputs) for inputs in sets]
                runs[0].run()
                self._gpu.synchronize()
                wrong.append(sets[0].wrong(runs[0].arrays))
            except CapacityError as error:
                wrong.append(error.message)
                runs = []
            ready.append(runs)
        right = [number for number, reason in enumerate(wrong) if not reason]
        times = self._rounds([ready[number] for number in right], ends) if right else []
        found = dict(zip(right, times, strict=True))
        timings = tuple(
            _timing(trial, found.get(number), wrong[number]) for number, trial in enumerate(case.trials)
        )
        return Timed(case, timings, len(times[0]) if times else 0)

    def _prepare(self, trial: Trial, inputs: Inputs) -> Ready:
        arrays, counts = inputs.arrays(trial.sizes), inputs.counts(trial.sizes)
        words = self._gpu.allocate(WORD_BYTES * len(Counts))
        values = _as_int32(words)
        values.copy_(values.new_tensor(counts))
        calls, scratch = [], 1
        for launch in trial.launches:
            at = words[WORD_BYTES * launch.counts :][:WORD_BYTES]
            pointers = tuple(arrays[name] for name in launch.args)
            kernel = self._load(launch.kernel)
            calls.append((GpuCall(launch.name, launch.kernel, launch.counts, pointers, at), kernel))
            scratch = max(scratch, scratch_bytes(kernel, counts[launch.counts], self._gpu.sms))
        memory = self._gpu.allocate(scratch)
        ready = GpuCalls(calls, counts, driver=self._driver, gpu=self._gpu, scratch=memory)
        return Ready(ready, counts, arrays)

    def _load(self, name: str) -> LoadedKernel:
        """A kernel; machine code that several share is loaded once."""
        if name not in self._kernels:
            kernel: BundleKernel = self._bundle.kernels[name]
            if kernel.file not in self._functions:
                module = self._driver.load(name, read_image(self._directory, kernel))
                shared = kernel.launch.shared_bytes
                self._functions[kernel.file] = self._driver.function(
                    name, module, kernel.launch.symbol, shared
                )
            self._kernels[name] = LoadedKernel(name, self._functions[kernel.file], kernel.launch)
        return self._kernels[name]

    def _rounds(self, ready: Sequence[Sequence[Ready]], ends: float) -> list[list[float]]:
        """Microseconds of each, round by round; inputs change every other one."""

        def goes_on(turn: int) -> bool:
            return turn <= LEAST_ROUNDS or (turn <= MOST_ROUNDS and self._clock() < ends)

        runs = [lambda turn, sets=sets: sets[turn // 2 % SETS].run() for sets in ready]
        return timed_rounds(runs, self._gpu, self._flush, goes_on)


def _as_int32(memory: Any) -> Any:
    """The same memory."""
    import torch

    return memory.view(torch.int32)


def _timing(trial: Trial, times: Sequence[float] | None, wrong: str) -> Timing:
    if times is None:
        return Timing(trial, None, wrong)
    middle = len(times) // 2
    first, second = (sample(half) for half in (times[:middle], times[middle:]))
    digits = 3  # events tell half a microsecond
    halves = tuple(
        replace(one, median_us=round(one.median_us, digits), spread_us=round(one.spread_us, digits))
        for one in (first, second)
    )
    return Timing(trial, (halves[0], halves[1]), wrong)


# ------------------------------------------------------------------------------------ command


def main(arguments: Sequence[str]) -> int:
    """0 if all cases are timed, 3 if some are left."""
    parser = argparse.ArgumentParser("python -m pagec.autotune.bundle_run", description="Times a bundle.")
    parser.add_argument("bundle", type=Path, help="the directory that pagec tune prepare wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--budget", type=float, default=0, help="seconds that it may take (0: any)")
    given = parser.parse_args(arguments)
    try:
        left = run_bundle(given.bundle, given.output, given.budget, say=lambda text: print(text, flush=True))
    except PagecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if left:
        print(f"{left} cases are left: run it again with the same output")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
