"""Computing again against swapping, by rates; the machine in test_scheduler_machine.py does both."""

from __future__ import annotations

import pytest

from pagec.runtime.preemption import PreemptionCost

# 1,000 tokens/s, 100 bytes a token over a link of 1 MB/s: 1 ms against 0.2 ms a token.
COST = PreemptionCost(1000, 100, 1e6, swap_latency_s=0.004)


def test_costs_are_what_the_rates_say() -> None:
    assert COST.recompute_s(20) == pytest.approx(0.02)
    assert COST.swap_s(20) == pytest.approx(2 * (0.004 + 0.002))


@pytest.mark.parametrize(("num_tokens", "swaps"), [(1, False), (9, False), (11, True), (1000, True)])
def test_few_tokens_are_computed_again_and_many_swapped(num_tokens: int, swaps: bool) -> None:
    """Both take the same for 10 tokens."""
    assert COST.prefers_swap(num_tokens) == swaps


def test_a_slow_link_is_never_used() -> None:
    assert not PreemptionCost(1000, 100, 1e5).prefers_swap(10_000)
