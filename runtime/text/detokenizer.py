"""Turns a stream of token ids into a stream of text.

A token's text depends on its neighbours: a character may be spread over tokens, and some tokenizers strip
or join spaces. So a window of the latest tokens is decoded with and without the new ones, and the
difference is passed on; while it ends in the middle of a character (U+FFFD), it is held back.

Characters end soon, so what never comes to one is no text, and is passed on, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
NUM_BEFORE: Final = 8  # tokens of the text before that matter to the next one
MAX_HELD: Final = 64  # tokens without a character's end


class Detokenizer:
    """One stream. The pieces it gives, `finish`'s included, make up the whole text.

    `before`: the tokens that the stream goes on from, if their text is the stream's beginning.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before[-NUM_BEFORE:])
        self._num_given = len(self._window)  # tokens at the window's start whose text has been passed on
        self._given = decode(self._window).rstrip(REPLACEMENT)  # their text within the window

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain after these tokens (often their own, sometimes none)."""
        self._window.extend(ids)
        text = self._decode(self._window)
        # No advance without text: a window that starts with unprinted tokens only could decode otherwise.
        if len(text) <= len(self._given):
            return ""
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_given < MAX_HELD:
            return ""
        return self._pass_on(text)

    def finish(self) -> str:
        """What was held back; ends with U+FFFD if the stream ended within a character."""
        return self._pass_on(self._decode(self._window))

    def _pass_on(self, text: str) -> str:
        piece = text[len(self._given) :]
        del self._window[: self._num_given]
        self._num_given = len(self._window)
        self._given = self._decode(self._window)
        return piece
