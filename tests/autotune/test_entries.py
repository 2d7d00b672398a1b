"""Entries: what the compiler refuses is no choice; strict sets share their numeric knobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pagec.autotune import search
from pagec.autotune.entries import (
    attention_entries,
    decode_buckets,
    linear_buckets,
    linear_entry,
    prefill_buckets,
)
from pagec.autotune.prediction import Point
from pagec.autotune.problem import Decode, Linear, Prefill, Problem
from pagec.autotune.search import MODELS
from pagec.autotune.shipped import Recorded, Recording
from pagec.autotune.table import MODES, Entry
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.backends.targets import load_cuda_target

H100 = load_cuda_target("h100")
Asked = Sequence[tuple[Problem, Point]]
Answers = list[tuple[Problem, Point, Resources]]


class Pretended:
    """A compiler for which points that `bad` names spill; others take what is estimated. Answers once."""

    def __init__(self, bad: Callable[[Point], bool]) -> None:
        self.bad, self.seen = bad, list[tuple[str, Point]]()

    def resources(self, asked: Asked) -> Answers:
        given = []
        for problem, point in asked:
            if (problem.key, point) not in self.seen:
                self.seen.append((problem.key, point))
                held = Resources(255, 64, 1024, "HMMA")
                if not self.bad(point):
                    held = MODELS[problem.kind][0](problem, point, H100)
                given.append((problem, point, held))
        return given


def points(entry: Entry) -> list[Point]:
    return [choice.point for mode in MODES for choice in entry.sets[mode]]


def test_what_spills_is_no_choice() -> None:
    buckets = linear_buckets(4096, 4096)
    free = linear_entry(buckets, H100)
    assert any(point["warps"] == 8 for point in points(free))
    compiler = Pretended(lambda point: point["warps"] == 8)
    entry = linear_entry(buckets, H100, compiler)
    assert all(point["warps"] == 4 for point in points(entry))
    assert all(("n4096_k4096", point) in compiler.seen for point in points(entry))
    for mode in MODES:
        for one, other in zip(entry.sets[mode], free.sets[mode], strict=True):
            assert one.us >= other.us


def test_the_best_of_each_bucket_are_compiled_beside_what_is_chosen() -> None:
    """All twelve that rank best in the end, of which the first two compile badly."""
    buckets = linear_buckets(4096, 4096)
    found = [search.candidates(problem, H100)[:2] for _, problem in buckets]
    bad = [one.point for bucket in found for one in bucket]
    compiler = Pretended(lambda point: point in bad)
    linear_entry(buckets, H100, compiler, best=12)
    for _, problem in buckets:
        ranked = [one for one in search.candidates(problem, H100) if one.point not in bad]
        assert all((problem.key, one.point) in compiler.seen for one in ranked[:12])


def test_strict_linears_share_bk_splits_and_instruction() -> None:
    strict = linear_entry(linear_buckets(6144, 4096), H100).sets["strict"]
    shared = {(one.point["BK"], one.point["splits"], one.facts["mma"]) for one in strict}
    assert len(shared) == 1


def test_attention_shares_blocks_and_strict_splits() -> None:
    compiler = Pretended(lambda point: point["BN"] == 128)
    prefill, decode = attention_entries(
        prefill_buckets(32, 8, 128), decode_buckets(32, 8, 128), H100, compiler
    )
    assert all(point["BN"] < 128 for point in points(prefill) + points(decode))
    assert len({point["block_size"] for point in points(decode)}) == 1
    strict = [one.point for entry in (prefill, decode) for one in entry.sets["strict"]]
    assert len({(point["BN"], point["split"]) for point in strict}) == 1
    blocks = {"block_size": points(decode)[0]["block_size"]}
    assert all(("d128_g4", {**point, **blocks}) in compiler.seen for point in points(prefill))
    assert all(one.point["per_sm"] == one.facts["occupancy"] for one in decode.sets["default"])
    assert all(point["split"] == 0 for point in (one.point for one in prefill.sets["default"]))


def test_a_record_stands_for_the_compiler() -> None:
    """What was recorded while compiling gives the same entry without."""
    buckets = linear_buckets(2048, 8192)
    recording = Recording(Pretended(lambda point: point["BN"] == 64), H100)
    compiled = linear_entry(buckets, H100, recording)
    assert recording.records
    assert linear_entry(buckets, H100, Recorded(recording.records, H100)) == compiled
    a100 = load_cuda_target("a100")
    assert linear_entry(buckets, a100, Recorded(recording.records, a100)) == linear_entry(buckets, a100)


@pytest.mark.parametrize(
    ("problem", "point"),
    [
        (
            Linear(16, 1024, 512),
            {"BM": 16, "BN": 64, "BK": 64, "group_m": 1, "splits": 2, "tma": 0, "warps": 4, "stages": 3},
        ),
        (Prefill(4, 1, 64), {"BM": 64, "BN": 64, "split": 0, "warps": 4, "stages": 2}),
        (
            Decode(4, 1, 64, 1, 512),
            {"BN": 64, "split": 256, "block_size": 32, "warps": 4, "stages": 3, "per_sm": 2},
        ),
    ],
    ids=["linear", "prefill", "decode"],
)
def test_estimates_are_near_what_the_compiler_gives(tmp_path: Path, problem: Problem, point: Point) -> None:
    pytest.importorskip("triton")
    from pagec.autotune.compiled import PointCompiler

    compiler = PointCompiler(H100, tmp_path, 0, lambda *_: None)
    ((_, _, held),) = compiler.resources([(problem, point)])
    assert compiler.resources([(problem, point)]) == []  # each once
    guess = MODELS[problem.kind][0](problem, point, H100)
    assert held.shared_bytes == guess.shared_bytes
    assert (held.stack_bytes, held.mma) == (0, guess.mma)
    assert abs(held.registers - guess.registers) <= 32


def test_no_compiling_beyond_the_budget(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from pagec.autotune.compiled import PointCompiler

    compiler = PointCompiler(H100, tmp_path, 1e-9, lambda *_: None)
    assert compiler.resources([(Linear(16, 1024, 512), {})]) == []
