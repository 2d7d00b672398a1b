"""Generation defaults that an artifact carries (tokenizer/generation.json)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOKENIZER_DIRECTORY: Final = "tokenizer"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Which tokens end a text, and which one begins it; the `_token`s are texts for chat templates."""

    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    add_bos: bool = False
    bos_token: str = ""
    eos_token: str = ""

    @staticmethod
    def read(artifact: Path) -> GenerationDefaults:
        """Those of an artifact; none if it has no tokenizer."""
        file = artifact / TOKENIZER_DIRECTORY / "generation.json"
        if not file.is_file():
            return GenerationDefaults()
        data = json.loads(file.read_text(encoding="utf-8"))
        return GenerationDefaults(
            frozenset(data["eos_token_ids"]),
            data.get("bos_token_id"),
            bool(data.get("add_bos", False)),
            data.get("bos_token") or "",
            data.get("eos_token") or "",
        )
