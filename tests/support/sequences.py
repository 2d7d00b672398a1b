"""Sequences as the block manager sees them, driven step by step."""

from __future__ import annotations

from array import array

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.sequence import Sequence


def sequence(num_tokens: int, groups: int = 1, first: int = 1000) -> Sequence:
    """One whose tokens are first, first + 1, ..."""
    tokens = list(range(first, first + num_tokens))
    return Sequence(tokens, num_tokens, num_tokens - 1, [array("i") for _ in range(groups)], 1 << 20)


def compute(blocks: BlockManager, own: Sequence, num_tokens: int | None = None) -> None:
    """A sequence's step up to so many tokens, all by default."""
    num_tokens = num_tokens or len(own)
    own.tokens += range(len(own), num_tokens)
    assert blocks.grow(own, num_tokens)
    own.num_computed = num_tokens
    blocks.commit(own)


def started(blocks: BlockManager, own: Sequence, num_tokens: int | None = None, salt: str = "") -> Sequence:
    blocks.begin(own, salt)
    compute(blocks, own, num_tokens)
    return own


def tables(own: Sequence) -> list[list[int]]:
    return [list(table) for table in own.block_tables]


def fork(blocks: BlockManager, parent: Sequence) -> Sequence:
    child = Sequence(list(parent.tokens), parent.num_prompt, parent.next_logit, [], 1 << 20)
    child.num_computed = parent.num_computed
    blocks.fork(parent, child)
    return child
