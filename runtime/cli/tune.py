"""`pagec tune`: which tiles, stages and splits the kernels of a model take on a target."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from pagec.runtime.cli.compile import ModelArgument, OpsOption
from pagec.runtime.cli.console import JsonFlag, print_json, print_table, progress_display, stderr

if TYPE_CHECKING:
    from pagec.autotune.database import Database
    from pagec.autotune.prediction import Candidate
    from pagec.autotune.table import Entry, Table

DEFAULT_COMMAND: Final = "model"
# The head size and group of Llama.
COMPARED: Final = "d128_g4"
# What goes without saying.
PLAIN: Final = {"tma": 0, "splits": 1, "group_m": 1, "split": 0}


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
            "full: more repetitions."
        ),
    ] = Effort.NORMAL,
    strict: StrictFlag = False,
    ops: OpsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Tune the kernels of a model: MODEL is what `pagec compile` takes."""
    if _is_gpu(target):
        if offline is False:
            _refuse(
                f"{target} cannot be measured here",
                place="--measure",
                remedy="leave it out: the cost model ranks without a GPU",
            )
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
        _print_entries(f"{table.kind} on {table.target}", _rows(table.entries.items(), _mode(strict)))
    stderr().print("\n".join(f"[dim]{path}[/]" for path in paths))


def _offline(model: str, name: str, budget: float, effort: Effort, ops: Sequence[Path]) -> list[Table]:
    from pagec.autotune.compiled import PointCompiler
    from pagec.autotune.model import shapes_of_model, tune_offline
    from pagec.compiler.backends.targets import load_cuda_target
    from pagec.compiler.driver import CompileOptions, cache_root

    target = load_cuda_target(name)
    options = CompileOptions(model=model, weights="none", target=name, ops=tuple(ops))
    with progress_display() as progress:
        compiler = None
        if effort is not Effort.QUICK:
            compiler = PointCompiler(target, cache_root() / "cubins", budget, progress)
        return tune_offline(shapes_of_model(options), target, progress, compiler)


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
        for kind in _kinds(database.target):
            entries = [(key, entry) for key in database.keys(kind) if (entry := database.find(kind, key))]
            shown += [
                {"target": database.target, "kind": kind, "key": key, **entry.to_json()}
                for key, entry in entries
            ]
            if entries and not as_json:
                _print_entries(f"{kind} on {database.target}", _rows(entries, _mode(strict)))
        _say(database.notices)
        if not as_json and _is_gpu(database.target):
            _print_public(database.target)
            _print_decode(database)
    if as_json:
        print_json(shown, indent=1)


@app.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Tables that pagec tune wrote.")],
) -> None:
    """Add tables, say of another machine, to the user's own."""
    from pagec.autotune.table import read_table

    for table in [read_table(file) for file in files]:
        typer.echo(_store(table))


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
            _say(database.notices)
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
    from pagec.autotune.database import Database
    from pagec.compiler.backends.targets import GPUS, load_target
    from pagec.compiler.driver import cache_root

    cache, found = cache_root(), []
    for name in targets or GPUS:
        if _is_gpu(name):
            found.append(Database(name, "cuda", cache=cache))
        else:
            found.append(Database(load_target(name).name, "cpu", cache=cache))
    return found


def _kinds(target: str) -> list[str]:
    """What is tuned on a target, by template."""
    from pagec.autotune.cpu_space import KNOBS
    from pagec.autotune.space import SPACES

    return list(SPACES if _is_gpu(target) else KNOBS)


def _store(table: Table) -> Path:
    """Into the user's tables; a stale one there makes way."""
    from pagec.autotune.database import DIRECTORY
    from pagec.autotune.table import merge, read_table, table_path
    from pagec.compiler.driver import cache_root
    from pagec.compiler.errors import ArtifactError

    root = cache_root() / DIRECTORY
    path = table_path(root, table.target, table.kind)
    try:
        merged = merge(read_table(path) if path.is_file() else None, table)
    except ArtifactError as error:
        _say([f"{path} is replaced: {error.message}"])
        merged = table
    return merged.write(root)


def _to_json(table: Table) -> dict[str, Any]:
    entries = {key: entry.to_json() for key, entry in table.entries.items()}
    return {"target": table.target, "kind": table.kind, "entries": entries}


# ---------------------------------------------------------------------------------- for people


def _mode(strict: bool) -> str:
    return "strict" if strict else "default"


def _say(notices: Sequence[str]) -> None:
    for notice in notices:
        stderr().print(f"[yellow]{notice}[/]", soft_wrap=True)


def _rows(entries: Any, mode: str) -> list[tuple[str, ...]]:
    """Cells: shape, rows, knobs, time, baseline, roofline, bound, origin."""
    return [_row(key, entry, choice) for key, entry in entries for choice in entry.sets[mode]]


def _row(key: str, entry: Entry, choice: Any) -> tuple[str, ...]:
    least = choice.facts.get("roofline_us")
    return (
        key,
        str(choice.rows or "any"),
        " ".join(f"{knob} {value}" for knob, value in choice.point.items() if value != PLAIN.get(knob)),
        _number(choice.us),
        "does not fit" if choice.baseline_us is None else _number(choice.baseline_us),
        f"{100 * least / choice.us:.0f} %" if least else "",
        str(choice.facts.get("bound", "")),
        entry.origin,
    )


def _print_entries(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table as Grid

    grid = Grid("shape", "rows", "chosen", "us", "untuned", "of roof", "bound by", "", title=title)
    for column in (grid.columns[0], grid.columns[2], *grid.columns[-2:]):
        column.no_wrap = True
    for column in grid.columns[3:6]:
        column.justify = "right"
    for row in rows:
        grid.add_row(*row)
    print_table(grid)


def _print_public(name: str) -> None:
    """The model's best tile of dense causal prefill beside that of a kernel tuned on the device."""
    from rich.table import Table as Grid

    from pagec.autotune.compare import against_public
    from pagec.compiler.backends.targets import load_cuda_target

    grid = Grid(
        "head size",
        "best",
        "us",
        "public tile",
        "us",
        "best / public",
        title=f"dense causal prefill on {name}, 4,096 tokens, 32 heads, by the model's own figures",
    )
    for one in against_public(load_cuda_target(name)):
        grid.add_row(
            str(one.head_dim),
            one.best_tile,
            _number(one.best_us),
            one.public_tile,
            _number(one.public_us),
            f"{one.best_us / one.public_us:.3f}",
        )
    print_table(grid)


def _print_decode(database: Database) -> None:
    """Chosen points of paged decoding beside tiles of 64 keys in blocks of 16."""
    from rich.table import Table as Grid

    from pagec.autotune.compare import against_small_blocks
    from pagec.compiler.backends.targets import load_cuda_target

    entry = database.find("attention_decode", COMPARED)
    if entry is None:
        return
    title = f"paged decoding on {database.target}, {COMPARED}: chosen, and the best of block 16, BN 64"
    grid = Grid(
        "sequences", "context", "chosen", "us", "bound by", "block 16, BN 64", "us", "bound by", title=title
    )
    for one in against_small_blocks(load_cuda_target(database.target), entry):
        grid.add_row(
            str(one.problem.sequences),
            str(one.problem.context),
            *(cell for found in (one.chosen, one.small) for cell in _cells(found)),
        )
    print_table(grid)


def _cells(found: Candidate) -> tuple[str, str, str]:
    assert found.prediction is not None
    knobs = " ".join(
        f"{knob} {found.point[knob]}" for knob in ("BN", "block_size", "split", "warps", "stages")
    )
    return knobs, _number(found.us), found.prediction.bound


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"
