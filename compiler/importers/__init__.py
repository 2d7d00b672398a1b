"""Importers: checkpoints of other formats, and the specs, weights and tokenizers that they hold."""

from __future__ import annotations

from pagec.compiler.importers.checkpoint import Checkpoint, WeightSource
from pagec.compiler.importers.formats import open_checkpoint
from pagec.compiler.importers.model import Imported, import_model, locate
from pagec.compiler.importers.tokenizer import TokenizerFiles, tokenizer_of

__all__ = [
    "Checkpoint",
    "Imported",
    "TokenizerFiles",
    "WeightSource",
    "import_model",
    "locate",
    "open_checkpoint",
    "tokenizer_of",
]
