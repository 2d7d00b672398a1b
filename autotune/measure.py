"""Comparing times: interleaved, by medians, and only what exceeds the noise counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

# A share of the baseline's time: a greater loss counts even where the noise is greater still.
HIDDEN: Final = 0.01
# Runs by which candidates are screened, and how much slower than the baseline is too slow to go on with.
SCREENED: Final = 3
FAR: Final = 1.2
# Runs once and says how long that took, in seconds.
Run = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one candidate: the median and the distance between the quartiles, in microseconds."""

    median_us: float
    spread_us: float


def interleaved(runs: Sequence[Run], rounds: int) -> list[Sample]:
    """All candidates in turn, round after round, so that what else the machine does hits them alike.

    Every other round goes backwards, and a round before the first warms up.
    """
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        order = range(len(runs)) if turn % 2 else reversed(range(len(runs)))
        for number in order:
            seconds = runs[number]()
            if turn:
                times[number].append(1e6 * seconds)
    return [sample(found) for found in times]


def sample(times_us: Sequence[float]) -> Sample:
    """The median and the distance between the quartiles; of one time there is no spread."""
    if len(times_us) < 2:
        return Sample(times_us[0], 0.0)
    low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return Sample(middle, high - low)


def beats(one: Sample, baseline: Sample) -> bool:
    """Whether one is faster than the baseline by more than either of them varies."""
    return baseline.median_us - one.median_us > max(one.spread_us, baseline.spread_us)


def slows(one: Sample, baseline: Sample) -> bool:
    """Whether one is slower than the baseline: by more than the noise, or more than noise may hide."""
    return beats(baseline, one) or one.median_us > (1 + HIDDEN) * baseline.median_us


def winner(cases: Sequence[Sequence[Run]], rounds: int) -> tuple[int, list[Sample], list[Sample]]:
    """(which, its samples, the baseline's) of the candidate that is best over all cases.

    cases[i][0] is the baseline. The best has the least geometric mean of those that slow down no case, and
    beats the baseline in some. The best of many is partly the luckiest, so it meets the baseline once more,
    alone, and has to win again.
    """
    kept = hopeful(cases)
    found = [interleaved([runs[number] for number in kept], rounds) for runs in cases]
    baseline = [samples[0] for samples in found]
    place = min(range(len(kept)), key=lambda at: _mean_ratio([s[at] for s in found], baseline))
    best = kept[place]
    if best == 0 or not _wins([samples[place] for samples in found], baseline):
        return 0, baseline, baseline
    again = [interleaved([runs[0], runs[best]], rounds) for runs in cases]
    baseline, samples = [pair[0] for pair in again], [pair[1] for pair in again]
    return (best, samples, baseline) if _wins(samples, baseline) else (0, baseline, baseline)


def hopeful(cases: Sequence[Sequence[Run]]) -> list[int]:
    """The baseline and the candidates that slow no case down by far, by a few runs each."""
    kept = list(range(len(cases[0])))
    for runs in cases:
        times: dict[int, list[float]] = {number: [] for number in kept}
        for _ in range(SCREENED):
            for number in kept:
                times[number].append(runs[number]())
        kept = [number for number in kept if min(times[number]) <= FAR * min(times[0])]
    return kept


def _wins(samples: Sequence[Sample], baseline: Sequence[Sample]) -> bool:
    pairs = list(zip(samples, baseline, strict=True))
    return any(beats(one, base) for one, base in pairs) and not any(slows(one, base) for one, base in pairs)


def _mean_ratio(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """The geometric mean of times over the baseline's; infinite for what slows a case down."""
    pairs = list(zip(samples, baseline, strict=True))
    if any(slows(one, base) for one, base in pairs):
        return float("inf")
    return statistics.geometric_mean([one.median_us / base.median_us for one, base in pairs])
