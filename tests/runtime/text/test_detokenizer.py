"""The pieces of a stream make up the whole text; no broken characters in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagec.runtime.text.detokenizer import REPLACEMENT, Detokenizer

TEXTS = [
    "plain words, and more.",
    "emoji 👩‍👩‍👧‍👦 in a 🙂 row 🎉🎉",
    "日本語のテキスト、そして中文。",
    "  two  spaces\n\nand lines ",
    "é e\u0301 ñ \u200b",
]


def byte_level() -> Tokenizer:
    """One token per byte: every character outside ASCII is spread over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's manner: words with a mark for the space before, bytes for what is unknown."""
    pieces = [f"<0x{i:02X}>" for i in range(256)] + ["▁", *"abcdefghijklmnopqrstuvwxyz,."]
    pieces += ["▁two", "▁and", "words"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def stream(tokenizer: Tokenizer, ids: Sequence[int], step: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.add(ids[at : at + step]) for at in range(0, len(ids), step)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_pieces_make_up_the_text(make: object, text: str, step: int) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text).ids
    pieces = stream(tokenizer, ids, step)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(text=st.text(max_size=30), cut=st.integers(0, 120))
def test_any_text_cut_anywhere(text: str, cut: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids[:cut]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_stream_that_ends_within_a_character_says_so_at_the_end() -> None:
    tokenizer = byte_level()
    pieces = stream(tokenizer, tokenizer.encode("ab🙂").ids[:-1])
    assert pieces[:2] == ["a", "b"]
    assert not any(REPLACEMENT in piece for piece in pieces[:-1])
    assert pieces[-1] == REPLACEMENT


def test_text_is_given_at_once_when_it_is_certain() -> None:
    tokenizer = byte_level()
    assert stream(tokenizer, tokenizer.encode("abc").ids) == ["a", "b", "c", ""]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_are_silent_and_cost_no_space(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    words = tokenizer.encode("and two").ids
    end = tokenizer.token_to_id("<end>")
    ids = [end, *words, end, end, *words]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
