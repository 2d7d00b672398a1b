"""MODEL_OR_ARTIFACT and the other options of commands that run a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer


class WeightsMemory(StrEnum):
    """How weights come into memory."""

    COPY = "copy"
    MMAP = "mmap"

    @property
    def kind(self) -> Literal["copy", "mmap"]:
        """As the engine takes it."""
        return "mmap" if self is WeightsMemory.MMAP else "copy"


ModelOrArtifact = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_ARTIFACT", help="An artifact, or what compile takes.", show_default=False
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads.", show_default="PAGEC_THREADS, or all cores")
]
Graphs = Annotated[
    int | None,
    typer.Option(
        "--graphs",
        min=0,
        help="On a GPU: steps of up to so many new tokens, one of each sequence, are captured as graphs and "
        "replayed; 0: none.",
        show_default="the artifact's most sequences",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(help="PATH of weights, or random:SEED.", show_default="the model's own"),
]
WeightsMemoryOption = Annotated[
    WeightsMemory,
    typer.Option(
        "--weights-memory",
        help="copy: read by all threads into huge pages. mmap: the file's own pages, read as touched.",
    ),
]
KvBytes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Size of the KV pool.", show_default="a share of what is free, or what is of use"
    ),
]
KvDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory where cached KV blocks outlive the process; others may share it.", show_default=False
    ),
]
KvDirBytes = Annotated[
    int | None,
    typer.Option(min=1, help="Most bytes in --kv-dir; the longest unused go first.", show_default="8 GiB"),
]
KvHostBytes = Annotated[
    int, typer.Option(min=0, help="Host memory for cold KV blocks and preempted requests; 0: none.")
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0: always the likeliest token; above: drawn by probability.")
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from so many tokens only (0: all).")]
TopP = Annotated[float, typer.Option(help="Draw from the tokens that together reach this.")]
MinP = Annotated[
    float, typer.Option(help="Draw from tokens of at least this share of the likeliest's probability.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.", show_default="drawn")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say on stderr where the memory goes.")]


def find_artifact(model: str, weights: str | None) -> tuple[Path, str | None]:
    """The artifact, and which weights to load into it (None: its own). If the model cannot be compiled, its
    child process has said why, and the command ends."""
    from pagec.compiler.errors import CompileError
    from pagec.runtime import models

    try:
        return models.find_artifact(model, weights)
    except CompileError as error:
        raise typer.Exit(1) from error
