"""`pagec bench`: workloads, start-up and kernels, beside the machine's limits in the same run; scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pagec.runtime.cli import bench_scheduling
from pagec.runtime.cli.console import (
    JsonFlag,
    print_json,
    print_ledger,
    print_limits,
    print_table,
    progress_display,
    stderr,
)
from pagec.runtime.cli.models import (
    Graphs,
    ModelOrArtifact,
    Threads,
    Verbose,
    Weights,
    WeightsMemory,
    WeightsMemoryOption,
    find_artifact,
)

if TYPE_CHECKING:
    from pagec.compiler.artifact import Artifact, GpuArtifact
    from pagec.runtime.bench.kernels import KernelTime
    from pagec.runtime.bench.limits import Limits
    from pagec.runtime.bench.summary import Summary
    from pagec.runtime.engine import Engine

Repeat = Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported.")]
DEFAULT_REPEAT: Final = 5
ALL: Final = ("latency", "prefill", "throughput", "prefix")

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _help() -> None:
    """Measure a model on this machine: greedy, ignoring the end of text, new random tokens every time.

    The read bandwidth and the peak of dot products are measured in the same run: on a CPU by compiled code,
    on a GPU by a copy within its memory and by torch's product of matrices.

        [bold]pagec bench latency SmolLM2.gguf --json[/]
    """


def _command(name: str, title: str, names: Sequence[str]) -> None:
    def command(
        model: ModelOrArtifact,
        repeat: Repeat = DEFAULT_REPEAT,
        threads: Threads = None,
        graphs: Graphs = None,
        weights: Weights = None,
        weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
        verbose: Verbose = False,
        as_json: JsonFlag = False,
    ) -> None:
        options = Options(model, repeat, threads, graphs, weights, weights_memory, verbose, as_json)
        _run(names, name == "all", options)

    command.__doc__ = title
    app.command(name)(command)


_command("latency", "One stream: 128 prompt tokens, 128 generated.", ["latency"])
_command("prefill", "One prompt of 1,024 tokens.", ["prefill"])
_command("throughput", "64 requests at once; prompts 32 to 256 tokens, answers 16 to 256.", ["throughput"])
_command("prefix", "32 requests that share 512 tokens, with 32 of their own and 32 generated.", ["prefix"])
app.command("schedule")(bench_scheduling.schedule)
app.command("memory")(bench_scheduling.memory)
app.command("host")(bench_scheduling.host)
_command("all", "The four workloads in turns, then startup if there is a tokenizer.", ALL)


@dataclass(frozen=True, slots=True)
class Options:
    """What the commands share."""

    model: str
    repeat: int
    threads: int | None
    graphs: int | None
    weights: str | None
    weights_memory: WeightsMemory
    verbose: bool
    as_json: bool

    def open(self) -> tuple[Artifact | GpuArtifact, str | None]:
        """The artifact, compiled if need be, and which weights to load."""
        from pagec.compiler.artifact import open_artifact

        path, weights = find_artifact(self.model, self.weights)
        return open_artifact(path), weights

    def engine(
        self, artifact: Artifact | GpuArtifact, weights: str | None, num_blocks: int | None = None
    ) -> Engine:
        from pagec.runtime.engine import Engine

        engine = Engine(
            artifact,
            threads=self.threads,
            weights=weights,
            weights_memory=self.weights_memory.kind,
            num_blocks=num_blocks,
            graph_rows=self.graphs,
        )
        if self.verbose:
            print_ledger(engine.ledger)
        return engine

    @property
    def child_options(self) -> list[str]:
        """The same choices for `pagec generate`."""
        words = ["--weights-memory", self.weights_memory.value]
        words += ["--threads", str(self.threads)] if self.threads else []
        words += ["--graphs", str(self.graphs)] if self.graphs is not None else []
        return words + (["--weights", self.weights] if self.weights else [])


def _run(names: Sequence[str], with_startup: bool, options: Options) -> None:
    from pagec.runtime.bench.run import run_workloads
    from pagec.runtime.bench.workloads import pool_blocks

    artifact, weights = options.open()
    engine = options.engine(artifact, weights, pool_blocks(names, artifact.program))
    with progress_display() as progress:
        reports = run_workloads(artifact, engine, names, options.repeat, progress)
    ledger = engine.ledger.to_json()
    rows = {report.workload: report.figures for report in reports}
    found = {report.workload: {**report.to_json(), "memory": ledger} for report in reports}
    del engine
    if with_startup and (summary := _startup(artifact.path, options)):
        from pagec.runtime.bench.summary import to_json

        rows["startup"] = summary
        found["startup"] = {"workload": "startup", "repeat": options.repeat, **to_json(summary)}
    if options.as_json:
        print_json(found if len(names) > 1 else found[names[0]])
    else:
        _print_figures(rows)


def _startup(path: Path, options: Options) -> dict[str, Summary] | None:
    """Figures of fresh processes; None, and a word about it, if the artifact has no tokenizer."""
    from pagec.compiler.errors import ArtifactError
    from pagec.runtime.bench.startup import measure_startup

    try:
        return measure_startup(path, options.child_options, options.repeat)
    except ArtifactError as error:
        stderr().print(f"[yellow]startup left out: {error.message}[/]")
        return None


@app.command("startup")
def startup(
    model: ModelOrArtifact,
    repeat: Repeat = DEFAULT_REPEAT,
    threads: Threads = None,
    graphs: Graphs = None,
    weights: Weights = None,
    weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
    as_json: JsonFlag = False,
) -> None:
    """From process start to the first token of `pagec generate`, in fresh processes."""
    from pagec.runtime.bench.startup import measure_startup
    from pagec.runtime.bench.summary import to_json

    options = Options(model, repeat, threads, graphs, weights, weights_memory, False, as_json)
    artifact, _ = options.open()
    summary = measure_startup(artifact.path, options.child_options, repeat)
    if as_json:
        print_json({"workload": "startup", "repeat": repeat, **to_json(summary)})
    else:
        _print_figures({"startup": summary})


@app.command("kernels")
def kernels(
    model: ModelOrArtifact,
    repeat: Repeat = DEFAULT_REPEAT,
    threads: Threads = None,
    weights: Weights = None,
    weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
    verbose: Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Each kernel alone at several row counts, beside the least time that its bytes and FLOPs allow.

    Weights, keys and values come from memory; rows of activations may not, so a share can exceed 100 %.
    """
    from pagec.runtime.bench.kernels import time_kernels

    options = Options(model, repeat, threads, 0, weights, weights_memory, verbose, as_json)
    artifact, loaded = options.open()
    engine = options.engine(artifact, loaded)
    with progress_display() as progress:
        rows, limits = time_kernels(artifact, engine, repeat, progress)
    if as_json:
        head = {"workload": "kernels", "model": artifact.program.model, "repeat": repeat}
        times = [row.to_json() for row in rows]
        print_json({**head, "threads": engine.device.num_workers, **limits.figures, "kernels": times})
    else:
        _print_kernels(rows, limits)


# ------------------------------------------------------------------------------------- for people


def _print_figures(reports: Mapping[str, Mapping[str, Summary]]) -> None:
    from rich.table import Table

    table = Table("workload", "figure", "median", "least", "greatest")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, figures in reports.items():
        for figure, summary in figures.items():
            numbers = (summary.median, summary.least, summary.greatest)
            table.add_row(name, figure, *(_number(figure, value) for value in numbers))
        table.add_section()
    print_table(table)


def _number(figure: str, value: float) -> str:
    if figure.endswith("_share"):
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _print_kernels(rows: Sequence[KernelTime], limits: Limits) -> None:
    from rich.table import Table

    table = Table("kernel", "launches", "rows", "us", "bound us", "of it", "by", "case")
    table.columns[0].no_wrap = table.columns[-1].no_wrap = True
    for column in table.columns[1:6]:
        column.justify = "right"
    for row in rows:
        has_bound = row.bound_us > 0
        table.add_row(
            row.kernel,
            str(row.launches),
            str(row.rows),
            f"{row.us:,.1f}",
            f"{row.bound_us:,.1f}" if has_bound else "",
            f"{100 * row.share:.0f} %" if has_bound else "",
            row.bound,
            row.case,
        )
    print_table(table)
    print_limits(limits)
