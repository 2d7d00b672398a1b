"""Beam search: a request's sequences are its beams, and its commit hook decides which of them go on.

    candidates    every beam, followed by each of its likeliest tokens; the likeliest of all count
    score         sum of log probabilities / generated tokens ** length_penalty; an end of text counts as one

A sum of log probabilities stands for the product of the probabilities, which would underflow; since every
token lowers it, short texts would win without the penalty.

The likeliest candidates that do not end are the next beams. One that ends is a hypothesis if it ranks among
the first `beam_width`; the best `beam_width` hypotheses stay. When `max_tokens` is reached, the first
`beam_width` candidates become hypotheses, ended or not. The search stops earlier once there are so many and

    early_stopping    True     nothing more: what might come is not waited for
                      False    the best beam, scored at its present length, is no better than the worst
                      "never"  nor is it with its present sum at the most favourable length: `max_tokens` if
                               the penalty is above 0, else the present one

All of this is what transformers does, whose search with one beam is a greedy one. Another rule altogether is

                      "all"    hypotheses compete with the beams: of both together the best `beam_width` by
                               score are kept, and the search stops when all of these have ended

Sums are float64. Of equal candidates that of the better beam comes first, then the lower token id; an
earlier hypothesis comes before an equal one found later.

A beam is a fork of the one that it continues and shares its blocks; beams without successors are dropped.
Where a beam goes on with the token that its sequence has got anyway (the likeliest), that sequence stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from pagec.compiler.errors import RequestError
from pagec.runtime.sampling import checks
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import token_logprobs
from pagec.runtime.sequence import Changes, Fork, Request

EarlyStopping = Literal[True, False, "never", "all"]
EARLY_STOPPING: Final = (True, False, "never", "all")
MAX_LENGTH_PENALTY: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What a beam search is asked for; names as vLLM's and, where it has none, as transformers'.

    beam_width          beams, and hypotheses that are kept
    n                   hypotheses that are given back, the best ones (None: all)
    max_tokens          None: as many as the model's length leaves; ignore_eos: the end of text ends nothing
    length_penalty      above 0 long texts gain, below 0 short ones; early_stopping: see above
    temperature         0: nothing is drawn
    include_stop_str_in_output   the token that ended a text stays in it; hypotheses' tokens have it anyway

    RequestError for a value of the wrong type or out of range.
    """

    beam_width: int
    n: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        expected = "a whole number of at least 1"
        for name in ("beam_width", "max_tokens", "n"):
            value = getattr(self, name)
            if value is not None or name == "beam_width":
                object.__setattr__(self, name, checks.whole(name, value, 1, None, expected))
        if self.n is not None and self.n > self.beam_width:
            checks.bad("n", self.n, f"at most beam_width, {self.beam_width}")
        most = MAX_LENGTH_PENALTY
        for name, low, high, expected in (
            ("length_penalty", -most, most, f"a number from {-most:g} to {most:g}"),
            ("temperature", 0.0, 0.0, "0: a beam search draws nothing"),
        ):
            object.__setattr__(self, name, checks.number(name, getattr(self, name), low, high, expected))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            checks.flag(name, getattr(self, name))
        rule = self.early_stopping
        if not isinstance(rule, bool | str) or rule not in EARLY_STOPPING:
            checks.bad("early_stopping", rule, 'true, false, "never" or "all"')

    @property
    def as_greedy(self) -> SamplingParams:
        """What it has in common with other requests."""
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)

    def check(self, *, max_choices: int) -> None:
        """RequestError for what an engine that runs at most `max_choices` sequences at once cannot do."""
        if self.beam_width > max_choices:
            checks.bad(
                "beam_width", self.beam_width, f"at most {max_choices}, the sequences that run at once"
            )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that a beam search has found: generated tokens, the end of text among them if it ended with
    one ("stop"), each with its log probability. `score` as above."""

    tokens: tuple[int, ...]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """What a beam has generated, the last token first. `total`: the sum of the log probabilities.

    Compared by identity: thousands of tokens may be chained here.
    """

    before: _Path | None
    token: int
    logprob: float
    total: float
    length: int


class _Beam(NamedTuple):
    """A path, and the number of the request's sequence that is at its end or, of a candidate, before it."""

    path: _Path
    sequence: int


class BeamSearch:
    """The commit hook of one request, which must have `hook_logits` and end nowhere before `max_tokens`.

    `ends`: the tokens that end a text. It drops all sequences when the search is done, and leaves what it
    has found in `request.hypotheses`.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, ends: Collection[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._width = params.beam_width
        self._ends = frozenset(ends)
        # A beam ends in so many ways at most: enough candidates do not.
        self._num_candidates = max(2, 1 + len(self._ends)) * self._width
        is_greedy = self._width == 1 and params.early_stopping == "never"
        self._rule: EarlyStopping = True if is_greedy else params.early_stopping
        self._beams = [_Beam(_Path(None, -1, 0.0, 0.0, 0), 0)]  # the best first
        self._ended: list[_Path] = []  # likewise

    def __call__(self, request: Request, tokens: Sequence[int], logits: Any) -> Changes:
        """Decides which beams go on; see CommitHook."""
        candidates = self._candidates(tokens, logits)
        beams = self._compete(candidates) if self._rule == "all" else self._sift(candidates)
        if not beams or self._is_decided(beams[0].path):
            request.hypotheses = [self._hypothesis(path) for path in self._ended[: self._params.n]]
            return Changes(drops=range(len(tokens)))
        return self._go_on(beams, tokens)

    def _candidates(self, tokens: Sequence[int], logits: Any) -> list[_Beam]:
        """The likeliest continuations of all beams, the best first; impossible ones are none."""
        rows = token_logprobs(logits, tokens, self._num_candidates)
        found = [
            (-(beam.path.total + known.logprob), rank, token, known.logprob)
            for rank, beam in enumerate(self._beams)
            for token, known in rows[beam.sequence].top.items()
            if known.logprob > -math.inf
        ]
        if not found:
            raise RequestError("the model's logits are not numbers", place="model")
        found.sort()
        candidates = []
        for negative, rank, token, logprob in found[: self._num_candidates]:
            path, sequence = self._beams[rank]
            longer = _Path(path, token, logprob, -negative, path.length + 1)
            candidates.append(_Beam(longer, sequence))
        return candidates

    def _sift(self, candidates: Sequence[_Beam]) -> list[_Beam]:
        """The next beams by transformers' rules; what has ended becomes a hypothesis if it ranks high."""
        beams = [beam for beam in candidates if not self._has_ended(beam.path)][: self._width]
        self._ended += [beam.path for beam in candidates[: self._width] if self._has_ended(beam.path)]
        self._ended.sort(key=self._score, reverse=True)
        del self._ended[self._width :]
        return beams

    def _compete(self, candidates: Sequence[_Beam]) -> list[_Beam]:
        """The next beams where hypotheses take places of them."""
        everyone = [*(_Beam(path, -1) for path in self._ended), *candidates]
        everyone.sort(key=lambda beam: self._score(beam.path), reverse=True)
        kept = everyone[: self._width]
        self._ended = [beam.path for beam in kept if self._has_ended(beam.path)]
        return [beam for beam in kept if not self._has_ended(beam.path)]

    def _has_ended(self, path: _Path) -> bool:
        return path.token in self._ends or path.length == self._max_tokens

    def _score(self, path: _Path, length: int | None = None) -> float:
        """`length`: taken in place of the path's own."""
        return float(path.total / (length or path.length) ** self._params.length_penalty)

    def _is_decided(self, best: _Path) -> bool:
        """Whether no beam can become a hypothesis any more, the best being this one."""
        if self._rule == "all" or len(self._ended) < self._width:
            return False
        if self._rule is True:
            return True
        is_longest_best = self._rule == "never" and self._params.length_penalty > 0
        length = self._max_tokens if is_longest_best else best.length
        return self._score(best, length) <= self._score(self._ended[-1])

    def _go_on(self, beams: Sequence[_Beam], tokens: Sequence[int]) -> Changes:
        """Sequences for the next beams; those that stay come first, then the forks."""
        staying = sorted(
            (beam for beam in beams if beam.path.token == tokens[beam.sequence]), key=lambda b: b.sequence
        )
        forking = [beam for beam in beams if beam.path.token != tokens[beam.sequence]]
        numbers = {beam: number for number, beam in enumerate([*staying, *forking])}
        self._beams = [_Beam(beam.path, numbers[beam]) for beam in beams]
        return Changes(
            [Fork(beam.sequence, beam.path.token) for beam in forking],
            sorted(set(range(len(tokens))) - {beam.sequence for beam in staying}),
        )

    def _hypothesis(self, path: _Path) -> Hypothesis:
        steps = []
        at: _Path | None = path
        while at is not None and at.length:
            steps.append(at)
            at = at.before
        steps.reverse()
        return Hypothesis(
            tuple(step.token for step in steps),
            self._score(path),
            path.total,
            "stop" if path.token in self._ends else "length",
            tuple(step.logprob for step in steps),
        )
