"""The rows of bench on the fake GPU: what they launch and say; time that runs out, rows that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.fake_cuda import FakeGpu

from gpu import bench, rows
from gpu.artifacts import Artifacts
from gpu.bench import run_bench
from gpu.fake import FakeMachine
from gpu.results import Line, Results
from gpu.rows import Bench, Row, Sizes
from gpu.timing import FLUSHED, LEAST_ROUNDS, MOST_ROUNDS, Timer
from pagec.autotune.measure import Sample
from pagec.compiler.errors import DeviceError

HEAD: Line = {"gpu": "Fake 9000", "sources": "abc"}


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    gpu, ran = FakeGpu(), list[str]()

    def run(name: str, operations: int) -> Callable[[], None]:
        def begin() -> None:
            ran.append(name)
            for _ in range(operations):
                gpu.begin(lambda: None)

        return begin

    ticks = count()
    timer = Timer(gpu, 1 << 10, seconds=LEAST_ROUNDS + 2.5, clock=lambda: float(next(ticks)))
    samples, rounds = timer.time({"slow": run("slow", 3), "fast": run("fast", 1)})
    # Each operation takes the fake GPU a microsecond.
    assert samples == {"slow": Sample(3.0, 0.0), "fast": Sample(1.0, 0.0)}
    assert LEAST_ROUNDS < rounds < MOST_ROUNDS
    assert ran[:4] == ["fast", "slow", "slow", "fast"]
    assert len(ran) == 2 * (rounds + 1)
    assert len(gpu.behind(min(gpu._starts))) == FLUSHED << 10


def test_a_comparison_says_how_much_faster_it_is() -> None:
    samples = {"ours": Sample(8.0, 0.4), "flash": Sample(10.0, 0.1), "cuDNN": Sample(7.0, 0.1)}
    line = rows.compared((samples, 9))
    assert line == {
        "unit": "us",
        "ours": 8.0,
        "peers": {"flash": 10.0, "cuDNN": 7.0},
        "spread": 0.05,
        "n": 9,
        "ratio": 1.25,
    }
    assert rows.compared(({"ours": Sample(8.0, 0.0)}, 5), {"copy": 4.0})["ratio"] == 0.5


SMALL = Sizes(
    prefill=((1, 16), (2, 8)),
    decode=((2, 20), (1, 60)),
    linear_rows=(1, 16),
    batches=(1, 4),
    context=20,
    short_context=10,
    short_batches=(1, 4),
    requests=2,
    prompt=5,
    answer=3,
)


class ScriptedTimer(Timer):
    """Runs each once; ours take 2 us, the others 3, a copy as long as `copy_us`."""

    def __init__(self, copy_us: float = 4.0) -> None:
        self.copy_us = copy_us

    def time(self, runs: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Sample], int]:
        for run in runs.values():
            run()
        times = {"ours": 2.0, "copy": self.copy_us}
        return {name: Sample(times.get(name, 3.0), 0.0) for name in runs}, 7


def measured(artifacts: Artifacts, results: Results, **options: Any) -> tuple[int, FakeMachine]:
    machine = FakeMachine(execute=False)
    given: dict[str, Any] = {"budget_s": 1e6, "say": lambda _: None, "timer": ScriptedTimer()} | options
    return run_bench(artifacts, machine, results, sizes=SMALL, **given), machine


def test_every_row_is_measured_on_the_fake_gpu(artifacts: Artifacts, tmp_path: Path) -> None:
    results = Results(tmp_path / "bench.jsonl", HEAD)
    left, _ = measured(artifacts, results)
    assert {name: line["error"] for name, line in results.lines.items() if "error" in line} == {}
    assert left == 0
    assert list(results.lines) == [row.name for row in rows.all_rows(SMALL)]
    line = results.lines["prefill attention, 2 x 8 tokens"]
    assert line["peers"]["SDPA flash"] == 3.0
    assert line["ratio"] == 1.5
    # Keys and values of 2 sequences of 20 tokens, 2 KV heads of 16, float32, at what the copy reached.
    line = results.lines["decode attention, 2 x 20 keys"]
    nbytes, speed = 2 * 20 * 2 * 2 * 16 * 4, 2 * (FakeGpu().total_bytes // 8) / 4.0
    assert line["copy_gb_per_s"] == pytest.approx(speed / 1e3, rel=0.01)
    assert line["peers"]["copy bandwidth"] == pytest.approx(nbytes / speed, abs=0.01)
    assert "tokens/s" in bench.COLUMNS["ours"](results.lines["engine of 1b, 2 requests of 5 + 3 tokens"])
    text = results.write_markdown("Times", bench.COLUMNS).read_text()
    assert len(text.splitlines()) == 6 + len(results.lines)


def test_what_rows_launch(artifacts: Artifacts) -> None:
    machine = FakeMachine(execute=False)
    loaded = machine.load(artifacts.open("8b"), num_blocks=40)
    of = {kernel.key: kernel.template for kernel in loaded.artifact.program.kernels}

    def launched(measure: Callable[[Bench], Line]) -> list[str]:
        library: Any = loaded.library
        before = len(library.launches)
        measure(Bench(lambda _: loaded, ScriptedTimer(), 1.0))
        return [of[launch.key] for launch in library.launches[before:]]

    assert launched(lambda b: rows.prefill("8b", 1, 16, b)) == ["attention_prefill"]
    assert launched(lambda b: rows.decode("8b", 2, 20, b)) == ["attention_decode", "attention_merge"]
    for which in rows.LINEARS:
        found = launched(lambda b, which=which: rows.linear("8b", which, 16, b))  # type: ignore[misc]
        assert set(found) <= {"linear", "linear_sum"}
        assert found[0] == "linear"
    assert launched(lambda b: rows.decode_step("8b", 4, 20, b)) == []  # a graph's launches were captured


def test_a_bound_counts_weights_once_and_the_context_of_each(artifacts: Artifacts) -> None:
    loaded = FakeMachine(execute=False).load(artifacts.open("8b"), num_blocks=40)
    times = {
        batch: rows.decode_step("8b", batch, 20, Bench(lambda _: loaded, ScriptedTimer(), 1.0))["peers"]
        for batch in (1, 4)
    }
    per_sequence = 2 * 20 * 2 * 2 * 16 * 4  # two layers
    assert times[4]["copy bandwidth"] - times[1]["copy bandwidth"] == 3 * per_sequence


def test_a_run_without_time_leaves_rows_and_the_next_one_goes_on(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    seconds, taken = iter(range(0, 10_000, 10)), list[str]()

    def measure(name: str) -> Callable[[Bench], Line]:
        def found(_: Bench) -> Line:
            taken.append(name)
            return {"unit": "us", "ours": 1.0}

        return found

    made = [Row(name, ("1b",), measure(name)) for name in "abcde"]
    path = tmp_path / "bench.jsonl"
    options = {"rows": made, "budget_s": 60.0, "clock": lambda: float(next(seconds))}
    left, _ = measured(artifacts, Results(path, HEAD), **options)
    assert 0 < left < 5
    assert taken == list("abcde"[: 5 - left])
    again, _ = measured(artifacts, Results(path, HEAD), rows=made)
    assert again == 0
    assert taken == list("abcde")


def test_a_row_that_fails_leaves_the_others(artifacts: Artifacts, tmp_path: Path) -> None:
    def fails(_: Bench) -> Line:
        raise RuntimeError("no kernel for this")

    made = [Row("a", ("1b",), fails), Row("b", ("1b",), lambda _: {"unit": "us", "ours": 1.0})]
    results = Results(tmp_path / "bench.jsonl", HEAD)
    left, _ = measured(artifacts, results, rows=made)
    assert left == 1
    assert results.lines["a"]["error"] == "no kernel for this"
    assert "ours" in results.lines["b"]


def test_an_error_of_the_gpu_ends_the_run_and_is_noted(artifacts: Artifacts, tmp_path: Path) -> None:
    def fails(_: Bench) -> Line:
        raise DeviceError("illegal address", place="kernel k")

    made = [Row("a", ("1b",), fails), Row("b", ("1b",), fails)]
    results = Results(tmp_path / "bench.jsonl", HEAD)
    with pytest.raises(DeviceError):
        measured(artifacts, results, rows=made)
    assert list(results.lines) == ["a"]
    assert results.pending(["a", "b"]) == ["b", "a"]


def test_models_that_a_row_does_not_want_are_dropped(artifacts: Artifacts) -> None:
    models = bench.LoadedModels(artifacts, FakeMachine(execute=False), 64)
    first = models.load("1b")
    models.keep(("1b", "1b-short"))
    assert models.load("1b") is first
    models.keep(("8b",))
    assert models.load("1b") is not first


def test_goals_are_the_ones_that_are_asked_for() -> None:
    goals = {row.name: row.goal for row in rows.all_rows(Sizes())}
    assert goals["prefill attention, 1 x 4096 tokens"] == 1.0
    assert goals["decode attention, 16 x 4096 keys"] == 0.85
    assert goals["decode step of 8b, batch 1"] == pytest.approx(1 / 1.3, abs=1e-3)
    assert goals["decode step of 1b at context 64, batch 1: long limit beside short"] == 0.95
