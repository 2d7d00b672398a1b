"""How long an engine's steps take and what they compute, as the engine process reports it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from pagec.runtime.scheduler import Clock, Entry
from pagec.runtime.server.messages import StepTimes, StepTotals
from pagec.runtime.trace import Trace

# Seconds; the bounds of the step times' histogram.
STEP_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RECENT_STEPS: Final = 120
RATE_S: Final = 5.0


class Meter(Trace):
    """A trace of an engine that keeps sums, and the latest steps."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._steps = 0
        self._seconds = 0.0
        self._counts = [0] * (len(STEP_BOUNDS) + 1)
        self._prompt_tokens = self._generated_tokens = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds
        self._lately: deque[tuple[float, int, int]] = deque()  # end, prompt tokens, generated tokens

    def now_us(self) -> float:
        return (self._clock() - self._began) * 1e6

    def execute(self, entries: Sequence[Entry], began_us: float) -> None:
        now = self._clock()
        seconds = now - self._began - began_us / 1e6
        prompt = sum(max(min(e.start + e.num_tokens, e.sequence.num_prompt) - e.start, 0) for e in entries)
        generated = sum(e.num_draws for e in entries)
        self._steps += 1
        self._seconds += seconds
        self._counts[bisect_left(STEP_BOUNDS, seconds)] += 1
        self._prompt_tokens += prompt
        self._generated_tokens += generated
        self._recent.append(seconds)
        self._lately.append((now, prompt, generated))
        self._forget(now)

    def rates(self) -> tuple[float, float]:
        """Generated and prompt tokens per second, over the last seconds."""
        now = self._clock()
        self._forget(now)
        window = max(min(RATE_S, now - self._began), 1e-3)
        generated = sum(count for _, _, count in self._lately)
        return generated / window, sum(count for _, count, _ in self._lately) / window

    def times(self) -> StepTimes:
        """Of the latest steps."""
        recent = [round(seconds * 1e3, 3) for seconds in self._recent]
        if not recent:
            return StepTimes(0.0, 0.0, 0.0, [])
        return StepTimes(
            recent[-1], round(sum(recent) / len(recent), 3), float(np.percentile(recent, 99)), recent
        )

    def totals(self) -> StepTotals:
        """Since the start."""
        buckets = [sum(self._counts[: n + 1]) for n in range(len(self._counts))]
        return StepTotals(self._steps, self._seconds, buckets, self._prompt_tokens, self._generated_tokens)

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - RATE_S:
            self._lately.popleft()
