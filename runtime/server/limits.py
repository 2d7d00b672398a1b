"""How large a request may be before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Most bytes of a body, prompts of a request, stop strings, bad words, and characters of one of these."""

    max_body_bytes: int = 16 << 20
    max_prompts: int = 256
    max_stops: int = 64
    max_bad_words: int = 256
    max_word_chars: int = 4096

    def check(self, params: SamplingParams) -> None:
        """RequestError for parameters beyond the limits."""
        for name, texts, most in (
            ("stop", params.stop or (), self.max_stops),
            ("bad_words", params.bad_words or (), self.max_bad_words),
        ):
            self._check_texts(name, texts, most)

    def _check_texts(self, name: str, texts: Sequence[str], most: int) -> None:
        if len(texts) > most:
            raise RequestError(f"{len(texts)} texts are more than {most}", place=name)
        longest = max(map(len, texts), default=0)
        if longest > self.max_word_chars:
            raise RequestError(
                f"a text of {longest} characters is longer than {self.max_word_chars}", place=name
            )
