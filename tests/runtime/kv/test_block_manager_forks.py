"""Groups with a window hold their window only; forks share blocks until one writes."""

from __future__ import annotations

import pytest
from support.sequences import compute, fork, sequence, started, tables

from pagec.runtime.kv.block_manager import BlockManager


def test_a_window_holds_its_last_blocks_only() -> None:
    blocks = BlockManager(60, 4, [None, 6])
    own = started(blocks, sequence(4, groups=2))
    for length in range(5, 41):
        compute(blocks, own, length)
        # The next token sees the 5 before it, and itself.
        assert next(n for n, b in enumerate(tables(own)[1]) if b) == max(length - 5, 0) // 4
    assert sum(b > 0 for b in tables(own)[1]) == 2
    assert blocks.num_used == 10 + 2
    assert blocks.num_cached == 8
    blocks.check([own])


def test_a_hit_needs_the_last_window_only() -> None:
    blocks = BlockManager(60, 4, [None, 6])
    own = started(blocks, sequence(40, groups=2))
    last = tables(own)
    blocks.release(own)
    again = sequence(40, groups=2)
    assert blocks.begin(again) == 36
    assert tables(again)[0] == last[0][:9]
    assert tables(again)[1][:7] == [0] * 7
    assert tables(again)[1][7] > 0  # had left the window, and was kept
    assert tables(again)[1][8] == last[1][8]
    blocks.check([again])


def test_a_hit_is_as_long_as_some_window_is_whole() -> None:
    blocks = BlockManager(60, 4, [None, 6])
    own = started(blocks, sequence(40, groups=2))
    blocks.release(own)
    entry = blocks._index.by_block
    # Take block 7 of the window's group away: hits of 32 and 36 tokens would need it.
    gone = next(e for e in blocks._index.entries.values() if e is not None and _depth(e) == 7).blocks[1]
    blocks._evict(entry[gone], 1)  # type: ignore[arg-type]
    assert blocks.begin(sequence(40, groups=2)) == 28
    blocks.check()


def _depth(entry: object) -> int:
    depth = 0
    while (entry := entry.parent) is not None:  # type: ignore[attr-defined]
        depth += 1
    return depth


def test_blocks_out_of_the_window_are_free_without_a_cache() -> None:
    blocks = BlockManager(60, 4, [6], prefix_cache=False)
    started(blocks, sequence(40))
    assert blocks.num_free == 59 - 2


@pytest.mark.parametrize(
    ("windows", "ahead", "needed"),
    [
        ([None], None, 25),
        ([None, 16], None, 50),
        ([None, 16], 1, 25 + 5),
        ([16], 1, 5),  # 16 tokens that begin with the last of a block
        ([16], 40, 15),
        ([1], 1, 1),
        ([2], 1, 2),
        ([1000, 1000], 1, 50),
    ],
)
def test_what_a_sequence_needs_at_its_full_length(
    windows: list[int | None], ahead: int | None, needed: int
) -> None:
    assert BlockManager(9, 4, windows).needed_at_full_length(100, ahead) == needed


def test_a_fork_copies_the_last_block_when_it_is_written_and_only_that() -> None:
    blocks = BlockManager(20, 4)
    parent = started(blocks, sequence(10))
    child = fork(blocks, parent)
    assert blocks.num_used == 3
    assert blocks.take_copies() == []
    before = tables(parent)[0]
    compute(blocks, child, 11)
    assert tables(parent)[0] == before
    assert tables(child)[0][:2] == before[:2]
    assert blocks.take_copies() == [(before[2], tables(child)[0][2])]
    compute(blocks, parent, 11)  # nobody shares it any more
    assert tables(parent)[0] == before
    assert blocks.take_copies() == []
    assert blocks.stats().copies == 1
    blocks.check([parent, child])


def test_the_parent_copies_if_it_writes_first() -> None:
    blocks = BlockManager(20, 4)
    parent = started(blocks, sequence(10))
    child = fork(blocks, parent)
    before = tables(child)[0]
    compute(blocks, parent, 11)
    assert tables(child)[0] == before
    assert blocks.take_copies() == [(before[2], tables(parent)[0][2])]


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    blocks = BlockManager(20, 4)
    parent = started(blocks, sequence(8))
    assert blocks.grow(parent, 9)  # the block for the next token is the parent's own
    child = fork(blocks, parent)
    compute(blocks, parent, 9)
    compute(blocks, child, 9)
    assert blocks.take_copies() == []
    assert tables(parent)[0][:2] == tables(child)[0][:2]
    assert tables(parent)[0][2] != tables(child)[0][2]


def test_a_copy_needs_a_block() -> None:
    blocks = BlockManager(4, 4)
    parent = started(blocks, sequence(10))
    child = fork(blocks, parent)
    assert not blocks.grow(child, 11)
    assert blocks.take_copies() == []
    blocks.release(parent)
    assert blocks.grow(child, 11)
    assert blocks.take_copies() == []


def test_a_prefix_without_its_beginning_is_not_found_until_it_is_whole_again() -> None:
    blocks = BlockManager(8, 4)
    parent, other = sequence(9), sequence(9)
    for own, length in ((parent, 8), (other, 4)):
        blocks.begin(own)
        assert blocks.grow(own, length)
        own.num_computed = length
    child = fork(blocks, parent)
    blocks.commit(other)
    blocks.commit(parent)  # takes the other's first block; the child keeps theirs
    blocks.release(other)
    blocks.release(parent)
    filler = sequence(20, first=5000)
    assert blocks.grow(filler, 20)
    assert blocks.stats().evictions == 1
    assert blocks.begin(sequence(9)) == 0
    blocks.commit(child)
    assert blocks.begin(sequence(9)) == 8
    blocks.check()


def test_forks_of_forks_come_back() -> None:
    blocks = BlockManager(40, 4)
    family = [started(blocks, sequence(10))]
    for _ in range(4):
        family += [fork(blocks, parent) for parent in family[:3]]
    for own in family:
        blocks.release(own)
    assert blocks.num_used == 0
    assert blocks.num_cached == 2
    blocks.check([])
