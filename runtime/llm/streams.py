"""One prompt's output in an event loop, while the engine runs in its own thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pagec.compiler.errors import PagecError
from pagec.runtime.llm.answers import Answer, Job
from pagec.runtime.llm.engine_thread import EngineThread
from pagec.runtime.llm.outputs import CompletionOutput, RequestOutput

Start = Callable[[Job, Callable[[RequestOutput], None]], Answer]


class Stream:
    """An asynchronous iterator; see LLM.stream. It is started by its first step.

    The engine holds what it gives news to, but not the stream itself: so one that nobody holds any more is
    collected, and aborts.
    """

    def __init__(
        self, thread: EngineThread, make: Callable[[], Job], start: Start, *, delta: bool = False
    ) -> None:
        self._thread = thread
        self._make = make
        self._start = start
        self._delta = delta
        self._answer: Answer | None = None
        self._whole: RequestOutput | None = None
        self._num_choices = 0
        self._has_ended = False
        self._news: deque[RequestOutput] = deque()
        self._event = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._has_ended:
            raise StopAsyncIteration
        if self._answer is None:
            self._answer = await self._begin()
        while not self._news:
            self._event.clear()
            await self._event.wait()
        if self._delta:
            output = self._news.popleft()
            self._has_ended = output.finished
            return output
        return self._grown()

    def _grown(self) -> RequestOutput:
        """The whole output with all news."""
        if self._whole is None:
            first = self._news[0]
            choices = [CompletionOutput(index) for index in range(self._num_choices)]
            self._whole = replace(first, outputs=choices, prompt_logprobs=None)
        while self._news:
            self._whole.add(self._news.popleft())
        self._has_ended = self._whole.finished
        return self._whole.copy()

    async def _begin(self) -> Answer:
        """Checks and tokenizes in a thread, so that the event loop goes on."""
        job = await asyncio.to_thread(self._make)
        self._num_choices = job.params.n
        loop, news, event, start = asyncio.get_running_loop(), self._news, self._event, self._start

        def take(new: RequestOutput) -> None:
            news.append(new)
            event.set()

        def give(new: RequestOutput) -> None:
            loop.call_soon_threadsafe(take, new)

        future = self._thread.call(lambda: start(job, give))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # too late to keep it from starting, perhaps
            future.add_done_callback(partial(_abort_started, self._thread))
            raise

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Aborts it if it has not ended. Idempotent."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        answer, has_ended = self._answer, self._has_ended
        self._has_ended = True
        if answer is not None and not has_ended:
            with suppress(PagecError):  # the engine has ended
                self._thread.call(lambda: self._thread.abort(answer))


def _abort_started(thread: EngineThread, future: Future[Answer]) -> None:
    """Of a start that nobody waits for any more; in the engine's thread, if it was made."""
    if not future.cancelled() and future.exception() is None:
        thread.abort(future.result())
