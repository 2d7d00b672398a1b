"""Bar charts as SVG: panels side by side, a bar per label, each panel with its own scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 300  # of a panel
_LABEL: Final = 80  # of its labels
_ROW: Final = 24
_HEAD: Final = 40
_COLOURS: Final = ("#8a8f98", "#2f6db3", "#3a9d6e", "#c9782e", "#8053a6")


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of all labels."""

    title: str
    values: Mapping[str, float]


def bar_chart(title: str, panels: Sequence[Panel]) -> str:
    """The panels as the text of an SVG file."""
    rows = max(len(panel.values) for panel in panels)
    width, height = len(panels) * _WIDTH + 20, _HEAD * 2 + rows * _ROW + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, 10 + number * _WIDTH)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: int) -> list[str]:
    """A bar per value; the longest takes what labels and numbers leave."""
    room = _WIDTH - _LABEL - 80
    most = max(panel.values.values()) or 1.0
    parts = [f'<text x="{left}" y="{_HEAD + 16}" font-weight="bold">{escape(panel.title)}</text>']
    for row, (label, value) in enumerate(panel.values.items()):
        y = _HEAD * 2 - 10 + row * _ROW
        length = max(room * value / most, 1.0)
        colour = _COLOURS[row % len(_COLOURS)]
        parts += [
            f'<text x="{left}" y="{y + 13}">{escape(label)}</text>',
            f'<rect x="{left + _LABEL}" y="{y}" width="{length:.1f}" height="{_ROW - 7}" fill="{colour}"/>',
            f'<text x="{left + _LABEL + length + 5:.1f}" y="{y + 13}">{_number(value)}</text>',
        ]
    return parts


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
