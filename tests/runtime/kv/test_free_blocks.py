"""Runs of free blocks against a set of ids."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pagec.runtime.kv.free_blocks import FreeBlocks, FreeRuns

SIZE = 40


def runs_of(free: set[int]) -> list[range]:
    """Maximal ranges, found the plain way."""
    runs: list[range] = []
    for block in sorted(free):
        if runs and runs[-1].stop == block:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_runs_are_maximal_and_the_longest_is_known(seed: int) -> None:
    rng = random.Random(seed)
    runs, free = FreeRuns(SIZE), set(range(1, SIZE))
    for _ in range(60):
        if free and rng.random() < 0.5:
            run = rng.choice(runs_of(free))
            taken = runs.take(run.start, rng.randrange(1, 12))
            assert taken.start == run.start
            assert set(taken) <= set(run)
            free -= set(taken)
        elif missing := runs_of(set(range(1, SIZE)) - free):
            gap = rng.choice(missing)
            start = rng.randrange(gap.start, gap.stop)
            stop = rng.randrange(start, gap.stop) + 1
            runs.add(start, stop)
            free |= set(range(start, stop))
        expected = runs_of(free)
        assert sorted(runs, key=lambda run: run.start) == expected
        assert runs.num_free == len(free)
        assert len(runs.longest()) == max(map(len, expected), default=0)
        assert not free or runs.longest() in expected
        assert [block for block in range(SIZE) if runs.begins(block)] == [run.start for run in expected]


def test_claims_follow_their_table_until_somebody_needs_them() -> None:
    free, claims = FreeBlocks(41), [range(0), range(0)]
    first = free.extend(0, 0, 4, claims, 0, 0)
    assert first == [1, 2, 3, 4]
    assert claims[0] == range(5, 9)  # as many as the table has, up to an eighth of the pool
    second = free.extend(0, 0, 1, claims, 1, 0)
    assert second[0] == 9
    assert free.num_free == 40 - 5
    rest = free.extend(1, second[0], 35, claims, 1, 0)
    assert not any(claims)
    assert sorted(first + second + rest) == list(range(1, 41))
    assert free.num_free == 0
    free.check()


def test_what_is_given_up_joins_its_neighbours() -> None:
    free, claims = FreeBlocks(41), [range(0)]
    (block,) = free.extend(0, 0, 1, claims, 0, 0)
    free.unclaim(claims, 0)
    free.add(block)
    assert list(free.runs) == [range(1, 41)]
    assert free.fragmentation() == 0


def test_pieces_double_while_there_is_room() -> None:
    free, claims, table = FreeBlocks(2000), [range(0)], [0]
    blocked = [range(0)]
    while len(table) <= 64:
        table += free.extend(len(table) - 1, table[-1], 1, claims, 0, 0)
        free.extend(0, 0, 1, blocked, 0, 0)  # somebody else takes what follows
        free.unclaim(blocked, 0)
    starts = [n for n, (a, b) in enumerate(pairwise(table)) if b != a + 1]
    lengths = [b - a for a, b in pairwise(starts)]
    assert lengths == [4, 8, 16, 32]


def test_a_table_goes_on_behind_its_last_block_rather_than_in_the_longest_run() -> None:
    free, claims = FreeBlocks(41), [range(0)]
    free.runs.take(1, 9)
    for block in (2, 3, 4):
        free.add(block)
    assert free.extend(1, 1, 1, claims, 0, 0) == [2]
    assert free.take(4) == 10


def test_the_newest_claim_gives_way_first() -> None:
    free, old, new = FreeBlocks(41), [range(0)], [range(0)]
    free.extend(0, 0, 4, old, 0, 0)
    free.extend(0, 0, 1, new, 0, 0)
    assert old[0]
    assert new[0]
    free.runs.take(free.runs.longest().start, free.runs.num_free)
    kept = old[0]
    free.take(0)
    assert (old[0], new[0]) == (kept, range(0))
