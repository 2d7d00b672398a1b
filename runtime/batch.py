"""A step's numbers: flat int32 arrays, as the kernels read them and as they may be sent to another process.

tokens[T] positions[T]        token ids and their positions, sequence after sequence
query_start[S+1]              where each sequence's tokens begin in `tokens`
seq_lens[S]                   a sequence's length after this step's tokens
slot_mapping[group][T]        where a token's keys and values go: block * block_size + offset
block_tables[group][S, B]     a sequence's blocks; unused entries name the scratch block 0
tiles[n, 2]                   attention's work items: (sequence in the batch, first row of its chunk)
logit_rows[n]                 rows of `tokens` whose logits are wanted, ascending
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagec.compiler.program import Program
from pagec.runtime.scheduler import Entry

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step; see above. `want_logits`: the logits themselves are wanted, not only their argmax."""

    tokens: I32
    positions: I32
    query_start: I32
    seq_lens: I32
    slot_mapping: tuple[I32, ...]
    block_tables: tuple[I32, ...]
    tiles: I32
    logit_rows: I32
    want_logits: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)


def build_batch(entries: Sequence[Entry], program: Program) -> Batch:
    """The batch of a schedule."""
    starts, counts = _column([e.start for e in entries]), _column([e.num_tokens for e in entries])
    query_start = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    owner = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
    positions = _ramp(counts, query_start) + starts[owner]
    tables = tuple(_block_table(entries, group, program) for group in range(len(program.kv.groups)))
    size = np.int32(program.kv.block_size)
    block, offset = np.divmod(positions, size)
    logit_counts = _column([e.num_logits for e in entries])
    return Batch(
        tokens=_column([token for e in entries for token in e.token_ids]),
        positions=positions,
        query_start=query_start,
        seq_lens=starts + counts,
        slot_mapping=tuple(table[owner, block] * size + offset for table in tables),
        block_tables=tables,
        tiles=_tiles(starts, counts, program.query_tile),
        logit_rows=_last_rows(query_start, logit_counts),
        want_logits=any(e.request.want_logits for e in entries),
    )


def _column(values: list[int]) -> I32:
    return np.array(values, dtype=np.int32)


def _ramp(counts: I32, ends: I32) -> I32:
    """0, 1, .. counts[i] - 1 for each i, one after the other; `ends` = [0, *cumsum(counts)]."""
    return np.arange(ends[-1], dtype=np.int32) - np.repeat(ends[:-1], counts)


def _block_table(entries: Sequence[Entry], group: int, program: Program) -> I32:
    rows = np.zeros((len(entries), program.max_blocks), np.int32)
    for row, entry in zip(rows, entries, strict=True):
        table = entry.sequence.block_tables[group]
        row[: len(table)] = table
    return rows


def _last_rows(query_start: I32, counts: I32) -> I32:
    """The last counts[i] rows of each sequence i."""
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    return _ramp(counts, ends) + np.repeat(query_start[1:] - counts, counts)


def _tiles(starts: I32, counts: I32, height: int) -> I32:
    """Tiles of `height` rows, those with most keys to read first: workers take them in turn."""
    num_tiles = -(-counts // np.int32(height))
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(num_tiles, dtype=np.int32)])
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), num_tiles)
    first = _ramp(num_tiles, ends) * np.int32(height)
    last = np.minimum(first + np.int32(height), counts[owner])
    cost = (last - first).astype(np.int64) * (starts[owner] + last)
    order = np.argsort(-cost, kind="stable")
    return np.stack([owner, first], axis=1)[order]
