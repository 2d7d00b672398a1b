"""Executes a program: all memory and all launches are resolved at load; a step passes only numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pagec.compiler.artifact import Artifact
from pagec.compiler.errors import ArtifactError
from pagec.compiler.program import Launch, RowCount
from pagec.runtime.batch import I32, Batch
from pagec.runtime.device import KernelCall, Prepared, Tensor, TensorDevice
from pagec.runtime.ledger import kv_blocks
from pagec.runtime.loaded import LoadedProgram, StepOutput
from pagec.runtime.memory import Areas, step_bytes
from pagec.runtime.weights import WeightsMemory

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
# So much of the pool, beyond what is in use, is made ready before it is needed. Not the whole pool: who
# serves little would find the machine's memory taken all the same.
READY_BYTES: Final = 1 << 30


class Runner(LoadedProgram):
    """A program for a CPU, loaded. `num_blocks` or `kv_bytes` size the KV pool; `weights` and
    `weights_memory` as in load_weights."""

    def __init__(
        self,
        artifact: Artifact,
        device: TensorDevice,
        *,
        weights: str | None = None,
        weights_memory: WeightsMemory = "copy",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
    ) -> None:
        program = artifact.program
        self.program = program
        self._tensors = device
        self._kernels = {kernel.key: kernel for kernel in program.kernels}
        self._known_tensors: dict[tuple[str, str], Tensor] = {}
        memory = Areas(artifact, device, weights, weights_memory, step_bytes=step_bytes(program))
        num_blocks = kv_blocks(
            program, num_blocks=num_blocks, kv_bytes=kv_bytes, free_bytes=device.free_bytes()
        )
        memory.add_kv(num_blocks)
        super().__init__(program, device, memory, num_blocks)
        calls = {launch.name: self._call(launch) for launch in (*program.body, *program.head)}
        self._calls = calls
        names = [launch.name for launch in (*program.body, *program.head)]
        draws = [launch.name for launch in program.head if launch.rows == "sampled"]
        self._step = self.prepare(names)
        # The same in two parts: on the logits between them the host may work.
        self._to_logits = self.prepare(name for name in names if name not in draws)
        self._from_logits = self.prepare(draws)
        self._done: deque[StepOutput] = deque()
        self._previous: I32 = np.zeros(0, np.int32)  # the tokens that the last submitted step chose

    def submit(self, batch: Batch) -> None:
        """Starts a step (on a CPU: runs it); `collect` gives the outputs, the oldest first."""
        self._check(batch)
        if len(batch.copies):
            with self.trace.span("copy"):
                self._copy(batch.copies)
        self.trace.batch(batch)
        with self.trace.span("upload"):
            self.upload(batch)
        starts = range(0, max(len(batch.logit_rows), 1), self.program.capacity.R)
        parts = [self._run(batch, start) for start in starts]
        output = parts[0] if len(parts) == 1 else _joined(parts)
        self._previous = output.tokens
        self._done.append(output)

    def collect(self) -> StepOutput:
        """Waits for the oldest step in flight."""
        assert self._done, "no step is in flight"
        return self._done.popleft()

    def expect_blocks(self, end: int) -> None:
        kv = self.program.kv
        self._tensors.touch_ahead(self.memory.kv, kv.spans, end * kv.span_bytes + READY_BYTES // kv.spans)

    def settle(self) -> None:
        self._tensors.settle()

    def prepare(self, names: Iterable[str]) -> Prepared:
        """Some of the program's launches as a list of their own; `run` takes tokens, tiles, logit rows,
        merges."""
        return self._tensors.prepare([self._calls[name] for name in names])

    def launch(self, name: str, num_rows: int) -> None:
        """Runs one launch alone, on whatever its arguments hold (for verify and the tuner)."""
        self.prepare([name]).run(*[num_rows] * NUM_COUNTS)

    def head_counts(self, num_rows: int, want_logits: bool, sampled: bool = False) -> tuple[int, ...]:
        """Row counts of the head, as `Prepared.run` takes them."""
        kinds = (num_rows, 0) if want_logits or sampled else (0, num_rows)
        return (0, 0, num_rows, 0, *kinds, num_rows if sampled else 0)

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

    def _run(self, batch: Batch, start: int) -> StepOutput:
        """The head over up to R logit rows from `start` on; before the first ones the body, in the same call,
        for between two calls the team waits."""
        rows = batch.logit_rows[start : start + self.program.capacity.R]
        count = len(rows)
        sampling = batch.sampling if count else None
        sampled = sampling is not None
        counts = self.head_counts(count, batch.want_logits, sampled)
        if start == 0:
            tiles = len(batch.tiles)
            merges = self.program.merges(tiles, max(batch.seq_lens))
            counts = (batch.num_tokens, tiles, count, merges, *counts[4:])
        original, errors = None, dict[int, Exception]()
        if count:
            self.trace.head(count)
        with self.trace.span("head" if start else "body"):
            self.upload_logit_rows(rows)
            if sampling is not None:
                self.upload_sampling(sampling.chunk(start, start + count))
            if batch.processors:
                self._to_logits.run(*counts)
                original, errors = self._process(batch.processors, start, count)
                self._from_logits.run(*counts)
            else:
                self._launch(counts)
        return StepOutput(
            self._read("sampling.token" if sampled else "argmax", count),
            (self._read("logits", count) if original is None else original) if batch.want_logits else None,
            self._read("sampling.logprob", count) if sampled else None,
            errors,
        )

    def _launch(self, rows: tuple[int, ...]) -> None:
        if self.trace.kernels:
            launches = (*self.program.body, *self.program.head)
            counts = [rows[_COUNTS[launch.rows]] for launch in launches]
            ran = [(one.name, one.key_for(n), n) for one, n in zip(launches, counts, strict=True)]
            self.trace.launches(ran, self._step.time_us(*rows))
        else:
            self._step.run(*rows)

    def _known(self, tokens: I32) -> I32:
        """The tokens, with what the step before chose in place of -1 - row."""
        if not self._done:  # so all that was chosen is known
            return tokens
        rows = np.flatnonzero(tokens < 0)
        if not len(rows):
            return tokens
        known = tokens.copy()
        # A row whose logits are no numbers chooses none: its request will fail, the others go on.
        known[rows] = np.clip(self._previous[-1 - tokens[rows]], 0, self.program.vocab - 1)
        return known

    def _call(self, launch: Launch) -> KernelCall:
        try:
            kernels = [(limit, self._kernels[key] if key else None) for limit, key in launch.variants]
            chosen = [kernel for _, kernel in kernels if kernel]
            if len({kernel.signature for kernel in chosen}) > 1:
                raise ValueError("its kernels take different arrays")
            pairs = zip(launch.args, chosen[0].signature, strict=True)
            tensors = tuple(self._tensor(name, dtype) for name, dtype in pairs)
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"launch {launch.name} cannot be resolved ({error})",
                place="program.json",
                remedy="compile the model again",
            ) from error
        variants = tuple((limit, kernel.symbol if kernel else "") for limit, kernel in kernels)
        shares = tuple(kernel.shares if kernel else 1 for _, kernel in kernels)
        return KernelCall(launch.name, _COUNTS[launch.rows], variants, tensors, shares)

    def _tensor(self, name: str, dtype: str) -> Tensor:
        """Many launches share their arrays: each is described once."""
        tensor = self._known_tensors.get((name, dtype))
        if tensor is None:
            tensor = self._tensors.tensor(self.memory.find(name), dtype)
            self._known_tensors[name, dtype] = tensor
        return tensor


def _joined(parts: Sequence[StepOutput]) -> StepOutput:
    """One output of a step's parts, which have the same kinds of results."""

    def joined(arrays: Iterable[Any]) -> Any:
        found = [array for array in arrays if array is not None]
        return np.concatenate(found) if found else None

    return StepOutput(
        joined(part.tokens for part in parts),
        joined(part.logits for part in parts),
        joined(part.logprobs for part in parts),
        {row: error for part in parts for row, error in part.errors.items()},
    )
