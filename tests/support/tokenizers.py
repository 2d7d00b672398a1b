"""Real tokenizers without a model: the files that an artifact has, written from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from pagec.compiler.importers.gguf import GgufCheckpoint
from pagec.compiler.importers.tokenizer import tokenizer_of_gguf
from pagec.runtime.text.tokenizer import Tokenizer


def write_tokenizer(gguf: Path, artifact: Path) -> Path:
    """The tokenizer of a GGUF file as an artifact has it; the path of its tokenizer.json."""
    files = tokenizer_of_gguf(GgufCheckpoint(gguf))
    assert files is not None
    directory = artifact / "tokenizer"
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(files.tokenizer_json)
    (directory / "generation.json").write_text(json.dumps(files.generation))
    if files.chat_template is not None:
        (directory / "chat_template.jinja").write_text(files.chat_template)
    return directory / "tokenizer.json"


def byte_tokenizer(artifact: Path, *, eos_token_ids: Collection[int] = (0,)) -> Tokenizer:
    """In SentencePiece's manner: some words and letters, the bytes for all else; 0 and 1 are special."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = ["</s>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehlnorstwy.,", "▁the", "on▁"]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(pieces[:2])
    directory = artifact / "tokenizer"
    directory.mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "generation.json").write_text(json.dumps({"eos_token_ids": list(eos_token_ids)}))
    return Tokenizer.open(artifact)
