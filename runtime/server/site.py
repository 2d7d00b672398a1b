"""What the front process serves once its engine is ready: HTTP by uvicorn, gRPC, and a graceful end.

The first SIGTERM or SIGINT begins to drain: what runs is finished, what is new is refused. The second one
ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import uvicorn

from pagec.runtime.server.app import make_app
from pagec.runtime.server.client import EngineClient
from pagec.runtime.server.messages import Ready
from pagec.runtime.server.metrics import Metrics
from pagec.runtime.server.options import Address, FrontOptions
from pagec.runtime.server.record import Recorder
from pagec.runtime.server.service import Observer, Service, ServiceInfo
from pagec.runtime.server.tools import make_tool_format
from pagec.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagec.runtime.server.grpc.server import GrpcServer

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
BACKLOG: Final = 2048
# After the drain: for connections to be closed.
LEAVE_S: Final = 5


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the site, and tells it when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()


class Site:
    """One server. PagecError if its options do not fit; `close` ends its record."""

    def __init__(self, options: FrontOptions, client: EngineClient, ready: Ready) -> None:
        if options.tool_format is not None:
            make_tool_format(None, options.tool_format)
        self._options = options
        self._client = client
        self._num_signals = 0
        self._ending: asyncio.Task[None] | None = None
        tokenizer = Tokenizer.open(options.artifact)
        _ = tokenizer.template  # a broken one is refused now, not with the first conversation
        self._metrics = Metrics()
        self._recorder = _recorder(options, tokenizer, ready)
        observers: list[Observer] = [self._metrics]
        if self._recorder is not None:
            observers.append(self._recorder)
        self._service = Service(
            client,
            tokenizer,
            ServiceInfo(options.names or (ready.model,), version("pagec"), ready),
            limits=options.limits,
            max_queue=options.max_queue,
            observers=observers,
        )

    @property
    def is_hurried(self) -> bool:
        """Whether a second signal has come."""
        return self._num_signals > 1

    def close(self) -> None:
        """Ends the record."""
        if self._recorder is not None:
            self._recorder.close()

    async def serve(self, listener: socket.socket, on_ready: Callable[[Address], None]) -> None:
        """Serves until a signal ends it."""
        options, service = self._options, self._service
        grpc = await self._start_grpc()
        address = Address(
            options.host,
            listener.getsockname()[1],
            grpc.port if grpc is not None else None,
            self._client.process.pid,
            service.info.engine,
        )
        app = make_app(service, self._metrics, api_keys=options.api_keys, tool_format=options.tool_format)
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            lifespan="off",
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=LEAVE_S,
            backlog=BACKLOG,
            server_header=False,
        )
        server = _Uvicorn(config, lambda: on_ready(address))
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, server)
        try:
            await server.serve(sockets=[listener])
        finally:
            if grpc is not None:
                await grpc.stop(0.0 if self.is_hurried else 1.0)

    async def _start_grpc(self) -> GrpcServer | None:
        options = self._options
        if options.grpc_port is None:
            return None
        from pagec.runtime.server.grpc.server import start_grpc

        return await start_grpc(
            self._service,
            options.host,
            options.grpc_port,
            api_keys=options.api_keys,
            max_message_bytes=options.limits.max_body_bytes,
        )

    def _on_signal(self, server: uvicorn.Server) -> None:
        self._num_signals += 1
        if self.is_hurried:
            self._service.end_all_now()
            server.should_exit = server.force_exit = True
        else:
            self._ending = asyncio.ensure_future(self._drain(server))

    async def _drain(self, server: uvicorn.Server) -> None:
        await self._service.drain(self._options.drain_s)
        server.should_exit = True


def _recorder(options: FrontOptions, tokenizer: Tokenizer, ready: Ready) -> Recorder | None:
    if options.record is None:
        return None
    head = {
        "model": ready.model,
        "artifact": str(options.artifact),
        "digest": ready.digest,
        "weights": options.engine.get("weights"),
    }
    return Recorder(options.record, tokenizer, head)
