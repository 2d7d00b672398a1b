"""Structured outputs: which tokens may come next, so that the text is what a grammar says (llguidance).

    StructuredOutputsParams -> GrammarCompiler -> GrammarState: mask, accept, mask, accept, ... done

The masks are the sampling kernel's (compiler/sampling.py). One `GrammarCompiler` serves a model; every choice
of a request has a `GrammarState` of its own. What a grammar may cost is bounded: its length, its compilation,
and the work for each token, beyond which its request ends with an error.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from pagec.compiler.errors import ArtifactError, RequestError
from pagec.compiler.sampling import mask_words
from pagec.runtime.sampling.params import StructuredOutputsParams
from pagec.runtime.sampling.sampler import I32, pack_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS: Final = 64 * 1024
MAX_GBNF_WORK: Final = 2_000_000  # rules times characters: about a second to translate
MAX_REASON_CHARS: Final = 300
NUM_KEPT: Final = 64  # compiled grammars that are kept for the next request that wants the same

# JSON allows any amount of space between its parts, and small models never stop writing it.
_JSON_SPACE: Final = r"[ \t\r\n]{1,40}"
_GBNF_RULE: Final = re.compile(r"[ \t]*[\w-]+[ \t]*::=")
_GBNF_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_REASON: Final = re.compile(r"^error: (.+)", re.MULTILINE)


class GrammarCompiler:
    """Compiles what requests want for one model: its `tokenizer.json`, its vocabulary, what ends its texts.
    Threads may share it.

    Tokens of the model that the tokenizer does not have are never allowed, nor are special tokens, unless a
    Lark grammar names them.
    """

    def __init__(self, tokenizer_json: Path, vocab: int, eos_token_ids: Collection[int]) -> None:
        self._file = tokenizer_json
        self._vocab = vocab
        self._eos = sorted(token for token in eos_token_ids if 0 <= token < vocab)
        self._lock = threading.RLock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: dict[tuple[str, str], GrammarState] = {}

    def prepare(self) -> LLTokenizer:
        """Reads the tokenizer, which the first `compile` does otherwise."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def compile(self, wanted: StructuredOutputsParams) -> GrammarState:
        """The state before the first token; RequestError for a grammar that is malformed, asks for what is
        not supported, allows no text at all, or is too complex."""
        if not self._eos:
            raise RequestError("this model has no token that ends a text", place="structured_outputs")
        key = _source(wanted)
        with self._lock:
            state = self._kept.pop(key, None) or self._compile(*key)
            self._kept[key] = state  # the latest is the last
            if len(self._kept) > NUM_KEPT:
                self._kept.pop(next(iter(self._kept)))
            return state.fork()

    def _compile(self, name: str, text: str) -> GrammarState:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self.prepare()
        place = f"structured_outputs.{name}"
        if len(text) > MAX_GRAMMAR_CHARS:
            _refuse(place, f"{len(text)} characters are too many: at most {MAX_GRAMMAR_CHARS}")
        try:
            grammar = _translate(name, text)
        except ValueError as error:
            _refuse(place, str(error))
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        state = GrammarState(matcher, _Ends(tokenizer.eos_token, self._eos, self._vocab), place)
        state.mask()  # finds what is malformed, allows nothing, or is too complex for its first token
        return state

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            text = self._file.read_text(encoding="utf-8")
            num_known = _num_tokens(json.loads(text))
            eos = [token for token in self._eos if token < num_known]
            return LLTokenizer(text, n_vocab=max(num_known, self._vocab), eos_token=eos or None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"not for grammars: {error}", place=str(self._file)) from error


class _Ends:
    """The tokens that end a model's text. `inner`: the token, as a rule of them, that a matcher ends with."""

    def __init__(self, inner: int, eos: Collection[int], vocab: int) -> None:
        self.inner = inner
        self.vocab = vocab
        self.tokens = frozenset(eos)
        self.mask = pack_mask(eos, vocab)

    def model_mask(self, matcher_mask: bytes) -> I32:
        """A matcher's mask as the model's."""
        bits = np.frombuffer(matcher_mask, np.uint32)
        may_end = bits[self.inner >> 5] >> (self.inner & 31) & 1
        words = bits[: mask_words(self.vocab)].copy()
        if self.vocab % 32:
            words[-1] &= np.uint32((1 << self.vocab % 32) - 1)
        if self.inner < self.vocab:
            words[self.inner >> 5] &= ~np.uint32(1 << (self.inner & 31))
        return words.view(np.int32) | self.mask if may_end else words.view(np.int32)


class GrammarState:
    """What one choice has written, as its grammar sees it."""

    def __init__(self, matcher: LLMatcher, ends: _Ends, place: str) -> None:
        self._matcher = matcher
        self._ends = ends
        self._place = place
        self._mask: I32 | None = None
        self._has_ended = False

    def mask(self) -> I32:
        """Packed bits of the tokens that may come next, [mask_words(vocab)]; not to be written to.

        The tokens that end a text are among them exactly if it may end here. RequestError if finding out
        takes too much, or if no token is left.
        """
        if self._mask is None:
            self._mask = self._ends.mask if self._has_ended else self._find_mask()
        return self._mask

    def accept(self, token: int) -> None:
        """Goes on by a token; RequestError if the mask does not have it. After an end only ends follow."""
        if not 0 <= token < self._ends.vocab or not self.mask()[token >> 5] >> (token & 31) & 1:
            raise RequestError(f"token {token} does not fit here", place=self._place)
        if token in self._ends.tokens:
            self._has_ended = True
        elif not self._matcher.consume_token(token):
            _refuse(self._place, self._matcher.get_error())
        self._mask = None

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._has_ended or bool((self.mask() == self._ends.mask).all())

    def fork(self) -> GrammarState:
        """Another state that has come as far as this one."""
        other = GrammarState(self._matcher.deep_copy(), self._ends, self._place)
        other._mask, other._has_ended = self._mask, self._has_ended
        return other

    def _find_mask(self) -> I32:
        # A matcher in error allows the end, or raises.
        bits = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            _refuse(self._place, self._matcher.get_error())
        mask = self._ends.model_mask(bits)
        if not mask.any():
            _refuse(self._place, "no token of this model can follow")
        return mask


# ------------------------------------------------------------------------------------ translation


def _source(wanted: StructuredOutputsParams) -> tuple[str, str]:
    """Which field is set, and its value as text."""
    name = next(field.name for field in fields(wanted) if getattr(wanted, field.name) is not None)
    value = getattr(wanted, name)
    if name == "json_object":
        return name, '{"type": "object"}'
    return name, value if isinstance(value, str) else json.dumps(value)


def _translate(name: str, text: str) -> str:
    """A field's text as llguidance's grammar; ValueError if it is malformed."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if name in ("json", "json_object"):
        text = {"true": "{}", "false": '{"enum": []}'}.get(text.strip(), text)
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _JSON_SPACE})
    if name == "regex":
        return LLMatcher.grammar_from_regex(text)
    if name == "choice":  # one terminal: alternatives of the parser would be too many soon
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(_quoted(text))}")
    num_rules = sum(_GBNF_RULE.match(line) is not None for line in text.splitlines())
    if not num_rules:
        return LLMatcher.grammar_from_lark(text)
    if num_rules * len(text) > MAX_GBNF_WORK:
        raise ValueError(f"{num_rules} rules in {len(text)} characters are too complex; use Lark's syntax")
    try:
        lark = gbnf_to_lark(_GBNF_ESCAPE.sub(_plain, text))
    except Exception as error:  # nothing narrower is raised
        raise ValueError(str(error)) from error
    return LLMatcher.grammar_from_lark(lark)


def _quoted(choices: str) -> list[str]:
    return [json.dumps(choice) for choice in json.loads(choices)]


def _plain(escape: re.Match[str]) -> str:
    """\\u and \\U in a form that the translation to Lark does not get wrong."""
    code = int(escape[1] or escape[2] or "0", 16)
    if escape[0][1] not in "uU" or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return escape[0]
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def _num_tokens(tokenizer: Any) -> int:
    """The tokens of a tokenizer.json: one more than the greatest id."""
    vocab = tokenizer["model"]["vocab"]
    greatest = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
    return 1 + int(max((greatest, *(token["id"] for token in tokenizer.get("added_tokens", ())))))


def _refuse(place: str, reason: str) -> NoReturn:
    """`reason` as llguidance words it: of a long one what counts."""
    found = _REASON.search(reason)
    text = (found[1] if found else reason).partition("\n")[0].strip()
    if text.startswith("NoExtension"):
        text = "no text can be as it says"
    raise RequestError(text[:MAX_REASON_CHARS], place=place)
