"""Comparisons of times, with clocks that the tests make up."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pagec.autotune.measure import SCREENED, Sample, beats, hopeful, interleaved, sample, slows, winner


def noisy(us: float, noise: float, seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: 1e-6 * (us + noise * rng.random())


def test_runs_take_turns_both_ways() -> None:
    order: list[int] = []

    def run(number: int) -> Callable[[], float]:
        def once() -> float:
            order.append(number)
            return 1.0

        return once

    interleaved([run(0), run(1), run(2)], rounds=2)
    assert order == [2, 1, 0, 0, 1, 2, 2, 1, 0]  # a round to warm up, then two


def test_the_first_round_does_not_count() -> None:
    times = iter([100.0, 1e-6, 3e-6])
    assert interleaved([lambda: next(times)], rounds=2) == [sample([1.0, 3.0])]


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=20))
def test_a_sample_is_the_median_and_the_quartiles_distance(times: list[float]) -> None:
    one = sample(times)
    assert min(times) <= one.median_us <= max(times)
    assert 0 <= one.spread_us <= max(times) - min(times)


def test_a_gain_within_the_noise_is_none() -> None:
    assert not beats(Sample(95, 10), Sample(100, 1))
    assert not beats(Sample(95, 1), Sample(100, 10))
    assert beats(Sample(95, 1), Sample(100, 2))


def test_equal_candidates_leave_the_baseline() -> None:
    for seed in range(20):
        runs = [noisy(100, 5, 100 * seed + number) for number in range(6)]
        assert winner([runs], rounds=9)[0] == 0


def test_a_faster_candidate_wins_and_its_baseline_is_kept() -> None:
    best, samples, baseline = winner([[noisy(100, 2, 0), noisy(80, 2, 1), noisy(90, 2, 2)]], rounds=9)
    assert best == 1
    assert 80 <= samples[0].median_us <= 82
    assert 100 <= baseline[0].median_us <= 102


def test_what_slows_another_case_down_does_not_win() -> None:
    first = [noisy(100, 1, 0), noisy(50, 1, 1), noisy(90, 1, 2)]
    second = [noisy(100, 1, 3), noisy(120, 1, 4), noisy(99, 1, 5)]
    assert winner([first, second], rounds=9)[0] == 2


def test_a_lucky_candidate_has_to_win_again() -> None:
    """Fast in the first comparison only."""
    times = iter([*[1e-6] * (SCREENED + 10), *[200e-6] * 10])
    assert winner([[noisy(100, 1, 0), lambda: next(times)]], rounds=9)[0] == 0


def test_a_loss_counts_even_within_the_noise() -> None:
    """What a poor machine cannot tell apart is not taken for equal."""
    assert slows(Sample(102, 30), Sample(100, 30))
    assert slows(Sample(100.5, 0.1), Sample(100, 0.1))
    assert not slows(Sample(100.5, 1), Sample(100, 1))
    assert not slows(Sample(90, 1), Sample(100, 1))
    first, second = [noisy(100, 1, 0), noisy(50, 1, 1)], [noisy(100, 60, 2), noisy(110, 60, 3)]
    assert winner([first, second], rounds=9)[0] == 0


def test_what_is_far_too_slow_in_some_case_is_not_timed_on() -> None:
    counts = [0, 0, 0]

    def run(number: int, us: float) -> Callable[[], float]:
        def once() -> float:
            counts[number] += 1
            return 1e-6 * us

        return once

    cases = [[run(0, 100), run(1, 90), run(2, 50)], [run(0, 100), run(1, 119), run(2, 130)]]
    assert hopeful(cases) == [0, 1]
    winner(cases, rounds=9)
    assert counts[2] == 4 * SCREENED, "two screenings of two cases, and no more"
