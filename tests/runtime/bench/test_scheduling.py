"""Simulated policies, memory and the host's part of a step: exact numbers where no clock is in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pagec.compiler.dims import Capacity
from pagec.compiler.program import KvGroup, KvLayout, Program
from pagec.runtime.bench.batching import measure_batching
from pagec.runtime.bench.chart import Panel, bar_chart
from pagec.runtime.bench.host import measure_host, program_of
from pagec.runtime.bench.memory import held_slots, measure_memory
from pagec.runtime.bench.roofline import ACCELERATORS, LLAMA_8B, Accelerator, ModelSize, work_of
from pagec.runtime.bench.schedule import NAMES, Outcome, compare, draw_cases
from pagec.runtime.bench.workloads import Ask, throughput_lengths
from pagec.runtime.engine import Engine
from pagec.runtime.scheduler import Entry
from pagec.runtime.sequence import Request


def test_work_of_chunks_counts_causal_pairs() -> None:
    request = Request(0, [1] * 9, 4, 1)
    entries = [Entry(request, request.sequences[0], *part) for part in ((0, 3, 0), (7, 1, 1))]
    assert work_of(entries) == (4, 3 + 8, (1 + 2 + 3) + 8)


def test_a_step_takes_what_its_bytes_or_its_flops_take() -> None:
    model = ModelSize("m", weights_bytes=100, token_flops=10, pair_flops=1, kv_bytes=2)
    device = Accelerator("d", 10, 100, 1000, bandwidth_share=0.5, peak_share=0.5, overhead_s=1)
    assert device.step_s(model, 1, 50, 50) == 1 + (100 + 100) / 5
    assert device.step_s(model, 1000, 50, 500) == 1 + (10_000 + 500) / 50
    assert device.kv_tokens(model) == (900 - 100) // 2


def test_arrivals_have_the_rate_asked_for() -> None:
    cases = draw_cases(2000, 5.0)
    assert cases[-1].arrival == pytest.approx(400, rel=0.1)
    assert {case.arrival for case in draw_cases(3, 0.0)} == {0.0}
    assert draw_cases(5, 1.0) == draw_cases(5, 1.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found = compare(ACCELERATORS["a100"], LLAMA_8B, NAMES, 600, 1.1)
    return {outcome.policy: outcome for outcome in found}


def test_continuous_batching_beats_static(outcomes: dict[str, Outcome]) -> None:
    static, fcfs = outcomes["static"], outcomes["fcfs"]
    assert fcfs.output_tokens_per_s > 1.5 * static.output_tokens_per_s
    assert fcfs.ttft_s["p50"] < static.ttft_s["p50"]
    assert fcfs.goodput_share > static.goodput_share


def test_all_policies_bring_the_same_tokens(outcomes: dict[str, Outcome]) -> None:
    tokens = {round(o.output_tokens_per_s * o.seconds, -3) for o in outcomes.values()}
    assert len(tokens) == 1
    for outcome in outcomes.values():
        assert outcome.requests == 600
        assert outcome.to_json().keys() >= {"ttft_s", "token_s", "goodput_share", "preemptions"}


def model(*windows: int | None, max_len: int = 1024) -> Program:
    kv = KvLayout("bf16", 16, 1, 16, tuple(KvGroup((n,), w) for n, w in enumerate(windows)))
    return replace(program_of(64), capacity=Capacity(512, 64, 64), kv=kv, max_len=max_len)


@pytest.mark.parametrize("windows", [(None,), (None, 128)])
def test_few_slots_wait_for_tokens(windows: tuple[int | None, ...]) -> None:
    figures = measure_memory(model(*windows))
    assert figures.waste < 0.04
    assert figures.static_waste > 0.4
    assert figures.blocks_saved >= 0.6
    assert figures.peak_slots < figures.static_slots
    assert figures.mean_run > 1  # tables go on where they are, most of the time
    assert 0 <= figures.fragmentation < 1
    longest = max(2 * output for _, output in throughput_lengths())
    assert figures.steps > longest


def test_a_small_pool_preempts_and_wastes_no_more() -> None:
    figures = measure_memory(model(None), num_blocks=200)
    assert figures.preemptions > 0
    assert figures.waste < 0.04
    assert figures.peak_slots <= 199 * 16


def test_slots_are_counted_once() -> None:
    one, two = (Request(n, [1] * 40, 4, 1).sequences[0] for n in range(2))
    one.block_tables[0].extend([1, 2, 3])
    two.block_tables[0].extend([1, 2, 4])
    one.num_computed, two.num_computed = 40, 33
    assert held_slots([one, two], 16) == (4 * 16, 8 + 15)


def test_parts_of_the_hosts_work_are_all_there() -> None:
    cost = measure_host(8, "deadline", steps=20)
    assert cost.parts.keys() == {"schedule", "prepare", "commit", "total"}
    assert cost.parts["total"].median >= max(cost.parts[part].median for part in ("prepare", "commit"))
    assert cost.to_json()["sequences"] == 8


def test_a_chart_is_wellformed_and_to_scale() -> None:
    text = bar_chart("a < b", [Panel("x", {"one": 1.0, "two & three": 2.0}), Panel("y", {"one": 0.0})])
    root = ElementTree.fromstring(text)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("height") == "17"]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[1] == 2 * widths[0]
    assert widths[2] == 1.0


def test_static_and_continuous_on_an_engine(small: Path) -> None:
    engine = Engine(small, threads=1, num_blocks=200, max_seqs=4)
    asks = [Ask([n] * 9, 3 + n) for n in range(8)]
    found = measure_batching(engine, 1, asks)
    names = [f"{k}_{v}" for k in ("static", "continuous") for v in ("output_tokens_per_s", "ttft_s")]
    assert found.keys() == {*names, "ratio"}
    assert all(summary.median > 0 for summary in found.values())
    assert engine.scheduler.blocks.stats().hit_tokens == 0
