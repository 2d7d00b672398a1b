"""Answers that end when their reader goes away: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from pagec.compiler.errors import PagecError
from pagec.runtime.server.generation import Call, Generation, Update
from pagec.runtime.server.openai.failures import describe
from pagec.runtime.server.service import Service

T = TypeVar("T")
DONE: Final = b"data: [DONE]\n\n"


class ClientGone(Exception):  # noqa: N818
    """Nobody reads the answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does some work unless the client goes away first: then the work is cancelled, and ClientGone raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def start_all(
    service: Service, calls: Sequence[Call], id: str, stack: AsyncExitStack
) -> list[Generation]:
    """Starts calls that make one answer: all, or none. They end with the stack."""
    ids = [id] if len(calls) == 1 else [f"{id}-{number}" for number in range(len(calls))]

    async def start(call: Call, name: str) -> Generation:
        return await stack.enter_async_context(await service.start(call, name))

    results = await asyncio.gather(*map(start, calls, ids), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Generation)]


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Update]]:
    """Updates of several generations as they come, each with the number of its generation."""
    if len(generations) == 1:
        async for update in generations[0]:
            yield 0, update
        return
    queue: asyncio.Queue[tuple[int, Update | PagecError | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for update in generations[number]:
                queue.put_nowait((number, update))
            queue.put_nowait((number, None))
        except PagecError as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number)) for number in range(len(generations))]
    try:
        left = len(generations)
        while left:
            number, item = await queue.get()
            if isinstance(item, PagecError):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()


class EventStream(Response):
    """Sends what an iterator gives as server-sent events; `stack` is closed at the end, whatever that is.
    An error becomes the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Any],
        stack: AsyncExitStack | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._stack = stack or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        async with self._stack:
            with suppress(ClientGone):
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_body(send, event if isinstance(event, bytes) else encode_event(event))
        except PagecError as error:
            await _send_body(send, encode_event(describe(error)))
        await send({"type": "http.response.body", "body": b""})


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def encode_event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def answer(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that some work gives; one that nobody sees if the client has gone meanwhile."""
    try:
        return await while_connected(request.receive, work)
    except ClientGone:
        return Response(status_code=499)
