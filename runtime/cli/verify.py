"""`pagec verify`: an artifact's kernels, and the whole model, against the reference interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagec.runtime.cli.console import JsonFlag, print_json


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: a kernel's key (or "model"), its number of rows, its error and the bound on it."""

    subject: str
    num_rows: int
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # NaN is not


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact directory.")],
    as_json: JsonFlag = False,
) -> None:
    """Check every kernel and the whole model on fresh random inputs of several sizes.

    Exits with 1 if an error is out of bounds.
    """
    rows = verify_artifact(artifact)
    if as_json:
        print_json([{**asdict(row), "ok": row.ok} for row in rows])
    else:
        Console().print(_table(rows))
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def verify_artifact(path: Path) -> list[Row]:
    """Compares and measures; raises ArtifactError if the artifact cannot be opened."""
    raise NotImplementedError(f"verify {path}")


def _table(rows: Sequence[Row]) -> Table:
    table = Table("kernel", "rows", "error", "bound", "")
    for row in rows:
        verdict = "[green]ok[/]" if row.ok else "[bold red]out of bounds[/]"
        table.add_row(row.subject, str(row.num_rows), f"{row.error:.2e}", f"{row.bound:.2e}", verdict)
    return table
