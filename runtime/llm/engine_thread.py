"""An engine that steps in a thread of its own, so that several callers' requests share its batches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from pagec.compiler.errors import PagecError
from pagec.runtime.engine import Engine
from pagec.runtime.loop import TokenOutput
from pagec.runtime.sequence import Request

T = TypeVar("T")


class Reader(Protocol):
    """Gets what comes of one request, in the engine's thread."""

    @property
    def request(self) -> Request:
        """The request."""

    def take(self, output: TokenOutput) -> None:
        """A step has brought it something."""

    def give_up(self, error: Exception | None) -> None:
        """Nothing more will come: it has ended, it was aborted, or the engine has failed."""


class EngineThread:
    """Runs an engine's steps; whoever wants something of the engine says so by `call`.

    An error that escapes a step is a defect: it ends all requests and the thread, and every later call says
    which it was.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._readers: dict[int, Reader] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._end_lock = threading.RLock()  # a collected stream may call while a call is made
        self._has_ended = False
        self._error: Exception | None = None  # what has ended it
        self._thread = threading.Thread(target=self._run, name="pagec-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function between two steps, in order of calls; PagecError if the engine has ended."""
        future: Future[T] = Future()
        with self._end_lock:
            if self._has_ended:
                raise self._refusal()
            self._calls.put((function, future))
        return future

    def watch(self, reader: Reader) -> None:
        """Gives a request's outputs to a reader from now on; to be called in the engine's thread."""
        self._readers[reader.request.id] = reader

    def abort(self, reader: Reader) -> None:
        """Ends a request if it has not ended; to be called in the engine's thread."""
        if self._readers.pop(reader.request.id, None) is not None:
            self._drop(reader, None)

    def close(self) -> None:
        """Aborts what runs, and ends thread and engine. Idempotent."""
        with self._end_lock:
            if not self._has_ended:
                self._has_ended = True
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._answer_calls():
                self._hand_out(self._engine.step())
        except Exception as raised:  # a defect; nobody shall wait for ever
            self._error = raised
        except BaseException as raised:  # it would end this thread only, and in silence
            self._error = PagecError(f"the engine has ended: {raised!r}", place="LLM")
            self._error.__cause__ = raised
        with self._end_lock:
            self._has_ended = True
        for reader in list(self._readers.values()):
            with suppress(BaseException):  # an engine that has failed may not be able to abort
                self._drop(reader, self._error)
        self._readers.clear()
        self._refuse_calls()
        self._engine.close()

    def _refusal(self) -> PagecError:
        if self._error is None:
            return PagecError("the engine has been closed", place="LLM")
        refusal = PagecError(
            f"the engine has failed: {self._error!r}", place="LLM", remedy="open another LLM"
        )
        refusal.__cause__ = self._error
        return refusal

    def _answer_calls(self) -> bool:
        """Runs what is asked for, and waits for it if there is nothing else to do; False at the end."""
        while True:
            try:
                asked = self._calls.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if asked is None:
                return False
            function, future = asked
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # the caller's
                    future.set_exception(error)

    def _refuse_calls(self) -> None:
        while not self._calls.empty():
            asked = self._calls.get()
            if asked is not None and asked[1].set_running_or_notify_cancel():
                asked[1].set_exception(self._refusal())

    def _hand_out(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            reader = self._readers.get(output.request.id)
            if reader is not None:
                try:
                    reader.take(output)
                except Exception as error:  # its own fault ends a request, and no other
                    del self._readers[output.request.id]
                    self._drop(reader, error)
        for output in outputs:
            if output.request.is_finished and (reader := self._readers.pop(output.request.id, None)):
                self._drop(reader, output.request.error)

    def _drop(self, reader: Reader, error: Exception | None) -> None:
        """Whoever waits for a request shall hear of its end, however it came."""
        try:
            self._engine.abort(reader.request)
        finally:
            with suppress(Exception):  # nobody listens any more: an event loop may have been closed
                reader.give_up(error)
