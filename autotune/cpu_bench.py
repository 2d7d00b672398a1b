"""Runs single kernels of a program on this CPU, outside of any engine, with memory of their own.

Weights, keys and values are random and lie apart for each launch, so that a run over all launches reads more
than the caches hold, as a step does. Results are compared as bytes, over memory that held NaN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pagec.compiler.dims import ITEM_BYTES, DType
from pagec.compiler.packing import to_bf16
from pagec.compiler.program import Buffer, Kernel, Launch, Program
from pagec.runtime.device import KernelCall, Memory, Prepared, TensorDevice

# Random bytes are made once and laid down again and again.
PATTERN_ELEMENTS: Final = 1 << 18
CONTEXT: Final = 512


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of a kernel: tokens, or for attention tiles of sequences (tokens before, new ones)."""

    rows: int
    name: str
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Bench:
    """Memory for launches of a program, by argument, and their kernels' calls."""

    program: Program
    device: TensorDevice
    _memory: dict[tuple[str, str], Memory] = field(default_factory=dict)
    _patterns: dict[DType, Any] = field(default_factory=dict)

    def calls(self, launches: Sequence[Launch], kernel: Kernel) -> Prepared:
        """The launches with this kernel in place of their own."""
        calls = []
        for launch in launches:
            tensors = tuple(
                self.device.tensor(self._of(launch, arg), dtype)
                for arg, dtype in zip(launch.args, kernel.signature, strict=True)
            )
            calls.append(KernelCall(launch.name, 0, ((0, kernel.symbol),), tensors))
        return self.device.prepare(calls)

    def result(self, launch: Launch, kernel: Kernel, case: Case) -> tuple[bytes, ...]:
        """The bytes that a launch stores, over NaN: its result and what it leaves for the launch after it."""
        outputs = dict.fromkeys((launch.args[-1], "scratch:"))
        memories = [self._of(launch, arg) for arg in outputs if arg in launch.args]
        for memory in memories:
            self.device.fill_nan(memory)
        self.load([launch], case)
        self.calls([launch], kernel).run(case.rows)
        return tuple(self.device.download(memory, np.uint8).tobytes() for memory in memories)

    def run(self, launches: Sequence[Launch], kernel: Kernel, case: Case) -> Callable[[], float]:
        """Seconds of one run of all the launches."""
        prepared = self.calls(launches, kernel)

        def once() -> float:
            self.load(launches, case)
            began = time.perf_counter()
            prepared.run(case.rows)
            return time.perf_counter() - began

        return once

    def load(self, launches: Sequence[Launch], case: Case) -> None:
        """Lays down the step that a case of attention sees."""
        if not case.chunks:
            return
        arrays = step_arrays(self.program, case.chunks)
        for launch in launches:
            for arg in launch.args:
                name = arg.removeprefix("step:").split(".")[0]
                if arg.startswith("step:") and name in arrays:
                    self.device.upload(self._of(launch, arg), arrays[name])

    def weight_bytes(self, launch: Launch) -> int:
        """What a launch reads that no cache holds."""
        sizes = {weight.name: weight.nbytes for weight in self.program.weights}
        return sum(sizes.get(arg.removeprefix("weight:"), 0) for arg in launch.args)

    def _of(self, launch: Launch, arg: str) -> Memory:
        """An argument's memory; buffers and steps of a launch are its own."""
        key = ("", arg) if arg.startswith(("weight:", "kv:")) or arg == "scratch:" else (launch.name, arg)
        if key not in self._memory:
            self._memory[key] = self._allocate(arg)
        return self._memory[key]

    def _allocate(self, arg: str) -> Memory:
        kind, _, name = arg.partition(":")
        program = self.program
        match kind:
            case "weight":
                weight = next(w for w in program.weights if w.name == name)
                return self._random(weight.nbytes, weight.dtype)
            case "buffer":
                buffer = next(b for b in program.buffers if b.name == name)
                return self._random(_buffer_bytes(buffer, program), buffer.dtype)
            case "kv":
                blocks = self._num_blocks() + 1
                return self._random(blocks * program.kv.span_bytes, program.kv.dtype)
            case "scratch":
                return self.device.allocate(max(program.scratch_bytes, 4))
            case "step" if name == "logit_rows":
                memory = self.device.allocate(4 * program.capacity.R)
                self.device.upload(memory, np.arange(program.capacity.R, dtype=np.int32))
                return memory
        return self.device.allocate(4 * max(self._step_words(name), 1))

    def _step_words(self, name: str) -> int:
        T, S = self.program.capacity.T, self.program.capacity.S
        return 2 * T if name == "tiles" else S * self.program.max_blocks if "block" in name else max(T, S) + 1

    def _num_blocks(self) -> int:
        """Enough for every case's sequences."""
        T, size = self.program.capacity.T, self.program.kv.block_size
        return (self.program.capacity.S + 1) * -(-CONTEXT // size) + -(-(T + CONTEXT) // size)

    def _random(self, nbytes: int, dtype: DType) -> Memory:
        memory = self.device.allocate(nbytes)
        pattern = self._pattern(dtype).view(np.uint8).reshape(-1)
        for start in range(0, nbytes, pattern.size):
            end = min(nbytes, start + pattern.size)
            self.device.upload(memory[start:end], pattern[: end - start])
        return memory

    def _pattern(self, dtype: DType) -> Any:
        if dtype not in self._patterns:
            values = np.random.default_rng(0).standard_normal(PATTERN_ELEMENTS, np.float32)
            self._patterns[dtype] = to_bf16(values) if dtype == "bf16" else values
        return self._patterns[dtype]


def _buffer_bytes(buffer: Buffer, program: Program) -> int:
    return buffer.stride * ITEM_BYTES[buffer.dtype] * program.capacity.rows(buffer.rows)


def step_arrays(program: Program, chunks: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What attention reads of a step with these sequences (tokens before, new ones); blocks are their own."""
    starts = np.cumsum([0, *(new for _, new in chunks)]).astype(np.int32)
    lengths = [before + new for before, new in chunks]
    tables = np.zeros((len(chunks), program.max_blocks), np.int32)
    block = 1
    for table, length in zip(tables, lengths, strict=True):
        size = -(-length // program.kv.block_size)
        table[:size] = np.arange(block, block + size)
        block += size
    tiles = [
        (sequence, row)
        for sequence, (_, new) in enumerate(chunks)
        for row in range(0, new, program.query_tile)
    ]
    longest_first = sorted(tiles, key=lambda tile: -(chunks[tile[0]][0] + tile[1]))
    return {
        "tiles": np.array(longest_first, np.int32),
        "query_start": starts,
        "seq_lens": np.array(lengths, np.int32),
        "block_tables": tables,
    }
