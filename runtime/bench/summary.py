"""Figures of several repetitions: the median, with the least and the greatest beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure over all repetitions."""

    median: float
    least: float
    greatest: float

    @property
    def spread(self) -> float:
        """(greatest - least) / median."""
        return (self.greatest - self.least) / self.median if self.median else 0.0


def summarise(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


def summarise_all(repetitions: Sequence[Figures]) -> dict[str, Summary]:
    """Every figure that each repetition has."""
    return {name: summarise([figures[name] for figures in repetitions]) for name in repetitions[0]}


def to_json(summaries: Mapping[str, Summary]) -> dict[str, object]:
    """The medians by name, then their extremes under "min" and "max"."""
    medians = {name: rounded(s.median) for name, s in summaries.items()}
    least = {name: rounded(s.least) for name, s in summaries.items()}
    return {**medians, "min": least, "max": {name: rounded(s.greatest) for name, s in summaries.items()}}


def rounded(value: float) -> float:
    """Six significant digits: more is noise."""
    return float(f"{value:.6g}")
