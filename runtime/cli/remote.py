"""A server as commands talk to it: JSON and server-sent events, by the standard library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from pagec.compiler.errors import PagecError

if TYPE_CHECKING:
    from http.client import HTTPResponse

CONNECT_S: Final = 10.0
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="PAGEC_API_KEY", help="Key of a server that asks for one.", show_default=False),
]


class Remote:
    """A server at a URL. PagecError if it cannot be reached, or refuses."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PagecError(f"{url!r} is no URL of a server", remedy="give one like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._parts = parts
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return json.loads(self._open(path, None).read())

    def events(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """The JSON of each event that a path sends, to its end or "[DONE]". Closing it ends the request."""
        from http.client import HTTPException  # slow to import, and few commands talk to servers

        response = self._open(path, body)
        try:
            for line in response:
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if isinstance(event, dict) and event.get("error"):
                        raise PagecError(event["error"]["message"])
                    yield event
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            response.close()

    def _open(self, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        secure = self._parts.scheme == "https"
        kind = HTTPSConnection if secure else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_S)
        headers = dict(self._headers)
        data = None
        if body is not None:
            data = json.dumps(body)
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connection.sock.settimeout(None)  # an answer takes the time that it takes
            connection.request("POST" if data else "GET", self._parts.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from error
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._refusal(response)
        return response

    def _unreachable(self, error: Exception) -> PagecError:
        return PagecError(
            f"no connection: {error}", place=self.url, remedy="start a server there: pagec serve MODEL"
        )

    def _refusal(self, response: HTTPResponse) -> PagecError:
        try:
            message = str(json.loads(response.read())["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{response.status} {response.reason}"
        remedy = "give --api-key, or set PAGEC_API_KEY" if response.status == HTTPStatus.UNAUTHORIZED else ""
        return PagecError(message, place=self.url, remedy=remedy)
