"""The front process, from its start to its end: an engine process, and HTTP and gRPC before it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

import uvloop

from pagec.compiler.errors import PagecError
from pagec.runtime.server.client import EngineClient
from pagec.runtime.server.messages import Start
from pagec.runtime.server.options import Address, FrontOptions

# For what the engine does when it is told to stop: to write its cache into files.
CLOSE_S: Final = 60.0


def run_front(options: FrontOptions, on_ready: Callable[[Address], None]) -> None:
    """Serves until a signal ends it; PagecError if that cannot begin."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options, on_ready))


async def _run(options: FrontOptions, on_ready: Callable[[Address], None]) -> None:
    with _bound(options.host, options.port) as listener:
        client = await EngineClient.start(Start(str(options.artifact), options.engine))
        seconds = 0.0
        try:
            from pagec.runtime.server.site import Site  # the libraries are read while the engine is opened

            site = Site(options, client, await client.ready)
            with contextlib.closing(site):
                await site.serve(listener, on_ready)
            seconds = 0.0 if site.is_hurried else CLOSE_S
        finally:
            await client.close(seconds)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has its port; it will listen when the engine is ready."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise PagecError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            place="--port",
            remedy="give another --port, or 0 for any that is free",
        ) from error
    return bound
