"""What the commands share: where people's output goes, and how a compilation's progress is shown.

Results go to stdout; progress, errors and figures for people go to stderr, so that output can be piped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagec.compiler.errors import PagecError

if TYPE_CHECKING:
    from rich.console import Console

    from pagec.runtime.bench.limits import Limits
    from pagec.runtime.ledger import Ledger

Progress = Callable[[str, int, int], None]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def stderr() -> Console:
    """The console for people. rich is imported when something is to be said."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_error(error: PagecError) -> None:
    """An error that the user can mend: no traceback."""
    from rich.markup import escape

    stderr().print(f"[bold red]error:[/] [red]{escape(str(error))}[/]", soft_wrap=True)


def print_ledger(ledger: Ledger) -> None:
    """Where the memory goes, on stderr."""
    stderr().print("\n".join(f"[dim]{line}[/]" for line in ledger.lines()))


def print_json(data: Any, *, indent: int | None = None) -> None:
    json.dump(data, sys.stdout, indent=indent, ensure_ascii=False)
    sys.stdout.write("\n")


def print_limits(limits: Limits) -> None:
    """The machine's limits, on stderr."""
    figures = limits.figures
    stderr().print(
        f"[dim]read bandwidth {figures['read_bandwidth_gb_per_s']:.1f} GB/s, "
        f"peak {figures['peak_gflops']:,.0f} GFLOP/s[/]"
    )


def print_table(table: Any) -> None:
    """A table on stdout, so wide that nothing in it is cut off, also in a pipe."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    console.width = 1000
    console.width = Measurement.get(console, console.options, table).maximum
    console.print(table)


@contextmanager
def progress_display() -> Iterator[Progress]:
    """A display of stages; call what it gives with (stage, done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Display

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Display(*columns, console=stderr()) as display:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total)
            display.update(tasks[stage], completed=done, total=total)

        yield update
