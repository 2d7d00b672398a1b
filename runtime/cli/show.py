"""`pagec show`: what a model becomes, stage by stage."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pagec.runtime.cli.compile import TARGET_HELP, OpsOption
from pagec.runtime.cli.console import JsonFlag, print_json


class Subject(StrEnum):
    """What can be looked at."""

    GRAPH = "graph"
    FUSED = "fused"
    PLAN = "plan"
    KERNELS = "kernels"
    MANIFEST = "manifest"


def command(
    what: Annotated[Subject, typer.Argument(help="Which stage.")],
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_ARTIFACT")],
    target: Annotated[str, typer.Option(help=f"Of a model: {TARGET_HELP}")] = "cpu",
    strict: Annotated[
        bool, typer.Option("--strict", help="Of a model for a GPU: as compile has it.")
    ] = False,
    ops: OpsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a model's graph, its fused graph, its plan (bytes and FLOPs; what was fused, what was not and
    why), its kernels (for a GPU: what they occupy, and their time by the cost model), or a manifest.

        [bold]pagec show plan SmolLM2.gguf[/]
        [bold]pagec show kernels llama-3.2-1b --target h100[/]
    """
    if what is Subject.MANIFEST:
        _show_manifest(Path(model), as_json)
        return
    from pagec.compiler.show_gpu import is_for_gpu

    if is_for_gpu(model, target):
        from pagec.runtime.cli.show_gpu import show_gpu

        show_gpu(what.value, model, target, strict, ops or (), as_json)
        return
    from pagec.compiler.artifact import Artifact
    from pagec.compiler.driver import CompileOptions
    from pagec.compiler.show import show
    from pagec.runtime.cli.tuned import tuned_choices

    tuned = {} if Artifact.is_artifact(Path(model)) else tuned_choices(target)
    options = CompileOptions(model=model, target=target, ops=tuple(ops or ()), tuned=tuned)
    typer.echo(show(what.value, options, as_json), nl=False)


def _show_manifest(path: Path, as_json: bool) -> None:
    from pagec.compiler.artifact import look_at

    manifest = look_at(path).manifest
    if as_json:
        print_json(manifest, indent=1)
        return
    for key, value in manifest.items():
        if key != "files":
            typer.echo(f"{key:10} {_line(value)}")
    for name, entry in manifest["files"].items():
        typer.echo(f"file       {entry['bytes']:>12} bytes  sha256 {entry['sha256'][:16]}  {name}")


def _line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_line(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(_line(item) for item in value)
    return str(value)
