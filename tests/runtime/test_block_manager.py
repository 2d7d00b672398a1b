"""Blocks are handed out once, shared by count, and all come back."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pagec.compiler.errors import CapacityError
from pagec.runtime.block_manager import BlockManager


def tables(count: int = 1) -> list[array[int]]:
    return [array("i") for _ in range(count)]


def test_grow_gives_ascending_blocks_and_never_scratch() -> None:
    blocks, own = BlockManager(5, 16), tables()
    assert blocks.grow(own, 33)
    assert list(own[0]) == [1, 2, 3]
    assert (blocks.num_free, blocks.num_used) == (1, 3)


def test_grow_within_a_block_takes_nothing() -> None:
    blocks, own = BlockManager(5, 16), tables()
    assert blocks.grow(own, 1)
    assert blocks.grow(own, 16)
    assert blocks.num_used == 1


def test_grow_is_all_or_nothing() -> None:
    blocks, own = BlockManager(4, 16), tables(2)
    assert not blocks.grow(own, 32)
    assert [len(t) for t in own] == [0, 0]
    assert blocks.num_free == 3


def test_a_shared_block_is_free_when_its_last_user_lets_go() -> None:
    blocks, own = BlockManager(4, 16), tables()
    blocks.grow(own, 20)
    second = blocks.share(own)
    blocks.release(own)
    assert blocks.num_free == 1
    blocks.release(second)
    assert blocks.num_free == 3


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="1 blocks"):
        BlockManager(1, 16)


class BlockMachine(RuleBasedStateMachine):
    """Any order of grow, share and release keeps the books right."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(24, 4)
        self.live: list[list[array[int]]] = []

    @rule(target=held, groups=st.integers(1, 3))
    def begin(self, groups: int) -> list[array[int]]:
        self.live.append(tables(groups))
        return self.live[-1]

    @rule(own=held, num_tokens=st.integers(0, 60))
    def grow(self, own: list[array[int]], num_tokens: int) -> None:
        before, free = [list(t) for t in own], self.blocks.num_free
        if self.blocks.grow(own, num_tokens):
            assert all(len(t) >= self.blocks.blocks_for(num_tokens) for t in own)
            assert [list(t)[: len(b)] for t, b in zip(own, before, strict=True)] == before
        else:
            assert [list(t) for t in own] == before
            assert self.blocks.num_free == free

    @rule(target=held, own=held)
    def share(self, own: list[array[int]]) -> list[array[int]]:
        self.live.append(self.blocks.share(own))
        return self.live[-1]

    @rule(own=consumes(held))
    def release(self, own: list[array[int]]) -> None:
        self.blocks.release(own)
        self.live = [t for t in self.live if t is not own]

    @invariant()
    def books_are_right(self) -> None:
        self.blocks.check()
        counts = [0] * self.blocks.num_blocks
        for own in self.live:
            for table in own:
                for block in table:
                    counts[block] += 1
        assert counts == self.blocks.references
        assert self.blocks.num_used == sum(count > 0 for count in counts)


BlockMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase
