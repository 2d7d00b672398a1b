"""Tokenizers: from a directory as they are, from GGUF rebuilt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagec.compiler.errors import CheckpointError
from pagec.compiler.importers.gguf import GgufCheckpoint
from pagec.compiler.importers.tokenizer import TokenizerFiles, tokenizer_of_directory, tokenizer_of_gguf

TEXTS = [
    "Hello, world!",
    "  leading and   several  spaces ",
    "日本語のテキストと中文",
    "emoji 🙂👩‍👩‍👧 and é à ñ",
    "def f(x):\n\treturn x  # comment\n\n\n",
    "don't we'll I'M",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]
DIGITS = ["12345", "in 1999, 3.14 and 1,000,000", "x1y22z333", "a  1", "٣٤٥ ²³"]


class FakeGguf:
    """The metadata of a GGUF file."""

    def __init__(self, directory: Path, **values: Any) -> None:
        self.path = directory / "fake.gguf"
        self.values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}

    def value(self, key: str) -> Any:
        return self.values.get(key)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> TokenizerFiles:
    files = tokenizer_of_gguf(GgufCheckpoint(smollm2_gguf))
    assert files is not None
    return files


def test_smollm2_round_trips(smollm2: TokenizerFiles) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    for text in TEXTS + DIGITS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_smollm2_has_the_ids_that_transformers_gives_but_for_digits(
    smollm2: TokenizerFiles, smollm2_gguf: Path
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    ours = Tokenizer.from_str(smollm2.tokenizer_json)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


def test_smollm2_splits_digits_one_by_one(smollm2: TokenizerFiles) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    for text in DIGITS:
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text).ids]
        assert all(len(piece.strip()) == 1 for piece in pieces if any(c in "0123456789" for c in piece)), (
            pieces
        )
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]


def test_smollm2_control_tokens_and_generation(smollm2: TokenizerFiles) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids == [1, 4093, 2]
    assert tokenizer.decode([1, 4093, 2]) == "user"
    assert smollm2.generation == {
        "eos_token_ids": [2],
        "bos_token_id": 1,
        "pad_token_id": 2,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos": False,
    }
    assert smollm2.chat_template is not None
    assert "add_generation_prompt" in smollm2.chat_template


def test_the_same_file_gives_the_same_text(smollm2: TokenizerFiles, smollm2_gguf: Path) -> None:
    assert tokenizer_of_gguf(GgufCheckpoint(smollm2_gguf)) == smollm2


BYTES = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]


def byte_level(directory: Path, pre: str | None, **more: Any) -> Tokenizer:
    tokens = ["<s>", "</s>", *BYTES, "ab", "12"]
    fake = FakeGguf(
        directory, model="gpt2", pre=pre, tokens=tokens, token_type=[3, 3] + [1] * (len(tokens) - 2),
        merges=["a b", "1 2"], bos_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    files = tokenizer_of_gguf(fake)  # type: ignore[arg-type]
    assert files is not None
    return Tokenizer.from_str(files.tokenizer_json)


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["ab", "12"]),
        ("smollm", ["ab", "1", "2"]),
        ("llama-bpe", ["<s>", "ab", "12"]),
        ("qwen2", ["ab", "1", "2"]),
        ("default", ["ab", "12"]),
        (None, ["ab", "12"]),
    ],
)
def test_kinds_of_byte_level_tokenizers(pre: str | None, tokens: list[str], tmp_path: Path) -> None:
    assert byte_level(tmp_path, pre).encode("ab12").tokens == tokens


def test_bos_and_eos_as_the_file_says(tmp_path: Path) -> None:
    assert byte_level(tmp_path, "llama-bpe", add_bos_token=False).encode("ab").tokens == ["ab"]
    both = byte_level(tmp_path, "gpt-2", add_bos_token=True, add_eos_token=True)
    assert both.encode("ab").tokens == ["<s>", "ab", "</s>"]


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cuts text in the way 'mystery'; known: .*gpt-2"):
        byte_level(tmp_path, "mystery")
    with pytest.raises(CheckpointError, match="its tokenizer is of kind 'bert'"):
        tokenizer_of_gguf(FakeGguf(tmp_path, model="bert", tokens=["a"]))  # type: ignore[arg-type]
    assert tokenizer_of_gguf(FakeGguf(tmp_path)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    pieces = ["▁", "a", "b", "c", "ab", "▁ab", "abc", "▁c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-50.0, -51.0, -52.0, -53.0, -1.0, -2.0, -3.0, -4.0]
    fake = FakeGguf(
        tmp_path, model="llama", tokens=tokens, token_type=kinds, scores=scores, bos_token_id=1,
        eos_token_id=2, unknown_token_id=0, add_space_prefix=prefix,
    )  # fmt: skip
    files = tokenizer_of_gguf(fake)  # type: ignore[arg-type]
    assert files is not None
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    assert tokenizer.encode("ab c").tokens == ["<s>", "▁ab" if prefix else "ab", "▁c"]
    assert tokenizer.encode("abc").tokens == ["<s>", *(["▁ab", "c"] if prefix else ["abc"])]
    assert files.generation["add_bos"] is True
    for text in ("ab  c", "é🙂", "cab\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


# --------------------------------------------------------------------------------- directories


def directory_with(path: Path, smollm2: TokenizerFiles, **files: Any) -> TokenizerFiles:
    (path / "tokenizer.json").write_text(smollm2.tokenizer_json)
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data))
    found = tokenizer_of_directory(path)
    assert found is not None
    return found


def test_a_directory_is_taken_as_it_is(tmp_path: Path, smollm2: TokenizerFiles) -> None:
    assert tokenizer_of_directory(tmp_path) is None
    found = directory_with(
        tmp_path,
        smollm2,
        tokenizer_config={"chat_template": "{{ x }}", "bos_token": {"content": "<|im_start|>"}},
        config={"eos_token_id": 0},
        generation_config={"eos_token_id": [2, 0, 2], "temperature": 0.2, "top_k": None},
    )
    assert found.tokenizer_json == smollm2.tokenizer_json
    assert found.chat_template == "{{ x }}"
    assert found.generation == {
        "eos_token_ids": [2, 0], "bos_token_id": 1, "pad_token_id": None, "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>", "add_bos": False, "temperature": 0.2,
    }  # fmt: skip


def test_chat_templates_in_their_other_places(tmp_path: Path, smollm2: TokenizerFiles) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert directory_with(tmp_path, smollm2, tokenizer_config={"chat_template": several}).chat_template == "D"
    assert directory_with(tmp_path, smollm2, config={"eos_token_id": 0}).generation["eos_token_ids"] == [0]
    (tmp_path / "chat_template.jinja").write_text("J")
    assert directory_with(tmp_path, smollm2).chat_template == "J"


def test_a_tokenizer_beside_a_gguf_file_wins(tmp_path: Path, smollm2: TokenizerFiles) -> None:
    directory_with(tmp_path, smollm2)
    found = tokenizer_of_gguf(FakeGguf(tmp_path, model="mystery", tokens=["a"]))  # type: ignore[arg-type]
    assert found is not None
    assert found.tokenizer_json == smollm2.tokenizer_json


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        tokenizer_of_directory(tmp_path)
