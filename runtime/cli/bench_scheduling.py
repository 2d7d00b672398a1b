"""`pagec bench schedule`, `memory` and `host`: what needs no kernel to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagec.runtime.cli.console import JsonFlag, print_json, print_table, progress_display, stderr
from pagec.runtime.cli.models import ModelOrArtifact, Threads, find_artifact

if TYPE_CHECKING:
    from pagec.runtime.bench.schedule import Outcome
    from pagec.runtime.bench.summary import Summary


def schedule(
    device: Annotated[list[str] | None, typer.Option(help="a100 or h100; repeatable.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per policy.")] = 10_000,
    load: Annotated[float, typer.Option(min=0.01, help="Arrivals, 1 being what the device gets done.")] = 1.1,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Run static and continuous batching here, too, on this model.", show_default=False),
    ] = None,
    threads: Threads = None,
    as_json: JsonFlag = False,
) -> None:
    """Static batching and the policies on devices that are not here, by a cost model of an 8B model.

    Scheduler and block manager are the real ones; step times are a roofline's. With --model static and
    continuous batching are also measured, on this machine's engine with the requests of `throughput`.
    """
    from pagec.runtime.bench.roofline import ACCELERATORS, LLAMA_8B
    from pagec.runtime.bench.schedule import NAMES, compare
    from pagec.runtime.bench.summary import to_json

    names = device or list(ACCELERATORS)
    for name in names:
        if name not in ACCELERATORS:
            raise typer.BadParameter(f"one of {', '.join(ACCELERATORS)}", param_hint="--device")
    outcomes: list[Outcome] = []
    with progress_display() as progress:
        for name in names:
            outcomes += compare(
                ACCELERATORS[name],
                LLAMA_8B,
                NAMES,
                requests,
                load,
                lambda done, name=name: progress(name, done, len(NAMES)),  # type: ignore[misc]
            )
    measured = _measure(model, threads) if model is not None else {}
    if svg is not None:
        svg.write_text(_picture(outcomes, load), encoding="utf-8")
    if as_json:
        rows = [outcome.to_json() for outcome in outcomes]
        report = {"workload": "schedule", "model": LLAMA_8B.name, "load": load, "outcomes": rows}
        print_json({**report, "measured": to_json(measured)} if measured else report)
        return
    _print_outcomes(outcomes)
    for name, summary in measured.items():
        typer.echo(f"{name}: {summary.median:.2f} ({summary.least:.2f} to {summary.greatest:.2f})")


def memory(
    model: ModelOrArtifact,
    num_blocks: Annotated[
        int | None, typer.Option(min=2, help="Size of the pool.", show_default="all that could be used")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Unwritten slots of the pool, beside static allocation, and what shared beginnings save.

    For the limits, KV groups and block size of a model. No kernel runs: the numbers are exact.
    """
    from pagec.compiler.artifact import open_artifact
    from pagec.runtime.bench.memory import measure_memory

    program = open_artifact(find_artifact(model, None)[0]).program
    figures = measure_memory(program, num_blocks).to_json()
    if as_json:
        print_json({"workload": "memory", "model": program.model, **figures})
        return
    from rich.table import Table

    table = Table("figure", "value")
    table.columns[1].justify = "right"
    for name, value in figures.items():
        table.add_row(name, f"{100 * value:.2f} %" if isinstance(value, float) else f"{value:,}")
    print_table(table)


def host(
    sequences: Annotated[list[int] | None, typer.Option(min=1, help="Decoding at once; repeatable.")] = None,
    policy: Annotated[str, typer.Option(help="fcfs, priority or deadline.")] = "fcfs",
    as_json: JsonFlag = False,
) -> None:
    """CPU time of the host's part of a step: schedule, prepare, commit."""
    from pagec.runtime.bench.host import SIZES, measure_host

    costs = [measure_host(count, policy) for count in sequences or SIZES]
    if as_json:
        print_json({"workload": "host", "policy": policy, "steps": [cost.to_json() for cost in costs]})
        return
    from rich.table import Table

    table = Table("sequences", "part", "median us", "least", "greatest")
    for column in table.columns[2:]:
        column.justify = "right"
    for cost in costs:
        for name, summary in cost.parts.items():
            values = (summary.median, summary.least, summary.greatest)
            table.add_row(str(cost.num_sequences), name, *(f"{value:,.0f}" for value in values))
        table.add_section()
    print_table(table)


def _measure(model: str, threads: int | None) -> dict[str, Summary]:
    from pagec.compiler.artifact import open_artifact
    from pagec.runtime.bench.batching import ROWS, measure_batching
    from pagec.runtime.engine import Engine

    path, weights = find_artifact(model, None)
    return measure_batching(Engine(open_artifact(path), weights=weights, threads=threads, max_seqs=ROWS))


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    from rich.table import Table

    names = ("device", "policy", "tokens/s", "good/s", "good", "first p50 s", "p99", "each p50 ms", "p99")
    table = Table(*names, "preempted", "steps", "host s")
    for column in table.columns[2:]:
        column.justify = "right"
    table.columns[0].no_wrap = True
    device = ""
    for o in outcomes:
        if device and o.device != device:
            table.add_section()
        device = o.device
        table.add_row(
            o.device.split()[0],
            o.policy,
            f"{o.output_tokens_per_s:,.0f}",
            f"{o.goodput_per_s:.2f}",
            f"{100 * o.goodput_share:.1f} %",
            f"{o.ttft_s['p50']:.2f}",
            f"{o.ttft_s['p99']:.2f}",
            f"{1000 * o.token_s['p50']:.1f}",
            f"{1000 * o.token_s['p99']:.1f}",
            f"{o.preemptions:,}",
            f"{o.steps:,}",
            f"{o.host_s:.1f}",
        )
    print_table(table)
    stderr().print("[dim]good: within the request's own targets; each: seconds per further token[/]")


def _picture(outcomes: Sequence[Outcome], load: float) -> str:
    """Three panels for each device."""
    from pagec.runtime.bench.chart import Panel, bar_chart

    devices = list(dict.fromkeys(o.device for o in outcomes))
    panels = []
    for device in devices:
        mine = [o for o in outcomes if o.device == device]
        short = device.split()[0]
        panels += [
            Panel(f"{short}: output tokens/s", {o.policy: o.output_tokens_per_s for o in mine}),
            Panel(f"{short}: good requests/s", {o.policy: o.goodput_per_s for o in mine}),
            Panel(f"{short}: first token, median s", {o.policy: o.ttft_s["p50"] for o in mine}),
        ]
    return bar_chart(f"{outcomes[0].requests:,} requests per policy, load {load}", panels)
