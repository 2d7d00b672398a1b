"""Grammars on a real tokenizer: what masks let through is what was asked for, and nothing else is."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizers import byte_tokenizer, write_tokenizer

from pagec.compiler.errors import ArtifactError, RequestError
from pagec.compiler.sampling import mask_words
from pagec.runtime.sampling.grammar import MAX_GBNF_WORK, MAX_GRAMMAR_CHARS, GrammarCompiler, GrammarState
from pagec.runtime.sampling.params import StructuredOutputsParams
from pagec.runtime.text.tokenizer import Tokenizer

VOCAB = 49152  # tokens of SmolLM2's tokenizer
EOS = [2, 0]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 3, None]}, "maxItems": 3},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = r"""
root   ::= object
value  ::= object | string | number | ("true" | "null") ws
object ::= "{" ws ( pair ("," ws pair){0,2} )? "}" ws   # not too many
pair   ::= string ":" ws value
string ::= "\"" [a-z\u00e9\u4e00-\u4e10]{0,8} "\"" ws
number ::= "-"? [0-9]{1,4} ws
ws     ::= | " " | "\n" [ \t]{0,2}
"""
LARK = r"""
start: greeting " " NAME ("!" | ".")
greeting: "hello" | "good " ("day" | "night")
NAME: /[A-Z][a-z]{1,9}/
"""


@pytest.fixture(scope="module")
def tokenizer_json(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(smollm2_gguf, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_json: Path) -> Tokenizer:
    return Tokenizer.open(tokenizer_json.parent.parent)


@pytest.fixture(scope="module")
def compiler(tokenizer_json: Path) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json, VOCAB, EOS)


def allowed(state: GrammarState, vocab: int = VOCAB) -> list[int]:
    mask = state.mask()
    assert mask.dtype == np.int32
    assert mask.shape == (mask_words(vocab),)
    tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert max(tokens) < vocab
    return tokens


def walk(state: GrammarState, closers: set[int], seed: int, steps: int = 50) -> list[int] | None:
    """A random text of a grammar, without its end; None if it became long. `closers` come often, or every
    walk would be lost in strings."""
    chance, ids = random.Random(seed), list[int]()
    for _ in range(steps):
        tokens = allowed(state)
        ends = set(EOS) & set(tokens)
        assert ends in (set(), set(EOS))
        assert state.is_done == (set(tokens) == set(EOS))
        if ends and (state.is_done or chance.random() < 0.3):
            return ids
        closing = closers.intersection(tokens)
        token = chance.choice(sorted(closing) if closing and chance.random() < 0.5 else tokens)
        if token not in ends:
            state.accept(token)
            ids.append(token)
    return None


def spell(state: GrammarState, ids: Sequence[int]) -> None:
    for token in ids:
        state.accept(token)


def spelled(tokenizer: Tokenizer, state: GrammarState, text: str) -> bool:
    """Whether a grammar takes a text, token by token, and may end there."""
    try:
        spell(state, tokenizer.encode(text))
    except RequestError:
        return False
    return set(EOS) <= set(allowed(state))


def fits_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"name", "age"} <= set(value) <= {"name", "age", "tags", "at"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and all(tag in ("a", "bé", 3, None) for tag in value.get("tags", []))
        and len(value.get("tags", [])) <= 3
        and ("at" not in value or isinstance(value["at"]["x"], int | float))
    )


def is_gbnf(text: str) -> bool:
    return isinstance(json.loads(text), dict) and not re.search(r"[A-Z]", text)


PHONE = r"(\+\d{1,2} )?\(?[0-9]{3}\)?[- ]x?"
CHOICES = ["yes", "no", "no more", 'a "b"\\ \n/', "日本"]
WANTED: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": PERSON}, lambda text: fits_person(json.loads(text))),
    ({"json": json.dumps(PERSON)}, lambda text: fits_person(json.loads(text))),
    ({"json": True}, lambda text: [json.loads(text)]),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": PHONE}, lambda text: re.fullmatch(PHONE, text)),
    ({"regex": r"^(é|日本|🙂){1,4}$"}, lambda text: re.fullmatch(r"(é|日本|🙂){1,4}", text)),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": GBNF}, is_gbnf),
    ({"grammar": LARK}, lambda text: re.fullmatch(r"(hello|good (day|night)) [A-Z][a-z]{1,9}[!.]", text)),
]


@pytest.mark.parametrize(("wanted", "fits"), WANTED)
def test_random_walks_give_what_was_asked_for(
    compiler: GrammarCompiler, tokenizer: Tokenizer, wanted: dict[str, Any], fits: Callable[[str], Any]
) -> None:
    texts = set()
    closers = {token for text in ("}", "]", '"', '":', "1") for token in tokenizer.encode(text)}
    for seed in range(12):
        ids = walk(compiler.compile(StructuredOutputsParams(**wanted)), closers, seed)
        if ids is not None:
            text = tokenizer.decode(ids)
            assert fits(text), text
            texts.add(text)
    assert len(texts) >= 2


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (
            {"json": PERSON},
            ['{"name": "Bo", "age": 7}', '{"name":"é🙂","age":150,"tags":["bé",null]}'],
            ['{"name": "Bo"}', '{"name": "Bo", "age": 151}', '{"name": 2, "age": 1}', "[]", '{"name": "B'],
        ),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "\\n"\n}'], ["[]", '{"a"}']),
        ({"json": {"type": "array"}}, ["[ 1, 2]"], ["[" + 80 * "\n" + "]"]),
        ({"regex": "a+b?"}, ["a", "aab"], ["b", "abb", ""]),
        ({"regex": "x*"}, ["", "xx"], ["y"]),
        ({"choice": ["on", "once"]}, ["on", "once"], ["onc", "onces", ""]),
        ({"grammar": GBNF}, ["{}", '{"ab": {"é": -12}}', '{"一": true}'], ['{"X": 1}', "[]"]),
        ({"grammar": LARK}, ["good night Ada!"], ["good Ada!", "hello ada!"]),
        ({"grammar": 'root ::= "\\u0041\\x42\\n" | [\\u0061-\\u0063]+'}, ["AB\n", "abc"], ["A", "d"]),
        ({"grammar": 'start: "root ::= " /[0-9]/'}, ["root ::= 1"], ["root ::= x"]),
    ],
)  # fmt: skip
def test_texts_that_fit_and_texts_that_do_not(
    compiler: GrammarCompiler, tokenizer: Tokenizer, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for texts, fits in ((good, True), (bad, False)):
        for text in texts:
            state = compiler.compile(StructuredOutputsParams(**wanted))
            assert spelled(tokenizer, state, text) == fits, text


CHAIN = "\n".join(f"r{i} ::= r{i + 1}" for i in range(1500))
REFUSED = [
    ({"json": {"type": "nope"}}, "json", "nope"),
    ({"json": {"not": {"type": "string"}}}, "json", "not"),
    ({"json": False}, "json", "[Uu]nsatisfiable"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json", "greater"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "json", "look-around"),
    ({"json": {"$ref": "#"}}, "json", "no text"),
    ({"json": {"$ref": "other.json"}}, "json", "other.json"),
    ({"json": {"a": float("nan")}}, "json", "expected value"),
    ({"json": '{"items":' * 200 + "1" + "}" * 200}, "json", "recursion limit"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": r"(a)\1"}, "regex", "backreferences"),
    ({"regex": r"\bfoo"}, "regex", "lookaround"),
    ({"regex": "(.{1,300}){1,300}"}, "regex", "too many"),
    ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex", "characters are too many"),
    ({"choice": ["\ud800"]}, "choice", "escape"),
    ({"grammar": ""}, "grammar", "[Ee]mpty"),
    ({"grammar": "what is this?"}, "grammar", "."),
    ({"grammar": "root ::= x"}, "grammar", "'x' not found"),
    ({"grammar": 'x ::= "a"'}, "grammar", "root"),
    ({"grammar": "root ::= root"}, "grammar", "no text"),
    ({"grammar": 'root ::= "\\ud800"'}, "grammar", "."),
    ({"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000}, "grammar", "recursion"),
    ({"grammar": f'root ::= r0\n{CHAIN}\nr1500 ::= "x"'}, "grammar", "too complex"),
    ({"grammar": "start: b"}, "grammar", "unknown name"),
    ({"grammar": "\n" * 60000 + "x"}, "grammar", "."),
]


@pytest.mark.parametrize(("wanted", "field", "reason"), REFUSED)
def test_what_cannot_be_done_is_refused(
    compiler: GrammarCompiler, wanted: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        compiler.compile(StructuredOutputsParams(**wanted))
    assert refused.value.place == f"structured_outputs.{field}"
    assert "\n" not in refused.value.message


def test_the_longest_translation_is_bearable(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The time that a translation takes grows with rules times characters, and is bounded by it."""
    rule, count = 'r{} ::= ("x" | "y") ("x" | "y") r{}\n', 200
    text = "root ::= r0\n" + "".join(rule.format(i, i + 1) for i in range(count)) + f'r{count} ::= "z"'
    assert MAX_GBNF_WORK / 2 < count * len(text) < MAX_GBNF_WORK
    assert spelled(tokenizer, compiler.compile(StructuredOutputsParams(grammar=text)), 2 * count * "x" + "z")


def test_a_token_that_does_not_fit_ends_only_that_state(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(StructuredOutputsParams(choice=["yes", "no"]))
    other = state.fork()
    (yes,), (no,) = tokenizer.encode("yes"), tokenizer.encode("no")
    for token in (*tokenizer.encode("maybe")[:1], 2, VOCAB, -1):
        with pytest.raises(RequestError, match=f"token {token} ") as refused:
            state.accept(token)
        assert refused.value.place == "structured_outputs.choice"
    state.accept(yes)
    assert state.is_done
    assert not other.is_done
    other.accept(no)
    assert other.is_done


def test_a_grammar_that_turns_out_too_complex_ends_with_an_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = "start: " + " | ".join(f'"a{i}" start' for i in range(3000))
    state = compiler.compile(StructuredOutputsParams(grammar=grammar))
    with pytest.raises(RequestError, match="items"):
        spell(state, tokenizer.encode("a1a2a3a4"))
    assert compiler.compile(StructuredOutputsParams(regex="a+")).mask().any()


def test_forks_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(StructuredOutputsParams(regex="ab[0-9]c?"))
    spell(state, tokenizer.encode("ab"))
    before = allowed(state)
    fork = state.fork()
    fork.accept(tokenizer.encode("7")[0])
    assert allowed(state) == before
    assert allowed(fork) == sorted([*EOS, tokenizer.encode("c")[0]])


def test_after_the_end_only_ends_follow(compiler: GrammarCompiler) -> None:
    state = compiler.compile(StructuredOutputsParams(regex="x*"))
    assert not state.is_done
    for token in (2, 0, 2):
        state.accept(token)
        assert state.is_done
        assert allowed(state) == [0, 2]
        assert allowed(state.fork()) == [0, 2]


def test_equal_wishes_are_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = StructuredOutputsParams(regex="(once|twice)")
    first = compiler.compile(wanted)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    again = compiler.compile(wanted)
    assert again is not first
    assert allowed(again) == allowed(first)


# -------------------------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("vocab", [VOCAB + 31, VOCAB + 1])
def test_a_model_with_more_tokens_than_its_tokenizer(tokenizer_json: Path, vocab: int) -> None:
    """Rows that pad an embedding are never allowed, but one of them may be what ends a text."""
    ends = [0, VOCAB + 0]
    state = GrammarCompiler(tokenizer_json, vocab, ends).compile(StructuredOutputsParams(regex="[^x]*"))
    assert max(allowed(state, vocab)) == VOCAB
    state.accept(VOCAB)
    assert allowed(state, vocab) == ends


@pytest.mark.parametrize("vocab", [VOCAB - 1, 40000])
def test_a_model_with_fewer_tokens_than_its_tokenizer(tokenizer_json: Path, vocab: int) -> None:
    state = GrammarCompiler(tokenizer_json, vocab, EOS).compile(StructuredOutputsParams(regex="[^x]*"))
    assert vocab - 20 < max(allowed(state, vocab)) < vocab


def test_ends_that_the_tokenizer_does_not_know(tokenizer_json: Path) -> None:
    """llguidance then ends with a token of its own choice, which must not be the model's."""
    state = GrammarCompiler(tokenizer_json, VOCAB + 8, [VOCAB + 3]).compile(
        StructuredOutputsParams(choice=["x"])
    )
    assert VOCAB + 3 not in allowed(state, VOCAB + 8)
    state.accept(allowed(state, VOCAB + 8)[0])
    assert allowed(state, VOCAB + 8) == [VOCAB + 3]


def test_without_an_end_there_are_no_structured_outputs(tokenizer_json: Path) -> None:
    with pytest.raises(RequestError, match="no token that ends"):
        GrammarCompiler(tokenizer_json, VOCAB, []).compile(StructuredOutputsParams(json_object=True))


def test_bytes_of_a_character_come_one_by_one(tmp_path: Path) -> None:
    """In SentencePiece's manner: a byte token is allowed where a character may go on with it."""
    tokenizer = byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    vocab = 2 + 256 + 19
    state = GrammarCompiler(path, vocab, [0]).compile(StructuredOutputsParams(regex="é🙂"))
    for byte in "é🙂".encode():
        assert allowed(state, vocab) == [2 + byte]
        state.accept(2 + byte)
    assert allowed(state, vocab) == [0]
    assert tokenizer.decode([2 + byte for byte in "é🙂".encode()]) == "é🙂"


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}', "\udcff"])
def test_a_tokenizer_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path / "tokenizer.json", 10, [0]).prepare()


def test_masks_of_real_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Each token's mask is that of a matcher which has read the same text anew."""
    ids: Sequence[int] = tokenizer.encode('{"name": "Ada", "age": 36}')
    wanted = StructuredOutputsParams(json=PERSON)
    state = compiler.compile(wanted)
    for end in range(len(ids)):
        fresh = compiler.compile(wanted)
        spell(fresh, ids[:end])
        assert (fresh.mask() == state.mask()).all()
        state.accept(ids[end])
