"""What there is to try of a program's kernels: numbers of rows, and steps for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from pagec.compiler.gpu_program import GpuProgram
from pagec.compiler.program import Program
from pagec.runtime.bench.cost import Chunk
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

ROW_COUNTS: Final = (1, 2, 4, 16, 64, 256, 1024)
DECODE_CONTEXTS: Final = ((1, 1024), (16, 512), (64, 256))  # sequences, tokens of each
PREFILL_STARTS: Final = (0, 512)


@dataclass(frozen=True, slots=True)
class Case:
    """Launches, by name, that take this kernel for so many rows, and the chunks of the step that is in memory
    then."""

    kernel: str
    launches: tuple[str, ...]
    rows: int
    chunks: Sequence[Chunk]
    name: str = ""


class KernelBench(Protocol):
    """Runs the kernels of a loaded program."""

    def cases(self) -> list[Case]:
        """Every kernel at every row count that is to be tried."""

    def time_us(self, case: Case, before: Callable[[], None], repeat: int) -> float:
        """Microseconds of all launches of a case: the median over passes, `before` each of which something
        else is done."""


def row_counts(least: int, most: int) -> list[int]:
    """Numbers of rows to try, from `least` to `most`, which is one of them."""
    return sorted({*(n for n in ROW_COUNTS if least <= n < most), most})


def wanted_steps(capacity_tokens: int) -> list[list[Chunk]]:
    """Steps to try attention in: decoding, then chunks of prompts."""
    wanted = [[(context - 1, 1)] * count for count, context in DECODE_CONTEXTS]
    return wanted + [[(start, capacity_tokens)] for start in PREFILL_STARTS]


def fitting(program: Program | GpuProgram, num_blocks: int, step: Sequence[Chunk]) -> list[Chunk]:
    """As much of a step as capacity, length and pool allow."""
    room, blocks = program.capacity.T, (num_blocks - 1) // max(len(program.kv.groups), 1)
    chunks = []
    for start, count in step[: program.capacity.S]:
        start = min(start, program.max_len - 1)
        count = min(count, room, program.max_len - start)
        blocks -= -(-(start + count) // program.kv.block_size)
        if count < 1 or blocks < 0:
            break
        room -= count
        chunks.append((start, count))
    return chunks


def make_entries(program: Program | GpuProgram, chunks: Sequence[Chunk]) -> list[Entry]:
    """Entries of sequences whose earlier tokens are taken as computed; blocks are given out in order."""
    rng, block = np.random.default_rng(0), 1
    entries: list[Entry] = []
    for start, count in chunks:
        tokens = rng.integers(0, program.vocab, start + count).tolist()
        request = Request(len(entries), tokens, 1, len(program.kv.groups))
        sequence = request.sequences[0]
        for table in sequence.block_tables:
            size = -(-(start + count) // program.kv.block_size)
            table.extend(range(block, block + size))
            block += size
        entries.append(Entry(request, sequence, start, count, 1))
    return entries
