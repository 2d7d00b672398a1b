"""A step's numbers: flat int32 arrays, as the kernels read them and as they may be sent to another process.

tokens[T] positions[T]        token ids and their positions, sequence after sequence
query_start[S+1]              where each sequence's tokens begin in `tokens`
seq_lens[S]                   a sequence's length after this step's tokens
slot_mapping[group][T]        where a token's keys and values go: block * block_size + offset
block_tables[group][S, B]     a sequence's blocks, B as many as the longest has; unused entries name block 0
tiles[n, 2]                   attention's work items: (sequence in the batch, first row of its chunk)
logit_rows[n]                 rows of `tokens` whose logits are wanted, ascending; one from which several
                              choices are drawn comes as often
copies[n, 2]                  (source, target) of blocks to be copied before the step, one after the other

A token -1 - r is the one that logit row r of the step before chooses.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagec.compiler.gpu_program import GpuProgram
from pagec.compiler.program import Program
from pagec.runtime.sampling.sampler import GREEDY, Processors, Row, SamplingInputs, sampling_inputs
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Sequence

I32 = npt.NDArray[np.int32]
_NO_COPIES: Final = np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step; see above. `want_logits`: the logits themselves are wanted, not only their argmax.
    `sampling`: what the logit rows ask for, if it is more than the argmax. `processors`: by logit row,
    functions of this process that change its logits, and the output that they are told."""

    tokens: I32
    positions: I32
    query_start: I32
    seq_lens: I32
    slot_mapping: tuple[I32, ...]
    block_tables: tuple[I32, ...]
    tiles: I32
    logit_rows: I32
    copies: I32 = field(default_factory=lambda: _NO_COPIES)
    want_logits: bool = False
    sampling: SamplingInputs | None = None
    processors: Processors = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)


def build_batch(
    entries: Items[Entry], program: Program | GpuProgram, copies: Items[tuple[int, int]] = ()
) -> Batch:
    """The batch of a schedule; `copies` as from BlockManager.take_copies."""
    requests, sequences, first, num_tokens, num_logits, num_draws = zip(*entries, strict=True)
    tables = tuple(
        _block_table([sequence.block_tables[group] for sequence in sequences])
        for group in range(len(program.kv.groups))
    )
    if num_tokens == num_logits == num_draws and max(num_tokens) == 1:
        rows = _decodes(first, [sequence.block_tables for sequence in sequences], program)
    else:
        starts, counts = _column(first), _column(num_tokens)
        rows = _chunks(starts, counts, _column(num_logits), _column(num_draws), tables, program)
    return Batch(
        tokens=_column(_tokens(sequences, first, num_tokens)),
        positions=rows.positions,
        query_start=rows.query_start,
        seq_lens=rows.seq_lens,
        slot_mapping=rows.slot_mapping,
        block_tables=tables,
        tiles=rows.tiles,
        logit_rows=rows.logit_rows,
        copies=_column([block for pair in copies for block in pair]).reshape(-1, 2) if copies else _NO_COPIES,
        want_logits=any(request.needs_logits for request in requests),
        sampling=_sampling(entries, program.vocab),
        processors=_processors(entries),
    )


class _Rows(NamedTuple):
    """The arrays of Batch that follow from where chunks begin and how long they are."""

    positions: I32
    query_start: I32
    seq_lens: I32
    slot_mapping: tuple[I32, ...]
    tiles: I32
    logit_rows: I32


def _decodes(
    starts: Items[int], block_tables: Items[Items[array[int]]], program: Program | GpuProgram
) -> _Rows:
    """One token of each sequence, one logit row each. As _chunks has it; but the host works while no kernel
    runs, and with nothing in the caches, where a call of numpy takes ten times as long as it usually does."""
    size, count = program.kv.block_size, len(starts)
    longest_first = sorted(range(count), key=starts.__getitem__, reverse=True)
    return _Rows(
        _column(starts),
        _column(range(count + 1)),
        _column([start + 1 for start in starts]),
        tuple(
            _column(
                [
                    tables[group][start // size] * size + start % size
                    for start, tables in zip(starts, block_tables, strict=True)
                ]
            )
            for group in range(len(program.kv.groups))
        ),
        _column([number for sequence in longest_first for number in (sequence, 0)]).reshape(-1, 2),
        _column(range(count)),
    )


def _chunks(
    starts: I32,
    counts: I32,
    num_logits: I32,
    num_draws: I32,
    tables: Items[I32],
    program: Program | GpuProgram,
) -> _Rows:
    query_start = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    owner = np.repeat(np.arange(len(starts), dtype=np.int32), counts)
    positions = _ramp(counts, query_start) + starts[owner]
    size = np.int32(program.kv.block_size)
    block, offset = np.divmod(positions, size)
    return _Rows(
        positions,
        query_start,
        starts + counts,
        tuple(table[owner, block] * size + offset for table in tables),
        _tiles(starts, counts, program.query_tile),
        _logit_rows(query_start, num_logits, num_draws),
    )


def _sampling(entries: Items[Entry], vocab: int) -> SamplingInputs | None:
    """What the logit rows ask for; None if all take the greatest logit."""
    if all(entry.sequence.sampler is None for entry in entries):
        return None
    rows: list[Row] = []
    for request, sequence, start, count, num_logits, num_draws in entries:
        end = start + count
        samplers = request.samplers if num_draws > 1 else (sequence.sampler,)
        if num_logits and sequence.sampler is not None and sequence.tokens[end] < 0:
            rows += [GREEDY] * (num_logits - num_draws)
            rows += [sampler.row(sequence.tokens, end) for sampler in samplers if sampler is not None]
        else:
            rows += [GREEDY] * num_logits
    return sampling_inputs(rows, vocab)


def _processors(entries: Items[Entry]) -> Processors:
    """The functions for the rows that choose a token of a request that has any."""
    if not any(entry.request.logits_processors for entry in entries):
        return {}
    found, row = {}, 0
    for request, sequence, start, count, num_logits, num_draws in entries:
        row += num_logits
        if request.logits_processors and num_logits and sequence.tokens[start + count] < 0:
            output = sequence.tokens[sequence.num_prompt : start + count]
            found.update(dict.fromkeys(range(row - num_draws, row), (request.logits_processors, output)))
    return found


def _column(values: Items[int]) -> I32:
    return np.frombuffer(array("i", values), np.int32)


def _tokens(sequences: Items[Sequence], starts: Items[int], counts: Items[int]) -> list[int]:
    """The step's tokens, sequence after sequence."""
    if len(counts) == sum(counts):  # decodes only
        return [s.tokens[at] for s, at in zip(sequences, starts, strict=True)]
    parts = zip(sequences, starts, counts, strict=True)
    return [token for s, at, count in parts for token in s.tokens[at : at + count]]


def _ramp(counts: I32, ends: I32) -> I32:
    """0, 1, .. counts[i] - 1 for each i, one after the other; `ends` = [0, *cumsum(counts)]."""
    return np.arange(ends[-1], dtype=np.int32) - np.repeat(ends[:-1], counts)


def _block_table(tables: Items[array[int]]) -> I32:
    """Block tables as rows of equal width."""
    width = max([len(table) for table in tables])
    flat, zeros = array("i"), array("i", bytes(4 * width))
    for table in tables:  # half as long as filling the rows of a numpy array takes
        flat.extend(table)
        flat.extend(zeros[len(table) :])
    return np.frombuffer(flat, np.int32).reshape(len(tables), width)


def _logit_rows(query_start: I32, counts: I32, draws: I32) -> I32:
    """The last rows of each sequence i, counts[i] of them, the very last one draws[i] times."""
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    rows = _ramp(counts, ends) + np.repeat(query_start[1:] - counts + draws - 1, counts)
    if draws.max() == 1:
        return rows
    return np.minimum(rows, np.repeat(query_start[1:] - 1, counts))


def _tiles(starts: I32, counts: I32, height: int) -> I32:
    """Tiles of `height` rows, those with most keys to read first."""
    num_tiles = -(-counts // np.int32(height))
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(num_tiles, dtype=np.int32)])
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), num_tiles)
    first = _ramp(num_tiles, ends) * np.int32(height)
    last = np.minimum(first + np.int32(height), counts[owner])
    cost = (last - first).astype(np.int64) * (starts[owner] + last)
    order = np.argsort(-cost, kind="stable")
    return np.stack([owner, first], axis=1)[order]
