"""From what requests ask to the numbers that the sampling kernel reads (compiler/sampling.py).

A `Sampler` belongs to one choice of a request; it knows the tokens so far and gives a row for the next one.
`sampling_inputs` puts the rows of a step together. Log probabilities of the likeliest tokens are found here,
on the host: few requests ask for them, and where they do the logits have come back anyway.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagec.compiler.errors import RequestError
from pagec.compiler.sampling import MAX_BIASES, NUM_WORDS, Words, mask_words
from pagec.runtime.sampling.params import LogitsProcessor, SamplingParams

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

_NO_EDITS: Final[I32] = np.zeros((0, 2), np.int32)
# 1 / temperature stays a float32 that is neither 0, which means greedy, nor infinite.
_INVERSE_RANGE: Final = (1e-37, 1e30)


def draw_seed() -> int:
    """A seed for a request that gives none."""
    return secrets.randbits(63)


class Row(NamedTuple):
    """What one logit row asks of sampling: words as in a settings row (positions of edits are filled in
    later), its edits, and the tokens that are allowed."""

    words: I32
    biases: I32 = _NO_EDITS
    seen: I32 = _NO_EDITS
    mask: I32 | None = None


class Grammar(Protocol):
    """What a choice's text has to be (grammar.py)."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete: nothing but the end may follow."""

    def mask(self) -> I32 | None:
        """Packed bits of the tokens that may come next (compiler/sampling.py); None: all."""

    def accept(self, token: int) -> None:
        """Takes the next token; RequestError if it may not come."""


class Sampler:
    """Chooses the tokens of one choice. Its numbers depend on (seed, choice, position) alone.

    `bad_words` as token ids; `grammar`: this choice's own.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        vocab: int,
        seed: int,
        choice: int = 0,
        eos_token_ids: Collection[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        params.check(vocab=vocab, max_choices=params.n)  # the kernel writes where tokens say
        self.params = params
        self._grammar = grammar
        self._mask = None if grammar is None else grammar.mask()
        self._num_prompt = len(prompt)
        self._vocab = vocab
        self._bad_words = tuple(tuple(word) for word in bad_words if all(0 <= t < vocab for t in word))
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_token_ids))
        self._ends = _bans(sorted(token for token in ends if 0 <= token < vocab))
        self._bias = _pairs((params.logit_bias or {}).items())
        if len(self._ends) + len(self._bias) + len(self._bad_words) > MAX_BIASES:
            raise RequestError(
                f"{len(self._bad_words)} are too many: at most {MAX_BIASES} with biases and stop tokens",
                place="bad_words",
            )
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else pack_mask(allowed, vocab)
        self._words = _words(params, seed, choice)
        self._seen = _SeenTokens(prompt if params.repetition_penalty != 1.0 else ())

    def row(self, tokens: Sequence[int], end: int | None = None) -> Row:
        """The row that chooses the token at position `end` (behind all, if not given) of prompt and output.

        What stood before it once never changes. Output tokens that are not known yet (below 0) may stand
        there only if `params.needs_host` is false.
        """
        end = len(tokens) if end is None else end
        words = self._words.copy()
        words[Words.POSITION] = end
        biases = self._biases(tokens, end)
        seen, mask = _NO_EDITS, self._allowed
        if self.params.has_penalties:
            seen = self._seen.update(tokens, self._num_prompt, end)
        if self._mask is not None:
            mask = self._mask if mask is None else mask & self._mask
        return Row(words, biases, seen, mask)

    def accept(self, token: int) -> bool:
        """Takes note of the token that was chosen; whether the text is complete with it."""
        if self._grammar is None:
            return False
        self._grammar.accept(token)
        self._mask = self._grammar.mask()
        return self._grammar.is_done

    def _biases(self, tokens: Sequence[int], end: int) -> I32:
        parts = [self._bias] if len(self._bias) else []
        if end - self._num_prompt < self.params.min_tokens and len(self._ends):
            parts.append(self._ends)
        if self._bad_words:
            parts.append(_bans(self._forbidden(tokens[self._num_prompt : end])))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else _NO_EDITS

    def _forbidden(self, output: Sequence[int]) -> list[int]:
        """The last tokens of the bad words whose others the output ends with."""
        return [
            word[-1]
            for word in self._bad_words
            if len(word) <= len(output) + 1 and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
        ]


class _SeenTokens:
    """Pairs (token, times it was generated), kept up to date token by token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt)
        self._place = {token: place for place, token in enumerate(distinct)}
        self._pairs = _pairs((token, 0) for token in distinct)
        self._num_counted = 0

    def update(self, tokens: Sequence[int], num_prompt: int, end: int) -> I32:
        """The pairs, once the output tokens up to `end` that are new have been counted."""
        for token in tokens[num_prompt + self._num_counted : end]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._pairs):
                self._pairs = np.concatenate([self._pairs, np.zeros((max(place, 16), 2), np.int32)])
            self._pairs[place] = token, self._pairs[place, 1] + 1
            self._num_counted += 1
        return self._pairs[: len(self._place)]


def _words(params: SamplingParams, seed: int, choice: int) -> I32:
    words = np.zeros(NUM_WORDS, np.int32)
    low, high = _INVERSE_RANGE
    inverse = 0.0 if params.is_greedy else min(max(1.0 / max(params.temperature, 1.0 / high), low), high)
    for word, number in (
        (Words.INVERSE_TEMPERATURE, inverse),
        (Words.TOP_P, params.top_p),
        (Words.MIN_P, params.min_p),
        (Words.REPETITION, params.repetition_penalty),
        (Words.PRESENCE, params.presence_penalty),
        (Words.FREQUENCY, params.frequency_penalty),
    ):
        words.view(np.float32)[word] = number
    words[Words.TOP_K] = min(params.top_k, np.iinfo(np.int32).max)
    words[[Words.SEED, Words.SEED_HIGH]] = np.array([seed % 2**64], np.uint64).view(np.int32)
    words[Words.CHOICE] = choice
    words[Words.FLAGS] = params.logprobs == 0
    return words


def _pairs(items: Iterable[tuple[int, float]]) -> I32:
    """(token, whole number), or (token, bits of a float)."""
    rows = list(items)
    pairs = np.zeros((len(rows), 2), np.int32)
    if rows:
        pairs[:, 0] = [token for token, _ in rows]
        values = np.array([value for _, value in rows])
        pairs[:, 1] = values if values.dtype.kind == "i" else values.astype(np.float32).view(np.int32)
    return pairs


def _bans(tokens: Sequence[int]) -> I32:
    """Biases that rule tokens out."""
    return _pairs((token, -np.inf) for token in tokens)


def pack_mask(tokens: Iterable[int], vocab: int) -> I32:
    """Allowed tokens as bits: bit t % 32 of word t // 32."""
    bits = np.zeros(32 * mask_words(vocab), np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


# ----------------------------------------------------------------------------------------- a step


# Of a row that nobody samples from.
GREEDY: Final = Row(np.zeros(NUM_WORDS, np.int32))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """settings[n, 16], edits[m, 2] and masks[k, words] of n logit rows."""

    settings: I32
    edits: I32
    masks: I32

    def chunk(self, start: int, stop: int) -> SamplingInputs:
        """Those of the rows start..stop - 1."""
        settings = self.settings[start:stop].copy()
        first, last = settings[0, Words.BIAS_START], settings[-1, Words.COUNT_END]
        settings[:, [Words.BIAS_START, Words.COUNT_START, Words.COUNT_END]] -= first
        has_mask = settings[:, Words.MASK] > 0
        before = settings[has_mask, Words.MASK].min(initial=len(self.masks) + 1) - 1
        settings[has_mask, Words.MASK] -= before
        masks = self.masks[before : before + has_mask.sum()]
        return SamplingInputs(settings, self.edits[first:last], masks)


def sampling_inputs(rows: Sequence[Row], vocab: int) -> SamplingInputs:
    """The inputs of a step's logit rows, in order."""
    settings = np.array([row.words for row in rows], np.int32).reshape(len(rows), NUM_WORDS)
    lengths = np.array([(len(row.biases), len(row.seen)) for row in rows], np.int32).reshape(len(rows), 2)
    ends = np.cumsum(lengths, dtype=np.int32).reshape(len(rows), 2)
    settings[:, Words.BIAS_START] = ends[:, 0] - lengths[:, 0]
    settings[:, Words.COUNT_START] = ends[:, 0]
    settings[:, Words.COUNT_END] = ends[:, 1]
    edits = [part for row in rows for part in (row.biases, row.seen) if len(part)]
    masks = [row.mask for row in rows if row.mask is not None]
    if masks:
        has_mask = np.array([row.mask is not None for row in rows])
        settings[has_mask, Words.MASK] = np.arange(1, len(masks) + 1)
    return SamplingInputs(
        settings,
        np.concatenate(edits) if edits else _NO_EDITS,
        np.stack(masks) if masks else np.zeros((0, mask_words(vocab)), np.int32),
    )


# By logit row: logits processors, and the output so far.
Processors = Mapping[int, tuple[Sequence[LogitsProcessor], list[int]]]


def process_logits(processors: Processors, logits: F32) -> dict[int, Exception]:
    """Runs logits processors on rows of logits[n, vocab], in place.

    What a processor raises is given back for its row, and the others go on: the fault is one request's, even
    if it would end the process (SystemExit). Only an interrupt from the keyboard goes through.
    """
    errors: dict[int, Exception] = {}
    for row, (functions, output) in processors.items():
        try:
            value = logits[row].copy()
            for function in functions:
                value = np.asarray(function(list(output), value), np.float32)
                if value.shape != logits[row].shape:
                    raise RequestError(
                        f"gave logits of shape {value.shape}, not {logits[row].shape}",
                        place="logits_processors",
                    )
            logits[row] = value
        except KeyboardInterrupt:
            raise
        except Exception as error:  # whatever it is, it is the function's
            errors[row] = error
        except BaseException as error:
            errors[row] = RequestError(f"a function raised {error!r}", place="logits_processors")
            errors[row].__cause__ = error
    return errors


# ----------------------------------------------------------------------------- log probabilities


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token, and its rank among all (the likeliest has 1) if it was looked for."""

    logprob: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's own log probability, and the likeliest tokens with theirs, descending."""

    token: int
    own: Logprob
    top: dict[int, Logprob] = field(default_factory=dict)


def token_logprobs(logits: F32, tokens: Iterable[int], count: int) -> list[TokenLogprobs]:
    """For rows of logits[n, vocab] the log probability of each row's token and its `count` likeliest ones.

    In float64, the row's greatest logit taken out first. Of equal logits the first token counts as the
    likelier among the listed; ranks count greater logits only.
    """
    return [_of_row(row, int(token), count) for row, token in zip(logits, tokens, strict=True)]


def _of_row(row: F32, token: int, count: int) -> TokenLogprobs:
    greatest = float(row.max())
    total = greatest + float(np.log(np.exp(row.astype(np.float64) - greatest).sum()))
    own = Logprob(float(row[token]) - total, int((row > row[token]).sum()) + 1)
    if count == 0:
        return TokenLogprobs(token, own)
    count = min(count, len(row))
    least = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.flatnonzero(row >= least)
    order = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    top = {int(t): Logprob(float(row[t]) - total, rank) for rank, t in enumerate(order, 1)}
    return TokenLogprobs(token, own, top)
