"""MODEL_OR_ARTIFACT and the other options of commands that run a model."""

from __future__ import annotations

import json
import subprocess
import sys
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
Verbose = Annotated[bool, typer.Option("--verbose", help="Say on stderr where the memory goes.")]


def find_artifact(model: str, weights: str | None) -> tuple[Path, str | None]:
    """The artifact, and which weights to load into it (None: its own).

    A model that is none is compiled in a child process: this one shall never hold the compiler and torch.
    """
    from pagec.compiler.artifact import Artifact

    path = Path(model)
    if Artifact.is_artifact(path):
        return path, weights
    words = [sys.executable, "-m", "pagec.runtime.cli", "compile", model, "--json"]
    if weights is not None:
        words += ["--weights", weights]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise typer.Exit(done.returncode)  # the child has said why
    return Path(json.loads(done.stdout)["path"]), None
