"""Executes a program: all memory and all launches are resolved at load; a step passes only numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.artifact import Artifact
from pagec.compiler.dims import ITEM_BYTES
from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.compiler.packing import buffer_to_rows, rows_to_buffer
from pagec.compiler.program import Launch, RowCount
from pagec.runtime.batch import I32, Batch
from pagec.runtime.device import Device, KernelCall, Prepared
from pagec.runtime.ledger import kv_blocks
from pagec.runtime.memory import Areas
from pagec.runtime.sampling.sampler import Processors, SamplingInputs, process_logits
from pagec.runtime.trace import NO_TRACE, Trace
from pagec.runtime.weights import WeightsMemory

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """For each of a batch's logit rows: its token and, if wanted, the logits [n, vocab]; log probabilities
    of the tokens where the batch is sampled, 0 of rows that did not ask; and what a row's own logits
    processors have raised."""

    tokens: I32
    logits: F32 | None
    logprobs: F32 | None = None
    errors: Mapping[int, Exception] = field(default_factory=dict)


# Which row count a launch takes, in the order in which `run` gives them.
_COUNTS: Final[Mapping[RowCount, int]] = {
    "T": 0,
    "tiles": 1,
    "R": 2,
    "merges": 3,
    "logits": 4,
    "greedy": 5,
    "sampled": 6,
}
NUM_COUNTS: Final = len(_COUNTS)


class Runner:
    """A loaded program. `num_blocks` or `kv_bytes` size the KV pool; `weights` and `weights_memory` as in
    load_weights. What runs is told to `trace`."""

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        *,
        weights: str | None = None,
        weights_memory: WeightsMemory = "copy",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
    ) -> None:
        program = artifact.program
        self.program = program
        self._device = device
        self.memory = Areas(artifact, device, weights, weights_memory)
        self.num_blocks = kv_blocks(
            program, num_blocks=num_blocks, kv_bytes=kv_bytes, free_bytes=device.free_bytes()
        )
        self.memory.add_kv(self.num_blocks)
        self.ledger = self.memory.ledger(self.num_blocks)
        calls = {launch.name: self._call(launch) for launch in (*program.body, *program.head)}
        self._calls = calls
        self.body = self.prepare(launch.name for launch in program.body)
        self.head = self.prepare(launch.name for launch in program.head)
        # The same in two parts: on the logits between them the host may work.
        draws = [launch.name for launch in program.head if launch.rows == "sampled"]
        self._to_logits = self.prepare(launch.name for launch in program.head if launch.name not in draws)
        self._from_logits = self.prepare(draws)
        self.trace: Trace = NO_TRACE
        self._done: deque[StepOutput] = deque()
        self._previous: I32 = np.zeros(0, np.int32)  # the tokens that the last submitted step chose

    def run(self, batch: Batch) -> StepOutput:
        """One step from beginning to end."""
        self.submit(batch)
        return self.collect()

    def submit(self, batch: Batch) -> None:
        """Starts a step (on a CPU: runs it); `collect` gives the outputs, the oldest first."""
        self._check(batch)
        kv = self.program.kv
        if len(batch.copies):
            with self.trace.span("copy"):
                self._device.copy_blocks(self.memory.kv, kv.spans, kv.span_bytes, batch.copies)
        self.trace.batch(batch)
        with self.trace.span("upload"):
            self.upload(batch)
        with self.trace.span("body"):
            tiles = len(batch.tiles)
            merges = self.program.merges(tiles, max(batch.seq_lens))
            self._launch(self.body, self.program.body, (batch.num_tokens, tiles, 0, merges, 0, 0, 0))
        output = self._run_head(batch)
        self._previous = output.tokens
        self._done.append(output)

    def collect(self) -> StepOutput:
        """Waits for the oldest step in flight."""
        assert self._done, "no step is in flight"
        return self._done.popleft()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of the pool, (source, target), between two steps."""
        kv = self.program.kv
        pairs = np.array(copies, np.int32).reshape(-1, 2)
        self._device.copy_blocks(self.memory.kv, kv.spans, kv.span_bytes, pairs)

    def read_blocks(self, blocks: Sequence[int], spare: list[Any] | None = None) -> list[Any]:
        """Host copies of blocks of the pool, opaque bytes, in `spare` arrays as far as there are any."""
        kv = self.program.kv
        return list(self._device.read_blocks(self.memory.kv, kv.spans, kv.span_bytes, blocks, spare))

    def write_blocks(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        """Puts such copies (anything with a buffer) into blocks of the pool."""
        kv = self.program.kv
        arrays = [np.frombuffer(block, np.uint8) for block in data]
        self._device.write_blocks(self.memory.kv, kv.spans, kv.span_bytes, blocks, arrays)

    def fill_kv_with_nan(self) -> None:
        """Poisons the whole pool (tests: no result may depend on stale keys and values)."""
        self._device.fill_nan(self.memory.kv)

    def prepare(self, names: Iterable[str]) -> Prepared:
        """Some of the program's launches as a list of their own; `run` takes tokens, tiles, logit rows,
        merges."""
        return self._device.prepare([self._calls[name] for name in names])

    def launch(self, name: str, num_rows: int) -> None:
        """Runs one launch alone, on whatever its arguments hold (for verify and the tuner)."""
        self.prepare([name]).run(*[num_rows] * NUM_COUNTS)

    def head_counts(self, num_rows: int, want_logits: bool, sampled: bool = False) -> tuple[int, ...]:
        """Row counts of the head, as `Prepared.run` takes them."""
        kinds = (num_rows, 0) if want_logits or sampled else (0, num_rows)
        return (0, 0, num_rows, 0, *kinds, num_rows if sampled else 0)

    def _launch(self, calls: Prepared, launches: Sequence[Launch], rows: tuple[int, ...]) -> None:
        if self.trace.kernels:
            times = calls.time_us(*rows)
            self.trace.launches(launches, [rows[_COUNTS[launch.rows]] for launch in launches], times)
        else:
            calls.run(*rows)

    def _run_head(self, batch: Batch) -> StepOutput:
        """The head over the logit rows, R at a time."""
        tokens, logits, logprobs = [], [], []
        errors: dict[int, Exception] = {}
        sampled = batch.sampling is not None
        for start in range(0, len(batch.logit_rows), self.program.capacity.R):
            rows = batch.logit_rows[start : start + self.program.capacity.R]
            self.trace.head(len(rows))
            with self.trace.span("head"):
                self.upload_logit_rows(rows)
                if batch.sampling is not None:
                    self.upload_sampling(batch.sampling.chunk(start, start + len(rows)))
                counts = self.head_counts(len(rows), batch.want_logits, sampled)
                if batch.processors:
                    self._to_logits.run(*counts)
                    original, found = self._process(batch.processors, start, len(rows))
                    errors |= found
                    self._from_logits.run(*counts)
                    logits += [original] if batch.want_logits else []
                else:
                    self._launch(self.head, self.program.head, counts)
                    logits += [self._read_logits(len(rows))] if batch.want_logits else []
            tokens.append(self._read("sampling.token" if sampled else "argmax", len(rows)))
            if sampled:
                logprobs.append(self._read("sampling.logprob", len(rows)))
        return StepOutput(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.concatenate(logits) if logits else None,
            np.concatenate(logprobs) if logprobs else None,
            errors,
        )

    def _read_logits(self, num_rows: int) -> F32:
        return self._read("logits", num_rows).view(np.float32)

    def _process(self, processors: Processors, start: int, count: int) -> tuple[F32, dict[int, Exception]]:
        """Lets the host change `count` rows of logits, from logit row `start` of the step on; what they were
        before, and what its functions have raised."""
        logits = self._read_logits(count)
        mine = {row - start: job for row, job in processors.items() if start <= row < start + count}
        changed = logits.copy()
        errors = process_logits(mine, changed)
        memory = self.memory.buffers[self.memory.outputs["logits"].name]
        self._device.upload(memory, rows_to_buffer(changed, "f32"))
        return logits, {start + row: error for row, error in errors.items()}

    def upload_logit_rows(self, rows: I32) -> None:
        """Puts the rows of a head chunk where kernels read them."""
        self._device.upload(self.memory.steps["logit_rows"], rows)

    def upload_sampling(self, inputs: SamplingInputs) -> None:
        """Puts what the rows of a head chunk ask for where the sampling kernel reads it."""
        upload, steps = self._device.upload, self.memory.steps
        upload(steps["sampling.settings"], inputs.settings)
        upload(steps["sampling.edits"], inputs.edits)
        upload(steps["sampling.masks"], inputs.masks)

    def _read(self, output: str, num_rows: int) -> npt.NDArray[np.int32]:
        """The first rows of an output, without padding."""
        buffer = self.memory.outputs[output]
        memory = self.memory.buffers[buffer.name][: num_rows * buffer.stride * ITEM_BYTES[buffer.dtype]]
        raw = self._device.download(memory, np.int32 if buffer.dtype == "i32" else np.float32)
        return buffer_to_rows(raw.reshape(num_rows, -1) if buffer.inner else raw, buffer.inner, buffer.dtype)

    def _check(self, batch: Batch) -> None:
        """A batch beyond the capacity would write outside the workspace."""
        capacity = self.program.capacity
        if not 0 < batch.num_tokens <= capacity.T or not 0 < batch.num_sequences <= capacity.S:
            raise CapacityError(
                f"{batch.num_tokens} tokens of {batch.num_sequences} sequences; the program holds 1 to "
                f"{capacity.T} of 1 to {capacity.S}",
                place="batch",
            )

    def upload(self, batch: Batch) -> None:
        """Puts a batch's arrays where kernels read them."""
        upload, steps = self._device.upload, self.memory.steps
        upload(steps["tokens"], self._known(batch.tokens))
        upload(steps["positions"], batch.positions)
        upload(steps["query_start"], batch.query_start)
        upload(steps["seq_lens"], batch.seq_lens)
        upload(steps["tiles"], batch.tiles)
        for group, (slots, tables) in enumerate(zip(batch.slot_mapping, batch.block_tables, strict=True)):
            upload(steps[f"slot_mapping.{group}"], slots)
            self._device.upload_rows(steps[f"block_tables.{group}"], tables, 4 * self.program.max_blocks)

    def _known(self, tokens: I32) -> I32:
        """The tokens, with what the step before chose in place of -1 - row."""
        rows = np.flatnonzero(tokens < 0)
        if not len(rows):
            return tokens
        known = tokens.copy()
        # A row whose logits are no numbers chooses none: its request will fail, the others go on.
        known[rows] = np.clip(self._previous[-1 - tokens[rows]], 0, self.program.vocab - 1)
        return known

    def _call(self, launch: Launch) -> KernelCall:
        kernels = {kernel.key: kernel for kernel in self.program.kernels}
        try:
            chosen = [kernels[key] for _, key in launch.variants if key]
            if len({kernel.signature for kernel in chosen}) > 1:
                raise ValueError("its kernels take different arrays")
            pairs = zip(launch.args, chosen[0].signature, strict=True)
            tensors = tuple(self._device.tensor(self.memory.find(name), dtype) for name, dtype in pairs)
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"launch {launch.name} cannot be resolved ({error})",
                place="program.json",
                remedy="compile the model again",
            ) from error
        variants = tuple((limit, kernels[key].symbol if key else "") for limit, key in launch.variants)
        return KernelCall(launch.name, _COUNTS[launch.rows], variants, tensors)
