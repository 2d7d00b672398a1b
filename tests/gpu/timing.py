"""Times by events on the GPU, of runs that take turns, each with nothing of use in the L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from pagec.autotune.gpu_rounds import timed_rounds
from pagec.autotune.measure import Sample, sample
from pagec.runtime.device.cuda.gpu import TorchGpu

Run = Callable[[], object]
# Of the L2 cache, what is read before each timed run: long enough for the host to be done with telling the
# GPU of the run before that begins.
FLUSHED: Final = 8
LEAST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 60


class Timer:
    """`seconds`: what the rounds of one comparison may take; a few are made in any case."""

    def __init__(
        self,
        gpu: TorchGpu,
        l2_bytes: int,
        seconds: float = 0.4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu, self._seconds, self._clock = gpu, seconds, clock
        self._flush = gpu.allocate(FLUSHED * l2_bytes)

    def time(self, runs: Mapping[str, Run]) -> tuple[dict[str, Sample], int]:
        """Microseconds of each by name, and in how many rounds."""
        ends = self._clock() + self._seconds

        def goes_on(turn: int) -> bool:
            return turn <= LEAST_ROUNDS or (turn <= MOST_ROUNDS and self._clock() < ends)

        turns = [lambda _, run=run: run() for run in runs.values()]
        times = timed_rounds(turns, self._gpu, self._flush, goes_on)
        return {name: sample(found) for name, found in zip(runs, times, strict=True)}, len(times[0])
