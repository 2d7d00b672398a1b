"""Why the server, and not the request, is the reason that there is no answer.

PagecError
|- Overloaded         the queue is full; says after how many seconds to try again
|- EngineDead         the engine process is gone, and with it all that it was doing
|- Draining           the server is about to end
`- GenerationError    something went wrong in the engine with this request; the others go on
"""

from __future__ import annotations

from pagec.compiler.errors import PagecError


class Overloaded(PagecError):  # noqa: N818
    """The queue is full. `retry_after_s`: when there may be room."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, remedy=f"try again after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class EngineDead(PagecError):  # noqa: N818
    """The engine process has ended."""


class Draining(PagecError):  # noqa: N818
    """The server finishes what it has begun and takes nothing more."""


class GenerationError(PagecError):
    """A request failed in the engine; it was valid."""
