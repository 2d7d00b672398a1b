"""The tuner's report: one HTML page that needs nothing else, drawn as SVG.

For every shape and GPU: all points of the search (time over shared memory), what was chosen, the baseline,
the distance to the roofline, and why: what a step of the inner loop asks of each pipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Final

from pagec.autotune import search
from pagec.autotune.database import Database
from pagec.autotune.prediction import Candidate, Point, roofline_us
from pagec.autotune.problem import Kind, Problem, problem_from
from pagec.autotune.report_page import SCRIPT, STYLE
from pagec.autotune.table import Choice
from pagec.compiler.target import CudaTarget

WIDTH: Final = 460
HEIGHT: Final = 240
LEFT: Final = 52
BOTTOM: Final = 34
TOP: Final = 12
BAR: Final = 16
# More points than this say no more: the slowest are left out of the picture.
MOST_POINTS: Final = 120
NUMBER: Final = re.compile(r"\d[\d,]*")


@dataclass(frozen=True, slots=True)
class Section:
    """A shape on a GPU at a number of rows: the search and what came of it."""

    problem: Problem
    target: CudaTarget
    choice: Choice
    found: Sequence[Candidate]
    origin: str = "predicted"

    @property
    def title(self) -> str:
        rows = f"up to {self.choice.rows} rows" if self.choice.rows else "any number of rows"
        return f"{self.target.name} {self.problem.kind} {self.problem.key}, {rows}"

    @property
    def least_us(self) -> float:
        """By products and bytes alone."""
        return roofline_us(self.problem, self.target)[0]


def sections_of(database: Database, kind: Kind, target: CudaTarget) -> Iterator[Section]:
    """The searches behind a kernel's choices, done again: for the fewest and for the most rows."""
    for key in database.keys(kind):
        entry = database.find(kind, key)
        assert entry is not None
        choices = entry.sets["default"]
        for choice in dict.fromkeys((choices[0].rows, choices[-1].rows)):
            one = next(c for c in choices if c.rows == choice)
            if "weighed_at" in one.facts:
                problem = problem_from(kind, one.facts["weighed_at"])
                origin = one.facts.get("origin", entry.origin)
                yield Section(problem, target, one, search.candidates(problem, target), origin)


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    body = "\n".join(_article(number, one) for number, one in enumerate(sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        "<p>Times are in microseconds. Predicted ones come from a cost model whose cache rates and "
        "latencies are estimates: they rank points, and are no measurements. In the pictures the chosen "
        "point is red, the baseline orange.</p>\n"
        f"{_overview(sections)}\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


# ------------------------------------------------------------------------------------- overview


def _overview(sections: Sequence[Section]) -> str:
    """A row for each section."""
    head = ("GPU", "kernel", "shape", "rows", "chosen", "us", "roofline", "of it", "baseline", "bound by", "")
    rows = [_row(number, one) for number, one in enumerate(sections)]
    cells = "".join(f"<th>{name}</th>" for name in head)
    return (
        '<p><label>Show <input id="filter" placeholder="h100 decode d128"/></label></p>\n'
        f'<table id="overview"><thead><tr>{cells}</tr></thead>\n<tbody>{"".join(rows)}</tbody></table>'
    )


def _row(number: int, one: Section) -> str:
    choice = one.choice
    base = "does not fit" if choice.baseline_us is None else _number(choice.baseline_us)
    cells = (
        f'<a href="#s{number}">{escape(one.target.name)}</a>',
        escape(one.problem.kind),
        escape(one.problem.key),
        str(choice.rows or "any"),
        escape(knobs(choice.point)),
        _number(choice.us),
        _number(one.least_us),
        f"{100 * one.least_us / choice.us:.0f} %",
        base,
        escape(str(choice.facts.get("bound", ""))),
        one.origin,
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def knobs(point: Point) -> str:
    """A point in a line: BM 128, BN 64, ..."""
    return ", ".join(f"{name} {value}" for name, value in point.items())


# ------------------------------------------------------------------------------------- sections


def _article(number: int, one: Section) -> str:
    fitting = [found for found in one.found if found.prediction is not None]
    dropped = _reasons(one.found)
    lost = "".join(f"<li>{count} points: {escape(reason)}</li>" for reason, count in dropped)
    best = next((found for found in fitting if found.point.items() <= one.choice.point.items()), fitting[0])
    assert best.prediction is not None
    return (
        f'<article id="s{number}"><h2>{escape(one.title)}</h2>\n'
        f"<p>{escape(knobs(one.choice.point))}: {_number(one.choice.us)} us, "
        f"{one.choice.us / one.least_us:.2f} times the roofline; weighed at "
        f"{escape(_sizes(one.problem))}.</p>\n"
        f'<div class="pair">{_scatter(one, fitting)}\n{_pipes(best)}</div>\n'
        f"<details><summary>{len(fitting)} points ranked, {len(one.found) - len(fitting)} dropped</summary>"
        f"<ul>{lost}</ul></details></article>"
    )


def _sizes(problem: Problem) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in problem.to_json().items())


def _reasons(found: Sequence[Candidate]) -> list[tuple[str, int]]:
    """Why points were dropped, the most frequent reason first; numbers in them are left out."""
    counts: dict[str, int] = {}
    for one in found:
        if one.prediction is None:
            reason = NUMBER.sub("N", one.reason)
            counts[reason] = counts.get(reason, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _scatter(one: Section, fitting: Sequence[Candidate]) -> str:
    """Points of the search: shared memory to the right, time upwards (its logarithm), the roofline a line."""
    shown = fitting[:MOST_POINTS]
    times = [found.us for found in shown] + [one.least_us]
    low, high = log10(min(times)) - 0.05, log10(max(times)) + 0.05
    most = max(found.prediction.resources.shared_bytes for found in shown if found.prediction) or 1

    def x(shared: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * shared / most

    def y(us: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - log10(us)) / (high - low)

    roof = y(one.least_us)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{escape(one.title)}: time over shared memory</title>",
        f'<line class="roof" x1="{LEFT}" x2="{WIDTH - 10}" y1="{roof:.1f}" y2="{roof:.1f}"/>',
        f'<text x="{WIDTH - 12}" y="{roof - 4:.1f}" text-anchor="end">roofline '
        f"{_number(one.least_us)} us</text>",
        f'<text x="4" y="{y(max(times)) + 4:.1f}">{_number(max(times))}</text>',
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle">shared memory, up to '
        f"{most // 1024} KB</text>",
    ]
    for found in reversed(shown):
        assert found.prediction is not None
        kind = "baseline" if found.point == one.choice.baseline else "point"
        if found.point.items() <= one.choice.point.items():
            kind = "chosen"
        spot = found.prediction
        parts.append(
            f'<circle class="{kind}" cx="{x(spot.resources.shared_bytes):.1f}" cy="{y(found.us):.1f}" '
            f'r="{3 if kind == "point" else 5}"><title>{escape(knobs(found.point))}: {_number(found.us)} us, '
            f"{spot.occupancy} per multiprocessor, {escape(spot.bound)}</title></circle>"
        )
    return "".join([*parts, "</svg>"])


def _pipes(best: Candidate) -> str:
    """Clocks that a step of the inner loop asks of each pipe: why the chosen point is bound as it is."""
    assert best.prediction is not None
    clocks: Mapping[str, float] = {str(pipe): value for pipe, value in best.prediction.clocks.items()}
    most, height = max(clocks.values()), TOP + BAR * len(clocks) + 24
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        "<title>clocks of a step by pipe</title>",
    ]
    for row, (pipe, value) in enumerate(sorted(clocks.items(), key=lambda item: -item[1])):
        top = TOP + BAR * row
        parts.append(
            f'<text x="118" y="{top + 10}" text-anchor="end">{escape(pipe)}</text>'
            f'<rect class="bar" x="124" y="{top}" width="{max(1.0, 240 * value / most):.1f}" height="11"/>'
            f'<text x="{130 + 240 * value / most:.1f}" y="{top + 10}">{value:,.0f}</text>'
        )
    held = best.prediction.resources
    parts.append(
        f'<text x="4" y="{height - 6}">clocks of a step; {best.prediction.occupancy} blocks per '
        f"multiprocessor, {held.registers} registers, {held.shared_bytes // 1024} KB, {held.mma}</text></svg>"
    )
    return "".join(parts)


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"
