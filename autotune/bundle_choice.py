"""Which points of a table's entry are worth timing on a GPU, and the kernels that a program launches for it.

For each bucket the untuned point and the cost model's best `best` ones: of points that differ in what the
model hardly tells apart (ALIKE) two at most, of decode attention also half as many in the second-best block
size. For strict programs the best `STRICT` sets of numeric choices, a point of each for all buckets, and the
set that stands where nothing is tuned. Prefill is timed in the block size that the model chooses for decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pagec.autotune import search
from pagec.autotune.compiled import attention_shape
from pagec.autotune.entries import Bucket, best_blocks, judged_anew, strict_pairs
from pagec.autotune.prediction import Candidate, Point
from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.autotune.space import BLOCK_SIZE, SPACES
from pagec.autotune.table import Mode
from pagec.compiler.backends.cuda.attention import DecodeKnobs, PrefillKnobs, decode, merge, prefill
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.knobs import Chooser
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape, linear, plain
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.target import CudaTarget

ALIKE: Final = frozenset({"stages", "group_m"})
MOST_ALIKE: Final = 2
STRICT: Final = 3


@dataclass(frozen=True, slots=True)
class Pick:
    """A point for a bucket: `point` as tables have it (None: untuned), `knobs` as it is launched, in cache
    blocks of `block_size` tokens."""

    rows: int
    problem: Problem
    mode: Mode
    point: Point | None
    knobs: Point
    block_size: int = BLOCK_SIZE


class Ranking:
    """Candidates by the cost model, and by what the compiler says once it has spoken."""

    def __init__(self, target: CudaTarget) -> None:
        self.target = target
        self._found: dict[tuple[Problem, bool], list[Candidate]] = {}

    def of(self, problem: Problem, *, strict: bool = False) -> list[Candidate]:
        """Best first. `strict`: as strict programs have it, prefill that starts afresh every so many keys."""
        if (problem, strict) not in self._found:
            points = list(SPACES[problem.kind].points())
            if strict and isinstance(problem, Prefill):
                splits = SPACES["attention_decode"].knobs["split"]
                points = [{**point, "split": split} for split in splits for point in points]
            self._found[problem, strict] = search.candidates(problem, self.target, points)
        return self._found[problem, strict]

    def judge(self, problem: Problem, compiled: Sequence[tuple[Point, Resources]]) -> None:
        """Ranks anew with what the compiler reported of points."""
        fresh = [(problem, point, held) for point, held in compiled]
        for key, found in self._found.items():
            if key[0] == problem:
                self._found[key] = judged_anew(problem, found, fresh, self.target)


def linear_picks(buckets: Sequence[Bucket], ranking: Ranking, best: int) -> list[Pick]:
    """Of a linear's buckets."""
    problems = [problem for _, problem in buckets]
    strict = [ranking.of(problem, strict=True) for problem in problems]
    sets = search.strict_sets(problems, strict)[:STRICT]
    picks = []
    for number, (rows, problem) in enumerate(buckets):
        chosen: dict[Mode, list[Candidate]] = {
            "default": varied(ranking.of(problem), best),
            "strict": [one[number] for one in sets],
        }
        picks += _picks(rows, problem, chosen, ranking.target, BLOCK_SIZE)
    return picks


def attention_picks(
    prefills: Sequence[Bucket], decodes: Sequence[Bucket], ranking: Ranking, best: int
) -> list[Pick]:
    """Of the buckets of both kernels, whose strict points go together."""
    found = [ranking.of(problem) for _, problem in decodes]
    blocks = best_blocks(decodes, found)[:2]
    of_block = [[[c for c in one if c.point["block_size"] == size] for one in found] for size in blocks]
    split = [ranking.of(problem, strict=True) for _, problem in prefills]
    pairs = strict_pairs(split, of_block[0], ranking.target)[:STRICT]
    picks = []
    for number, (rows, problem) in enumerate(prefills):
        chosen: dict[Mode, list[Candidate]] = {
            "default": varied(ranking.of(problem), best),
            "strict": [first[number] for first, _ in pairs],
        }
        picks += _picks(rows, problem, chosen, ranking.target, blocks[0])
    for number, (rows, problem) in enumerate(decodes):
        shares = [best, best // 2][: len(blocks)]
        chosen = {
            "default": [
                c for one, most in zip(of_block, shares, strict=True) for c in varied(one[number], most)
            ],
            "strict": [second[number] for _, second in pairs],
        }
        picks += _picks(rows, problem, chosen, ranking.target, blocks[0])
    return picks


def varied(found: Iterable[Candidate], most: int) -> list[Candidate]:
    """The first `most` that can run, of alike ones no more than MOST_ALIKE."""
    taken: list[Candidate] = []
    seen: dict[frozenset[tuple[str, int]], int] = {}
    for one in found:
        like = frozenset((knob, value) for knob, value in one.point.items() if knob not in ALIKE)
        if one.prediction is not None and seen.get(like, 0) < MOST_ALIKE and len(taken) < most:
            seen[like] = seen.get(like, 0) + 1
            taken.append(one)
    return taken


def _picks(
    rows: int,
    problem: Problem,
    chosen: Mapping[Mode, Sequence[Candidate]],
    target: CudaTarget,
    block_size: int,
) -> list[Pick]:
    """The untuned point of each mode, then the chosen ones."""
    picks = []
    for mode, found in chosen.items():
        # What is untuned decodes in untuned blocks; strict decoding in those that its default does.
        block = BLOCK_SIZE if isinstance(problem, Decode) and mode == "default" else block_size
        picks.append(Pick(rows, problem, mode, None, launched(problem, None, mode, target), block))
        for one in found:
            block = one.point.get("block_size", block_size)
            knobs = launched(problem, one.point, mode, target)
            picks.append(Pick(rows, problem, mode, one.point, knobs, block))
    return picks


# ------------------------------------------------------------------------------------- kernels


def launched(problem: Problem, point: Point | None, mode: Mode, target: CudaTarget) -> Point:
    """The knobs with which a program launches a point, or what is untuned."""
    kinds = ("attention_prefill", "attention_decode") if not isinstance(problem, Linear) else ("linear",)
    tuned = {f"{kind}/{problem.key}": ((0, point),) for kind in kinds} if point is not None else {}
    chooser = Chooser(target, tuned, strict=mode == "strict")
    knobs: LinearKnobs | PrefillKnobs | DecodeKnobs
    if isinstance(problem, Linear):
        knobs, _ = chooser.linear(LinearShape(problem.N, problem.K, "bf16"), problem.M)
    elif isinstance(problem, Prefill):
        knobs, _ = chooser.prefill(attention_shape(problem))
    else:
        knobs, _ = chooser.decode(attention_shape(problem), problem.sequences)
    return {knob: int(value) for knob, value in asdict(knobs).items()}


def kernels_of(pick: Pick, dtype: str = "bf16") -> tuple[CudaKernel, ...]:
    """What is launched for a pick, in order; the first is the one that its knobs are of."""
    problem, knobs = pick.problem, dict[str, Any](pick.knobs)
    if isinstance(problem, Linear):
        shape = LinearShape(problem.N, problem.K, dtype)
        return linear(shape, plain(shape, dtype), LinearKnobs.of(knobs))
    attention = replace(attention_shape(problem, pick.block_size), dtype=dtype, out_dtype=dtype)
    if isinstance(problem, Prefill):
        return (prefill(attention, PrefillKnobs(**knobs)),)
    return decode(attention, DecodeKnobs(**knobs)), merge(attention)
