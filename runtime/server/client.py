"""The front process's end of the engine process: starts it, talks to it, notices when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Final, cast

from pagec.compiler.errors import PagecError
from pagec.runtime.server.errors import EngineDead
from pagec.runtime.server.messages import (
    AskSnapshot,
    Failed,
    Frames,
    News,
    Ready,
    Snapshot,
    Start,
    Stop,
    ToEngine,
    ToFront,
    frame,
)

# Room for what the engine says while the front is busy: it shall not wait for the front.
SOCKET_BYTES: Final = 4 << 20


class EngineClient(asyncio.Protocol):
    """Messages to the engine process and from it. `death` says why it is gone, None while it is there;
    `on_news` and `on_death` are told."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.death: str | None = None
        self.on_news: Callable[[News], None] = lambda _: None
        self.on_death: Callable[[str], None] = lambda _: None
        self._frames: Frames[ToFront] = Frames(ToFront)
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._snapshots: list[asyncio.Future[Snapshot]] = []
        self._is_stopping = False

    @staticmethod
    async def start(start: Start) -> EngineClient:
        """Starts an engine process; it is there when `ready` is, which raises PagecError if it cannot be."""
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with theirs:
            words = [sys.executable, "-m", "pagec.runtime.server.worker", str(theirs.fileno())]
            process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        mine.setblocking(False)
        loop = asyncio.get_running_loop()
        _, client = await loop.create_unix_connection(lambda: EngineClient(process), sock=mine)
        client.send(start)
        return client

    # ------------------------------------------------------------------------------ talking

    def send(self, message: ToEngine) -> None:
        """Sends a message; nothing happens if the engine is dead."""
        if self._transport is not None and self.death is None:
            self._transport.write(frame(message))

    async def snapshot(self) -> Snapshot:
        """How the engine stands between two steps; EngineDead if there is none."""
        if self.death is not None:
            raise EngineDead(self.death)
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshots.append(future)
        self.send(AskSnapshot())
        return await future

    async def close(self, seconds: float) -> None:
        """Has the engine end: it keeps its cache if it has a directory for it. Killed after so many
        seconds. Idempotent."""
        self._is_stopping = True
        self.send(Stop())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), seconds)
        if self.process.poll() is None and not self._ended.done():
            self.process.kill()
        await asyncio.to_thread(self.process.wait)

    # ---------------------------------------------------------------------------- listening

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not say so

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, News):
                self.on_news(message)
            elif isinstance(message, Snapshot):
                waiting = self._snapshots.pop(0)
                if not waiting.done():
                    waiting.set_result(message)
            elif isinstance(message, Failed):
                self._fail(PagecError(message.message, place=message.place, remedy=message.remedy))
            elif not self.ready.done():
                self.ready.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine has closed its end: it has ended, or is about to."""
        del exc
        self.death = "the engine has been stopped" if self._is_stopping else self._cause()
        self._fail(EngineDead(self.death))
        for waiting in self._snapshots:
            if not waiting.done():
                waiting.set_exception(EngineDead(self.death))
        if not self._ended.done():
            self._ended.set_result(None)
        self.on_death(self.death)

    def _fail(self, error: PagecError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def _cause(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1.0)
            return f"the engine process has ended ({f'signal {-code}' if code < 0 else f'code {code}'})"
        return "the engine process has closed its socket"
