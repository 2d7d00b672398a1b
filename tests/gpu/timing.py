"""Times by events on the GPU, of runs that take turns, each after the L2 cache was overwritten."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from pagec.autotune.measure import Sample, sample
from pagec.runtime.device.cuda.gpu import TorchGpu

Run = Callable[[], object]
# Of the L2 cache, what is written before each timed run: long enough for the host to be done with telling the
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
        """Microseconds of each by name, and in how many rounds. The first round warms up and does not count;
        every other one goes backwards."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        ends = self._clock() + self._seconds
        for turn in range(MOST_ROUNDS + 1):
            if turn > LEAST_ROUNDS and self._clock() >= ends:
                break
            order = list(runs) if turn % 2 else list(runs)[::-1]
            # A whole round is told to the GPU before anything is waited for: it is not idle within one.
            events = [(name, *self._once(runs[name])) for name in order]
            self._gpu.wait(events[-1][2])
            for name, before, after in events:
                if turn:
                    times[name].append(self._gpu.elapsed_us(before, after))
        return {name: sample(found) for name, found in times.items()}, len(times[next(iter(runs))])

    def _once(self, run: Run) -> tuple[Any, Any]:
        self._gpu.read(self._flush)  # what was written would have to be written back meanwhile
        before = self._gpu.record(timed=True)
        run()
        return before, self._gpu.record(timed=True)
