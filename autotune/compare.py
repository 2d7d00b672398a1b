"""The cost model beside what is public of kernels that were tuned on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagec.autotune import prefill, search
from pagec.autotune.prediction import Candidate, Point
from pagec.autotune.problem import Decode, Prefill, problem_from
from pagec.autotune.space import SPACES
from pagec.autotune.table import Entry
from pagec.compiler.target import CudaTarget

HEADS: Final = 32
SMALL: Final = {"BN": 64, "block_size": 16}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best tile that the model finds for dense causal prefill, the public one, its figures of both."""

    head_dim: int
    best_tile: str
    best_us: float
    public_tile: str
    public_us: float


def against_public(target: CudaTarget) -> Iterator[Comparison]:
    """For each head size that such a kernel is known for on the target's architecture."""
    for sm, head_dim in prefill.PUBLIC:
        if sm == target.sm:
            problem = Prefill(HEADS, HEADS, head_dim)
            best = search.candidates(problem, target)[0]
            point, held = prefill.public_tile(problem, target)
            public = prefill.predict(problem, point, target, held)
            yield Comparison(head_dim, _tile(best.point), best.us, _tile(point), public.us)


@dataclass(frozen=True, slots=True)
class DecodeComparison:
    """A chosen point of paged decoding beside the best one with tiles of 64 keys in blocks of 16."""

    problem: Decode
    chosen: Candidate
    small: Candidate


def against_small_blocks(target: CudaTarget, entry: Entry) -> Iterator[DecodeComparison]:
    """For each bucket of an entry of decoding."""
    for choice in entry.sets["default"]:
        problem = problem_from("attention_decode", choice.facts["weighed_at"])
        assert isinstance(problem, Decode)
        points = [p for p in SPACES["attention_decode"].points() if SMALL.items() <= p.items()]
        small = search.candidates(problem, target, points)[0]
        yield DecodeComparison(problem, search.judged(problem, choice.point, target), small)


def _tile(point: Point) -> str:
    return f"{point['BM']} x {point['BN']}, {point['warps']} warps"
