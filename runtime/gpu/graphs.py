"""Captured launches: what a step replays in place of a call for each kernel.

The numbers of rows are read on the device, so that a graph depends on its bucket alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagec.compiler.gpu_program import GpuProgram
from pagec.compiler.launch import Counts
from pagec.runtime.device.cuda.device import CapturedGraph, CudaDevice
from pagec.runtime.gpu.launches import HeadKind, Launches
from pagec.runtime.gpu.step import StepImage, bucket_of


class Graphs:
    """Bodies of single new tokens and heads, captured for these buckets, the largest first, so that smaller
    ones find room in its memory."""

    def __init__(
        self,
        device: CudaDevice,
        program: GpuProgram,
        launches: Launches,
        image: StepImage,
        buckets: Sequence[int],
    ) -> None:
        self.buckets = tuple(sorted(buckets))
        self._bodies: dict[int, CapturedGraph] = {}
        self._heads: dict[tuple[int, HeadKind], CapturedGraph] = {}
        for bucket in reversed(self.buckets):
            body = launches.body(program.span(bucket))
            rows = image.graph_rows(bucket)
            self._bodies[bucket] = device.capture(lambda body=body, rows=rows: body.run(rows))  # type: ignore[misc]
            if bucket > program.capacity.R:
                continue
            span = program.span(bucket, head=True)
            kinds: tuple[HeadKind, ...] = ("greedy", "sampled")
            for kind in kinds:
                head, rows = launches.head(span, kind), head_rows(bucket)
                self._heads[bucket, kind] = device.capture(lambda head=head, rows=rows: head.run(rows))  # type: ignore[misc]

    def body(self, bucket: int) -> CapturedGraph | None:
        """For a step of single new tokens; None if there is none of this bucket."""
        return self._bodies.get(bucket)

    def head(self, num_rows: int, kind: HeadKind) -> CapturedGraph | None:
        """For so many logit rows; None if there is none."""
        if not self.buckets or num_rows > self.buckets[-1]:
            return None
        return self._heads.get((bucket_of(self.buckets, num_rows), kind))


def head_rows(num_rows: int) -> tuple[int, ...]:
    """What a head of so many logit rows is launched for, by Counts."""
    return tuple(num_rows if count is Counts.R else 0 for count in Counts)
