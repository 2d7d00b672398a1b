"""Executes a program: all memory and all launches are resolved at load; a step passes only numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.artifact import Artifact
from pagec.compiler.dims import ITEM_BYTES
from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.compiler.packing import buffer_to_rows
from pagec.compiler.program import Launch, RowCount
from pagec.runtime.batch import I32, Batch
from pagec.runtime.device import Device, KernelCall, Prepared
from pagec.runtime.ledger import kv_blocks
from pagec.runtime.memory import Areas
from pagec.runtime.trace import NO_TRACE, Trace
from pagec.runtime.weights import WeightsMemory

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """For each of a batch's logit rows: the likeliest token and, if wanted, the logits [n, vocab]."""

    tokens: I32
    logits: F32 | None


# Which row count a launch takes, in the order in which `run` gives them.
_COUNTS: Final[Mapping[RowCount, int]] = {"T": 0, "tiles": 1, "R": 2}


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
        self.trace: Trace = NO_TRACE
        self._done: StepOutput | None = None

    def run(self, batch: Batch) -> StepOutput:
        """One step from beginning to end."""
        self.submit(batch)
        return self.collect()

    def submit(self, batch: Batch) -> None:
        """Starts a step (on a CPU: runs it); `collect` gives its output."""
        assert self._done is None, "a step is in flight"
        self._check(batch)
        self.trace.batch(batch)
        with self.trace.span("upload"):
            self.upload(batch)
        with self.trace.span("body"):
            self._launch(self.body, self.program.body, (batch.num_tokens, len(batch.tiles), 0))
        self._done = self._run_head(batch)

    def collect(self) -> StepOutput:
        """Waits for the step in flight."""
        assert self._done is not None, "no step is in flight"
        output, self._done = self._done, None
        return output

    def fill_kv_with_nan(self) -> None:
        """Poisons the whole pool (tests: no result may depend on stale keys and values)."""
        self._device.fill_nan(self.memory.kv)

    def prepare(self, names: Iterable[str]) -> Prepared:
        """Some of the program's launches as a list of their own; `run` takes tokens, tiles, logit rows."""
        return self._device.prepare([self._calls[name] for name in names])

    def launch(self, name: str, num_rows: int) -> None:
        """Runs one launch alone, on whatever its arguments hold (for verify and the tuner)."""
        self.prepare([name]).run(num_rows, num_rows, num_rows)

    def _launch(self, calls: Prepared, launches: Sequence[Launch], rows: tuple[int, int, int]) -> None:
        if self.trace.kernels:
            times = calls.time_us(*rows)
            self.trace.launches(launches, [rows[_COUNTS[launch.rows]] for launch in launches], times)
        else:
            calls.run(*rows)

    def _run_head(self, batch: Batch) -> StepOutput:
        """The head over the logit rows, R at a time."""
        tokens, logits = [], []
        for start in range(0, len(batch.logit_rows), self.program.capacity.R):
            rows = batch.logit_rows[start : start + self.program.capacity.R]
            self.trace.head(len(rows))
            with self.trace.span("head"):
                self.upload_logit_rows(rows)
                self._launch(self.head, self.program.head, (0, 0, len(rows)))
            tokens.append(self._read("argmax", len(rows)))
            if batch.want_logits:
                logits.append(self._read("logits", len(rows)))
        return StepOutput(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.concatenate(logits) if logits else None,
        )

    def upload_logit_rows(self, rows: I32) -> None:
        """Puts the rows of a head chunk where kernels read them."""
        self._device.upload(self.memory.steps["logit_rows"], rows)

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
        upload(steps["tokens"], batch.tokens)
        upload(steps["positions"], batch.positions)
        upload(steps["query_start"], batch.query_start)
        upload(steps["seq_lens"], batch.seq_lens)
        upload(steps["tiles"], batch.tiles)
        for group, (slots, tables) in enumerate(zip(batch.slot_mapping, batch.block_tables, strict=True)):
            upload(steps[f"slot_mapping.{group}"], slots)
            upload(steps[f"block_tables.{group}"], tables)

    def _call(self, launch: Launch) -> KernelCall:
        kernels = {kernel.key: kernel for kernel in self.program.kernels}
        try:
            chosen = [kernels[key] for _, key in launch.variants]
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
        limits = [limit for limit, _ in launch.variants]
        variants = zip(limits, (kernel.symbol for kernel in chosen), strict=True)
        return KernelCall(launch.name, _COUNTS[launch.rows], tuple(variants), tensors)
