"""Starts the gRPC server: pagec.v1.Pagec, the standard health service, reflection."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagec.compiler.errors import PagecError
from pagec.runtime.server.errors import Draining, EngineDead
from pagec.runtime.server.grpc.servicer import SERVICE, Servicer
from pagec.runtime.server.service import Service

HEALTH_EVERY_S: Final = 0.5
HEALTH: Final = "/grpc.health.v1.Health/"


class GrpcServer:
    """A server that runs. `port`: the one given, or the one chosen for 0."""

    def __init__(self, server: grpc.aio.Server, port: int, watcher: asyncio.Task[None]) -> None:
        self.port = port
        self._server = server
        self._watcher = watcher

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more calls; ends those that run after so many seconds."""
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher
        await self._server.stop(grace_s)


async def start_grpc(
    service: Service, host: str, port: int, *, api_keys: Sequence[str] = (), max_message_bytes: int
) -> GrpcServer:
    """Serves on host:port (0: any that is free). With `api_keys` all but health asks for one of them.
    PagecError if the port cannot be had."""
    server = grpc.aio.server(
        interceptors=[_KeyCheck(api_keys)] if api_keys else [],
        options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 0)],
    )
    server.add_generic_rpc_handlers((Servicer(service).handlers(),))
    healthy = _Health(service)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(
        (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise PagecError(
            f"cannot listen on {address}", place="--grpc-port", remedy="give a port that is free"
        ) from error
    await server.start()
    return GrpcServer(server, bound, asyncio.create_task(healthy.follow()))


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Is what the service is: not serving when the engine is dead or the server shuts down."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._refresh()
        return await super().Check(request, context)

    async def follow(self) -> None:
        """Tells those that watch."""
        while True:
            await self._refresh()
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _refresh(self) -> None:
        status = health_pb2.HealthCheckResponse.SERVING
        try:
            self._service.check_ready()
        except (EngineDead, Draining):
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE.full_name):
            await self.set(name, status)


class _KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns calls away that show none of the keys. How long that takes tells nothing about them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._wanted = [f"Bearer {key}".encode() for key in keys]

    async def intercept_service(self, proceed: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith(HEALTH) or self._is_allowed(dict(details.invocation_metadata)):
            return await proceed(details)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _is_allowed(self, metadata: dict[str, str | bytes]) -> bool:
        given = metadata.get("authorization", "")
        shown = given.encode() if isinstance(given, str) else given
        return any([hmac.compare_digest(shown, wanted) for wanted in self._wanted])  # noqa: C419 (all of them)


async def _refuse(_request: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "metadata authorization: Bearer KEY is missing or wrong"
    )
