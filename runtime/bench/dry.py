"""Steps without kernels: scheduler and block manager as they are, any token as a result.

Which tokens come does not change who runs when and who holds which block, as long as the end of text is
ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from pagec.runtime.loop import Loop
from pagec.runtime.scheduler import Entry, Scheduler

VOCAB: Final = 50_000


class DryOutput:
    """Random tokens for so many logit rows."""

    logits: Any = None
    logprobs: None = None
    errors: Mapping[int, Exception] = MappingProxyType({})

    def __init__(self, rng: np.random.Generator, num_rows: int) -> None:
        self.tokens = rng.integers(0, VOCAB, num_rows, np.int32)


class DryRunner:
    """Takes numbers of logit rows for batches. `on_collect` is told when a step ends."""

    def __init__(self, on_collect: Callable[[], None] = lambda: None) -> None:
        self._rows: deque[int] = deque()
        self._rng = np.random.default_rng(0)
        self._on_collect = on_collect

    def submit(self, batch: int) -> None:
        self._rows.append(batch)

    def collect(self) -> DryOutput:
        self._on_collect()
        return DryOutput(self._rng, self._rows.popleft())


def count_rows(entries: Sequence[Entry]) -> int:
    """What DryRunner takes for a batch."""
    return sum([entry.num_logits for entry in entries])


def dry_loop(
    scheduler: Scheduler,
    prepare: Callable[[Sequence[Entry]], int] = count_rows,
    on_collect: Callable[[], None] = lambda: None,
) -> Loop:
    """A loop that computes nothing."""
    return Loop(scheduler, DryRunner(on_collect), prepare, vocab=VOCAB)
