"""A model's tokenizer as files: tokenizer.json, the chat template, and what generation needs to know.

A Hugging Face directory has them; a GGUF file has the vocabulary and the merges (or scores), from which
tokenizer.json is built. How text is cut before merging is data: configs/tokenizers.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import yaml

from pagec import configs
from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers.checkpoint import Checkpoint
from pagec.compiler.importers.gguf import GgufCheckpoint
from pagec.compiler.importers.hf import read_json

# Sampling defaults that a generation_config.json may hold.
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SPACE: Final = "\u2581"  # how SentencePiece writes a space


class _Kind(IntEnum):
    """Kinds of tokens in a GGUF file (tokenizer.ggml.token_type)."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`generation`: eos_token_ids, bos_token_id, pad_token_id, bos_token, eos_token (texts, for the chat
    template), add_bos (whether encoding puts bos in front), and sampling defaults."""

    tokenizer_json: str
    chat_template: str | None
    generation: Mapping[str, Any]


def tokenizer_of(checkpoint: Checkpoint) -> TokenizerFiles | None:
    """The tokenizer that comes with a checkpoint; None if there is none."""
    if isinstance(checkpoint, GgufCheckpoint):
        return tokenizer_of_gguf(checkpoint)
    return tokenizer_of_directory(checkpoint.path)


# ------------------------------------------------------------------------------ Hugging Face


def tokenizer_of_directory(path: Path) -> TokenizerFiles | None:
    """The tokenizer of a directory; None if there is no tokenizer.json."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", place=str(file), remedy="fetch it again") from error
    settings, config, generation = (
        read_json(path / name) if (path / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    tokenizer = _loaded(text, str(file))

    def token_id(name: str) -> Any:
        for source in (generation, config):
            if source.get(f"{name}_token_id") is not None:
                return source[f"{name}_token_id"]
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return tokenizer.token_to_id(token) if isinstance(token, str) else None

    sampling = {key: generation[key] for key in _SAMPLING if generation.get(key) is not None}
    ids = {name: token_id(name) for name in ("eos", "bos", "pad")}
    return TokenizerFiles(text, _template_of(path, settings), _generation(tokenizer, ids, sampling))


def _template_of(path: Path, settings: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _loaded(text: str, place: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"not a tokenizer: {error}", place=place, remedy="fetch it again") from error


def _generation(tokenizer: Any, ids: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What generation needs; `ids["eos"]` may be one id or a list."""
    eos = ids["eos"] if isinstance(ids["eos"], list) else [ids["eos"]]
    eos = [token for token in dict.fromkeys(eos) if isinstance(token, int)]
    bos = ids["bos"] if isinstance(ids["bos"], int) else None
    start = tokenizer.encode("a").ids[:1]
    return {
        "eos_token_ids": eos,
        "bos_token_id": bos,
        "pad_token_id": ids["pad"] if isinstance(ids["pad"], int) else None,
        "bos_token": None if bos is None else tokenizer.id_to_token(bos),
        "eos_token": tokenizer.id_to_token(eos[0]) if eos else None,
        "add_bos": bos is not None and start == [bos],
        **more,
    }


# -------------------------------------------------------------------------------------- GGUF


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokenizer's part of a GGUF file."""

    file: GgufCheckpoint
    tokens: Sequence[str]
    kinds: Sequence[int]

    def value(self, key: str) -> Any:
        return self.file.value(f"tokenizer.ggml.{key}")

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def tokenizer_of_gguf(file: GgufCheckpoint) -> TokenizerFiles | None:
    """The tokenizer of a GGUF file; None if it has none.

    A tokenizer.json beside the file wins: it is the original.
    """
    beside = tokenizer_of_directory(file.path.parent)
    if beside is not None:
        return beside
    model, tokens = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return None
    kinds = file.value("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = _Vocabulary(file, tokens, kinds)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise CheckpointError(
            f"its tokenizer is of kind {model!r}; known: {', '.join(builders)}",
            place=str(file.path),
            remedy="put the model's tokenizer.json beside the file",
        )
    data = builders[model](vocabulary)
    tokenizer = _loaded(json.dumps(data, ensure_ascii=False), str(file.path))
    template = file.value("tokenizer.chat_template")
    eos = [vocabulary.value(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {"eos": eos, "bos": vocabulary.value("bos_token_id"), "pad": vocabulary.value("padding_token_id")}
    return TokenizerFiles(
        tokenizer.to_str(), template if isinstance(template, str) else None, _generation(tokenizer, ids, {})
    )


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Byte-level BPE, as of GPT-2 and its followers."""
    kind = _byte_level_kind(vocabulary)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": kind.get("normalizer"),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": kind["pre_tokenizer"]},
        "post_processor": _template(vocabulary, bool(kind.get("add_bos", False))),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": bool(kind.get("ignore_merges", False)),
            "vocab": vocabulary.ids(),
            "merges": [merge.split(" ", 1) for merge in vocabulary.value("merges") or ()],
        },
    }


def _byte_level_kind(vocabulary: _Vocabulary) -> dict[str, Any]:
    wanted = vocabulary.value("pre") or "default"
    known = yaml.safe_load((configs.root() / "tokenizers.yaml").read_text(encoding="utf-8"))["byte_level"]
    for kind in known:
        if wanted in kind["names"]:
            return dict(kind)
    names = sorted(name for kind in known for name in kind["names"])
    raise CheckpointError(
        f"its tokenizer cuts text in the way {wanted!r}; known: {', '.join(names)}",
        place=str(vocabulary.file.path),
        remedy="put the model's tokenizer.json beside the file",
    )


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback, as of Llama 2 and Gemma."""
    prefix = vocabulary.value("add_space_prefix")
    prefix = True if prefix is None else bool(prefix)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    unspace = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.value("unknown_token_id")
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": _SPACE}, space] if prefix else [space],
        },
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids(),
            "merges": _merges_by_score(vocabulary),
        },
    }


def _merges_by_score(vocabulary: _Vocabulary) -> list[list[str]]:
    """Merges in the order in which SentencePiece prefers them: by the score of what they make.

    The file has scores only: every way to cut a piece into two pieces is a merge.
    """
    ids, scores = vocabulary.ids(), vocabulary.value("scores") or [0.0] * len(vocabulary.tokens)
    special = {t for t, k in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if k in (*_Kind,)}
    merges = []
    for index, token in enumerate(vocabulary.tokens):
        if token in special:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids and left not in special and right not in special:
                merges.append((-scores[index], ids[left], ids[right]))
    return [[vocabulary.tokens[left], vocabulary.tokens[right]] for _, left, right in sorted(merges)]


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else: control tokens and a user's own."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _Kind.USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (*_Kind,)
    ]


def _template(vocabulary: _Vocabulary, add_bos: bool) -> dict[str, Any] | None:
    """Puts bos in front and eos behind, where the file (or else its kind) says so."""
    said = vocabulary.value("add_bos_token")
    bos = vocabulary.value("bos_token_id") if (add_bos if said is None else said) else None
    eos = vocabulary.value("eos_token_id") if vocabulary.value("add_eos_token") else None
    if bos is None and eos is None:
        return None
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {vocabulary.tokens[i]: i for i in (bos, eos) if i is not None}

    def special(index: int | None) -> list[dict[str, Any]]:
        return [] if index is None else [{"SpecialToken": {"id": vocabulary.tokens[index], "type_id": 0}}]

    single = [*special(bos), sequence, *special(eos)]
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second],
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]} for token, index in tokens.items()
        },
    }
