"""`pagec profile`: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagec.runtime.cli.console import JsonFlag, print_json, print_ledger, print_limits, print_table, stderr
from pagec.runtime.cli.models import (
    ModelOrArtifact,
    Threads,
    Verbose,
    Weights,
    WeightsMemory,
    WeightsMemoryOption,
    find_artifact,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagec.runtime.bench.profile import PhaseProfile, ProfileRow


def command(
    model: ModelOrArtifact,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of decoding.")] = 32,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write a Chrome trace (chrome://tracing, Perfetto) here."),
    ] = None,
    threads: Threads = None,
    weights: Weights = None,
    weights_memory: WeightsMemoryOption = WeightsMemory.COPY,
    verbose: Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Time per kernel in steps of prefill and of decoding, beside what bytes and FLOPs allow.

    On a GPU every kernel is launched by itself, where serving replays captured steps: what is faster than a
    launch seems to take as long as that. `pagec bench kernels` has the kernels' own times.

    [bold]pagec profile SmolLM2.gguf --batch 8 -o trace.json[/]
    """
    from pagec.compiler.artifact import open_artifact
    from pagec.runtime.bench.profile import profile
    from pagec.runtime.engine import Engine

    path, weights = find_artifact(model, weights)
    artifact = open_artifact(path)
    engine = Engine(
        artifact, threads=threads, weights=weights, weights_memory=weights_memory.kind, graph_rows=0
    )
    if verbose:
        print_ledger(engine.ledger)
    found, recorder, limits = profile(artifact, engine, prompt_tokens, batch, steps)
    if output is not None:
        recorder.write(output)
    if as_json:
        phases = [phase.to_json() for phase in found]
        print_json({"model": artifact.program.model, **limits.figures, "phases": phases}, indent=1)
        return
    for phase in found:
        _print_phase(phase)
    print_limits(limits)
    if output is not None:
        stderr().print(f"[dim]trace of {len(recorder.steps)} steps: {output}[/]")


def _print_phase(phase: PhaseProfile) -> None:
    from rich.table import Table

    title = f"{phase.phase}: {phase.steps} steps of {phase.tokens:.0f} tokens, {phase.step_us:,.0f} us each"
    table = Table("kernel", "launches", "us", "share", "bound us", "of it", "by", title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[1:6]:
        column.justify = "right"
    for rows in (phase.kernels, phase.templates, phase.engine):
        _add_rows(table, rows)
    print_table(table)


def _add_rows(table: object, rows: Sequence[ProfileRow]) -> None:
    from rich.table import Table

    assert isinstance(table, Table)
    for row in rows:
        has_bound = row.bound_us > 0
        table.add_row(
            row.name,
            f"{row.launches:.0f}",
            f"{row.us:,.1f}",
            f"{100 * row.share:.1f} %",
            f"{row.bound_us:,.1f}" if has_bound else "",
            f"{100 * row.of_bound:.0f} %" if has_bound else "",
            row.bound,
        )
    table.add_section()
