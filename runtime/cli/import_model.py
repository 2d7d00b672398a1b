"""`pagec import`: the YAML that a checkpoint maps to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[
        Path, typer.Argument(metavar="DIR_OR_GGUF", help="A Hugging Face directory or a GGUF file.")
    ],
    draft: Annotated[
        bool, typer.Option("--draft", help="For an architecture that no family knows: a spec to complete.")
    ] = False,
) -> None:
    """Print the YAML spec that a checkpoint maps to.

    [bold]pagec import SmolLM2.gguf > smollm2.yaml[/]
    [bold]pagec import --draft NewModel > newmodel.yaml[/]
    """
    if draft:
        from pagec.compiler.importers.draft import draft as draft_of

        typer.echo(draft_of(source), nl=False)
        return
    from pagec.compiler.importers import import_model

    typer.echo(import_model(source).yaml_text, nl=False)
