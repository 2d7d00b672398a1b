"""Each kernel of a GPU program alone, at the ends of its buckets and between them.

The launches of a case are captured in a graph, so that what the host takes to launch does not count; a graph
is timed by events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from pagec.compiler.gpu_program import GpuLaunch
from pagec.compiler.launch import Counts
from pagec.runtime.batch import build_batch
from pagec.runtime.bench.cases import Case, fitting, make_entries, row_counts, wanted_steps
from pagec.runtime.bench.cost import Chunk
from pagec.runtime.bench.gpu_bounds import DECODE, MERGE, PREFILL
from pagec.runtime.gpu.runner import GpuRunner

ATTENTION = (PREFILL, DECODE, MERGE)


class GpuKernels:
    """As cases.KernelBench."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner, self._program = runner, runner.program
        self._templates = {kernel.key: kernel.template for kernel in self._program.kernels}
        spans = (*self._program.body, *self._program.head)
        self._launches = {(one.name, one.kernel): one for span in spans for one in span.launches}

    def cases(self) -> list[Case]:
        return [*self._rows_cases(), *self._attention_cases()]

    def time_us(self, case: Case, before: Callable[[], None], repeat: int) -> float:
        device = self._runner.device
        launches = [self._launches[name, case.kernel] for name in case.launches]
        step = self._runner.upload(build_batch(make_entries(self._program, case.chunks), self._program))
        rows = step.rows
        if launches[0].kernel not in self._attention():
            rows = tuple(case.rows if count == launches[0].counts else 0 for count in Counts)
            self._runner.upload_logit_rows(np.arange(self._program.capacity.R, dtype=np.int32))
            device.upload(self._runner.memory.steps["counts"], np.array(rows, np.int32))
        calls = self._runner.prepare(launches)
        calls.run(rows)
        graph = device.capture(lambda: calls.run(rows))
        times = []
        for _ in range(repeat + 1):
            before()
            times.append(device.time_us(graph.replay))
        return statistics.median(times[1:])

    def _attention(self) -> set[str]:
        return {key for key, template in self._templates.items() if template in ATTENTION}

    def _rows_cases(self) -> Iterator[Case]:
        """All but attention: what a span's launches do depends on the number of rows alone."""
        capacity = self._program.capacity
        full = fitting(self._program, self._runner.num_blocks, [(0, capacity.T)])
        tokens = sum(count for _, count in full)
        for spans, room in ((self._program.body, min(capacity.T, tokens)), (self._program.head, capacity.R)):
            least = 1
            for span in spans:
                most = min(span.rows, room)
                for launches in self._groups(span.launches) if least <= most else ():
                    if launches[0].kernel not in self._attention():
                        for rows in row_counts(least, most):
                            yield _case(launches, rows, full)
                least = span.rows + 1

    def _attention_cases(self) -> Iterator[Case]:
        """Steps of decoding and chunks of prompts, each with the kernels that have work in it."""
        seen = []
        for wanted in wanted_steps(self._program.capacity.T):
            chunks = fitting(self._program, self._runner.num_blocks, wanted)
            if not chunks or chunks in seen:
                continue
            seen.append(chunks)
            step = self._runner.upload(build_batch(make_entries(self._program, chunks), self._program))
            start, count = chunks[0]
            for launches in self._groups(step.span.launches):
                rows, template = step.rows[launches[0].counts], self._templates[launches[0].kernel]
                idle = template == MERGE and not step.rows[Counts.SPLITS]
                if template in ATTENTION and rows and not idle:
                    yield _case(launches, rows, chunks, f"{len(chunks)} x {count} at {start}")

    def _groups(self, launches: Iterable[GpuLaunch]) -> list[list[GpuLaunch]]:
        """Launches of the same kernel."""
        groups: dict[str, list[GpuLaunch]] = {}
        for launch in launches:
            groups.setdefault(launch.kernel, []).append(launch)
        return list(groups.values())


def _case(launches: Sequence[GpuLaunch], rows: int, chunks: Sequence[Chunk], name: str = "") -> Case:
    return Case(launches[0].kernel, tuple(one.name for one in launches), rows, chunks, name)
