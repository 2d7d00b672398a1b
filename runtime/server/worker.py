"""The engine process: `python -m pagec.runtime.server.worker FD`, started by client.py.

It opens an engine as the first message on the socket FD says, and then takes turns: read what has come, make
a step, tell what that brought in one message. With nothing to do it waits for the socket. It ends when the
front does: by Stop, or because the other end is closed.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from pagec.compiler.artifact import open_artifact
from pagec.compiler.errors import ArtifactError, PagecError, RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.kv.setup import owner_of
from pagec.runtime.loading import AnyArtifact
from pagec.runtime.sampling.beam import BeamSearchParams
from pagec.runtime.sampling.grammar import GrammarCompiler, GrammarState
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.server.messages import (
    Abort,
    AskSnapshot,
    Failed,
    Frames,
    Ready,
    Start,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    frame,
)
from pagec.runtime.server.meter import Meter
from pagec.runtime.server.params import unpacked
from pagec.runtime.server.report import Reporter, snapshot
from pagec.runtime.text.defaults import TOKENIZER_DIRECTORY, GenerationDefaults

READ_BYTES: Final = 1 << 18


class Connection:
    """The socket to the front, and a bell that other threads ring."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._frames: Frames[ToEngine] = Frames(ToEngine)
        self._bell, self._ring = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._socket, self._bell):
            self._selector.register(end, selectors.EVENT_READ)

    def send(self, message: ToFront) -> None:
        """Sends all of a message, waiting for the front if need be; BrokenPipeError if that has gone."""
        self._socket.sendall(frame(message))

    def receive(self, wait: bool) -> list[ToEngine]:
        """The messages that are there; `wait`: until there are some, or the bell rings. ConnectionError if
        the front has gone."""
        messages: list[ToEngine] = []
        for key, _ in self._selector.select(None if wait else 0):
            data = key.fileobj.recv(READ_BYTES)  # type: ignore[union-attr]
            if key.fileobj is self._socket:
                if not data:
                    raise ConnectionError
                messages = self._frames.feed(data)
        return messages

    def ring(self) -> None:
        """Ends a wait in `receive`. For any thread."""
        self._ring.send(b"\0")


class Grammars:
    """Compiles grammars in a thread of its own: some take long, and others' steps shall not wait."""

    def __init__(self, artifact: AnyArtifact, connection: Connection) -> None:
        tokenizer = artifact.path / TOKENIZER_DIRECTORY / "tokenizer.json"
        eos = GenerationDefaults.read(artifact.path).eos_token_ids
        self._compiler = GrammarCompiler(tokenizer, artifact.program.vocab, eos)
        self._pool = ThreadPoolExecutor(1)
        self._prepared = self._pool.submit(self._compiler.prepare)
        self._ring = connection.ring
        self._done: deque[tuple[Submit, SamplingParams, Future[GrammarState]]] = deque()

    def wait(self) -> None:
        """Until the first request will find all that it needs. Those that want a grammar of a tokenizer that
        is not fit for any are told so."""
        with contextlib.suppress(ArtifactError):
            self._prepared.result()

    def begin(self, message: Submit, params: SamplingParams) -> None:
        """Compiles what a request wants; see `take`."""
        assert params.structured_outputs is not None
        future = self._pool.submit(self._compiler.compile, params.structured_outputs)
        future.add_done_callback(lambda done: self._note(message, params, done))

    def _note(self, message: Submit, params: SamplingParams, done: Future[GrammarState]) -> None:
        self._done.append((message, params, done))
        self._ring()

    def take(self) -> Iterator[tuple[Submit, SamplingParams, Future[GrammarState]]]:
        """What has been compiled, or refused, since the last time."""
        while self._done:
            yield self._done.popleft()


class Worker:
    """Runs one engine for one front."""

    def __init__(self, engine: Engine, connection: Connection, grammars: Grammars) -> None:
        self._engine = engine
        self._connection = connection
        self._grammars = grammars
        self._reporter = Reporter()
        self._compiling: set[str] = set()
        self._meter = Meter(engine.scheduler.clock)
        self._asked = 0  # snapshots
        engine.trace = self._meter

    def run(self) -> None:
        """Until the front says stop; ConnectionError if it has gone."""
        while self._take_messages():
            for message, params, done in self._grammars.take():
                self._submit_compiled(message, params, done)
            if self._engine.has_work:
                self._reporter.note(self._engine.step())
            news = self._reporter.take()
            if news is not None:
                self._connection.send(news)
            for _ in range(self._asked):
                self._connection.send(snapshot(self._engine, self._meter, self._reporter))
            self._asked = 0

    def _take_messages(self) -> bool:
        """False if one of them says stop."""
        for message in self._connection.receive(wait=not self._engine.has_work):
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                self._abort(message)
            elif isinstance(message, AskSnapshot):
                self._asked += 1
            elif isinstance(message, Stop):
                return False
        return True

    def _submit(self, message: Submit) -> None:
        with self._refusing(message):
            params = unpacked(message.params)
            if params.structured_outputs is not None and message.beam is None:
                self._compiling.add(message.id)
                self._grammars.begin(message, params)
            else:
                self._add(message, params, None)

    def _submit_compiled(self, message: Submit, params: SamplingParams, done: Future[GrammarState]) -> None:
        if message.id not in self._compiling:
            return  # aborted meanwhile
        self._compiling.remove(message.id)
        with self._refusing(message):
            self._add(message, params, done.result())

    @contextlib.contextmanager
    def _refusing(self, message: Submit) -> Iterator[None]:
        """Whatever goes wrong with a request that is new, it is the request's own."""
        try:
            yield
        except Exception as error:
            self._reporter.refuse(message.id, error)

    def _add(self, message: Submit, params: SamplingParams, grammar: GrammarState | None) -> None:
        beam = BeamSearchParams(**message.beam) if message.beam is not None else None
        request = self._engine.add_request(
            message.prompt,
            params=params if beam is None else None,
            salt=message.salt,
            priority=message.priority,
            ttft_s=message.ttft_s,
            token_s=message.token_s,
            bad_words=message.bad_words,
            grammar=grammar,
            beam=beam,
        )
        self._reporter.accept(message.id, request)

    def _abort(self, message: Abort) -> None:
        if message.id in self._compiling:
            self._compiling.remove(message.id)
            self._reporter.refuse(message.id, RequestError("was aborted"))
        request = self._reporter.open.get(message.id)
        if request is None:
            return
        if message.choice is None:
            self._engine.abort(request)
        elif message.choice < len(request.sequences):
            self._engine.abort(request, message.choice, "stop")


def open_engine(artifact: AnyArtifact, options: Mapping[str, Any]) -> tuple[Engine, Ready]:
    """An engine that has made its first steps: the first request shall not be slower than the others."""
    if options.get("kv_dir") is not None:
        options = {**options, "kv_dir": Path(options["kv_dir"])}
    engine = Engine(artifact, **options)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=0)):
        engine.add_request([0], 2, params=params, ignore_eos=True)
        for _ in engine.stream():
            pass
    program = engine.program
    ready = Ready(
        model=program.model,
        digest=owner_of(artifact, options.get("weights")).hex(),
        vocab=program.vocab,
        max_len=program.max_len,
        max_rows=engine.scheduler.limits.max_rows,
        block_size=engine.scheduler.blocks.block_size,
        num_blocks=engine.scheduler.blocks.num_blocks,
        target=str(artifact.manifest["target"]["name"]),
        memory=engine.ledger.lines(),
    )
    return engine, ready


def _first_message(connection: Connection) -> Start:
    messages: list[ToEngine] = []
    while not messages:
        messages = connection.receive(wait=True)
    (start,) = messages
    assert isinstance(start, Start)
    return start


def serve(connection: Connection) -> None:
    """Opens the engine and runs it to its end."""
    start = _first_message(connection)
    try:
        artifact = open_artifact(Path(start.artifact))
        grammars = Grammars(artifact, connection)  # reads the tokenizer while the engine reads the weights
        engine, ready = open_engine(artifact, start.options)
        grammars.wait()
    except PagecError as error:
        connection.send(Failed(error.message, error.place, error.remedy))
        return
    except Exception as error:
        connection.send(Failed(f"the engine could not be opened: {error!r}"))
        raise
    with engine:
        connection.send(ready)
        Worker(engine, connection, grammars).run()


def main(words: list[str]) -> None:
    """The process. Signals are for the front, which then tells this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError):
        serve(Connection(socket.socket(fileno=int(words[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
