"""Hands out the blocks of the KV pool.

    block 0         scratch: what unused entries of a block table point to; never handed out
    free blocks     on the free list, reference count 0
    used blocks     in the tables of `references` sequences

free + used + 1 = total. A sequence has one table per KV group; all groups draw from one pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagec.compiler.errors import CapacityError


class BlockManager:
    """The owner of all blocks. Tables are changed here only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks holds no sequence; it needs 2 at least",
                place="num_blocks",
                remedy="give more memory to the KV pool",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        # A stack, lowest id on top, so that fresh blocks come in ascending order.
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks per group that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, tables: Sequence[array[int]], num_tokens: int) -> bool:
        """Extends the tables to hold `num_tokens` tokens. False, and nothing changed, if blocks lack."""
        wanted = -(-num_tokens // self.block_size)
        missing = 0
        for table in tables:
            missing += max(wanted - len(table), 0)
        if missing == 0:
            return True
        if missing > len(self._free):
            return False
        for table in tables:
            while len(table) < wanted:
                block = self._free.pop()
                self.references[block] = 1
                table.append(block)
        return True

    def share(self, tables: Sequence[array[int]]) -> list[array[int]]:
        """Second tables over the same blocks."""
        for table in tables:
            for block in table:
                self.references[block] += 1
        return [array("i", table) for table in tables]

    def release(self, tables: Sequence[array[int]]) -> None:
        """Empties the tables; blocks that no table holds any more are free."""
        for table in tables:
            while table:
                self._drop(table.pop())

    def _drop(self, block: int) -> None:
        assert self.references[block] > 0, f"block {block} is not in use"
        self.references[block] -= 1
        if self.references[block] == 0:
            self._free.append(block)

    def check(self) -> None:
        """Asserts the invariants (tests)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert 0 not in free, "the scratch block is free"
        assert all((self.references[b] == 0) == (b in free) for b in range(1, self.num_blocks))
        assert self.num_free + self.num_used + 1 == self.num_blocks
