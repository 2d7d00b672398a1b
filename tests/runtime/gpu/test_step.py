"""A step's image: what kernels find there for any batch, and what is left of the batch before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gpu_artifacts import gpu_artifact
from support.graphs import llama_text

from pagec.compiler.gpu_program import GpuProgram
from pagec.compiler.launch import Counts
from pagec.runtime.batch import Batch, _tiles
from pagec.runtime.gpu import step as steps
from pagec.runtime.gpu.step import StepImage, is_chain, max_items

T, S, R = 64, 8, 8
Chunks = list[tuple[int, int]]  # (tokens before, tokens now) of each sequence


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> GpuProgram:
    directory = tmp_path_factory.mktemp("gpu") / "artifact"
    return gpu_artifact(llama_text(max_len=4096), directory, T=T, S=S, R=R).program


def make_batch(program: GpuProgram, chunks: Chunks, copies: Any = ()) -> Batch:
    """Tokens 1, 2, ... in slots 100, 101, ...; the last row of each sequence is a logit row."""
    before, now = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(now, dtype=np.int32)])
    total = int(starts[-1])
    return Batch(
        tokens=np.arange(1, total + 1, dtype=np.int32),
        positions=np.arange(7, total + 7, dtype=np.int32),
        query_start=starts,
        seq_lens=before + now,
        slot_mapping=(np.arange(100, total + 100, dtype=np.int32),),
        block_tables=(np.ones((len(chunks), 1), np.int32),),
        tiles=_tiles(before, now, program.query_tile),
        logit_rows=starts[1:] - 1,
        copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def fill(image: StepImage, batch: Batch) -> steps.Step:
    return image.fill(batch, batch.logit_rows[:R], batch.copies)


chunks_strategy = st.lists(
    st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=S
).filter(lambda chunks: sum(now for _, now in chunks) <= T)


@given(chunks=chunks_strategy, more=st.sampled_from([0, 1, 5, steps.MORE_ITEMS]))
def test_every_row_is_computed_once_over_all_its_keys(program: GpuProgram, chunks: Chunks, more: int) -> None:
    """By a tile, or by the splits of a single new token, however little room there is for these."""
    batch = make_batch(program, chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "MORE_ITEMS", more)
        image = StepImage(program)
        step = fill(image, batch)
        assert step.rows[Counts.SPLITS] <= max_items(program)
    rows = [0] * batch.num_tokens
    for sequence, first in image.arrays["tiles"].reshape(-1, 2)[: step.rows[Counts.TILES]]:
        start, end = batch.query_start[sequence : sequence + 2]
        for row in range(start + first, min(start + first + program.query_tile, end)):
            rows[row] += 1
    keys: dict[int, list[int]] = {}
    items = image.arrays["splits"].reshape(-1, 2)[: step.rows[Counts.SPLITS]].tolist()
    for number, (sequence, split) in enumerate(items):
        first, last = image.arrays["split_start"][sequence : sequence + 2]
        assert first <= number < last, "the merge looks for it elsewhere"
        keys.setdefault(sequence, []).append(split)
    for sequence, splits in keys.items():
        count = -(-int(batch.seq_lens[sequence]) // step.span.key_split)
        assert splits == list(range(count))
        rows[batch.query_start[sequence]] += 1
    assert rows == [1] * batch.num_tokens
    assert image.arrays["split_start"][len(chunks)] == len(items)


@given(chunks=chunks_strategy)
def test_a_graph_is_for_single_new_tokens_alone(program: GpuProgram, chunks: Chunks) -> None:
    step = fill(StepImage(program), make_batch(program, chunks))
    if all(now == 1 for _, now in chunks):
        assert step.bucket == next(b for b in program.buckets if b >= len(chunks))
    else:
        assert step.bucket == 0


@given(first=chunks_strategy, second=chunks_strategy)
def test_nothing_of_the_step_before_is_left_within_the_bucket(
    program: GpuProgram, first: Chunks, second: Chunks
) -> None:
    """Padding names token 0 and the scratch block's first slot."""
    image = StepImage(program)
    fill(image, make_batch(program, first, [(1, 2)]))
    batch = make_batch(program, second)
    step = fill(image, batch)
    count = batch.num_tokens
    bucket = next(b for b in program.buckets if b >= count)
    for name, values in (
        ("tokens", batch.tokens),
        ("positions", batch.positions),
        ("slot_mapping.0", batch.slot_mapping[0]),
    ):
        np.testing.assert_array_equal(image.arrays[name][:count], values)
        assert not image.arrays[name][count:bucket].any()
    words = image.arrays["counts"].tolist()
    assert words == list(step.rows)
    assert words[: Counts.TILES] == [count, len(second), len(second)]
    assert words[Counts.COPIES] == 0


@given(chunks=chunks_strategy, copies=st.lists(st.tuples(st.just(1), st.integers(2, 9)), max_size=8))
def test_all_that_a_step_reads_is_sent(program: GpuProgram, chunks: Chunks, copies: Any) -> None:
    """What lies behind `used_bytes` may be poison."""
    image = StepImage(program)
    image.words[:] = -7
    batch = make_batch(program, chunks, copies)
    step = fill(image, batch)
    sent = image.words[: step.used_bytes // 4].copy()
    image.words[:] = -7
    image.words[: len(sent)] = sent
    again = {name: array.copy() for name, array in image.arrays.items()}
    fill(image, batch)
    needed = {
        "tokens": batch.num_tokens,
        "splits": 2 * step.rows[Counts.SPLITS],
        "tiles": 2 * step.rows[Counts.TILES],
        "copies": 2 * len(copies),
        "split_start": len(chunks) + 1,
    }
    for name, count in needed.items():
        np.testing.assert_array_equal(again[name][:count], image.arrays[name][:count])


def test_no_step_has_more_rows_than_launches_are_made_for(program: GpuProgram) -> None:
    image = StepImage(program)
    most = image.most_rows()
    for chunks in ([(4000, 1)] * S, [(0, T)], [(4000, 1)] * (S - 1) + [(0, T - S + 1)]):
        step = fill(image, make_batch(program, chunks, [(1, 2)] * S))
        assert all(n <= limit for n, limit in zip(step.rows, most, strict=True))
    for bucket in program.buckets:
        if bucket <= S:
            rows = image.graph_rows(bucket)
            assert all(n <= limit for n, limit in zip(rows, most, strict=True))
            assert rows[Counts.TILES] == rows[Counts.COPIES] == 0
            assert rows[Counts.SPLITS] == max_items(program)


@given(copies=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=6))
def test_copies_that_are_no_chain_give_the_same_in_any_order(copies: list[tuple[int, int]]) -> None:
    array = np.array(copies, np.int32).reshape(-1, 2)
    pool = np.arange(8)
    one_by_one, at_once = pool.copy(), pool.copy()
    for source, target in copies:
        one_by_one[target] = one_by_one[source]
    at_once[array[:, 1]] = pool[array[:, 0]]
    if not is_chain(array):
        np.testing.assert_array_equal(one_by_one, at_once)
    else:
        sources, targets = set(array[:, 0].tolist()), array[:, 1].tolist()
        assert len(set(targets)) < len(targets) or sources & set(targets)


def test_a_program_without_attention_by_splits_takes_tiles(program: GpuProgram) -> None:
    none = replace(program, body=tuple(replace(span, key_split=0) for span in program.body))
    step = fill(StepImage(none), make_batch(none, [(5, 1), (9, 3)]))
    assert step.rows[Counts.SPLITS] == 0
    assert step.rows[Counts.TILES] == 2


def test_the_device_has_the_image_as_the_host_has_it(program: GpuProgram) -> None:
    """Its arrays come first among the step's, in the same order."""
    places = steps.starts({name: 4 * words for name, words in steps.image_words(program).items()})
    image = StepImage(program)
    base = image.words.ctypes.data
    assert {name: array.ctypes.data - base for name, array in image.arrays.items()} == places
