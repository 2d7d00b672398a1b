"""The spaces that are searched: a kernel's knobs and their values, and which points are none.

Values are a part of those that stand beside the templates (templates/cuda/*.yaml): what the cost model tells
apart. The size of a cache block is a knob here, for decoding decides it.

A *numeric* knob can change a bit of a result (the order of sums along K, the keys of a softmax step); the
others are schedule. Strict programs hold one set of numeric choices for all buckets of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Final

from pagec.autotune.prediction import Point
from pagec.autotune.problem import Decode, Kind, Linear, Prefill, Problem
from pagec.compiler.backends.cuda.attention import MIN_ROWS, AttentionShape
from pagec.compiler.backends.cuda.defaults import decode_knobs, linear_knobs, prefill_knobs
from pagec.compiler.backends.cuda.knobs import GROUP_ROWS
from pagec.compiler.backends.cuda.linear import LinearShape
from pagec.compiler.target import CudaTarget

# Tokens of a cache block untuned, and of the longest sequence: neither shows in a kernel's time.
BLOCK_SIZE: Final = 16
MAX_LEN: Final = 32768


@dataclass(frozen=True, slots=True)
class Space:
    """`knobs`: values of each, the plainest first; `numeric`: those that can change a bit."""

    kind: Kind
    knobs: Mapping[str, tuple[int, ...]]
    numeric: frozenset[str]

    def points(self) -> Iterator[Point]:
        """All combinations."""
        for values in product(*self.knobs.values()):
            yield dict(zip(self.knobs, values, strict=True))


SPACES: Final[Mapping[Kind, Space]] = {
    "attention_prefill": Space(
        "attention_prefill",
        {
            "BM": (32, 64, 128),
            "BN": (32, 64, 128),
            "split": (0,),
            "warps": (4, 8),
            "stages": (2, 3, 4),
        },
        frozenset({"BN", "split"}),
    ),
    "attention_decode": Space(
        "attention_decode",
        {
            "BN": (16, 32, 64, 128),
            "split": (128, 256, 512, 1024, 2048),
            "block_size": (16, 32, 64, 128),
            "warps": (2, 4, 8),
            "stages": (2, 3, 4),
        },
        frozenset({"BN", "split"}),
    ),
    "linear": Space(
        "linear",
        {
            "BM": (16, 32, 64, 128),
            "BN": (32, 64, 128, 256),
            "BK": (64, 128),
            "group_m": (1, 8),
            "splits": (1, 2, 4, 8),
            "tma": (0, 1),
            "warps": (4, 8),
            "stages": (2, 3, 4),
        },
        frozenset({"BK", "splits"}),
    ),
}


def baseline_of(problem: Problem, target: CudaTarget) -> Point:
    """What the backend takes where nothing is tuned."""
    if isinstance(problem, Linear):
        taken = asdict(linear_knobs(LinearShape(problem.N, problem.K, "bf16"), problem.M, target))
    else:
        sizes = problem.heads, problem.kv_heads, problem.head_dim
        shape = AttentionShape(*sizes, "bf16", "bf16", problem.head_dim**-0.5, BLOCK_SIZE, MAX_LEN)
        taken = asdict(decode_knobs(shape) if isinstance(problem, Decode) else prefill_knobs(shape))
    taken["block_size"] = BLOCK_SIZE
    return {knob: int(taken[knob]) for knob in SPACES[problem.kind].knobs}


def why_no_point(problem: Problem, point: Point, target: CudaTarget) -> str:
    """Why a combination of knobs is no kernel for the problem, or the same as another; empty if it is one."""
    if isinstance(problem, Linear):
        return _linear(problem, point, target)
    if point["split"] % point["BN"]:
        return f"splits of {point['split']} keys are no whole tiles of {point['BN']}"
    if isinstance(problem, Prefill):
        return "" if point["BM"] >= problem.group else f"{point['BM']} rows for {problem.group} heads"
    return _decode(problem, point)


def _linear(problem: Linear, point: Point, target: CudaTarget) -> str:
    if problem.K % (point["BK"] * point["splits"]):
        return f"K = {problem.K} is not {point['splits']} splits of whole steps of {point['BK']}"
    if point["tma"] and target.sm < 90:
        return f"{target.name} has no tensor memory accelerator"
    # A strict table takes one kind of matrix instruction for all rows: warp groups' have this many at least.
    least = GROUP_ROWS if target.sm >= 90 else MIN_ROWS
    if point["BM"] > least and point["BM"] >= 2 * problem.M:
        return f"{point['BM']} rows for {problem.M}"
    if point["group_m"] > 1 and point["BM"] >= problem.M:
        return "a band of tiles where there is one"
    return ""


def _decode(problem: Decode, point: Point) -> str:
    if point["split"] >= 2 * problem.context:
        return f"splits of {point['split']} keys for a context of {problem.context}"
    return ""
