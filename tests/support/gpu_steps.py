"""A GPU artifact's own launches on a CudaDevice, step by step, by nothing of the runtime but the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pagec.compiler.artifact import WEIGHTS, GpuArtifact, look_at, weights_header
from pagec.compiler.dims import BYTE_ALIGN, ITEM_BYTES, round_up
from pagec.compiler.gpu_program import GpuLaunch, GpuProgram
from pagec.compiler.launch import Counts
from pagec.compiler.packing import buffer_to_rows
from pagec.compiler.rope import cos_sin_of
from pagec.runtime.device.cuda.device import CudaDevice, GpuCall, GpuCalls
from support.fake_cuda import FakeGpu, FakeLibrary

NUM_BLOCKS, MAX_ITEMS = 12, 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's part of a step: its blocks, how many tokens it has already, and those that come now."""

    blocks: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]


class Steps:
    """All memory of a program, poisoned with NaN where nothing has been written."""

    def __init__(self, artifact: GpuArtifact, device: CudaDevice) -> None:
        self.program: GpuProgram = artifact.program
        self.device = device
        self.memory: dict[str, Any] = {}
        self._bring_weights(artifact)
        self._make_areas()
        self.counts = device.allocate(4 * len(Counts))

    def _bring_weights(self, artifact: GpuArtifact) -> None:
        head, offsets = weights_header(self.program.weights)
        size = sum(weight.nbytes for weight in self.program.weights)
        memory = self.device.read_file(artifact.path / WEIGHTS, len(head), size)
        for weight in self.program.weights:
            self.memory[f"weight:{weight.name}"] = memory[offsets[weight.name] - len(head) :][: weight.nbytes]
        for table in self.program.tables:
            turns = np.array(table.frequencies, np.float32)
            values = np.stack(cos_sin_of(turns, table.length, table.scale))
            self.memory[f"table:{table.name}"] = self._poisoned(values.nbytes)
            self.device.upload(self.memory[f"table:{table.name}"], values)

    def _make_areas(self) -> None:
        program, kv = self.program, self.program.kv
        offsets, nbytes = program.slot_offsets()
        workspace = self._poisoned(nbytes)
        for buffer in program.buffers:
            size = buffer.stride * ITEM_BYTES[buffer.dtype] * program.capacity.rows(buffer.rows)
            self.memory[f"buffer:{buffer.name}"] = workspace[offsets[buffer.slot] :][:size]
        self.scratch = self._poisoned(round_up(program.scratch_bytes, BYTE_ALIGN))
        self.memory["pool:"] = pool = self._poisoned(NUM_BLOCKS * kv.block_bytes)
        span = NUM_BLOCKS * kv.span_bytes
        for group in kv.groups:
            for index, layer in enumerate(group.layers):
                self.memory[f"kv:{layer}"] = pool[index * span :][:span]
        for name, size in zip(("stats", "sums"), program.split_bytes, strict=True):
            self.memory[f"partial:{name}"] = self._poisoned(MAX_ITEMS * size)
        self.memory["step:chosen"] = self.device.allocate(4 * program.capacity.T)

    def _poisoned(self, nbytes: int) -> Any:
        memory = self.device.allocate(nbytes)
        self.device.fill_nan(memory)
        return memory

    def run(self, chunks: Sequence[Chunk], *, captured: bool = False) -> tuple[Any, Any]:
        """(logits, greatest) of each chunk's last token. The next step's token -1 - i is chunk i's."""
        arrays, rows = step_arrays(self.program, chunks)
        for name, array in arrays.items():
            self._step_memory(name)
            self.device.upload(self.memory[f"step:{name}"], array)
        self.device.upload(self.counts, np.array(rows, np.int32))
        num = rows[Counts.R]
        span, head = self.program.span(rows[Counts.T]), self.program.span(num, head=True)
        launches = [launch for launch in (*span.launches, *head.launches) if launch.when != "sampled"]
        # As a bucket is padded: programs without a row must do nothing.
        padded = tuple(n + 2 if n else 0 for n in rows)
        calls = self.prepare(launches, padded)
        if captured:
            self.device.capture(lambda: calls.run(padded)).replay()
        else:
            calls.run(padded)
        self.device.copy(self.memory["step:chosen"][: 4 * num], self.memory["buffer:argmax"][: 4 * num])
        found = self.device.fetch(self.memory["step:chosen"][: 4 * num], np.int32)
        logits = next(buffer for buffer in self.program.buffers if buffer.name == "logits")
        raw = self.device.download(self.memory["buffer:logits"][: 4 * logits.stride * num], np.float32)
        return buffer_to_rows(raw.reshape(num, -1), logits.inner, "f32"), found.array()

    def prepare(self, launches: Sequence[GpuLaunch], most: Sequence[int]) -> GpuCalls:
        """Launches resolved by the names of their arguments."""
        calls = []
        for launch in launches:
            pointers = tuple(self._find(argument) for argument in launch.args)
            word = self.counts[4 * launch.counts : 4 * launch.counts + 4]
            calls.append(GpuCall(launch.name, launch.kernel, launch.counts, pointers, word))
        return self.device.prepare(calls, most)

    def _find(self, argument: str) -> Any:
        if argument.startswith("scratch:"):
            return self.scratch[int(argument.removeprefix("scratch:")) :]
        return self.memory[argument]

    def _step_memory(self, name: str) -> None:
        """Fixed places for a step's arrays, at capacity and then some."""
        capacity, blocks = self.program.capacity, self.program.max_blocks
        words = max(2 * capacity.T, capacity.S * blocks, 2 * MAX_ITEMS)
        if f"step:{name}" not in self.memory:
            self.memory[f"step:{name}"] = self.device.allocate(4 * words)


def step_arrays(program: GpuProgram, chunks: Sequence[Chunk]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A step's arrays by name, and how many there are of each of Counts.

    Single tokens go to decode attention; sequences are so short that each is one of its items.
    """
    lengths = [len(chunk.tokens) for chunk in chunks]
    positions = np.concatenate(
        [np.arange(c.start, c.start + n) for c, n in zip(chunks, lengths, strict=True)]
    )
    owner = np.repeat(np.arange(len(chunks)), lengths)
    tables = np.zeros((len(chunks), program.max_blocks), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    size = program.kv.block_size
    slots = tables[owner, positions // size] * size + positions % size
    singles = [row for row, n in enumerate(lengths) if n == 1]
    tiles = [(s, at) for s, n in enumerate(lengths) if n > 1 for at in range(0, n, program.query_tile)]
    ends = np.cumsum([0, *lengths])
    arrays = {
        "tokens": np.concatenate([chunk.tokens for chunk in chunks]),
        "positions": positions,
        "query_start": ends,
        "seq_lens": np.array([c.start + len(c.tokens) for c in chunks]),
        "tiles": np.array(tiles).reshape(-1, 2),
        "splits": np.array([(row, 0) for row in singles]).reshape(-1, 2),
        "split_start": np.cumsum([0, *(n == 1 for n in lengths)]),
        "logit_rows": ends[1:] - 1,
        "slot_mapping.0": slots,
        "block_tables.0": tables,
    }
    numbers = {Counts.T: sum(lengths), Counts.S: len(chunks), Counts.R: len(chunks)}
    numbers |= {Counts.TILES: len(tiles), Counts.SPLITS: len(singles)}
    rows = tuple(numbers.get(count, 0) for count in Counts)
    return {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}, rows


def run_steps(path: Path, steps: Sequence[Sequence[Chunk]]) -> list[tuple[Any, Any]]:
    """What each step gives, executed by Triton's interpreter: for `in_interpreter`. All but the first are
    captured and replayed."""
    run = _loaded(path)
    return [run.run(chunks, captured=number > 0) for number, chunks in enumerate(steps)]


def _loaded(path: Path) -> Steps:
    artifact, gpu = look_at(path), FakeGpu()
    assert isinstance(artifact, GpuArtifact)
    library = FakeLibrary(artifact, gpu, execute=True)
    return Steps(artifact, CudaDevice(artifact, gpu=gpu, library=library))


def copied_blocks(path: Path, copies: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    """The pool [spans, blocks, span bytes] before and after the program's own kernel has copied blocks."""
    run = _loaded(path)
    kv, pool = run.program.kv, run.memory["pool:"]
    shape = (kv.spans, NUM_BLOCKS, kv.span_bytes)
    before = np.random.default_rng(0).integers(0, 256, prod(shape), np.uint8)
    run.device.upload(pool, before)
    for name, values in (("copies", copies), ("num_blocks", [NUM_BLOCKS])):
        run.memory[f"step:{name}"] = run.device.allocate(256)
        run.device.upload(run.memory[f"step:{name}"], np.array(values, np.int32))
    rows = tuple(len(copies) if count is Counts.COPIES else 0 for count in Counts)
    run.device.upload(run.counts, np.array(rows, np.int32))
    padded = tuple(2 * n for n in rows)
    run.prepare([run.program.copy], padded).run(padded)
    after = run.device.download(pool, np.uint8)
    return before.reshape(shape), after.reshape(shape)
