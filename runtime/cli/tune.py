"""`pagec tune`: which tiles, stages and splits the kernels of a model take on a target."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from pagec.runtime.cli import tune_gpu
from pagec.runtime.cli.compile import ModelArgument, OpsOption
from pagec.runtime.cli.console import JsonFlag, print_json, progress_display, stderr
from pagec.runtime.cli.tune_show import mode_of, print_decode, print_entries, print_public, rows_of, say
from pagec.runtime.cli.tuned import kinds, open_database

if TYPE_CHECKING:
    from pagec.autotune.database import Database
    from pagec.autotune.table import Table

DEFAULT_COMMAND: Final = "model"


class _Commands(TyperGroup):
    """`pagec tune MODEL` is `pagec tune model MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


class Effort(StrEnum):
    """How much is tried."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


TargetOption = Annotated[
    list[str] | None,
    typer.Option("--target", help="A GPU, or a CPU kind; may be given again.", show_default="the GPUs"),
]
StrictFlag = Annotated[
    bool, typer.Option("--strict", help="The choices with one set of numeric knobs for all rows.")
]

app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _help() -> None:
    """Choose the kernels' tiles: by a cost model for GPUs, by measurement on this CPU.

        [bold]pagec tune llama-3.1-8b --target h100 --offline[/]

    What is chosen goes to $PAGEC_CACHE/tuned; pagec ships tables of its own (`pagec tune show`).
    """


@app.command(DEFAULT_COMMAND)
def model(
    model: ModelArgument,
    target: Annotated[str, typer.Option(help="cpu (this machine) or a name in configs/targets.")] = "cpu",
    offline: Annotated[
        bool | None,
        typer.Option(
            "--offline/--measure",
            help="By the cost model alone, or by timing kernels.",
            show_default="measure on a CPU, offline for a GPU",
        ),
    ] = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds that it may take (0: any).")] = 0,
    effort: Annotated[
        Effort,
        typer.Option(
            help="quick: estimates, or few rows. normal: what is chosen for a GPU is compiled; all rows. "
            "full: the best twelve of each bucket are compiled; more repetitions."
        ),
    ] = Effort.NORMAL,
    strict: StrictFlag = False,
    ops: OpsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Tune the kernels of a model: MODEL is what `pagec compile` takes."""
    if _is_gpu(target):
        if offline is False:
            tables = tune_gpu.measured(model, target, budget, effort.value, ops or [])
        else:
            tables = _offline(model, target, budget, effort, ops or [])
    else:
        if offline:
            _refuse(
                "there is no cost model of CPUs", place="--offline", remedy="leave it out: kernels are timed"
            )
        tables = _measured(model, target, budget, effort, ops or [])
    paths = [_store(table) for table in tables]
    if as_json:
        print_json([_to_json(table) for table in tables], indent=1)
        return
    for table in tables:
        print_entries(f"{table.kind} on {table.target}", rows_of(table.entries.items(), mode_of(strict)))
    stderr().print("\n".join(f"[dim]{path}[/]" for path in paths))


def _offline(model: str, name: str, budget: float, effort: Effort, ops: Sequence[Path]) -> list[Table]:
    from pagec.autotune.compiled import PointCompiler
    from pagec.autotune.model import shapes_of_model, tune_offline
    from pagec.compiler.backends.targets import load_cuda_target
    from pagec.compiler.driver import CompileOptions, cache_root

    target = load_cuda_target(name)
    options = CompileOptions(model=model, weights="none", target=name, ops=tuple(ops))
    best = tune_gpu.BEST[effort.value] if effort is Effort.FULL else 0
    with progress_display() as progress:
        compiler = None
        if effort is not Effort.QUICK:
            compiler = PointCompiler(target, cache_root() / "cubins", budget, progress)
        return tune_offline(shapes_of_model(options), target, progress, compiler, best)


def _measured(model: str, target: str, budget: float, effort: Effort, ops: Sequence[Path]) -> list[Table]:
    from pagec.autotune.cpu import tune_cpu
    from pagec.compiler.driver import CompileOptions

    options = CompileOptions(model=model, weights="random:0", target=target, ops=tuple(ops))
    with progress_display() as progress:
        return tune_cpu(options, effort.value, budget, progress)


@app.command("show")
def show(target: TargetOption = None, strict: StrictFlag = False, as_json: JsonFlag = False) -> None:
    """Show the tuned choices, the user's before those that pagec ships; for GPUs beside public kernels'."""
    shown = []
    for database in _databases(target):
        for kind in kinds(database.backend):
            entries = [(key, entry) for key in database.keys(kind) if (entry := database.find(kind, key))]
            shown += [
                {"target": database.target, "kind": kind, "key": key, **entry.to_json()}
                for key, entry in entries
            ]
            if entries and not as_json:
                print_entries(f"{kind} on {database.target}", rows_of(entries, mode_of(strict)))
        say(database.notices)
        if not as_json and _is_gpu(database.target):
            print_public(database.target)
            print_decode(database)
    if as_json:
        print_json(shown, indent=1)


@app.command("prepare")
def prepare(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="DIR", help="The bundle, a directory.", show_default=False),
    ],
    target: Annotated[str, typer.Option(help="A GPU.", show_default=False)],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="What pagec compile takes.",
            show_default="a part of the shipped tables",
        ),
    ] = None,
    best: Annotated[
        int, typer.Option(min=1, help="Points of each bucket that the cost model finds best.")
    ] = tune_gpu.BEST["normal"],
    ops: OpsOption = None,
) -> None:
    """Compile what is worth timing into a bundle, for a machine that has the GPU but not pagec's compiler.

    There `python -m pagec.autotune.bundle_run DIR -o results.jsonl` times it; `pagec tune merge` takes these.
    """
    tune_gpu.prepare(models or [], target, output, best, ops or [])


@app.command("merge")
def merge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Tables that pagec tune wrote, or results of a bundle."),
    ],
    into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tables to add to.", show_default="the user's own")
    ] = None,
) -> None:
    """Add tables or measurements, say of another machine, to the user's own tables."""
    from pagec.autotune.bundle import holds_results
    from pagec.autotune.table import read_table

    for file in files:
        for table in tune_gpu.merged(file, into) if holds_results(file) else [read_table(file)]:
            typer.echo(_store(table, into))


@app.command("report")
def report(
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML page.")] = Path("tuning.html"),
    target: TargetOption = None,
) -> None:
    """Write one self-contained HTML page: each search, what was chosen, how far it is from the roofline."""
    from pagec.autotune.report import page, sections_of
    from pagec.autotune.space import SPACES
    from pagec.compiler.backends.targets import load_cuda_target

    sections = []
    databases = _databases(target)
    gpus = [load_cuda_target(database.target) for database in databases]
    with progress_display() as progress:
        for done, (database, gpu) in enumerate(zip(databases, gpus, strict=True)):
            progress("search again", done, len(gpus))
            sections += [one for kind in SPACES for one in sections_of(database, kind, gpu)]
            say(database.notices)
        progress("search again", len(gpus), len(gpus))
    output.write_text(page(f"Tuned kernels: {', '.join(gpu.name for gpu in gpus)}", sections))
    stderr().print(f"[dim]{len(sections)} searches: {output}[/]")


# -------------------------------------------------------------------------------------- tables


def _refuse(message: str, *, place: str, remedy: str) -> None:
    from pagec.compiler.errors import TargetError

    raise TargetError(message, place=place, remedy=remedy)


def _is_gpu(target: str) -> bool:
    from pagec.compiler.backends.targets import GPUS

    return target in GPUS


def _databases(targets: Sequence[str] | None) -> list[Database]:
    """Of these targets, or of all GPUs; TargetError for one that there is not."""
    from pagec.compiler.backends.targets import GPUS

    return [open_database(name) for name in targets or GPUS]


def _store(table: Table, into: Path | None = None) -> Path:
    """Into the user's tables, or those below a directory; a stale one there makes way."""
    from pagec.autotune.database import DIRECTORY
    from pagec.autotune.table import merge, read_table, table_path
    from pagec.compiler.driver import cache_root
    from pagec.compiler.errors import ArtifactError

    root = into or cache_root() / DIRECTORY
    path = table_path(root, table.target, table.kind)
    try:
        merged = merge(read_table(path) if path.is_file() else None, table)
    except ArtifactError as error:
        say([f"{path} is replaced: {error.message}"])
        merged = table
    return merged.write(root)


def _to_json(table: Table) -> dict[str, Any]:
    entries = {key: entry.to_json() for key, entry in table.entries.items()}
    return {"target": table.target, "kind": table.kind, "entries": entries}
