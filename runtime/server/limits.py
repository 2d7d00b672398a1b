"""How large a request may be before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Most bytes of a body, characters of a text to tokenize, prompts of a request, stop strings, bad words,
    and characters of one of these and of all stop strings together."""

    max_body_bytes: int = 16 << 20
    max_text_chars: int = 1 << 20
    max_prompts: int = 256
    max_stops: int = 64
    max_bad_words: int = 256
    max_word_chars: int = 4096
    max_stop_chars: int = 16 << 10

    def check(self, params: SamplingParams) -> None:
        """RequestError for parameters beyond the limits."""
        for name, texts, most in (
            ("stop", params.stop or (), self.max_stops),
            ("bad_words", params.bad_words or (), self.max_bad_words),
        ):
            self._check_texts(name, texts, most)
        total = sum(map(len, params.stop or ()))
        if total > self.max_stop_chars:
            raise RequestError(f"{total} characters are more than {self.max_stop_chars}", place="stop")

    def check_prompt(self, text: str, place: str, max_len: int, longest_token: int) -> None:
        """RequestError for a text that cannot fit, whatever its tokens are: more characters than `max_len`
        tokens of `longest_token` characters have."""
        most = max_len * longest_token
        if len(text) > most:
            raise RequestError(
                f"{len(text)} characters are more than {most}, the longest token's {longest_token} times "
                f"the model's {max_len} tokens",
                place=place,
            )
        self.check_text(text, place)

    def check_text(self, text: str, place: str) -> None:
        """RequestError for a text that takes too long to tokenize."""
        if len(text) > self.max_text_chars:
            raise RequestError(
                f"{len(text)} characters are more than {self.max_text_chars}",
                place=place,
                remedy="send less, or token ids",
            )

    def _check_texts(self, name: str, texts: Sequence[str], most: int) -> None:
        if len(texts) > most:
            raise RequestError(f"{len(texts)} texts are more than {most}", place=name)
        longest = max(map(len, texts), default=0)
        if longest > self.max_word_chars:
            raise RequestError(
                f"a text of {longest} characters is longer than {self.max_word_chars}", place=name
            )
