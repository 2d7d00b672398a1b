"""In which order requests get a step's rows, tokens and blocks.

    fcfs       first come, first served
    priority   the lowest `priority` first; waiting for AGEING_S makes up for one level, so that none starves
    deadline   the earliest deadline first; a request without targets has those of `DeadlinePolicy`

A policy gives a request a key, the lowest is first. A key may only grow with time, and a request's key is
bounded, so that whoever waits becomes first in the end: requests that come later have later keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from pagec.compiler.errors import RequestError
from pagec.runtime.sequence import Request

# Seconds of waiting that weigh as much as one level of priority.
AGEING_S: Final = 10.0
# What a request without targets of its own is taken to want.
TTFT_S: Final = 10.0
TOKEN_S: Final = 1.0
# How long a request that has missed its deadline stands back behind those that still can keep theirs.
LATE_S: Final = 30.0


class Policy(Protocol):
    """An order of requests."""

    name: str
    # Whether keys change while requests wait or run.
    is_dynamic: bool

    def key(self, request: Request, now: float) -> float:
        """The request's place: the lowest is first."""

    def may_start(self, num_running: int) -> bool:
        """Whether waiting requests may join so many running ones."""


class FcfsPolicy:
    """First come, first served."""

    name = "fcfs"
    is_dynamic = False

    def key(self, request: Request, now: float) -> float:
        del now
        return request.arrival

    def may_start(self, num_running: int) -> bool:
        del num_running
        return True


class PriorityPolicy(FcfsPolicy):
    """The lowest `priority` first. All age alike: priority - waited / ageing_s orders requests as priority +
    arrival / ageing_s does, which never changes."""

    name = "priority"

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self.ageing_s = ageing_s

    def key(self, request: Request, now: float) -> float:
        del now
        return request.priority + request.arrival / self.ageing_s


class DeadlinePolicy(FcfsPolicy):
    """The earliest deadline first: that of token i is arrival + ttft_s + i * token_s.

    Under overload, serving first who is late already makes all others late, too: a missed deadline counts
    as `late_s` later.
    """

    name = "deadline"
    is_dynamic = True

    def __init__(self, ttft_s: float = TTFT_S, token_s: float = TOKEN_S, late_s: float = LATE_S) -> None:
        self.ttft_s, self.token_s, self.late_s = ttft_s, token_s, late_s

    def key(self, request: Request, now: float) -> float:
        first = self.ttft_s if request.ttft_s is None else request.ttft_s
        each = self.token_s if request.token_s is None else request.token_s
        deadline = request.arrival + first + request.num_emitted * each
        return deadline if now <= deadline else deadline + self.late_s


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "deadline": DeadlinePolicy,
}


def make_policy(name: str) -> Policy:
    """The policy of this name."""
    if name not in POLICIES:
        raise RequestError(
            f"there is no policy {name}", place="policy", remedy=f"one of {', '.join(POLICIES)}"
        )
    return POLICIES[name]()
