"""Tokens to text, ended by stop strings: against searching the whole text character by character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tokenizers import byte_tokenizer, write_tokenizer

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Logprob, TokenLogprobs
from pagec.runtime.text.choice import ChoiceText, TextPiece, _Prefix, bad_word_ids
from pagec.runtime.text.detokenizer import REPLACEMENT
from pagec.runtime.text.pieces import TokenTexts, token_bytes
from pagec.runtime.text.tokenizer import Tokenizer

TEXT = "So 🙂👩‍👩‍👧 said: naïve café, 日本語とemoji; e\u0301 ـًـ नमस्ते \n\n  END.\n```end``` the end. then"
END = 2  # <|im_end|>, what ends SmolLM2's texts


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(smollm2_gguf, path)
    return Tokenizer.open(path)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("pieces"))


def read(choice: ChoiceText, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[TextPiece]:
    """What comes of tokens that arrive in groups that end at the cuts, or one by one; then the end."""
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)}) if cuts else range(1, len(ids) + 1)
    found, start = [], 0
    for end in ends:
        found.append(choice.add(ids[start:end]))
        start = end
        if found[-1].stop_reason is not None:
            return found
    return [*found, choice.add((), (), True)]


def stopped(text: str, stops: Sequence[str], first: int = 0) -> tuple[str, str | None, int]:
    """The text up to the stop that is complete first behind so many characters, the stop, and its end."""
    for end in range(first + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop, end
    return text, None, len(text)


def certain(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Characters of the text up to the last token that ends with a character."""
    texts = (tokenizer.decode(ids[:end]) for end in range(len(ids), -1, -1))
    return len(next(text for text in texts if not text.endswith(REPLACEMENT)))


STOPS = st.lists(
    st.one_of(
        st.builds(lambda i, n: TEXT[i : i + n], st.integers(0, len(TEXT) - 1), st.integers(1, 9)),
        st.sampled_from(["end", "the end", " the", "th", "```", "\n\n", "é", "e", "👧", "日本", "zzz", "en"]),
    ),
    max_size=4,
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 20))
@pytest.mark.parametrize("name", ["smol", "pieces"])
def test_stops_are_found_wherever_the_tokens_are_cut(
    request: pytest.FixtureRequest,
    name: str,
    data: st.DataObject,
    stops: list[str],
    include: bool,
    min_tokens: int,
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    start = data.draw(st.integers(0, len(TEXT) - 1))
    text = TEXT[start : start + data.draw(st.integers(1, 60))].lstrip() or "x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    cuts = data.draw(st.lists(st.integers(1, len(ids)), max_size=6))
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    first = certain(tokenizer, ids[:min_tokens])
    expected, stop, end = stopped(text, stops, first)
    choice = ChoiceText(tokenizer, params)
    found = read(choice, ids, cuts)
    whole = text[:end] if include else expected
    assert "".join(piece.text for piece in found) == choice.text == whole
    assert choice.stop_reason == found[-1].stop_reason == stop
    assert all(piece.stop_reason is None for piece in found[:-1])
    given_ids = choice.token_ids
    assert given_ids == ids[: len(given_ids)]
    begins = [min(certain(tokenizer, ids[:i]), len(whole)) for i in range(len(given_ids))]
    assert choice.offsets == begins
    assert [min(at, len(whole)) for piece in found for at in piece.offsets] == begins
    assert choice.add(ids) == TextPiece() or stop is None


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(start=st.integers(0, len(TEXT) - 20), length=st.integers(1, 60), stops=STOPS)
def test_only_what_may_become_a_stop_is_held_back(
    smol: Tokenizer, start: int, length: int, stops: list[str]
) -> None:
    ids = smol.encode(TEXT[start : start + length])
    choice, so_far = ChoiceText(smol, SamplingParams(stop=stops)), ""
    for i, token in enumerate(ids, 1):
        piece = choice.add((token,))
        if piece.stop_reason is not None:
            return
        so_far += piece.text
        text = smol.decode(ids)[: certain(smol, ids[:i])]
        ends = [text[k:] for k in range(len(text))]
        held = next((end for end in ends if any(s.startswith(end) and s != end for s in stops)), "")
        assert so_far + held == text
        assert REPLACEMENT not in so_far


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(ids=st.lists(st.integers(3, 49151), min_size=1, max_size=40), data=st.data())
def test_any_tokens_give_the_text_of_all(smol: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    """Also those that are no text: U+FFFD stands where bytes make no character, and nowhere twice."""
    cuts = data.draw(st.lists(st.integers(1, len(ids)), max_size=6))
    choice = ChoiceText(smol, SamplingParams())
    assert "".join(piece.text for piece in read(choice, ids, cuts)) == choice.text == smol.decode(ids)


def test_a_stop_within_one_token_and_one_across_tokens(smol: Tokenizer) -> None:
    (token,) = smol.encode(" understanding")
    choice = ChoiceText(smol, SamplingParams(stop=["stand"]))
    assert choice.add((token,)) == TextPiece(" under", "stand", (0,))
    ids = smol.encode(" one, two, three")
    assert len(ids) >= 5
    found = read(ChoiceText(smol, SamplingParams(stop="e, two, t")), ids)
    assert [piece.text for piece in found] == [" on", "", "", "", "", ""][: len(found)]
    assert found[-1].stop_reason == "e, two, t"


def test_what_looked_like_a_stop_is_given_at_the_end(smol: Tokenizer) -> None:
    ids = smol.encode("value: <en")
    choice = ChoiceText(smol, SamplingParams(stop=["<end>"]))
    found = read(choice, ids)
    assert "".join(piece.text for piece in found[:-1]) == "value: "
    assert found[-1].text == "<en"


def test_a_stream_that_ends_within_a_character_says_so(smol: Tokenizer) -> None:
    ids = smol.encode("日")
    assert len(ids) > 1
    choice = ChoiceText(smol, SamplingParams())
    assert [piece.text for piece in read(choice, ids[:-1])][-1] == REPLACEMENT


def test_bytes_that_never_make_a_character_are_not_held_for_ever(smol: Tokenizer) -> None:
    lonely = smol.encode("日")[0]
    choice = ChoiceText(smol, SamplingParams())
    assert any(choice.add((lonely,)).text for _ in range(200))


# --------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_what_ends_a_text_is_not_its_part(smol: Tokenizer, skip: bool, include: bool) -> None:
    """As in vLLM: the end token has text only if stops are included, and special tokens are not skipped."""
    params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=include)
    choice = ChoiceText(smol, params)
    choice.add([*smol.encode("Yes."), END], finished=True)
    assert choice.text == ("Yes.<|im_end|>" if include and not skip else "Yes.")
    assert choice.token_ids[-1] == END


def test_a_stop_token_that_is_a_word(smol: Tokenizer) -> None:
    ids = smol.encode("One two")
    for include, text in ((True, "One two"), (False, "One")):
        choice = ChoiceText(smol, SamplingParams(stop_token_ids=ids[-1:], include_stop_str_in_output=include))
        read_all = choice.add(ids, finished=True)
        assert (read_all.text, read_all.stop_reason) == (text, None)


def test_an_end_that_is_ignored_is_text_like_any(smol: Tokenizer) -> None:
    choice = ChoiceText(smol, SamplingParams(ignore_eos=True, skip_special_tokens=False))
    choice.add([*smol.encode("a"), END], finished=True)
    assert choice.text == "a<|im_end|>"


def test_special_tokens_are_shown_if_asked_for_and_can_be_stops(smol: Tokenizer) -> None:
    ids = [*smol.encode("a"), 1, *smol.encode("b")]
    shown = ChoiceText(smol, SamplingParams(skip_special_tokens=False))
    read(shown, ids)
    assert shown.text == "a<|im_start|>b"
    stopping = ChoiceText(smol, SamplingParams(skip_special_tokens=False, stop="<|im_start|>"))
    read(stopping, ids)
    assert (stopping.text, stopping.stop_reason) == ("a", "<|im_start|>")


def test_without_text(smol: Tokenizer) -> None:
    choice = ChoiceText(smol, SamplingParams(detokenize=False))
    ids = smol.encode("some text")
    assert [piece.text for piece in read(choice, ids)] == [""] * (len(ids) + 1)
    assert choice.token_ids == ids
    with pytest.raises(RequestError, match="text only") as refused:
        ChoiceText(smol, SamplingParams(detokenize=False, stop="x"))
    assert refused.value.place == "stop"


def test_tokens_behind_a_stop_are_not_kept(smol: Tokenizer) -> None:
    ids = smol.encode("a b c d")
    logprobs = [TokenLogprobs(token, Logprob(-1.0, 1)) for token in ids]
    choice = ChoiceText(smol, SamplingParams(stop=" b"))
    choice.add(ids, logprobs)
    assert choice.token_ids == ids[:2]
    assert choice.logprobs == logprobs[:2]
    assert choice.add(ids, logprobs, True) == TextPiece()


def test_min_tokens_are_not_searched(smol: Tokenizer) -> None:
    ids = smol.encode("stop and stop and go")
    for min_tokens, text in ((0, ""), (1, "stop and "), (2, "stop and "), (3, "stop and stop and go")):
        choice = ChoiceText(smol, SamplingParams(stop="stop", min_tokens=min_tokens, max_tokens=None))
        read(choice, ids)
        assert choice.text == text


def test_a_text_goes_on_from_its_prompt(pieces: Tokenizer) -> None:
    """A space at a text's beginning is dropped by some tokenizers, but this is not the beginning."""
    prompt, ids = pieces.encode("the"), pieces.encode("sword")
    assert pieces.decode([*prompt, *ids]) == "the sword"
    choice = ChoiceText(pieces, SamplingParams(), prompt)
    read(choice, ids)
    assert choice.text == " sword"
    alone = ChoiceText(pieces, SamplingParams())
    read(alone, ids)
    assert alone.text == "sword"


def test_a_prompt_that_ends_within_a_character(smol: Tokenizer) -> None:
    ids = smol.encode("a日b")
    choice = ChoiceText(smol, SamplingParams(), ids[:2])
    read(choice, ids[2:])
    assert choice.text == "日b"


# --------------------------------------------------------------------------- single tokens


@pytest.mark.parametrize("name", ["smol", "pieces"])
def test_the_bytes_of_tokens_make_up_the_text(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    data = b"".join(texts.bytes(token) for token in ids)
    assert data.decode().removeprefix(" " if name == "pieces" else "") == TEXT
    broken = [token for token in ids if not _is_text(texts.bytes(token))]
    assert broken
    for token in broken:
        shown = json.loads(json.dumps({"token": texts.text(token)}))["token"]
        assert bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", "")) == texts.bytes(token)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_the_bytes_of_every_token(smol: Tokenizer) -> None:
    """Each one's own text, wherever it has one, and no two tokens the same."""
    everything = [token_bytes(smol, token) for token in range(49152)]
    assert len(set(everything)) == 49152
    for token in range(17, 49152, 7):
        if _is_text(everything[token]):
            assert everything[token].decode() == smol.decode([token])


def test_special_and_unknown_tokens_have_texts(smol: Tokenizer, pieces: Tokenizer) -> None:
    assert TokenTexts(smol).text(END) == "<|im_end|>"
    assert TokenTexts(smol).text(50000) == "token_id:50000"
    assert TokenTexts(smol).bytes(50000) == b""
    assert TokenTexts(pieces).text(2 + 10) == "\n"
    assert TokenTexts(pieces).bytes(2 + 0xFF) == b"\xff"
    assert TokenTexts(pieces).text(2 + 0xFF) == "bytes:\\xff"


# ------------------------------------------------------------------------------- bad words


def test_bad_words_at_the_beginning_and_behind_a_space(smol: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return smol.encode(text, add_special_tokens=False)

    assert bad_word_ids(smol, ["word"]) == [ids("word"), ids(" word")]
    assert bad_word_ids(smol, [" word"]) == [ids("word"), ids(" word")]
    assert bad_word_ids(smol, [" "]) == [ids(" ")]
    assert bad_word_ids(smol, ["several words", "🙂"]) == [
        ids(text) for text in ("several words", " several words", "🙂", " 🙂")
    ]
    assert bad_word_ids(smol, []) == []


def test_bad_words_have_no_token_that_begins_a_text(tmp_path: Path) -> None:
    generation: dict[str, Any] = {"eos_token_ids": [0], "bos_token_id": 1, "add_bos": True}
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer" / "generation.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("the")[0] == 1
    assert all(1 not in ids for ids in bad_word_ids(tokenizer, ["the"]))


def test_a_bad_word_that_is_no_text(smol: Tokenizer) -> None:
    with pytest.raises(RequestError) as refused:
        bad_word_ids(smol, ["\ud800"])
    assert refused.value.place == "bad_words"


@settings(max_examples=300, deadline=None)
@given(stop=st.text("ab", min_size=1, max_size=7), news=st.lists(st.text("abc", max_size=5), max_size=12))
def test_the_beginning_of_a_stop_that_a_text_ends_with(stop: str, news: list[str]) -> None:
    """Of few letters, so that stops repeat themselves and come whole."""
    prefix, text = _Prefix(stop), ""
    for new in news:
        text += new
        expected = max(length for length in range(len(stop)) if text.endswith(stop[:length]))
        assert prefix.add(new) == expected


class _CountedText(str):
    """Counts how often its characters are looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> str:
        self.looks += 1
        return super().__getitem__(place)


def test_long_stops_cost_no_more_for_a_character_than_short_ones() -> None:
    stop = _CountedText("ab" * 2000)
    prefix = _Prefix(stop)
    stop.looks = 0
    for _ in range(3000):
        prefix.add("ab")
    assert stop.looks <= 4 * 6000
