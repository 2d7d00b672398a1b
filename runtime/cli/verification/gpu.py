"""A GPU's kernels, one by one: those of every span of rows, and captured steps beside launched ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.gpu_program import GpuLaunch, Span
from pagec.compiler.launch import Counts
from pagec.runtime.batch import build_batch
from pagec.runtime.cli.verification.inputs import Step
from pagec.runtime.cli.verification.model import Verification
from pagec.runtime.cli.verification.row import Row
from pagec.runtime.cli.verification.step import NodeLaunches, StepCheck
from pagec.runtime.device import Array
from pagec.runtime.gpu.runner import GpuRunner
from pagec.runtime.gpu.step import StepImage, max_copies
from pagec.runtime.trace import NO_TRACE, Recorder

WORD = 4
# Sequences of the captured steps have so many tokens before.
CONTEXT = 5
# Elements of a pool's random contents before they repeat: a prime, so that no two blocks are the same.
PATTERN = 1_000_003


class GpuVerification(Verification):
    """Of an artifact for a GPU."""

    def __init__(self, artifact: GpuArtifact, weights: str | None = None, seed: int = -1) -> None:
        super().__init__(artifact, weights, seed)
        self.fused = fuse_writes(self.fused)

    def check(self, step: Step) -> StepCheck:
        return GpuStepCheck(self, step)

    def chunks(self, length: int) -> list[int]:
        """The last tokens come one by one, by captured steps where there are any."""
        return sorted({0, length // 2, *range(max(length - 2, 0), length + 1)})

    def more(self) -> list[Row]:
        return [*self._tokens(), *self._copies(), *self._graphs()]

    @property
    def gpu(self) -> GpuRunner:
        assert isinstance(self.runner, GpuRunner)
        return self.runner

    def _tokens(self) -> Iterator[Row]:
        """Tokens below 0 become what the step before has chosen."""
        program, T = self.gpu.program, self.program.capacity.T
        for launch in dict.fromkeys(span.launches[0] for span in program.body):
            chosen = self.rng.integers(0, program.vocab, T, np.int32)
            tokens = self.rng.integers(0, program.vocab, T, np.int32)
            tokens[::2] = -1 - np.arange(0, T, 2)[::-1]
            expected = np.where(tokens < 0, chosen[np.maximum(-1 - tokens, 0)], tokens)
            memory = self.gpu.memory.steps
            self.device.upload(memory["chosen"], chosen)
            self.device.upload(memory["tokens"], tokens)
            self.launch([launch], {Counts.T: T})
            same = self._same(self.device.download(memory["tokens"][: WORD * T], np.int32), expected)
            yield Row(launch.kernel, T, 0.0, same)

    def _copies(self) -> Iterator[Row]:
        """Random bytes, copied between blocks in one launch."""
        kv, launch, num_blocks = self.program.kv, self.gpu.program.copy, self.gpu.num_blocks
        pool = np.resize(self.rng.integers(0, 256, PATTERN, np.uint8), len(self.gpu.memory.kv))
        self.device.upload(self.gpu.memory.kv, pool)
        count = min(max_copies(self.gpu.program), num_blocks // 2)
        copies = self.rng.permutation(num_blocks)[: 2 * count].reshape(-1, 2).astype(np.int32)
        self.device.upload(self.gpu.memory.steps["copies"], copies)
        self.launch([launch], {Counts.COPIES: count})
        blocks = pool.reshape(max(kv.spans, 1), num_blocks, -1)
        blocks[:, copies[:, 1]] = blocks[:, copies[:, 0]]
        same = self._same(self.device.download(self.gpu.memory.kv, np.uint8), pool)
        yield Row(launch.kernel, count, 0.0, same)

    def _graphs(self) -> Iterator[Row]:
        """A captured step of each bucket gives the same bits as its launches one by one."""
        pool = self.rng.standard_normal(PATTERN, np.float32).view(np.uint32)
        # As bf16 a word's upper half is a number as it is; its lower half must not be NaN either.
        self.device.upload(self.gpu.memory.kv, np.resize(pool & 0xFFFF3FFF, len(self.gpu.memory.kv) // WORD))
        for bucket in self.gpu.graphs.buckets:
            num_tokens = min(bucket, self.program.capacity.S)
            batch = build_batch(self.entries([(CONTEXT, 1)] * num_tokens), self.program)
            captured = self.gpu.run(batch)
            self.gpu.trace = Recorder(kernels=True)  # in which launches are timed one by one
            launched = self.gpu.run(batch)
            self.gpu.trace = NO_TRACE
            assert captured.logits is not None
            assert launched.logits is not None
            error = float(np.abs(captured.logits - launched.logits).max())
            same = self._same(captured.logits, launched.logits)
            yield Row("captured steps", num_tokens, error, same)

    def _same(self, mine: Array, expected: Array) -> float:
        return 0.0 if np.array_equal(mine, expected) else float("inf")

    def launch(self, launches: Sequence[GpuLaunch], numbers: dict[Counts, int]) -> None:
        """Runs launches for these numbers of rows."""
        rows = tuple(numbers.get(count, 0) for count in Counts)
        self.device.upload(self.gpu.memory.steps["counts"], np.array(rows, np.int32))
        self.gpu.prepare(launches).run(rows)


class GpuStepCheck(StepCheck):
    """The launches of all spans that hold the step, not only of the first, which it would take."""

    def launches(self) -> Iterator[NodeLaunches]:
        assert isinstance(self.v, GpuVerification)
        program, nodes = self.v.gpu.program, {node.outputs[0] for node in self.fused.nodes}
        for spans, num_rows in (
            (program.body, self.batch.num_tokens),
            (program.head, len(self.batch.logit_rows)),
        ):
            for span in spans:
                if num_rows > span.rows:
                    continue
                rows = self._upload(self.v.gpu, span if spans is program.body else None)
                for group in _groups(span.launches, nodes):
                    ran = [one for one in group if rows[one.counts]]
                    yield NodeLaunches(
                        group[0].name,
                        tuple((one.kernel, rows[one.counts]) for one in ran),
                        tuple(arg for one in group for arg in one.args),
                        partial(self.v.gpu.prepare(group).run, rows),
                    )

    def _upload(self, runner: GpuRunner, span: Span | None) -> tuple[int, ...]:
        """Puts the step's arrays in place as this span of the body wants them; numbers of rows by Counts."""
        step = runner.upload(self.batch)
        if span is not None:
            image = StepImage(replace(runner.program, body=(span,), buckets=(span.rows,)))
            step = image.fill(self.batch, self.batch.logit_rows, self.batch.copies)
            for name, array in image.arrays.items():
                runner.device.upload(runner.memory.steps[name], array)
        runner.upload_sampling(self.sampling)
        return step.rows


def _groups(launches: Sequence[GpuLaunch], nodes: set[str]) -> list[list[GpuLaunch]]:
    """The launches of each node; what prepares the tokens computes none."""
    found: list[list[GpuLaunch]] = []
    for launch in launches:
        if launch.name in nodes:
            found.append([launch])
        elif found:
            found[-1].append(launch)
    return found
