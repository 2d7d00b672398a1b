"""Steps of chosen sequences in chosen chunks, by the runner itself, and the logits that they give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagec.compiler.gpu_program import GpuProgram
from pagec.runtime.batch import Batch, build_batch
from pagec.runtime.device.cuda.device import CudaDevice
from pagec.runtime.gpu.graphs import Graphs
from pagec.runtime.gpu.runner import GpuRunner
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

# (which sequence, how many of its tokens)
Part = tuple[int, int]
Steps = Sequence[Sequence[Part]]


class NoGraphs(Graphs):
    """In the place of a runner's graphs: every step is launched call by call."""

    def __init__(self) -> None:
        self.buckets, self._bodies, self._heads = (), {}, {}


class Texts:
    """Sequences with their blocks, drawn at random from the pool. `kept` of them, the first ones, are those
    whose logits are wanted."""

    def __init__(
        self,
        program: GpuProgram,
        num_blocks: int,
        texts: Sequence[Sequence[int]],
        kept: int,
        rng: np.random.Generator,
    ) -> None:
        self._program, self._kept = program, kept
        kv = program.kv
        free = (rng.permutation(num_blocks - 1) + 1).tolist()
        self._requests = []
        for number, tokens in enumerate(texts):
            request = Request(number, list(tokens), 1, len(kv.groups), want_logits=number < kept)
            for table in request.sequences[0].block_tables:
                table.extend(free.pop() for _ in range(-(-len(tokens) // kv.block_size)))
            self._requests.append(request)

    def entry(self, number: int, start: int, count: int) -> Entry:
        """So many tokens of a sequence; logits of each if it is kept, else of the last."""
        request = self._requests[number]
        num_logits = count if number < self._kept else 1
        return Entry(request, request.sequences[0], start, count, num_logits)

    def batch(self, parts: Iterable[tuple[int, int, int]]) -> Batch:
        """A step of (sequence, start, count)."""
        return build_batch([self.entry(*part) for part in parts], self._program)


def num_blocks_for(program: GpuProgram, texts: Sequence[Sequence[int]]) -> int:
    """Blocks of a pool that holds them all."""
    size = program.kv.block_size
    return 1 + len(program.kv.groups) * sum(-(-len(text) // size) for text in texts)


def poison(runner: GpuRunner, device: CudaDevice) -> None:
    """NaN in all that a step writes before it reads it."""
    for memory in (*runner.memory.buffers.values(), runner.memory.scratch):
        device.fill_nan(memory)


def logits_of(
    runner: GpuRunner,
    device: CudaDevice,
    texts: Texts,
    lengths: Sequence[int],
    steps: Steps,
    kept: int,
) -> list[Any]:
    """Logits [length, vocab] of each kept sequence, from steps that take all of its tokens in order. What the
    pool and the workspace held before is poisoned, the workspace before each step."""
    runner.fill_kv_with_nan()
    done = [0] * len(lengths)
    found: list[list[Any]] = [[] for _ in range(kept)]
    for step in steps:
        parts = [(number, done[number], count) for number, count in step]
        poison(runner, device)
        output = runner.run(texts.batch(parts))
        row = 0
        for number, _, count in parts:
            done[number] += count
            if number < kept:
                assert output.logits is not None
                found[number].append(output.logits[row : row + count])
            row += count if number < kept else 1
    assert done[:kept] == list(lengths[:kept])
    return [np.concatenate(rows) for rows in found]


# ---------------------------------------------------------------------------------------- ways


@dataclass(frozen=True, slots=True)
class Way:
    """Steps that compute the same sequences in another company or in other chunks; `eager`: launch by launch
    where there are graphs."""

    name: str
    steps: Steps
    eager: bool = field(default=False)


def ways(lengths: Sequence[int], kept: int, most_tokens: int, most_sequences: int, last: int) -> list[Way]:
    """Several ways to compute the `kept` first of sequences of these lengths; the others are strangers. In
    some of them the `last` tokens of each come one by one."""
    mine, all_of = list(range(kept)), list(range(len(lengths)))[:most_sequences]
    alone = [[(number, lengths[number])] for number in mine]
    whole = packed([(number, lengths[number]) for number in all_of], most_tokens)
    chunks = [_split(lengths[number], 7 + 11 * number) for number in all_of]
    turns = range(max(map(len, chunks)))
    mixed = [[(n, chunks[n][turn]) for n in all_of if turn < len(chunks[n])] for turn in turns]
    singles = tails(lengths, all_of, last, most_tokens)
    return [
        Way("alone", alone),
        Way("in a crowd", whole),
        Way("in chunks", [part for step in mixed for part in packed(step, most_tokens)]),
        Way("token by token, by graphs", singles),
        Way("token by token, launch by launch", singles, eager=True),
        Way("the last tokens alone", tails(lengths, mine, last, most_tokens, together=False)),
    ]


def tails(
    lengths: Sequence[int], numbers: Sequence[int], last: int, most_tokens: int, *, together: bool = True
) -> list[list[Part]]:
    """All tokens but the last few in chunks, then these one by one."""
    heads = [(n, lengths[n] - last) for n in numbers if lengths[n] > last]
    ends = [[(n, 1) for n in numbers if lengths[n] - last + at >= 0] for at in range(last)]
    if not together:
        ends = [[part] for step in ends for part in step]
    return [*packed(heads, most_tokens), *filter(None, ends)]


def packed(parts: Iterable[Part], most_tokens: int) -> list[list[Part]]:
    """Parts in order, so many tokens to a step at most."""
    steps: list[list[Part]] = []
    room = 0
    for number, count in parts:
        while count:
            if not room:
                steps.append([])
                room = most_tokens
            taken = min(count, room)
            steps[-1].append((number, taken))
            count, room = count - taken, room - taken
    return steps


def _split(length: int, size: int) -> list[int]:
    return [min(size, length - at) for at in range(0, length, size)]
