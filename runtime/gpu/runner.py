"""Executes a GPU program: fixed buffers, launches packed at load, captured steps, several steps in flight.

A step of single new tokens replays the graph of its bucket, any other is launched call by call; the head
likewise, by the bucket of its logit rows and by what these want. All runs on one stream, so that a step's
copies wait for the kernels before them; the host waits in `collect` alone, or where it has to change logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.errors import CapacityError
from pagec.compiler.gpu_program import GpuLaunch, Span
from pagec.compiler.launch import Counts
from pagec.runtime.batch import I32, Batch
from pagec.runtime.device.cuda.device import CapturedGraph, CudaDevice, Fetch, GpuCalls
from pagec.runtime.gpu.graphs import Graphs, head_rows
from pagec.runtime.gpu.launches import HeadKind, Launches
from pagec.runtime.gpu.memory import GpuAreas
from pagec.runtime.gpu.step import WORD, Step, StepImage, bucket_of, is_chain, max_copies
from pagec.runtime.ledger import kv_blocks
from pagec.runtime.loaded import F32, LoadedProgram, StepOutput
from pagec.runtime.weights import WeightsMemory

# A GPU is seldom shared: so much of what is free becomes the KV pool if no size is given.
KV_SHARE: Final = 0.9


@dataclass(slots=True)
class _Flight:
    """A step's results, most of them on their way to the host."""

    tokens: Fetch | None = None
    logits: list[F32 | Fetch] = field(default_factory=list)
    logprobs: list[Fetch] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)


class GpuRunner(LoadedProgram):
    """A program for a GPU, loaded. `num_blocks` or `kv_bytes` size the KV pool; `weights` and
    `weights_memory` as in load_weights; `graph_rows`: the most tokens of a step that is captured (0: none;
    None: as many as sequences)."""

    def __init__(
        self,
        artifact: GpuArtifact,
        device: CudaDevice,
        *,
        weights: str | None = None,
        weights_memory: WeightsMemory = "copy",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        graph_rows: int | None = None,
    ) -> None:
        self.program = program = artifact.program
        self.device = device
        self.image = StepImage(program)
        self._areas = memory = GpuAreas(artifact, device, weights, weights_memory)
        most = min(program.capacity.S, program.capacity.S if graph_rows is None else graph_rows)
        buckets = [rows for rows in program.buckets if rows <= most]
        memory.note_graphs(self._measure(artifact, buckets))
        num_blocks = kv_blocks(
            program,
            num_blocks=num_blocks,
            kv_bytes=kv_bytes,
            free_bytes=device.free_bytes() - memory.ledger(0).graphs_bytes,
            share=KV_SHARE,
        )
        memory.add_kv(num_blocks)
        super().__init__(program, device, memory, num_blocks)
        self._launches, self.graphs = self._resolve(artifact, buckets)
        self._flights: deque[_Flight] = deque()

    def _resolve(self, artifact: GpuArtifact, buckets: Sequence[int]) -> tuple[Launches, Graphs]:
        launches = Launches(artifact, self.device, self._areas, self.image.most_rows())
        launches.run_empty()
        return launches, Graphs(self.device, self.program, launches, self.image, buckets)

    def _measure(self, artifact: GpuArtifact, buckets: Sequence[int]) -> int:
        """Bytes that the graphs will take. The pool's size depends on it, and they on where the pool lies: so
        they are captured for a pool of two blocks first."""
        if not buckets:
            return 0
        self._areas.add_kv(2)
        before = self.device.free_bytes()
        kept = self._resolve(artifact, buckets)
        found = max(before - self.device.free_bytes(), 0)
        del kept
        return found

    # ---------------------------------------------------------------------------------- steps

    def submit(self, batch: Batch) -> None:
        """Starts a step; `collect` gives the outputs, the oldest first."""
        self._check(batch)
        with self.trace.span("upload"):
            step = self.upload(batch)
        self.trace.batch(batch)
        if step.rows[Counts.COPIES]:
            self._launches.copy.run(step.rows)
        with self.trace.span("body"):
            graph = self.graphs.body(step.bucket)
            self._run(graph, self._launches.body(step.span), step.rows)
        self._flights.append(self._run_head(batch))

    def collect(self) -> StepOutput:
        """Waits for the oldest step in flight."""
        assert self._flights, "no step is in flight"
        flight = self._flights.popleft()
        tokens = np.zeros(0, np.int32) if flight.tokens is None else flight.tokens.array()
        logits = [
            one if isinstance(one, np.ndarray) else self._rows("logits", one.array()) for one in flight.logits
        ]
        logprobs = [self._rows("sampling.logprob", one.array()) for one in flight.logprobs]
        return StepOutput(
            tokens,
            np.concatenate(logits) if logits else None,
            np.concatenate(logprobs) if logprobs else None,
            flight.errors,
        )

    def prepare(self, launches: Iterable[GpuLaunch]) -> GpuCalls:
        """Some of the program's launches as a list of their own."""
        return self._launches.prepare(launches)

    def upload(self, batch: Batch) -> Step:
        """Puts a batch's arrays where kernels read them."""
        copies = batch.copies
        if len(copies) and (len(copies) > max_copies(self.program) or is_chain(copies)):
            with self.trace.span("copy"):  # one after the other
                self._copy(copies)
            copies = copies[:0]
        step = self.image.fill(batch, batch.logit_rows[: self.program.capacity.R], copies)
        self._device.upload(self._areas.image[: step.used_bytes], self.image.words[: step.used_bytes // WORD])
        for group, tables in enumerate(batch.block_tables):
            memory = self.memory.steps[f"block_tables.{group}"]
            self._device.upload_rows(memory, tables, WORD * self.program.max_blocks)
        return step

    def _run(self, graph: CapturedGraph | None, calls: GpuCalls, rows: tuple[int, ...]) -> None:
        """By the graph if there is one; kernel by kernel where each is to be timed."""
        if self.trace.kernels:
            ran = [(call.name, call.kernel, rows[call.count]) for call in calls.calls]
            self.trace.launches(ran, calls.time_us(rows))
        elif graph is not None:
            graph.replay()
        else:
            calls.run(rows)

    # ----------------------------------------------------------------------------------- head

    def _run_head(self, batch: Batch) -> _Flight:
        """The head over the logit rows, R at a time."""
        R, chosen = self.program.capacity.R, self.memory.steps["chosen"]
        num_rows = len(batch.logit_rows)
        kind: HeadKind = "greedy" if batch.sampling is None else "sampled"
        if WORD * num_rows > len(chosen):
            raise CapacityError(f"{num_rows} logit rows do not fit in a step", place="batch")
        flight = _Flight()
        for start in range(0, num_rows, R):
            rows = batch.logit_rows[start : start + R]
            self.trace.head(len(rows))
            with self.trace.span("head"):
                self._upload_head(batch, start, rows)
                if batch.processors:
                    self._process_head(batch, start, len(rows), flight)
                else:
                    self._launch_head(kind, len(rows))
                    if batch.want_logits:
                        flight.logits.append(self._fetch("logits", len(rows)))
                token = self._output("argmax" if kind == "greedy" else "sampling.token", len(rows))
                self.device.copy(chosen[WORD * start : WORD * (start + len(rows))], token)
                if kind == "sampled":
                    flight.logprobs.append(self._fetch("sampling.logprob", len(rows)))
        if num_rows:
            flight.tokens = self.device.fetch(chosen[: WORD * num_rows], np.int32)
        return flight

    def _upload_head(self, batch: Batch, start: int, rows: I32) -> None:
        """What a chunk of logit rows needs; the first one's rows have come with the step's image."""
        if start:
            self.upload_logit_rows(rows)
            self._device.upload(self._areas.count(Counts.R), np.array([len(rows)], np.int32))
        if batch.sampling is not None:
            self.upload_sampling(batch.sampling.chunk(start, start + len(rows)))

    def _launch_head(self, kind: HeadKind, num_rows: int) -> None:
        span = self._head_span(num_rows)
        graph = self.graphs.head(num_rows, kind)
        self._run(graph, self._launches.head(span, kind), head_rows(num_rows))

    def _process_head(self, batch: Batch, start: int, num_rows: int, flight: _Flight) -> None:
        """The head with the host's own work on the logits in between; waits for them."""
        span, rows = self._head_span(num_rows), head_rows(num_rows)
        self._launches.head(span, "logits").run(rows)
        original, errors = self._process(batch.processors, start, num_rows)
        flight.errors |= errors
        self._launches.head(span, "draws").run(rows)
        if batch.want_logits:
            flight.logits.append(original)

    def _head_span(self, num_rows: int) -> Span:
        """As a graph of these rows has it: padded to the next bucket."""
        capacity = self.program.capacity
        return self.program.span(min(bucket_of(self.program.buckets, num_rows), capacity.R), head=True)

    def _fetch(self, output: str, num_rows: int) -> Fetch:
        return self.device.fetch(self._output(output, num_rows), np.int32)
