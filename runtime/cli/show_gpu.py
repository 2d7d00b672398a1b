"""`pagec show` of what is for a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pagec.runtime.cli.console import print_json, print_table, progress_display
from pagec.runtime.cli.tuned import tuned_choices

if TYPE_CHECKING:
    from pagec.compiler.show_gpu import GpuModel


def show_gpu(what: str, model: str, target: str, strict: bool, ops: Iterable[Path], as_json: bool) -> None:
    """`what`: graph, fused, plan or kernels."""
    from pagec.compiler.driver import CompileOptions
    from pagec.compiler.ir import format_graph, to_json
    from pagec.compiler.show_gpu import format_plan, load_gpu_graphs, load_gpu_model, plan_rows
    from pagec.compiler.user_ops import load_ops

    load_ops(ops)
    options = CompileOptions(
        model=model, target=target, ops=tuple(ops), strict=strict, tuned=tuned_choices(target, strict)
    )
    if what == "kernels":
        with progress_display() as progress:
            found = load_gpu_model(options, progress)
        _show_kernels(found, as_json)
        return
    graphs = load_gpu_graphs(options)
    if what == "plan":
        if as_json:
            print_json(plan_rows(graphs), indent=2)
        else:
            typer.echo(format_plan(graphs), nl=False)
        return
    chosen = graphs.graph if what == "graph" else graphs.fused
    if as_json:
        print_json(to_json(chosen), indent=2)
    else:
        typer.echo(format_graph(chosen), nl=False)


def _show_kernels(model: GpuModel, as_json: bool) -> None:
    """A line for each kernel; as JSON with its source."""
    rows = _rows(model)
    if as_json:
        print_json([{**row, "source": model.sources[row["key"]]} for row in rows], indent=2)
        return
    from rich.table import Table

    heads = ("kernel", "tile", "warps", "stages", "registers", "shared", "spills", "blocks/SM", "MMA")
    grid = Table(*heads, "rows", "us", "bound by", title=f"{model.program.model} on {model.target.name}")
    grid.columns[0].no_wrap = True
    grid.columns[0].overflow = "fold"
    for column in (*grid.columns[2:8], *grid.columns[9:11]):
        column.justify = "right"
    for row in rows:
        us = "" if row["predicted_us"] is None else f"{row['predicted_us']:.4g}"
        names = ("key", "tile", "warps", "stages", "registers", "shared_bytes", "spills", "occupancy", "mma")
        grid.add_row(*(str(row[name]) for name in names), str(row["rows"]), us, row["bound"] or "")
    print_table(grid)


def _rows(model: GpuModel) -> list[dict[str, Any]]:
    """What the compiler says of each kernel, and the cost model where it has one of its kind."""
    from pagec.autotune.kernels import predicted
    from pagec.compiler.show_gpu import kernel_rows

    rows = []
    for row in kernel_rows(model):
        found = predicted(row.kernel, row.rows, row.resources, model.target)
        time: dict[str, Any] = {"predicted_us": None, "bound": None, "predicted_for": None}
        if found is not None:
            problem, prediction = found
            time = {
                "predicted_us": float(f"{prediction.us:.6g}"),
                "bound": prediction.bound,
                "predicted_for": problem.to_json(),
            }
        rows.append({**row.to_json(), **time})
    return rows
