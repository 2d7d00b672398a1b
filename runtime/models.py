"""Which artifact is meant by what a user calls a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pagec.compiler.artifact import Artifact
from pagec.compiler.errors import CompileError


def find_artifact(
    model: str, weights: str | None = None, *, capture: bool = False
) -> tuple[Path, str | None]:
    """The artifact, and which weights to load into it (None: its own); CompileError if there is none.

    A model that is none is compiled (once) in a child process: this one shall never hold the compiler and
    torch. What the child says goes to stderr, or with `capture` into the error.
    """
    path = Path(model)
    if Artifact.is_artifact(path):
        return path, weights
    words = [sys.executable, "-m", "pagec.runtime.cli", "compile", model, "--json"]
    if weights is not None:
        words += ["--weights", weights]
    said = subprocess.PIPE if capture else None
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=said, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.rpartition("error: ")[2].strip() if capture else ""  # behind its progress
        raise CompileError(reason or f"{model} could not be compiled")
    return Path(json.loads(done.stdout)["path"]), None
