"""From a shape to its entries: choices for each bucket of rows, by the cost model and perhaps the compiler.

With a compiler a choice stands only if the compiler agrees: what is chosen is compiled and judged anew by the
registers and shared memory that it reports, until everything chosen has been compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, Protocol

from pagec.autotune import decode, search
from pagec.autotune.occupancy import limit_of
from pagec.autotune.prediction import Candidate, Point, roofline_us
from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.autotune.space import SPACES, baseline_of
from pagec.autotune.table import Choice, Entry
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.target import CudaTarget

# Up to so many sequences (0: any number): sequences and context at which choices are weighed.
DECODE_BUCKETS: Final = ((1, 1, 8192), (16, 16, 4096), (0, 128, 2048))
# Up to so many rows: rows at which choices are weighed.
LINEAR_BUCKETS: Final = ((16, 16), (64, 64), (256, 256), (1024, 1024), (0, 4096))
Bucket = tuple[int, Problem]
# Candidates of each bucket, best first.
Found = list[list[Candidate]]
Lists = Mapping[str, Found]


class Compiler(Protocol):
    """What compiles points. It may give fewer than asked, or none where its time is up."""

    def resources(self, asked: Sequence[tuple[Problem, Point]]) -> list[tuple[Problem, Point, Resources]]:
        """What those that it has not compiled before take."""


def prefill_buckets(heads: int, kv_heads: int, head_dim: int) -> list[Bucket]:
    """One choice for all numbers of tokens."""
    return [(0, Prefill(heads, kv_heads, head_dim))]


def decode_buckets(heads: int, kv_heads: int, head_dim: int) -> list[Bucket]:
    """By the number of sequences."""
    return [(rows, Decode(heads, kv_heads, head_dim, s, context)) for rows, s, context in DECODE_BUCKETS]


def linear_buckets(n: int, k: int) -> list[Bucket]:
    """By the number of rows."""
    return [(rows, Linear(m, n, k)) for rows, m in LINEAR_BUCKETS]


# ------------------------------------------------------------------------------------- choosing


def linear_entry(buckets: Sequence[Bucket], target: CudaTarget, compiler: Compiler | None = None) -> Entry:
    """Choices for each bucket, and with one BK, number of splits and matrix instruction for all."""
    problems = [problem for _, problem in buckets]

    def pick(lists: Lists) -> dict[str, list[Candidate]]:
        found = lists["linear"]
        return {"default": search.choose(found), "strict": search.choose_strict(problems, found)}

    lists = {"linear": [search.candidates(problem, target) for problem in problems]}
    of = {"default": ("linear", problems), "strict": ("linear", problems)}
    chosen = _settled(lists, pick, of, target, compiler)
    return _entry(buckets, target, chosen["default"], chosen["strict"])


def attention_entries(
    prefill: Sequence[Bucket],
    decoding: Sequence[Bucket],
    target: CudaTarget,
    compiler: Compiler | None = None,
) -> tuple[Entry, Entry]:
    """Entries of prefill and decode. They share a program's cache blocks; strict ones BN and split, too."""
    first, second = [problem for _, problem in prefill], [problem for _, problem in decoding]
    split = max(SPACES["attention_decode"].knobs["split"])
    points = [{**point, "split": split} for point in SPACES["attention_prefill"].points()]

    def pick(lists: Lists) -> dict[str, list[Candidate]]:
        block = best_block(decoding, lists["decode"])
        of_block = [[one for one in found if one.point["block_size"] == block] for found in lists["decode"]]
        strict = _strict_attention(lists["split prefill"], of_block)
        return {
            "prefill": search.choose(lists["prefill"]),
            "split prefill": strict[0],
            "decode": search.choose(of_block),
            "strict decode": strict[1],
        }

    lists = {
        "prefill": [search.candidates(problem, target) for problem in first],
        # How long a split is does not show in the time of prefill, or in what it takes.
        "split prefill": [search.candidates(problem, target, points) for problem in first],
        "decode": [search.candidates(problem, target) for problem in second],
    }
    of = {
        "prefill": ("prefill", first),
        "split prefill": ("split prefill", first),
        "decode": ("decode", second),
        "strict decode": ("decode", second),
    }
    chosen = _settled(lists, pick, of, target, compiler)
    bn_split = {knob: chosen["strict decode"][0].point[knob] for knob in ("BN", "split")}
    strict = [replace(one, point={**one.point, **bn_split}) for one in chosen["split prefill"]]
    decodes = [[search.with_programs(one) for one in chosen[name]] for name in ("decode", "strict decode")]
    return (
        _entry(prefill, target, chosen["prefill"], strict),
        _entry(decoding, target, *decodes),
    )


def best_block(buckets: Sequence[Bucket], found: Sequence[Sequence[Candidate]]) -> int:
    """The block size: least time, over all buckets, by sequence that the pool holds."""
    costs: dict[int, list[float]] = {}
    for (_, problem), ranked in zip(buckets, found, strict=True):
        assert isinstance(problem, Decode)
        best: dict[int, Candidate] = {}
        for one in ranked:
            if one.prediction is not None:
                best.setdefault(one.point["block_size"], one)
        for size, one in best.items():
            costs.setdefault(size, []).append(one.us * (1 + decode.empty_share(problem, one.point)))
    means = {size: search.mean(us) for size, us in sorted(costs.items()) if len(us) == len(buckets)}
    return min(means, key=lambda size: means[size])


def _strict_attention(prefill: Found, decoding: Found) -> tuple[list[Candidate], list[Candidate]]:
    """Keys of a tile and of a split that serve both kernels best."""
    best: tuple[float, list[Candidate], list[Candidate]] | None = None
    knobs = SPACES["attention_decode"].knobs
    for bn in knobs["BN"]:
        first = _firsts(prefill, {"BN": bn})
        for split in knobs["split"]:
            second = _firsts(decoding, {"BN": bn, "split": split})
            if len(first) < len(prefill) or len(second) < len(decoding):
                continue
            cost = search.mean([search.mean_us(first), search.mean_us(second)])
            if best is None or cost < best[0]:
                best = cost, first, second
    assert best is not None, "no tile of keys serves prefill and decode"
    return best[1], best[2]


def _firsts(found: Found, knobs: Mapping[str, int]) -> list[Candidate]:
    """The best of each bucket that has these knobs; nothing of a bucket that has none."""
    firsts = (
        next((one for one in bucket if knobs.items() <= one.point.items() and one.prediction), None)
        for bucket in found
    )
    return [one for one in firsts if one is not None]


def _settled(
    lists: dict[str, Found],
    pick: Callable[[Lists], dict[str, list[Candidate]]],
    of: Mapping[str, tuple[str, Sequence[Problem]]],
    target: CudaTarget,
    compiler: Compiler | None,
) -> dict[str, list[Candidate]]:
    """What is picked, once the compiler has seen all of it. `of`: which list and problems a pick is from."""
    chosen = pick(lists)
    while compiler is not None:
        asked = [
            (problem, one.point)
            for name, ones in chosen.items()
            for problem, one in zip(of[name][1], ones, strict=True)
        ]
        fresh = compiler.resources(asked)
        if not fresh:
            break
        for name, problems in dict(of.values()).items():
            for number, problem in enumerate(problems):
                lists[name][number] = _judged(problem, lists[name][number], fresh, target)
        chosen = pick(lists)
    return chosen


def _judged(
    problem: Problem,
    found: Sequence[Candidate],
    fresh: Sequence[tuple[Problem, Point, Resources]],
    target: CudaTarget,
) -> list[Candidate]:
    """The candidates with those anew whose kernel has been compiled."""
    mine = [
        (point, held)
        for other, point, held in fresh
        if (other.kind, other.key) == (problem.kind, problem.key)
    ]
    judged = [
        next(
            (search.candidate(problem, point, target, held) for point, held in mine if point == one.point),
            one,
        )
        for one in found
    ]
    return search.ranked(judged)


# ------------------------------------------------------------------------------------- writing


def _entry(
    buckets: Sequence[Bucket], target: CudaTarget, default: Sequence[Candidate], strict: Sequence[Candidate]
) -> Entry:
    sets = {
        mode: tuple(
            choice_of(rows, problem, one, target) for (rows, problem), one in zip(buckets, found, strict=True)
        )
        for mode, found in (("default", default), ("strict", strict))
    }
    return Entry("predicted", sets)


def choice_of(rows: int, problem: Problem, one: Candidate, target: CudaTarget) -> Choice:
    """What a table says of a candidate."""
    assert one.prediction is not None
    baseline = search.judged(problem, baseline_of(problem, target), target)
    least, roof = roofline_us(problem, target)
    held = one.prediction.resources
    facts: dict[str, Any] = {
        "weighed_at": problem.to_json(),
        "bound": one.prediction.bound,
        "roofline_us": rounded(least),
        "roofline": roof,
        "occupancy": one.prediction.occupancy,
        "limit": limit_of(held, one.point["warps"], target),
        **asdict(held),
    }
    del facts["stack_bytes"]
    if baseline.prediction is None:
        facts["baseline"] = baseline.reason
    else:
        facts["baseline_bound"] = baseline.prediction.bound
    known = rounded(baseline.us) if baseline.prediction else None
    return Choice(rows, one.point, rounded(one.us), baseline.point, known, facts=facts)


def rounded(us: float) -> float:
    """To the digits that tables hold."""
    return float(f"{us:.{search.DIGITS}g}")
