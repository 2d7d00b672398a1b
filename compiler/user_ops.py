"""A user's own ops: Python files given by `--ops FILE.py`, which register them in the table of ops.

    from pagec.compiler.ops import Param, elementwise, register

    register(elementwise("swish", [Param("x", "value"), Param("beta", "scalar", 1.0, "number")],
                         meaning=lambda x, *, beta=1.0: x * (beta * x).sigmoid(),
                         scalar="x * sigmoid(beta * x)"))

The file is code and runs with all rights of the user who gives it. An artifact names the files it was made
with, but does not carry them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pagec.compiler.errors import ArtifactError, CompileError
from pagec.compiler.ir import Graph
from pagec.compiler.ops import OPS

_LOADED: Final[dict[Path, str]] = {}


def load_ops(files: Iterable[Path]) -> dict[str, str]:
    """Runs each file once; name -> sha256 of the files. CompileError if one cannot be run."""
    return {file.name: _load(file.resolve()) for file in files}


def _load(file: Path) -> str:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CompileError(f"cannot be read: {error.strerror}", place=str(file)) from error
    digest = hashlib.sha256(text).hexdigest()
    if _LOADED.get(file) == digest:
        return digest
    if file in _LOADED:
        raise CompileError("has changed since this process read it", place=str(file), remedy="start anew")
    spec = importlib.util.spec_from_file_location(f"pagec_ops_{digest[:12]}", file)
    if spec is None or spec.loader is None:
        raise CompileError("is no Python file", place=str(file), remedy="give a file that ends in .py")
    before = set(OPS)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except (Exception, SystemExit) as error:
        for name in set(OPS) - before:  # half of a file's ops would be worse than none
            del OPS[name]
        line = _line(error, file)
        raise CompileError(
            f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}",
            place=f"{file}:{line}" if line else str(file),
            remedy="mend the file; see pagec.compiler.ops",
        ) from error
    _LOADED[file] = digest
    return digest


def _line(error: BaseException, file: Path) -> int | None:
    """The line of the file that an error comes from."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)


def check_known(graph: Graph, place: str) -> None:
    """ArtifactError names the ops of an artifact's graph that no file has registered."""
    unknown = sorted({node.op for node in graph.nodes if node.op not in OPS})
    if unknown:
        raise ArtifactError(
            f"its graph has ops that pagec does not know: {', '.join(unknown)}",
            place=place,
            remedy="give the file that registers them: --ops FILE.py",
        )
