"""Times by events on a GPU, of runs that take turns, each with nothing of use in the L2 cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagec.runtime.device import Memory
from pagec.runtime.device.cuda.gpu import Event, TorchGpu

# Begins a run; told which turn it is.
Run = Callable[[int], object]


def timed_rounds(
    runs: Sequence[Run], gpu: TorchGpu, flush: Memory, goes_on: Callable[[int], bool]
) -> list[list[float]]:
    """Microseconds of each run, round by round, as long as `goes_on` says so of the next turn.

    The first round warms up and does not count; every other one goes backwards. `flush`: memory that is read
    before each run.
    """
    times: list[list[float]] = [[] for _ in runs]
    turn = 0
    while goes_on(turn):
        order = range(len(runs)) if turn % 2 else reversed(range(len(runs)))
        # A whole round is told to the GPU before anything is waited for: it is never idle within one.
        events = [(number, *_once(runs[number], turn, gpu, flush)) for number in order]
        gpu.wait(events[-1][2])
        for number, before, after in events:
            if turn:
                times[number].append(gpu.elapsed_us(before, after))
        turn += 1
    return times


def _once(run: Run, turn: int, gpu: TorchGpu, flush: Memory) -> tuple[Event, Event]:
    """Events around a run."""
    gpu.read(flush)  # what was written would have to be written back meanwhile
    before = gpu.record(timed=True)
    run(turn)
    return before, gpu.record(timed=True)
