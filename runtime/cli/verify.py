"""`pagec verify`: an artifact's kernels, and the whole model, against the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagec.runtime.cli.compile import OpsOption
from pagec.runtime.cli.console import JsonFlag, print_json, progress_display

if TYPE_CHECKING:
    from rich.table import Table

    from pagec.runtime.cli.verification.row import Row


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact directory.")],
    weights: Annotated[
        str | None,
        typer.Option(help="Weights for an artifact without: a path, or random:SEED.", show_default="its own"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs; another every day.")] = -1,
    ops: OpsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every kernel and the whole model on fresh random inputs of several sizes.

    An error is given in units of what the arithmetic allows: 1 is the bound. Exits with 1 if one is beyond.
    """
    with progress_display() as progress:
        rows = verify_artifact(artifact, weights=weights, seed=seed, ops=ops or (), progress=progress)
    if as_json:
        print_json([{**asdict(row), "ok": row.ok} for row in rows])
    else:
        from rich.console import Console

        console = Console()
        console.width = max(console.width, 110)  # keys are to be read whole, also in a pipe
        console.print(_table(rows))
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def verify_artifact(
    path: Path,
    *,
    weights: str | None = None,
    seed: int = -1,
    ops: Iterable[Path] = (),
    progress: Callable[[str, int, int], None],
) -> list[Row]:
    """Compares and measures; raises ArtifactError if the artifact cannot be opened."""
    from pagec.compiler.artifact import Artifact, open_artifact
    from pagec.compiler.user_ops import load_ops

    load_ops(ops)
    artifact = open_artifact(path)
    if isinstance(artifact, Artifact):
        from pagec.runtime.cli.verification.cpu import CpuVerification

        return CpuVerification(artifact, weights, seed).run(progress)
    from pagec.runtime.cli.verification.gpu import GpuVerification

    return GpuVerification(artifact, weights, seed).run(progress)


def _table(rows: Sequence[Row]) -> Table:
    """One line per kernel: the numbers of rows that were tried, and the worst of them."""
    from rich.table import Table

    from pagec.runtime.cli.verification.row import worse

    table = Table("kernel", "rows tried", "largest error", "of the bound", "")
    table.columns[0].no_wrap = True
    for subject in dict.fromkeys(row.subject for row in rows):
        own = [row for row in rows if row.subject == subject]
        worst = worse(*own)
        verdict = "[green]ok[/]" if worst.ok else "[bold red]out of bounds[/]"
        tried = ", ".join(str(row.num_rows) for row in own)
        error = max(row.error for row in own)
        table.add_row(subject, tried, f"{error:.2e}", f"{worst.of_bound:.3f}", verdict)
    return table
