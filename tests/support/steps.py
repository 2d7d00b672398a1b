"""A model and a device of plain Python, for the scheduler and the loop.

The model's next token is a hash of all tokens so far, read back from the pool by the block tables: a block
handed out twice, freed too early or copied wrongly changes what it says, and so does a slot of the window
that is gone. A step runs when it is collected, so nothing that its schedule assumed may change before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.scheduler import Entry

VOCAB = 50


def says(tokens: Sequence[int]) -> int:
    """The model's next token."""
    return (sum((i + 1) * (token + 3) for i, token in enumerate(tokens)) * 7919 + 5) % VOCAB


def generate(prompt: Sequence[int], count: int) -> list[int]:
    """What it goes on with, alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(says(tokens))
    return tokens[len(prompt) :]


class Part(NamedTuple):
    """A sequence's part of a step: tokens from `start`, and its tables as they were then."""

    tokens: list[int]
    start: int
    num_logits: int
    num_draws: int
    tables: list[list[int]]


class Step(NamedTuple):
    parts: list[Part]
    copies: list[tuple[int, int]]


class Output(NamedTuple):
    tokens: Any
    logits: Any = None
    logprobs: Any = None
    errors: Any = MappingProxyType({})


class FakeRunner:
    """`prepare` and the runner of a loop. `broken`: a token in whose place no number comes."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.pool: dict[tuple[int, int], int] = {}
        self.steps: deque[Step] = deque()
        self.broken: int | None = None
        self.fail_next: str | None = None
        self.num_steps = 0
        self.on_step: Callable[[Step], None] = lambda step: None  # noqa: ARG005
        self._last: list[int] = []

    def prepare(self, entries: Sequence[Entry]) -> Step:
        parts = [
            Part(e.token_ids, e.start, e.num_logits, e.num_draws, [list(t) for t in e.sequence.block_tables])
            for e in entries
        ]
        return Step(parts, list(self.blocks.take_copies()))

    def submit(self, step: Step) -> None:
        if self.fail_next == "submit":
            self.fail_next = None
            raise RuntimeError("no device")
        self.steps.append(step)

    def collect(self) -> Output:
        step = self.steps.popleft()
        self.num_steps += 1
        self.on_step(step)
        size = self.blocks.block_size
        for source, target in step.copies:
            for offset in range(size):
                if (source, offset) in self.pool:
                    self.pool[target, offset] = self.pool[source, offset]
        before, self._last = self._last, []
        for part in step.parts:
            tokens = [token if token >= 0 else before[-1 - token] for token in part.tokens]
            for i, token in enumerate(tokens):
                block, offset = divmod(part.start + i, size)
                for table in part.tables:
                    assert table[block], "a token is written to the scratch block"
                    self.pool[table[block], offset] = token
        for part in step.parts:
            end = part.start + len(part.tokens)
            num_rows = part.num_logits - part.num_draws + 1 if part.num_logits else 0
            self._last += [self._read(part, row + 1) for row in range(end - num_rows, end)]
            self._last += self._last[-1:] * (part.num_draws - 1)
        if self.fail_next == "collect":
            self.fail_next = None
            raise RuntimeError("the device is gone")
        chosen = np.array([-1 if token == self.broken else token for token in self._last], np.int32)
        return Output(chosen)

    def _read(self, part: Part, length: int) -> int:
        """What the model says to the first tokens of a sequence, as the pool has them."""
        seen: list[list[int | None]] = []
        for group, window in enumerate(self.blocks.windows):
            tokens: list[int | None] = []
            for position in range(length):
                block, offset = divmod(position, self.blocks.block_size)
                if window is not None and position + window < length:
                    tokens.append(None)
                else:
                    assert part.tables[group][block], "a token is read from the scratch block"
                    tokens.append(self.pool[part.tables[group][block], offset])
            seen.append(tokens)
        for position in range(length):
            known = {tokens[position] for tokens in seen} - {None}
            assert len(known) <= 1, "groups disagree"
        return says([token for token in seen[0] if token is not None])
