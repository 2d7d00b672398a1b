"""The offline search: enumerate, drop what the target cannot hold, rank by the cost model.

    candidates    every point of the space, with a prediction or the reason why it was dropped
    choose        one point for each bucket of rows, each the best of its own
    choose_strict one set of numeric knobs for all buckets: the least geometric mean

Ties go to the point that takes less shared memory, then to the space's order, which has the plainest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any, Final

from pagec.autotune import decode, linear, prefill
from pagec.autotune.occupancy import why_not
from pagec.autotune.prediction import Candidate, Point, Prediction
from pagec.autotune.problem import Kind, Problem
from pagec.autotune.space import SPACES, why_no_point
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.target import CudaTarget

Estimate = Callable[[Any, Point, CudaTarget], Resources]
Predict = Callable[[Any, Point, CudaTarget, Resources], Prediction]
MODELS: Final[Mapping[Kind, tuple[Estimate, Predict]]] = {
    "attention_prefill": (prefill.estimate, prefill.predict),
    "attention_decode": (decode.estimate, decode.predict),
    "linear": (linear.estimate, linear.predict),
}
# Times that agree in so many digits are equal.
DIGITS: Final = 6


def candidate(
    problem: Problem, point: Point, target: CudaTarget, compiled: Resources | None = None
) -> Candidate:
    """A point judged, by the compiler's figures if there are any."""
    reason = why_no_point(problem, point, target)
    return Candidate(point, None, reason) if reason else judged(problem, point, target, compiled)


def judged(
    problem: Problem, point: Point, target: CudaTarget, compiled: Resources | None = None
) -> Candidate:
    """The same for a point that may be a poor one, such as a baseline."""
    estimate, predict = MODELS[problem.kind]
    held = compiled or estimate(problem, point, target)
    reason = why_not(held, point["warps"], target)
    if reason:
        return Candidate(point, None, reason)
    return Candidate(point, predict(problem, point, target, held))


def candidates(
    problem: Problem, target: CudaTarget, points: Iterable[Point] | None = None
) -> list[Candidate]:
    """All points of the space (or these), best first; the dropped ones last."""
    chosen = SPACES[problem.kind].points() if points is None else points
    return ranked(candidate(problem, point, target) for point in chosen)


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Best first; equal ones by what they take, then as they came."""
    return sorted(found, key=_order)


def _order(one: Candidate) -> tuple[float, int]:
    if one.prediction is None:
        return float("inf"), 0
    return float(f"{one.us:.{DIGITS}g}"), one.prediction.resources.shared_bytes


def numeric_of(problem: Problem, one: Candidate) -> tuple[object, ...]:
    """What of a candidate can change a bit: its numeric knobs, and the matrix instruction."""
    assert one.prediction is not None
    numeric = SPACES[problem.kind].numeric
    return (
        *(value for knob, value in one.point.items() if knob in numeric),
        one.prediction.resources.mma,
    )


def choose(found: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The best of each bucket."""
    return [ranked(bucket)[0] for bucket in found]


def choose_strict(problems: Sequence[Problem], found: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """A candidate for each bucket, all with the same numeric choices, least in the geometric mean."""
    return strict_sets(problems, found)[0]


def strict_sets(problems: Sequence[Problem], found: Sequence[Sequence[Candidate]]) -> list[list[Candidate]]:
    """For each numeric choice that holds for all buckets the best candidate of each; the best set first."""
    best: list[dict[tuple[object, ...], Candidate]] = []
    for problem, bucket in zip(problems, found, strict=True):
        by_choice: dict[tuple[object, ...], Candidate] = {}
        for one in ranked(bucket):
            if one.prediction is not None:
                by_choice.setdefault(numeric_of(problem, one), one)
        best.append(by_choice)
    common = [choice for choice in best[0] if all(choice in bucket for bucket in best)]
    assert common, f"no numeric choice holds for all buckets of {problems[0].key}"
    return sorted(([bucket[choice] for bucket in best] for choice in common), key=mean_us)


def mean_us(chosen: Iterable[Candidate]) -> float:
    """The geometric mean of their times."""
    return mean([one.us for one in chosen])


def mean(times: Sequence[float]) -> float:
    """The geometric mean, in as many digits as count."""
    return float(f"{exp(sum(map(log, times)) / len(times)):.{DIGITS}g}")


def with_programs(one: Candidate) -> Candidate:
    """The point with how many programs of it a multiprocessor holds, which a persistent grid needs."""
    assert one.prediction is not None
    return replace(one, point={**one.point, "per_sm": one.prediction.occupancy})
