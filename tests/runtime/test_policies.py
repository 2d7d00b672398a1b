"""Keys put requests in order, and whoever waits becomes first in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagec.compiler.errors import RequestError
from pagec.runtime.policies import POLICIES, DeadlinePolicy, make_policy
from pagec.runtime.sequence import Request

seconds = st.floats(0, 1e4)


def asked(arrival: float, **options: object) -> Request:
    request = Request(0, [1], 4, 1, **options)  # type: ignore[arg-type]
    request.arrival = arrival
    return request


@pytest.mark.parametrize("name", POLICIES)
@given(arrival=seconds, waited=seconds, more=seconds, priority=st.integers(0, 5))
def test_keys_of_waiting_requests_only_grow(
    name: str, arrival: float, waited: float, more: float, priority: int
) -> None:
    policy, request = make_policy(name), asked(arrival, priority=priority)
    early = policy.key(request, arrival + waited)
    late = policy.key(request, arrival + waited + more)
    assert early <= late
    assert early == late or policy.is_dynamic


@pytest.mark.parametrize("name", POLICIES)
@given(arrival=seconds, waited=seconds, priority=st.integers(0, 5))
def test_those_who_come_much_later_come_after(
    name: str, arrival: float, waited: float, priority: int
) -> None:
    policy = make_policy(name)
    old = policy.key(asked(arrival, priority=priority), arrival + waited)
    young = policy.key(asked(arrival + 100), arrival + 100 + waited)
    assert old < young


def test_further_tokens_have_later_deadlines() -> None:
    policy, request = DeadlinePolicy(), asked(10.0, ttft_s=2.0, token_s=0.5)
    assert policy.key(request, 11.0) == 12.0
    request.num_emitted = 3
    assert policy.key(request, 11.0) == 13.5
    assert policy.key(request, 14.0) == 13.5 + policy.late_s


def test_targets_are_met_or_not() -> None:
    request = asked(10.0, ttft_s=2.0, token_s=0.5)
    request.first_token_at, request.finished_at, request.num_emitted = 11.0, 13.0, 5
    assert not request.met_targets
    request.finish_reason = "length"
    assert request.met_targets
    request.finished_at = 13.1
    assert not request.met_targets
    request.token_s = None
    assert request.met_targets
    request.first_token_at = 12.5
    assert not request.met_targets


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="fcfs, priority, deadline"):
        make_policy("random")
