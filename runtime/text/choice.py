"""The text of one choice as its tokens come: detokenized, and ended by stop strings.

Of several stop strings that one ends the text which is complete first, character by character (of two that
end together, the longer one); so how the tokens were grouped makes no difference. Held back is only what may
still become a stop: the longest end of the text that begins one.

A choice's first `min_tokens` tokens are not searched (as in vLLM): a stop that is complete within them is
passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import TokenLogprobs
from pagec.runtime.text.detokenizer import Detokenizer
from pagec.runtime.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """Text that is certain now. `stop_reason`: the stop string that has ended it. `offsets`: where in the
    choice's text each new token begins (one that a stop takes back later may lie behind the end)."""

    text: str = ""
    stop_reason: str | None = None
    offsets: tuple[int, ...] = ()


class ChoiceText:
    """Reads the tokens of one choice; RequestError if it is to find stops without making text.

    `before`: the tokens whose text this one goes on from, a prompt's or none. Without a tokenizer there is no
    text. What has been read so far is in
    `token_ids`, `logprobs` and `offsets`, one for each token that came before a stop was complete.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, before: Sequence[int] = ()
    ) -> None:
        if params.stop and (tokenizer is None or not params.detokenize):
            remedy = "set detokenize to true" if tokenizer is not None else "there is no tokenizer"
            raise RequestError("is looked for in text only", place="stop", remedy=remedy)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.stop_reason: str | None = None
        self._stops = tuple(params.stop or ())
        self._prefixes = tuple(_Prefix(stop) for stop in self._stops)
        self._params = params
        self._ends = frozenset(params.stop_token_ids or ())
        if tokenizer is not None and not params.ignore_eos:
            self._ends |= tokenizer.defaults.eos_token_ids
        self._text = ""
        self._num_given = 0  # characters that have been passed on
        self._num_matched = 0  # characters that the prefixes have seen
        self._num_searched = 0  # no stop ends within so many characters, or it does not count

        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
            self._detokenizer = Detokenizer(decode, before)

    @property
    def text(self) -> str:
        """All that has been passed on."""
        return self._text[: self._num_given]

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), finished: bool = False
    ) -> TextPiece:
        """Reads tokens. `finished`: they are the last ones; an end token among them leaves no text, unless
        stops shall be included. After a stop string nothing is read any more."""
        if self.stop_reason is not None:
            return TextPiece()
        first = len(self.token_ids)
        self.logprobs += logprobs
        for place, token in enumerate(token_ids, 1):
            self._read(token, is_end=finished and place == len(token_ids) and token in self._ends)
            if self._find_stop():
                break
        if finished and self.stop_reason is None and self._detokenizer is not None:
            self._text += self._detokenizer.finish()
            self._find_stop()
        del self.logprobs[len(self.token_ids) :]
        return self._pass_on(first, is_whole=finished or self.stop_reason is not None)

    def _read(self, token: int, *, is_end: bool) -> None:
        self.token_ids.append(token)
        self.offsets.append(len(self._text))
        if self._detokenizer is not None and (not is_end or self._params.include_stop_str_in_output):
            self._text += self._detokenizer.add((token,))
        if len(self.token_ids) <= self._params.min_tokens:
            self._num_searched = len(self._text)

    def _find_stop(self) -> bool:
        """Looks for a stop in what is new, and cuts the text there."""
        found = []
        for stop in self._stops:
            begin = self._text.find(stop, max(self._num_searched - len(stop) + 1, 0))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        self._num_searched = len(self._text)
        if found:
            end, begin, self.stop_reason = min(found)
            self._text = self._text[: end if self._params.include_stop_str_in_output else begin]
        return bool(found)

    def _pass_on(self, first: int, *, is_whole: bool) -> TextPiece:
        kept = len(self._text) if is_whole else len(self._text) - self._num_held()
        piece = self._text[self._num_given : kept]
        self._num_given = max(kept, self._num_given)
        if self.stop_reason is not None:
            self.offsets = [min(offset, kept) for offset in self.offsets]
        return TextPiece(piece, self.stop_reason, tuple(self.offsets[first:]))

    def _num_held(self) -> int:
        """The length of the longest end of the text that a stop begins with, but is not whole."""
        new = self._text[self._num_matched :]
        self._num_matched = len(self._text)
        return max((prefix.add(new) for prefix in self._prefixes), default=0)


class _Prefix:
    """How much of a stop a growing text ends with, less than all of it (Knuth, Morris and Pratt): the work
    for new characters does not grow with the stop."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self._length = 0

    def add(self, new: str) -> int:
        """Reads more of the text; the length of the longest beginning of the stop at its end."""
        stop, borders, length = self._stop, self._borders, self._length
        for character in new:
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            if length == len(stop):
                length = borders[-1]
        self._length = length
        return length


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of a text: the length of the longest shorter beginning that also ends it."""
    borders, length = [0], 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length - 1]
        length += text[length] == character
        borders.append(length)
    return tuple(borders)


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token sequences of words that may not come: at a text's beginning, and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip() or word, f" {word.lstrip()}"):
            ids = tokenizer.encode(text, add_special_tokens=False, place="bad_words")
            found.setdefault(tuple(ids))
    return [list(ids) for ids in found if ids]
