"""What stands before all routes: keys, the size of bodies, a server that shuts down."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagec.runtime.server.openai.failures import failure, json_response

BEARER: Final = b"bearer"


class Guard:
    """An ASGI application around another. `keys`: one of them must be shown, except for `open_paths`; none:
    nobody is asked. Bodies of more than `max_body_bytes` are refused before they are read."""

    def __init__(
        self, app: ASGIApp, *, keys: Iterable[str], open_paths: Collection[str], max_body_bytes: int
    ) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)
        self._open_paths = open_paths
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"] not in self._open_paths and not self._allows(headers.get(b"authorization", b"")):
            body = failure(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )
            refusal = json_response(body, 401, {"www-authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            await json_response(self._too_large(int(length[:20])), 413)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _allows(self, authorization: bytes) -> bool:
        """Takes the same time for every key, and looks at all of them."""
        scheme, _, given = authorization.partition(b" ")
        results = [hmac.compare_digest(given.lstrip(b" "), key) for key in self._keys]
        return not self._keys or (scheme.lower() == BEARER and any(results))

    def _too_large(self, size: int) -> dict[str, dict[str, object]]:
        return failure(413, f"a body of {size} bytes is larger than {self._max_body_bytes}")

    def _counted(self, receive: Receive) -> Receive:
        """For bodies that come in chunks and do not say how long they are."""
        total = 0

        async def counting() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_body_bytes:
                raise HTTPException(413, str(self._too_large(total)["error"]["message"]))
            return message

        return counting
