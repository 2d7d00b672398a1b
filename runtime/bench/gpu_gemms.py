"""A GPU's matrix products alone: captured for those steps that are captured, else launched one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from pagec.compiler.gpu_program import Span
from pagec.compiler.launch import Counts
from pagec.runtime.device.cuda.device import CapturedGraph, GpuCalls
from pagec.runtime.gpu.graphs import head_rows
from pagec.runtime.gpu.runner import GpuRunner
from pagec.runtime.gpu.step import bucket_of
from pagec.runtime.trace import StepShape

Rows = tuple[int, ...]


class GpuGemms:
    """As gemms.Gemms."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner, self._program = runner, runner.program
        self._templates = {kernel.key: kernel.template for kernel in self._program.kernels}
        self._calls: dict[tuple[bool, int], GpuCalls] = {}
        self._graphs: dict[tuple[bool, int], CapturedGraph] = {}

    def seconds(self, steps: Sequence[StepShape]) -> float:
        """All are begun one after the other, as by an engine that never waits."""
        device, counts = self._runner.device, self._runner.memory.steps["counts"]
        work = [part for step in steps for part in (self._body(step), *self._heads(step))]
        before: Rows = ()
        device.synchronize()
        began = time.perf_counter()
        for rows, run in work:
            if rows != before:
                device.upload(counts, np.array(rows, np.int32))
            before = rows
            run()
        device.synchronize()
        return time.perf_counter() - began

    def _body(self, step: StepShape) -> tuple[Rows, Callable[[], None]]:
        """Numbers of rows, and what runs the products."""
        numbers = {Counts.T: step.num_tokens, Counts.S: len(step.chunks)}
        rows = tuple(numbers.get(count, 0) for count in Counts)
        bucket = bucket_of(self._program.buckets, step.num_tokens)
        if all(count == 1 for _, count in step.chunks) and self._runner.graphs.body(bucket) is not None:
            captured = self._runner.image.graph_rows(bucket)
            return rows, self._graph(self._program.span(bucket), False, bucket, captured).replay
        return rows, partial(self._list(self._program.span(bucket), False).run, rows)

    def _heads(self, step: StepShape) -> Iterator[tuple[Rows, Callable[[], None]]]:
        most = self._program.capacity.R
        for num_rows in step.head_rows:
            rows = head_rows(num_rows)
            bucket = min(bucket_of(self._program.buckets, num_rows), most)
            span = self._program.span(bucket, head=True)
            if self._runner.graphs.head(num_rows, "greedy") is not None:
                bucket = bucket_of(self._runner.graphs.buckets, num_rows)
                yield rows, self._graph(span, True, bucket, head_rows(bucket)).replay
            else:
                yield rows, partial(self._list(span, True).run, rows)

    def _list(self, span: Span, is_head: bool) -> GpuCalls:
        key = is_head, span.rows
        if key not in self._calls:
            products = [one for one in span.launches if "linear" in self._templates[one.kernel]]
            self._calls[key] = self._runner.prepare(products)
        return self._calls[key]

    def _graph(self, span: Span, is_head: bool, bucket: int, rows: Rows) -> CapturedGraph:
        key = is_head, bucket
        if key not in self._graphs:
            calls = self._list(span, is_head)
            calls.run(rows)
            self._graphs[key] = self._runner.device.capture(lambda: calls.run(rows))
        return self._graphs[key]
