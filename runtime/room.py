"""Blocks for requests. What a prompt will need is promised when it starts, and taken chunk by chunk.

A promise is a number, not a block: blocks that are promised stay in the cache, and no sequence holds slots
that it is not about to write. Nobody else's growth may break a promise, so a request that has started comes
to its next token without preempting anyone.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.sequence import Request, Sequence


class Room:
    """The pool as the scheduler sees it. `ahead`: most tokens of a sequence in all steps in flight."""

    def __init__(self, blocks: BlockManager, ahead: int) -> None:
        self.blocks = blocks
        self._ahead = ahead
        self._promised: dict[Sequence, int] = {}
        self._num_promised = 0

    @property
    def num_available(self) -> int:
        """Blocks that are neither in use nor promised."""
        return self.blocks.num_free + self.blocks.num_cached - self._num_promised

    def needed(self, request: Request) -> int:
        """The most blocks that a request ever holds, if its sequences share none. The last token is never
        fed back, so it needs no slot."""
        return self.blocks.needed_at_full_length(request.max_len - 1, self._ahead) * request.width

    def is_awaited(self, request: Request) -> bool:
        """Whether another computes the next block of its prompt just now, or it is being read from disk:
        better wait than do it twice."""
        return self.blocks.is_awaited(request.sequences[0], request.salt)

    def start(self, request: Request) -> bool:
        """Takes what the cache has of a request's tokens, in the pool or moved up from host memory, and
        promises blocks for the rest; False, and nothing changed, if they lack."""
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                continue
            self.blocks.begin(sequence, request.salt)
            lacking = self._lacking(sequence, sequence.num_computed)
            if lacking > self.num_available:
                self.release(request.sequences)
                return False
            self.blocks.load(sequence)
            sequence.num_scheduled = sequence.num_computed
            self._promise(sequence, self._lacking(sequence, sequence.num_computed))
        if not request.num_preemptions:
            request.num_cached_tokens = sum(s.num_computed for s in request.sequences)
        return True

    def whole(self, request: Request) -> int:
        """Blocks that a request's tokens so far take if none is shared and none has left a window."""
        living = [s for s in request.sequences if s.finish_reason is None]
        return sum(self.blocks.needed_at_full_length(len(s.tokens)) for s in living)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lets a sequence write up to `num_tokens` tokens; False, and nothing changed, if blocks lack."""
        promised = self._promised.get(sequence, 0)
        if (
            self._num_promised > promised
            and self._missing(sequence, num_tokens) > self.num_available + promised
        ):
            return False
        if not self.blocks.grow(sequence, num_tokens, ahead=len(sequence.tokens)):
            return False
        if promised:
            self._promise(sequence, self._lacking(sequence, num_tokens))
        return True

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Frees blocks and promises; what was computed is computed again should the sequence go on."""
        for sequence in sequences:
            self._promise(sequence, 0)
            self.blocks.release(sequence)
            if sequence.finish_reason is None:
                sequence.num_computed = sequence.num_scheduled = 0

    def _promise(self, sequence: Sequence, count: int) -> None:
        self._num_promised += count - self._promised.pop(sequence, 0)
        if count:
            self._promised[sequence] = count

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that growth takes at most: a fork's last block may have to be copied, unless it is full."""
        tables = sequence.block_tables
        copied = int(sequence.num_slots == 0 and sequence.num_computed % self.blocks.block_size > 0)
        return (self.blocks.blocks_for(num_tokens) - len(tables[0]) + copied) * len(tables)

    def _lacking(self, sequence: Sequence, computed: int) -> int:
        """Blocks that a sequence still takes until all its tokens are computed, once `computed` are."""
        num_tokens, size = len(sequence.tokens), self.blocks.block_size
        whole, windowed, held, rest = self.blocks.blocks_for(num_tokens), 0, 0, 0
        lacking = 0
        for window, table in zip(self.blocks.windows, sequence.block_tables, strict=True):
            if window is None:
                lacking += whole - len(table)
            else:  # blocks behind the window come back while it moves on
                windowed += 1
                rest += whole - len(table)
                held += len(table) - max(computed - window + 1, 0) // size
        if windowed:
            globals_ = len(sequence.block_tables) - windowed
            most = self.blocks.needed_at_full_length(num_tokens, self._ahead) - globals_ * whole
            lacking += min(rest, max(most - held, 0))
        return lacking
