"""A program in a device's memory: what runners of all devices share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagec.compiler.dims import ITEM_BYTES
from pagec.compiler.errors import CapacityError
from pagec.compiler.packing import buffer_to_rows, rows_to_buffer
from pagec.compiler.program import Memory as MemoryPlan
from pagec.runtime.batch import I32, Batch
from pagec.runtime.device import Device, Memory
from pagec.runtime.memory import Areas
from pagec.runtime.sampling.sampler import Processors, SamplingInputs, process_logits
from pagec.runtime.trace import NO_TRACE, Trace

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


class LoadedProgram:
    """A program, its memory, and a KV pool of `num_blocks`. What runs is told to `trace`."""

    def __init__(self, program: MemoryPlan, device: Device, memory: Areas, num_blocks: int) -> None:
        self._device = device
        self._kv = program.kv
        self._capacity = program.capacity
        self.memory = memory
        self.num_blocks = num_blocks
        self.ledger = memory.ledger(num_blocks)
        self.trace: Trace = NO_TRACE

    def submit(self, batch: Batch) -> None:
        """Starts a step."""
        raise NotImplementedError

    def collect(self) -> StepOutput:
        """Waits for the oldest step in flight."""
        raise NotImplementedError

    def run(self, batch: Batch) -> StepOutput:
        """One step from beginning to end."""
        self.submit(batch)
        return self.collect()

    def expect_blocks(self, end: int) -> None:
        """Blocks of the pool below `end` have been given out. A device that needs time to make memory ready
        may do it for the next ones."""

    def settle(self) -> None:
        """Waits until what expect_blocks began is done, as it is with an engine that was idle for a while
        (benchmarks)."""

    def fill_kv_with_nan(self) -> None:
        """Poisons the whole pool (tests: no result may depend on stale keys and values)."""
        self._device.fill_nan(self.memory.kv)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of the pool, (source, target), between two steps."""
        self._copy(np.array(copies, np.int32).reshape(-1, 2))

    def read_blocks(self, blocks: Sequence[int], spare: list[Any] | None = None) -> list[Any]:
        """Host copies of blocks of the pool, opaque bytes, in `spare` arrays as far as there are any."""
        kv = self._kv
        return list(self._device.read_blocks(self.memory.kv, kv.spans, kv.span_bytes, blocks, spare))

    def write_blocks(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        """Puts such copies (anything with a buffer) into blocks of the pool."""
        kv = self._kv
        arrays = [np.frombuffer(block, np.uint8) for block in data]
        self._device.write_blocks(self.memory.kv, kv.spans, kv.span_bytes, blocks, arrays)

    def upload_logit_rows(self, rows: I32) -> None:
        """Puts the rows of a head chunk where kernels read them."""
        self._device.upload(self.memory.steps["logit_rows"], rows)

    def upload_sampling(self, inputs: SamplingInputs) -> None:
        """Puts what the rows of a head chunk ask for where the sampling kernel reads it."""
        for name in ("settings", "edits", "masks"):
            array = getattr(inputs, name)
            if array.size:
                self._device.upload(self.memory.steps[f"sampling.{name}"], array)

    def _copy(self, copies: I32) -> None:
        kv = self._kv
        self._device.copy_blocks(self.memory.kv, kv.spans, kv.span_bytes, copies)

    def _output(self, output: str, num_rows: int) -> Memory:
        """The memory of the first rows of an output, with their padding."""
        buffer = self.memory.outputs[output]
        return self.memory.buffers[buffer.name][: num_rows * buffer.stride * ITEM_BYTES[buffer.dtype]]

    def _rows(self, output: str, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An output's values, from its memory's words: without padding."""
        buffer = self.memory.outputs[output]
        values = raw.view(np.int32 if buffer.dtype == "i32" else np.float32)
        return buffer_to_rows(
            values.reshape(-1, buffer.stride) if buffer.inner else values, buffer.inner, buffer.dtype
        )

    def _read(self, output: str, num_rows: int) -> npt.NDArray[Any]:
        """The first rows of an output, as the launches so far have left them."""
        return self._rows(output, self._device.download(self._output(output, num_rows), np.int32))

    def _process(self, processors: Processors, start: int, count: int) -> tuple[F32, dict[int, Exception]]:
        """Lets the host change `count` rows of logits, from logit row `start` of the step on; what they were
        before, and what its functions have raised."""
        logits: F32 = self._read("logits", count)
        mine = {row - start: job for row, job in processors.items() if start <= row < start + count}
        changed = logits.copy()
        errors = process_logits(mine, changed)
        memory = self.memory.buffers[self.memory.outputs["logits"].name]
        self._device.upload(memory, rows_to_buffer(changed, "f32"))
        return logits, {start + row: error for row, error in errors.items()}

    def _check(self, batch: Batch) -> None:
        """A batch beyond the capacity would write outside the workspace."""
        capacity = self._capacity
        if not 0 < batch.num_tokens <= capacity.T or not 0 < batch.num_sequences <= capacity.S:
            raise CapacityError(
                f"{batch.num_tokens} tokens of {batch.num_sequences} sequences; the program holds 1 to "
                f"{capacity.T} of 1 to {capacity.S}",
                place="batch",
            )
