"""Each kernel of a CPU program alone: what there is to try, and how it is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pagec.compiler.program import HEAD_COUNTS, Launch
from pagec.runtime.batch import build_batch
from pagec.runtime.bench.cases import Case, fitting, make_entries, row_counts, wanted_steps
from pagec.runtime.bench.probes import seconds
from pagec.runtime.runner import NUM_COUNTS, Runner


class CpuKernels:
    """As cases.KernelBench."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._program = runner, runner.program

    def cases(self) -> list[Case]:
        return list(self._cases())

    def time_us(self, case: Case, before: Callable[[], None], repeat: int) -> float:
        runner, program = self._runner, self._program
        runner.upload(build_batch(make_entries(program, case.chunks), program))
        runner.upload_logit_rows(np.arange(program.capacity.R, dtype=np.int32))
        calls = runner.prepare(case.launches)
        times = []
        for _ in range(repeat + 1):
            before()
            times.append(seconds(calls, *[case.rows] * NUM_COUNTS))
        return 1e6 * statistics.median(times[1:])

    def _cases(self) -> Iterator[Case]:
        T, R = self._program.capacity.T, self._program.capacity.R
        full = fitting(self._program, self._runner.num_blocks, [(0, T)])
        for launches in self._groups():
            match launches[0].rows:
                case "tiles" | "merges":
                    yield from self._attention_cases(launches)
                case count:
                    most = min(R, T) if count in HEAD_COUNTS else min(T, sum(n for _, n in full))
                    for rows in row_counts(1, most):
                        if launches[0].key_for(rows):
                            yield _case(launches, rows, full)

    def _groups(self) -> list[list[Launch]]:
        """Launches with the same kernels, body and head apart: the head may have as few rows as one."""
        groups: dict[object, list[Launch]] = {}
        for launch in (*self._program.body, *self._program.head):
            groups.setdefault((launch.rows, launch.variants), []).append(launch)
        return list(groups.values())

    def _attention_cases(self, launches: list[Launch]) -> Iterator[Case]:
        seen = []
        for step in wanted_steps(self._program.capacity.T):
            chunks = fitting(self._program, self._runner.num_blocks, step)
            if not chunks or chunks in seen:
                continue
            seen.append(chunks)
            rows = sum(-(-count // self._program.query_tile) for _, count in chunks)
            start, count = chunks[0]
            yield _case(launches, rows, chunks, f"{len(chunks)} x {count} at {start}")


def _case(launches: Sequence[Launch], rows: int, chunks: Sequence[tuple[int, int]], name: str = "") -> Case:
    return Case(launches[0].key_for(rows), tuple(one.name for one in launches), rows, chunks, name)
