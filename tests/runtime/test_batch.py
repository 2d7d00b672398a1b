"""A batch's arrays against the plain construction, token by token."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagec.compiler.artifact import Artifact
from pagec.runtime.batch import Batch, build_batch
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request

parts = st.lists(
    st.tuples(st.integers(0, 80), st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=6
)


def make_entries(shapes: list[tuple[int, int, int]], num_groups: int) -> list[Entry]:
    entries, block = [], 1
    for number, (start, count, logits) in enumerate(shapes):
        tokens = [(number * 31 + i * 7) % 50 for i in range(start + count)]
        request = Request(number, tokens, 1, num_groups)
        for table in request.sequences[0].block_tables:
            needed = -(-(start + count) // 16)
            table.extend(array("i", range(block, block + needed)))
            block += needed
        entries.append(Entry(request, request.sequences[0], start, count, min(logits, count)))
    return entries


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=parts, num_groups=st.integers(1, 2))
def test_arrays_equal_the_plain_construction(
    toy: Callable[..., Artifact], shapes: list[tuple[int, int, int]], num_groups: int
) -> None:
    program = toy(num_groups=num_groups).program
    entries = make_entries(shapes, num_groups)
    batch = build_batch(entries, program, [(3, 1), (1, 2)])
    assert batch.copies.tolist() == [[3, 1], [1, 2]]
    expected: dict[str, list[Any]] = {"tokens": [], "positions": [], "query_start": [0], "seq_lens": []}
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    logit_rows = []
    for entry in entries:
        for position in range(entry.start, entry.start + entry.num_tokens):
            if position >= entry.start + entry.num_tokens - entry.num_logits:
                logit_rows.append(len(expected["tokens"]))
            expected["tokens"].append(entry.sequence.tokens[position])
            expected["positions"].append(position)
            for group, table in enumerate(entry.sequence.block_tables):
                slots[group].append(table[position // 16] * 16 + position % 16)
        expected["query_start"].append(len(expected["tokens"]))
        expected["seq_lens"].append(entry.start + entry.num_tokens)
    for name, values in expected.items():
        assert getattr(batch, name).tolist() == values, name
    assert batch.logit_rows.tolist() == logit_rows
    for group in range(num_groups):
        assert batch.slot_mapping[group].tolist() == slots[group]
        width = max(len(entry.sequence.block_tables[group]) for entry in entries)
        assert batch.block_tables[group].shape == (len(entries), width)
        for row, entry in zip(batch.block_tables[group].tolist(), entries, strict=True):
            table = entry.sequence.block_tables[group].tolist()
            assert row == table + [0] * (width - len(table))
    check_types(batch)
    check_tiles(batch, entries, program.query_tile)


def check_types(batch: Batch) -> None:
    arrays = [
        batch.tokens,
        batch.positions,
        batch.query_start,
        batch.seq_lens,
        batch.tiles,
        batch.logit_rows,
        batch.copies,
    ]
    for item in [*arrays, *batch.slot_mapping, *batch.block_tables]:
        assert item.dtype == np.int32
        assert item.flags.c_contiguous


def check_tiles(batch: Batch, entries: list[Entry], height: int) -> None:
    """Tiles cover every row once, heaviest first."""
    tiles = [tuple(t) for t in batch.tiles.tolist()]
    assert sorted(tiles) == [
        (i, first) for i, e in enumerate(entries) for first in range(0, e.num_tokens, height)
    ]
    costs = []
    for i, first in tiles:
        last = min(first + height, entries[i].num_tokens)
        costs.append((last - first) * (entries[i].start + last))
    assert costs == sorted(costs, reverse=True)
