"""`pagec import`: the YAML that a checkpoint maps to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[
        Path, typer.Argument(metavar="DIR_OR_GGUF", help="A Hugging Face directory or a GGUF file.")
    ],
) -> None:
    """Print the YAML spec that a checkpoint maps to.

    [bold]pagec import SmolLM2.gguf > smollm2.yaml[/]
    """
    from pagec.compiler.importers import import_model

    typer.echo(import_model(source).yaml_text, nl=False)
