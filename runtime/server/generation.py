"""One call from its start to its end, as the front process sees it: tokens in, text out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pagec.compiler.errors import PagecError, RequestError
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import TokenLogprobs
from pagec.runtime.server.errors import GenerationError
from pagec.runtime.server.messages import Fault, Finished, Hypothesis, Timings, Tokens
from pagec.runtime.text.choice import ChoiceText, TextPiece
from pagec.runtime.text.tokenizer import Tokenizer

Outcome = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Call:
    """What is to be generated. `prompt` as token ids; `prompt_text` as it was given, if it was; the rest as
    in Engine.add_request."""

    prompt: Sequence[int]
    params: SamplingParams
    beam: BeamSearchParams | None = None
    salt: str = ""
    priority: int = 0
    ttft_s: float | None = None
    token_s: float | None = None
    prompt_text: str | None = None

    @property
    def width(self) -> int:
        """The most sequences that it runs at once."""
        return self.params.n if self.beam is None else self.beam.beam_width


@dataclass(frozen=True, slots=True)
class Update:
    """What came for one choice. `text` may be empty while a part of a character, or of a stop string, is
    held back. `finish_reason` ("stop", "length", "abort") comes once for each choice, with its last update;
    `stop_reason`: the stop string or stop token that ended it. `score`: of a beam search. `offsets`: where
    in the choice's text the text of each token begins."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, of all choices together, and of the prompt those found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Choice:
    """What is known of one choice; its reader has the tokens."""

    reader: ChoiceText
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None


class Generation:
    """An asynchronous iterator of updates; raises RequestError or GenerationError if a fault ended the
    request, EngineDead or Draining if the server did. As a context manager it aborts what is left early.

    `seed` is the one given or drawn; `prompt_logprobs`, if asked for, is there before the first update;
    `usage` and `timings` are whole when the iterator has ended.
    """

    def __init__(
        self, id: str, call: Call, tokenizer: Tokenizer, abort: Callable[[str, int | None], None]
    ) -> None:
        self.id = id
        self.call = call
        self.seed: int | None = call.params.seed
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.timings: Timings | None = None
        self.outcome: Outcome | None = None
        self.began = time.monotonic()
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices: list[Choice] = []  # none before the engine has taken it: until then nothing is checked
        self._tokenizer = tokenizer
        self._abort = abort
        self._updates: deque[Update] = deque()
        self._error: PagecError | None = None
        self._news = asyncio.Event()

    def _add_choice(self) -> Choice:
        choice = Choice(ChoiceText(self._tokenizer, self.call.params, self.call.prompt))
        self.choices.append(choice)
        return choice

    # ----------------------------------------------------------------------------- for readers

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts it if it is not over. Idempotent."""
        if self.outcome is None:
            self._abort(self.id, None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Update:
        while not self._updates:
            if self._error is not None:
                raise self._error
            if self.outcome is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._updates.popleft()

    @property
    def usage(self) -> Usage:
        """The tokens so far; those found in the cache are known at the end."""
        completion = sum(len(choice.reader.token_ids) for choice in self.choices)
        cached = self.timings.cached_tokens if self.timings else 0
        return Usage(len(self.call.prompt), completion, cached)

    @property
    def is_complete(self) -> bool:
        """Whether all its choices came to their own end."""
        return self.outcome in ("stop", "length")

    @property
    def total_s(self) -> float:
        """From the call to its end."""
        return (self.finished_at or time.monotonic()) - self.began

    # ------------------------------------------------------------------------- for the service

    def accept(self, seed: int | None) -> None:
        """The engine has taken it."""
        self.seed = seed
        for _ in range(self.call.params.n if self.call.beam is None else 0):
            self._add_choice()
        if not self.accepted.done():
            self.accepted.set_result(None)

    def take_prompt(self, logprobs: list[TokenLogprobs | None]) -> None:
        """What was asked for about the prompt's tokens."""
        self.prompt_logprobs = logprobs

    def refuse(self, error: PagecError) -> None:
        """The engine has not."""
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def add(self, tokens: Tokens) -> None:
        """New tokens of one choice. A stop string found in their text ends it."""
        choice = self.choices[tokens.choice]
        if choice.finish_reason is not None:
            return  # the engine has not heard of the stop yet
        if self.first_token_at is None and tokens.token_ids:
            self.first_token_at = time.monotonic()
        piece = choice.reader.add(tokens.token_ids, tokens.logprobs, tokens.finish_reason is not None)
        choice.finish_reason, choice.stop_reason = tokens.finish_reason, tokens.stop_reason
        if piece.stop_reason is not None:
            if choice.finish_reason is None:
                self._abort(self.id, tokens.choice)
            choice.finish_reason, choice.stop_reason = "stop", piece.stop_reason
        num_read = len(piece.offsets)  # none behind a stop
        self._give(tokens.choice, piece, tokens.token_ids[:num_read], tokens.logprobs[:num_read])

    def finish(self, finished: Finished) -> None:
        """The engine has done with it."""
        self.timings = finished.timings
        if finished.fault is not None:
            self.fail(error_of(finished.fault))
            return
        for index, hypothesis in enumerate(finished.hypotheses[: self.call.params.n]):
            self._give_hypothesis(index, hypothesis)
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None:  # ended from outside
                choice.finish_reason = finished.finish_reason
                self._give(index, choice.reader.add((), (), True), ())
        reasons = {choice.finish_reason for choice in self.choices}
        self._end("abort" if "abort" in reasons else "stop" if "stop" in reasons else "length")

    def fail(self, error: PagecError) -> None:
        """Something else has ended it."""
        if self.outcome is None:
            self._error = error
            self.refuse(error)
            self._end("error")

    def _give_hypothesis(self, index: int, found: Hypothesis) -> None:
        choice = self._add_choice()
        choice.finish_reason, choice.score = found.finish_reason or "length", found.score
        self._give(index, choice.reader.add(found.token_ids, (), True), tuple(found.token_ids))

    def _give(
        self,
        index: int,
        piece: TextPiece,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        choice = self.choices[index]
        self._updates.append(
            Update(
                index,
                piece.text,
                token_ids,
                logprobs,
                choice.finish_reason,
                choice.stop_reason,
                choice.score,
                piece.offsets,
            )
        )
        self._news.set()

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.finished_at = time.monotonic()
        self._news.set()


def error_of(fault: Fault) -> PagecError:
    """What the engine process said, as an exception."""
    kind = RequestError if fault.is_own else GenerationError
    return kind(fault.message, place=fault.place, remedy=fault.remedy)
