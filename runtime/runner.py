"""Executes a program: all memory and all launches are resolved at load; a step passes only numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from pagec.compiler.artifact import Artifact
from pagec.compiler.dims import BYTE_ALIGN, ITEM_BYTES, round_up
from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.compiler.packing import buffer_to_rows
from pagec.compiler.program import Buffer, Launch, Program, RopeTable
from pagec.compiler.rope import cos_sin_of
from pagec.runtime.batch import I32, Batch
from pagec.runtime.device import Device, Function, Memory, Tensor
from pagec.runtime.ledger import Ledger, kv_blocks
from pagec.runtime.weights import load_weights

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """For each of a batch's logit rows: the likeliest token and, if wanted, the logits [n, vocab]."""

    tokens: I32
    logits: F32 | None


@dataclass(frozen=True, slots=True)
class _Variant:
    max_rows: int
    function: Function
    args: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Launch:
    name: str
    by_tiles: bool
    variants: tuple[_Variant, ...]


class Runner:
    """A loaded program. `num_blocks` or `kv_bytes` size the KV pool; `weights` as in load_weights."""

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        *,
        weights: str | None = None,
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
    ) -> None:
        program = artifact.program
        self.program = program
        self._device = device
        self.memory = Areas(artifact, device, weights)
        self.num_blocks = kv_blocks(
            program, num_blocks=num_blocks, kv_bytes=kv_bytes, free_bytes=device.free_bytes()
        )
        self.memory.add_kv(self.num_blocks)
        self.ledger = self.memory.ledger(self.num_blocks)
        resolve = _Resolver(program, device, self.memory)
        self._body = [resolve.launch(launch) for launch in program.body]
        self._head = [resolve.launch(launch) for launch in program.head]
        self._done: StepOutput | None = None

    def run(self, batch: Batch) -> StepOutput:
        """One step from beginning to end."""
        self.submit(batch)
        return self.collect()

    def submit(self, batch: Batch) -> None:
        """Starts a step (on a CPU: runs it); `collect` gives its output."""
        assert self._done is None, "a step is in flight"
        self._check(batch)
        self.upload(batch)
        self._run(self._body, batch.num_tokens, len(batch.tiles))
        self._done = self._run_head(batch)

    def collect(self) -> StepOutput:
        """Waits for the step in flight."""
        assert self._done is not None, "no step is in flight"
        output, self._done = self._done, None
        return output

    def fill_kv_with_nan(self) -> None:
        """Poisons the whole pool (tests: no result may depend on stale keys and values)."""
        self._device.fill_nan(self.memory.kv)

    def launch(self, name: str, num_rows: int) -> None:
        """Runs one launch alone, on whatever its arguments hold (for verify and the tuner)."""
        found = next(launch for launch in (*self._body, *self._head) if launch.name == name)
        self._run([found], num_rows, num_rows)

    def _run(self, launches: list[_Launch], num_rows: int, num_tiles: int) -> None:
        workers = self._device.num_workers
        for launch in launches:
            rows = num_tiles if launch.by_tiles else num_rows
            for variant in launch.variants:
                if rows <= variant.max_rows:
                    variant.function(*variant.args, rows, workers)
                    break

    def _run_head(self, batch: Batch) -> StepOutput:
        """The head over the logit rows, R at a time."""
        tokens, logits = [], []
        for start in range(0, len(batch.logit_rows), self.program.capacity.R):
            rows = batch.logit_rows[start : start + self.program.capacity.R]
            self.upload_logit_rows(rows)
            self._run(self._head, len(rows), 0)
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


class Areas:
    """A program's device memory, by name: weights, tables, step arrays, buffers, the pool's layers."""

    def __init__(self, artifact: Artifact, device: Device, weights: str | None) -> None:
        self._program = program = artifact.program
        self._device = device
        self.weights = load_weights(device, artifact, weights)
        self.tables = {table.name: _rope_table(device, table) for table in program.tables}
        self.steps = _carve(device, _step_bytes(program))
        self.buffers = _workspace(device, program)
        buffers = {buffer.name: buffer for buffer in program.buffers}
        self.outputs: Mapping[str, Buffer] = {k: buffers[name] for k, name in program.outputs.items()}

    def add_kv(self, num_blocks: int) -> None:
        """The pool, [spans][num_blocks][span_bytes]; a layer sees the slice of its index in its group."""
        kv = self._program.kv
        # Block 1 of 30 layers lies in 30 places of a pool of gigabytes.
        self.kv = self._device.allocate(num_blocks * kv.block_bytes, sparse=True)
        size = num_blocks * kv.span_bytes
        self.layers = {
            layer: self.kv[index * size : (index + 1) * size]
            for group in kv.groups
            for index, layer in enumerate(group.layers)
        }

    def find(self, argument: str) -> Memory:
        """The memory behind a launch's argument, "kind:NAME"."""
        kind, _, name = argument.partition(":")
        match kind:
            case "kv":
                return self.layers[int(name)]
            case "buffer":
                return self.buffers[name]
            case "weight":
                return self.weights[name]
            case "table":
                return self.tables[name]
            case "step":
                return self.steps[name]
        raise KeyError(argument)

    def ledger(self, num_blocks: int) -> Ledger:
        program = self._program
        return Ledger(
            weights_bytes=sum(w.nbytes for w in program.weights),
            tables_bytes=sum(8 * t.length * len(t.frequencies) for t in program.tables),
            workspace_bytes=program.slot_offsets()[1],
            step_bytes=sum(_step_bytes(program).values()),
            kv_bytes=num_blocks * program.kv.block_bytes,
            kv_blocks=num_blocks,
            kv_tokens=(num_blocks - 1) // max(len(program.kv.groups), 1) * program.kv.block_size,
        )


class _Resolver:
    """Turns a program's launches into functions and tensors."""

    def __init__(self, program: Program, device: Device, areas: Areas) -> None:
        self._device = device
        self._areas = areas
        self._kernels = {kernel.key: kernel for kernel in program.kernels}
        self._tensors: dict[tuple[str, str], Tensor] = {}

    def launch(self, launch: Launch) -> _Launch:
        variants = tuple(
            self._variant(launch, max_rows or sys.maxsize, key) for max_rows, key in launch.variants
        )
        assert variants[-1].max_rows == sys.maxsize, launch
        return _Launch(launch.name, launch.rows == "tiles", variants)

    def _variant(self, launch: Launch, max_rows: int, key: str) -> _Variant:
        try:
            kernel = self._kernels[key]
            args = zip(launch.args, kernel.signature, strict=True)
            tensors = tuple(self._tensor(name, dtype) for name, dtype in args)
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"launch {launch.name}, kernel {key}: cannot be resolved ({error})",
                place="program.json",
                remedy="compile the model again",
            ) from error
        return _Variant(max_rows, self._device.function(kernel.symbol), tensors)

    def _tensor(self, name: str, dtype: str) -> Tensor:
        found = self._tensors.get((name, dtype))
        if found is None:
            found = self._tensors[name, dtype] = self._device.tensor(self._areas.find(name), dtype)
        return found


def _step_bytes(program: Program) -> dict[str, int]:
    """Bytes of the step's arrays at capacity."""
    T, S, R = program.capacity.T, program.capacity.S, program.capacity.R
    sizes = {
        "tokens": T,
        "positions": T,
        "logit_rows": R,
        "query_start": S + 1,
        "seq_lens": S,
        "tiles": 2 * T,
    }
    for group in range(len(program.kv.groups)):
        sizes[f"slot_mapping.{group}"] = T
        sizes[f"block_tables.{group}"] = S * program.max_blocks
    return {name: 4 * size for name, size in sizes.items()}


def _carve(device: Device, sizes: Mapping[str, int]) -> dict[str, Memory]:
    """Aligned pieces of one allocation."""
    memory = device.allocate(sum(round_up(size, BYTE_ALIGN) for size in sizes.values()))
    return {
        name: memory[at : at + size] for (name, size), at in zip(sizes.items(), _starts(sizes), strict=True)
    }


def _starts(sizes: Mapping[str, int]) -> Iterator[int]:
    at = 0
    for size in sizes.values():
        yield at
        at += round_up(size, BYTE_ALIGN)


def _workspace(device: Device, program: Program) -> dict[str, Memory]:
    """Every buffer's memory at capacity; buffers of one slot share it."""
    offsets, nbytes = program.slot_offsets()
    memory = device.allocate(nbytes)
    views = {}
    for buffer in program.buffers:
        size = buffer.stride * ITEM_BYTES[buffer.dtype] * program.capacity.rows(buffer.rows)
        views[buffer.name] = memory[offsets[buffer.slot] :][:size]
    return views


def _rope_table(device: Device, table: RopeTable) -> Memory:
    cos_sin = np.stack(cos_sin_of(np.array(table.frequencies, np.float32), table.length))
    memory = device.allocate(prod(cos_sin.shape) * 4)
    device.upload(memory, cos_sin)
    return memory
