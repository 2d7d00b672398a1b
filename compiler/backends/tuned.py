"""Tuned choices, as tables give them to a compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By "kind/shape" knobs for ascending numbers of rows, the last for any (0).
Choices = Sequence[tuple[int, Mapping[str, int]]]
Tuned = Mapping[str, Choices]
