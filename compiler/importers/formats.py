"""The forms that checkpoints come in."""

from __future__ import annotations

from pathlib import Path

from pagec.compiler.importers.checkpoint import Checkpoint
from pagec.compiler.importers.gguf import GgufCheckpoint
from pagec.compiler.importers.hf import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """A .gguf file, or a Hugging Face directory of safetensors."""
    return GgufCheckpoint(path) if path.suffix == ".gguf" else SafetensorsCheckpoint(path)
