"""What HTTP and gRPC stand on: validated calls in, text as it comes out, and how the engine stands.

    async with await service.start(call) as generation:
        async for update in generation:
            ...                         # leaving early, also by cancellation, aborts
    generation.usage, generation.timings

Everything here runs in the front process's event loop.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from pagec.compiler.errors import PagecError
from pagec.runtime.server.client import EngineClient
from pagec.runtime.server.errors import Draining, EngineDead, GenerationError, Overloaded
from pagec.runtime.server.generation import Call, Generation, error_of
from pagec.runtime.server.limits import RequestLimits
from pagec.runtime.server.messages import Abort, News, Ready, Snapshot, Submit
from pagec.runtime.server.params import UNFIT, packed, unfit
from pagec.runtime.text.choice import ChoiceText, bad_word_ids
from pagec.runtime.text.pieces import TokenTexts
from pagec.runtime.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_RETRY_S: Final = 60
DEFAULT_MAX_QUEUE: Final = 256


class Observer(Protocol):
    """Is told what becomes of calls."""

    def refused(self, error: PagecError) -> None:
        """A call was not taken."""

    def finished(self, generation: Generation) -> None:
        """A generation is over, whatever ended it."""


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What is served: the names that requests may use, the first one is reported; and the engine's own
    words about itself."""

    names: tuple[str, ...]
    version: str
    engine: Ready

    @property
    def model(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Stats:
    """How the server stands; see messages.Snapshot."""

    model: str
    uptime_s: float
    engine: Snapshot


class Service:
    """Takes calls for one engine. `max_queue`: so many sequences may be open beyond those that can run."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        info: ServiceInfo,
        *,
        limits: RequestLimits | None = None,
        max_queue: int = DEFAULT_MAX_QUEUE,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.texts = TokenTexts(tokenizer)
        self.info = info
        self.limits = limits or RequestLimits()
        self._client = client
        self.most_open = info.engine.max_rows + max_queue
        self._observers = tuple(observers)
        self._open: dict[str, Generation] = {}
        self._num_open = 0  # sequences
        self._mean_s = 1.0  # how long a generation takes, lately
        self._is_draining = False
        self._became_idle = asyncio.Event()
        self.began_at = time.time()
        self._began = time.monotonic()
        self._asked: asyncio.Task[Snapshot] | None = None
        self._last = _Latest()
        client.on_news = self._take_news
        client.on_death = self._end_all

    # ------------------------------------------------------------------------------ calls

    async def start(self, call: Call, id: str | None = None) -> Generation:
        """Hands a call to the engine; returns when that has taken it.

        `id`: how it is called in stats and records; one is drawn if not given. RequestError if the call is
        invalid, Overloaded, Draining or EngineDead if no call can be taken now.
        """
        try:
            return await self._start(call, id or new_id())
        except PagecError as error:
            for observer in self._observers:
                observer.refused(error)
            raise

    async def _start(self, call: Call, id: str) -> Generation:
        self.limits.check(call.params)
        rows, vocab = self.info.engine.max_rows, self.info.engine.vocab
        call.params.check(vocab=vocab, max_choices=rows)  # here, so that nobody waits for what cannot be
        if call.beam is not None:
            call.beam.check(max_choices=rows)
        ChoiceText(self.tokenizer, call.params)
        words = bad_word_ids(self.tokenizer, call.params.bad_words or ())
        self._admit()
        generation = Generation(id, call, self.tokenizer, self._abort)
        message = Submit(
            id,
            list(call.prompt),
            packed(call.params),
            packed(call.beam) if call.beam is not None else None,
            call.salt,
            call.priority,
            call.ttft_s,
            call.token_s,
            words,
        )
        try:
            self._client.send(message)
        except UNFIT as error:
            raise unfit(message) from error
        self._open[id] = generation
        self._num_open += call.width
        self._became_idle.clear()
        try:
            await generation.accepted
        except asyncio.CancelledError:  # who called has gone
            generation.close()
            raise
        except PagecError:
            self._forget(id)
            raise
        return generation

    def _admit(self) -> None:
        self.check_ready()
        if self._num_open >= self.most_open:
            waiting = self._num_open - self.info.engine.max_rows + 1
            turns = math.ceil(waiting / self.info.engine.max_rows)
            seconds = min(max(math.ceil(self._mean_s * turns), 1), MAX_RETRY_S)
            raise Overloaded(f"the queue is full: {self._num_open} sequences are open", seconds)

    def check_alive(self) -> None:
        """EngineDead if it is."""
        if self._client.death is not None:
            raise EngineDead(self._client.death, remedy="start the server again")

    def check_ready(self) -> None:
        """EngineDead or Draining if no call can be taken."""
        self.check_alive()
        if self._is_draining:
            raise Draining("the server is shutting down", remedy="send the request elsewhere")

    # --------------------------------------------------------------------------- the engine

    def _take_news(self, news: News) -> None:
        for accepted in news.accepted:
            self._tell(accepted.id, Generation.accept, accepted.seed)
        for refused in news.refused:
            self._tell(refused.id, Generation.refuse, error_of(refused.fault))
            self._forget(refused.id)
        for prompt in news.prompt_logprobs:
            self._tell(prompt.id, Generation.take_prompt, prompt.logprobs)
        for tokens in news.tokens:
            self._tell(tokens.id, Generation.add, tokens)
        for finished in news.finished:
            self._tell(finished.id, Generation.finish, finished)
            if generation := self._open.get(finished.id):
                self._close(generation)

    def _tell(self, id: str, what: Callable[[Generation, T], None], news: T) -> None:
        """Hands news to a generation that is still open. What goes wrong there is its own: the others' news
        come after it."""
        generation = self._open.get(id)
        if generation is None:
            return
        try:
            what(generation, news)
        except Exception as error:
            self._abort(id, None)
            generation.fail(GenerationError(f"a fault of the server: {type(error).__name__}: {error}"))
            self._close(generation)

    def _abort(self, id: str, choice: int | None) -> None:
        """Tells the engine that a request, or one of its choices, is not wanted any more."""
        if id in self._open:
            self._client.send(Abort(id, choice))

    def _close(self, generation: Generation) -> None:
        self._forget(generation.id)
        if generation.is_complete:
            self._mean_s += 0.2 * (generation.total_s - self._mean_s)
        for observer in self._observers:
            observer.finished(generation)

    def _forget(self, id: str) -> None:
        generation = self._open.pop(id, None)
        if generation is not None:
            self._num_open -= generation.call.width
        if not self._open:
            self._became_idle.set()

    def _end_all(self, why: str) -> None:
        """The engine has died."""
        self._fail_all(EngineDead(why, remedy="send the request again when the server is back"))

    def _fail_all(self, error: PagecError) -> None:
        for generation in list(self._open.values()):
            if generation.accepted.done():
                generation.fail(error)
                self._close(generation)
            else:
                generation.refuse(error)

    # ------------------------------------------------------------------------------ the end

    async def drain(self, seconds: float) -> None:
        """Takes no more calls, and waits until those that it has are over; after so many seconds what is
        left ends with an error."""
        self._is_draining = True
        if self._open:
            self._became_idle.clear()
            try:
                await asyncio.wait_for(self._became_idle.wait(), seconds)
            except TimeoutError:
                self.end_all_now()

    def end_all_now(self) -> None:
        """Every open call ends with an error."""
        self._is_draining = True
        for id in self._open:
            self._abort(id, None)
        self._fail_all(Draining("the server is shutting down", remedy="send the request elsewhere"))

    # ------------------------------------------------------------------------------- stats

    async def stats(self, max_age_s: float = 0.0) -> Stats:
        """How the engine stands between two steps; one that was asked at most so long ago will do.
        EngineDead if there is none."""
        self.check_alive()
        now = time.monotonic()
        if self._last.snapshot is None or now - self._last.at > max_age_s:
            if self._asked is None or self._asked.done():
                self._asked = asyncio.ensure_future(self._client.snapshot())
            snapshot = await asyncio.shield(self._asked)
            self._last = _Latest(snapshot, time.monotonic())
        assert self._last.snapshot is not None
        return Stats(self.info.model, time.monotonic() - self._began, self._last.snapshot)

    async def watch(self, every_s: float) -> AsyncIterator[Stats]:
        """Stats now, and then so often, as long as the server takes calls; watchers share what they see."""
        while not self._is_draining:
            yield await self.stats(max_age_s=every_s / 2)
            await asyncio.sleep(every_s)


@dataclass(frozen=True, slots=True)
class _Latest:
    """A snapshot, and when it came."""

    snapshot: Snapshot | None = None
    at: float = field(default=-math.inf)


def new_id() -> str:
    """A name for a call that no other has."""
    return secrets.token_hex(12)
