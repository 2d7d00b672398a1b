"""From a shape to its entries: choices for each bucket of rows, by the cost model and perhaps the compiler.

With a compiler a choice stands only if the compiler agrees: what is chosen, and the `best` of each bucket,
is compiled and judged anew by the registers and shared memory that it reports, until all of it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, Final, Protocol

from pagec.autotune import decode, search
from pagec.autotune.occupancy import limit_of
from pagec.autotune.prediction import Candidate, Point, roofline_us
from pagec.autotune.prefill import by_warp_groups
from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.autotune.space import SPACES, baseline_of
from pagec.autotune.table import Choice, Entry
from pagec.compiler.backends.cuda.attention import key_warps
from pagec.compiler.backends.cuda.knobs import GROUP_ROWS, GROUP_WARPS
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


def linear_entry(
    buckets: Sequence[Bucket], target: CudaTarget, compiler: Compiler | None = None, best: int = 0
) -> Entry:
    """Choices for each bucket, and with one BK, number of splits and matrix instruction for all."""
    problems = [problem for _, problem in buckets]

    def pick(lists: Lists) -> dict[str, list[Candidate]]:
        found = lists["linear"]
        return {"default": search.choose(found), "strict": search.choose_strict(problems, found)}

    lists = {"linear": [search.candidates(problem, target) for problem in problems]}
    of = {"default": ("linear", problems), "strict": ("linear", problems)}
    chosen = _settled(lists, pick, of, target, compiler, best)
    return _entry(buckets, target, chosen["default"], chosen["strict"])


def attention_entries(
    prefill: Sequence[Bucket],
    decoding: Sequence[Bucket],
    target: CudaTarget,
    compiler: Compiler | None = None,
    best: int = 0,
) -> tuple[Entry, Entry]:
    """Entries of prefill and decode. They share a program's cache blocks; strict ones BN and split, too."""
    first, second = [problem for _, problem in prefill], [problem for _, problem in decoding]
    splits = SPACES["attention_decode"].knobs["split"]
    points = [{**point, "split": split} for split in splits for point in SPACES["attention_prefill"].points()]

    def pick(lists: Lists) -> dict[str, list[Candidate]]:
        block = best_blocks(decoding, lists["decode"])[0]
        of_block = [[one for one in found if one.point["block_size"] == block] for found in lists["decode"]]
        strict = strict_pairs(lists["split prefill"], of_block, target)[0]
        return {
            "prefill": search.choose(lists["prefill"]),
            "split prefill": strict[0],
            "decode": search.choose(of_block),
            "strict decode": strict[1],
        }

    lists = {
        "prefill": [search.candidates(problem, target) for problem in first],
        "split prefill": [search.candidates(problem, target, points) for problem in first],
        "decode": [search.candidates(problem, target) for problem in second],
    }
    of = {
        "prefill": ("prefill", first),
        "split prefill": ("split prefill", first),
        "decode": ("decode", second),
        "strict decode": ("decode", second),
    }
    chosen = _settled(lists, pick, of, target, compiler, best)
    decodes = [[search.with_programs(one) for one in chosen[name]] for name in ("decode", "strict decode")]
    return (
        _entry(prefill, target, chosen["prefill"], chosen["split prefill"]),
        _entry(decoding, target, *decodes),
    )


def best_blocks(buckets: Sequence[Bucket], found: Sequence[Sequence[Candidate]]) -> list[int]:
    """Block sizes, the best first: by time, over all buckets, by sequence that the pool holds."""
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
    return sorted(means, key=lambda size: means[size])


def strict_pairs(
    prefill: Found, decoding: Found, target: CudaTarget
) -> list[tuple[list[Candidate], list[Candidate]]]:
    """Candidates of both kernels by keys of a tile and of a split; what serves both best comes first. No
    tile's keys are dealt among warps: decode has another number of these than prefill."""
    prefill = [[one for one in bucket if _keeps_keys_together(one.point, target)] for bucket in prefill]
    found: list[tuple[list[Candidate], list[Candidate]]] = []
    knobs = SPACES["attention_decode"].knobs
    decode_rows = {"BM": GROUP_ROWS, "warps": GROUP_WARPS}
    for bn, split in product(knobs["BN"], knobs["split"]):
        if not _keeps_keys_together({**decode_rows, "BN": bn}, target):
            continue
        first, second = (_firsts(one, {"BN": bn, "split": split}) for one in (prefill, decoding))
        if len(first) == len(prefill) and len(second) == len(decoding):
            found.append((first, second))
    assert found, "no tile of keys serves prefill and decode"
    return sorted(found, key=lambda both: search.mean([search.mean_us(one) for one in both]))


def _keeps_keys_together(point: Point, target: CudaTarget) -> bool:
    groups = by_warp_groups(point["BM"], point["warps"], target)
    return key_warps(point["BM"], point["BN"], point["warps"], groups=groups) == 1


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
    best: int,
) -> dict[str, list[Candidate]]:
    """What is picked, once the compiler has seen all of it. `of`: which list and problems a pick is from."""
    chosen = pick(lists)
    while compiler is not None:
        fresh = compiler.resources(_asked(lists, chosen, of, best))
        if not fresh:
            break
        for name, problems in dict(of.values()).items():
            for number, problem in enumerate(problems):
                lists[name][number] = judged_anew(problem, lists[name][number], fresh, target)
        chosen = pick(lists)
    return chosen


def _asked(
    lists: Lists,
    chosen: Mapping[str, list[Candidate]],
    of: Mapping[str, tuple[str, Sequence[Problem]]],
    best: int,
) -> list[tuple[Problem, Point]]:
    """What is chosen and the best of each list. Prefill's kernels are for the cache blocks of decode."""
    asked = [
        (problem, one.point)
        for name, ones in chosen.items()
        for problem, one in zip(of[name][1], ones, strict=True)
    ]
    asked += [
        (problem, one.point)
        for name, problems in dict(of.values()).items()
        for problem, found in zip(problems, lists[name], strict=True)
        for one in found[:best]
        if one.prediction is not None
    ]
    blocks = {"block_size": chosen["decode"][0].point["block_size"]} if "decode" in chosen else {}
    return [(problem, {**blocks, **point}) for problem, point in asked]


def judged_anew(
    problem: Problem,
    found: Sequence[Candidate],
    fresh: Sequence[tuple[Problem, Point, Resources]],
    target: CudaTarget,
) -> list[Candidate]:
    """The candidates with those anew whose kernel has been compiled, in whatever cache blocks."""
    mine = [
        (point, held)
        for other, point, held in fresh
        if (other.kind, other.key) == (problem.kind, problem.key)
    ]
    judged = [
        next(
            (
                search.candidate(problem, one.point, target, held)
                for point, held in mine
                if one.point.items() <= point.items()
            ),
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
