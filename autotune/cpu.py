"""Measured tuning on this CPU: the schedule knobs of a model's linears and attentions.

Every candidate's results are compared with the untuned kernel's, byte by byte; one that differs is dropped. A
winner beats the untuned kernel by more than the noise, twice, and is slower for none of the timed numbers of
rows; where there is none, the untuned one is what the table holds. Choices are for every number of rows, and
the same in strict programs: no knob changes a bit.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagec.autotune.cpu_bench import CONTEXT, Bench, Case
from pagec.autotune.cpu_space import Subject, point_of, subjects, variants
from pagec.autotune.fingerprint import cpu_versions, machine_name, template_hash
from pagec.autotune.measure import Sample, winner
from pagec.autotune.table import MODES, Choice, Entry, Table
from pagec.compiler.backends.cpu.build import Progress, build_library
from pagec.compiler.backends.cpu.emit import emit_all
from pagec.compiler.backends.cpu.knobs import MOST_ROWS
from pagec.compiler.backends.targets import load_cpu_target
from pagec.compiler.driver import CompileOptions, find_source, plan_model
from pagec.compiler.program import Kernel, Launch, Program
from pagec.compiler.target import CpuTarget
from pagec.runtime.device.cpu import CpuDevice

# Up to which numbers of rows linears have buckets, as far as the program's capacity goes.
ROWS: Final[Mapping[str, tuple[int, ...]]] = {
    "quick": (4, 64),
    "normal": (4, 8, 16, 64),
    "full": (3, 4, 6, 8, 12, 16, 32, 64, 128),
}
ROUNDS: Final[Mapping[str, int]] = {"quick": 5, "normal": 9, "full": 15}
# Weights of a run's launches: more than the caches hold.
ROTATED_BYTES: Final = 256 << 20
# A run of few rows goes over all those; one of many rows is cut to about this long.
RUN_S: Final = 0.02
LEAST_LAUNCHES: Final = 2


@dataclass(frozen=True, slots=True)
class Found:
    """The best kernel over some cases, beside the untuned one."""

    kernel: Kernel
    baseline: Kernel
    names: list[str]
    samples: list[Sample]
    baseline_samples: list[Sample]


def tune_cpu(
    options: CompileOptions, effort: str, budget_s: float, progress: Progress, threads: int | None = None
) -> list[Table]:
    """Measured tables of a model's kernels, within `budget_s` seconds (0: any): what is not reached by then
    has no entry, and stays untuned."""
    ends = time.monotonic() + budget_s if budget_s else float("inf")
    target = load_cpu_target(options.target)
    _, plan = plan_model(find_source(options).spec, options, target)
    work = subjects(plan.program)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        kernels = _all_kernels(plan.program, work, target)
        _build(kernels, target, path, progress)
        device = CpuDevice(path, threads)
        entries: dict[str, dict[str, Entry]] = {"linear": {}, "attention": {}}
        for done, subject in enumerate(work):
            progress("time kernels", done, len(work))
            # The head has some of the body's shapes once more.
            if time.monotonic() < ends and subject.key not in entries[subject.kind]:
                # Memory of its own: it is given back before the next.
                tuner = _Tuner(Bench(plan.program, device), target, effort)
                entries[subject.kind][subject.key] = tuner.entry(subject)
        progress("time kernels", len(work), len(work))
    versions = cpu_versions(device.num_workers)
    return [
        Table(target.name, kind, template_hash("cpu", kind), versions, found, machine_name())
        for kind, found in entries.items()
    ]


def _all_kernels(program: Program, work: Iterable[Subject], target: CpuTarget) -> tuple[Kernel, ...]:
    """The untuned kernels and all their variants."""
    own = {kernel.key: kernel for kernel in program.kernels}
    found: dict[str, Kernel] = {}
    for subject in work:
        for limit, key in subject.launches[0].variants:
            fitting = (k for k in variants(own[key], target) if worth_trying(k, limit or MOST_ROWS))
            for one in (own[key], *fitting):
                found.setdefault(one.key, one)
    return tuple(found.values())


def _build(kernels: tuple[Kernel, ...], target: CpuTarget, path: Path, progress: Progress) -> None:
    for name, text in emit_all(kernels, target).items():
        (path / name).write_text(text)
    build_library(kernels, path, target, path, progress)


@dataclass(slots=True)
class _Tuner:
    """Times the variants of one subject."""

    bench: Bench
    target: CpuTarget
    effort: str

    def entry(self, subject: Subject) -> Entry:
        """The choices for all numbers of rows."""
        if subject.kind == "attention":
            choices = [_choice(0, self._best(subject, self._attention_cases()))]
        else:
            buckets = self._buckets(subject)
            found = [self._best(subject, self._rows(subject, *bucket)) for bucket in buckets]
            limits = [*(greatest for _, greatest in buckets[:-1]), 0]
            choices = [_choice(limit, one) for limit, one in zip(limits, found, strict=True)]
        return Entry("measured", dict.fromkeys(MODES, tuple(choices)))

    def _buckets(self, subject: Subject) -> list[tuple[int, int]]:
        """The least and the greatest number of rows of each: no bucket has two untuned kernels."""
        capacity, first = self.bench.program.capacity, subject.launches[0]
        most = capacity.T if first.rows == "T" else capacity.R
        limits = {*ROWS[self.effort], *(limit for limit, _ in first.variants)} - {0}
        greatest = [*sorted(n for n in limits if n < most), most]
        return list(zip((1, *(n + 1 for n in greatest)), greatest, strict=False))

    def _rows(self, subject: Subject, least: int, greatest: int) -> list[Case]:
        """A bucket is timed at both ends and between them, where the untuned tile fits exactly: another one
        may be good for some number of rows and poor for the next."""
        tile = int(self._untuned(subject, greatest).params["MB"])
        third = (greatest - least) / 3
        between = {round((least + n * third) / tile) * tile for n in (1, 2)}
        rows = {least, greatest} | {n for n in between if least < n < greatest}
        return [Case(n, f"{n} rows") for n in sorted(rows)]

    def _untuned(self, subject: Subject, rows: int) -> Kernel:
        kernels = {kernel.key: kernel for kernel in self.bench.program.kernels}
        return subject.kernel(kernels, rows)

    def _attention_cases(self) -> list[Case]:
        """One decoding sequence and as many as there can be, of few tokens and of more; a prompt's chunks."""
        program = self.bench.program
        T, S = program.capacity.T, program.capacity.S
        context = min(CONTEXT, program.max_len) - 1
        shapes = [(n, before, 1) for n in (1, S) for before in (context // 4, context)]
        shapes += [(1, 0, min(T, context)), (1, context, min(T, program.max_len - context))]
        return [
            Case(n * -(-new // program.query_tile), f"{n} x {new} at {before}", ((before, new),) * n)
            for n, before, new in dict.fromkeys(shapes)
        ]

    def _best(self, subject: Subject, cases: Sequence[Case]) -> Found:
        """The kernel that is best over these cases."""
        baseline, first = self._untuned(subject, cases[0].rows), subject.launches[0]
        expected = [self.bench.result(first, baseline, case) for case in cases]
        candidates = [baseline]
        for kernel in variants(baseline, self.target):
            if worth_trying(kernel, cases[-1].rows):
                stored = (self.bench.result(first, kernel, case) for case in cases)
                if all(one == other for one, other in zip(stored, expected, strict=True)):
                    candidates.append(kernel)
        runs, counts = [], []
        for case in cases:
            launches = self._launches(subject, baseline, case)
            counts.append(len(launches))
            runs.append([self.bench.run(launches, kernel, case) for kernel in candidates])
        number, best, base = winner(runs, ROUNDS[self.effort])
        return Found(
            candidates[number],
            baseline,
            [case.name for case in cases],
            [_each(one, count) for one, count in zip(best, counts, strict=True)],
            [_each(one, count) for one, count in zip(base, counts, strict=True)],
        )

    def _launches(self, subject: Subject, kernel: Kernel, case: Case) -> tuple[Launch, ...]:
        """As many as read more than the caches hold, or fewer where one takes long."""
        each = max(self.bench.weight_bytes(subject.launches[0]), 1)
        launches = subject.launches[: max(LEAST_LAUNCHES, -(-ROTATED_BYTES // each))]
        once = self.bench.run(launches[:1], kernel, case)
        seconds = min(once(), once())
        return launches[: max(LEAST_LAUNCHES, int(RUN_S / max(seconds, 1e-9)))]


def worth_trying(kernel: Kernel, rows: int) -> bool:
    """A linear's tile of more rows than there are computes some of them twice."""
    return kernel.template != "linear" or int(kernel.params["MB"]) <= rows


def _each(sample: Sample, count: int) -> Sample:
    """Of one launch."""
    return Sample(round(sample.median_us / count, 3), round(sample.spread_us / count, 3))


def _choice(rows: int, found: Found) -> Choice:
    """Times are those of all cases together."""
    both = zip(found.names, found.samples, found.baseline_samples, strict=True)
    return Choice(
        rows,
        point_of(found.kernel),
        round(sum(one.median_us for one in found.samples), 3),
        point_of(found.baseline),
        round(sum(one.median_us for one in found.baseline_samples), 3),
        round(sum(max(a.spread_us, b.spread_us) for _, a, b in both), 3),
        {"timed": found.names},
    )
