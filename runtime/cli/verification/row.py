"""What a comparison has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: a kernel's key (or "model"), its number of rows, its largest absolute error, and the
    error over the bound where that is greatest."""

    subject: str
    num_rows: int
    error: float
    of_bound: float

    @property
    def ok(self) -> bool:
        return self.of_bound <= 1  # NaN is not


def worse(*rows: Row) -> Row:
    """The one that is furthest from its bound; NaN is beyond all."""
    return max(rows, key=lambda row: (row.of_bound != row.of_bound, row.of_bound))
