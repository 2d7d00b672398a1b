"""The workloads are those that are promised, and their figures are what they say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagec.compiler.artifact import Artifact
from pagec.runtime.bench.cost import AttentionCost, ModelCost
from pagec.runtime.bench.limits import Limits, median_limits
from pagec.runtime.bench.summary import summarise, summarise_all, to_json
from pagec.runtime.bench.workloads import WORKLOADS, Ask, Timeline, pool_blocks, throughput_lengths

VOCAB = 49152
COST = ModelCost(1000, 500, 2_000_000, 2, (AttentionCost(4, 2, 16, None),))
LIMITS = Limits(1e9, 1e10)


def lengths(name: str) -> list[tuple[int, int]]:
    return [(len(ask.prompt), ask.max_tokens) for ask in WORKLOADS[name].asks(VOCAB)]


def test_single_streams() -> None:
    assert lengths("latency") == [(128, 128)]
    assert lengths("prefill") == [(1024, 1)]


def test_throughput_draws_prompts_first_then_outputs() -> None:
    drawn = np.random.RandomState(0)
    prompts, outputs = drawn.randint(32, 257, 64), drawn.randint(16, 257, 64)
    expected = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    assert lengths("throughput") == throughput_lengths() == expected


def test_prefix_shares_512_tokens_and_nothing_else() -> None:
    asks = WORKLOADS["prefix"].asks(VOCAB)
    assert lengths("prefix") == [(544, 32)] * 32
    assert len({tuple(ask.prompt[:512]) for ask in asks}) == 1
    assert len({tuple(ask.prompt[512:]) for ask in asks}) == 32


@pytest.mark.parametrize("name", WORKLOADS)
def test_tokens_are_ordinary_and_new_every_time(name: str) -> None:
    one, two = WORKLOADS[name].asks(VOCAB), WORKLOADS[name].asks(VOCAB)
    tokens = {token for ask in one for token in ask.prompt}
    assert min(tokens) >= 100
    assert max(tokens) < VOCAB
    assert one[0].prompt != two[0].prompt
    assert WORKLOADS[name].asks(VOCAB, seed=3) == WORKLOADS[name].asks(VOCAB, seed=3)
    assert max(max(ask.prompt) for ask in WORKLOADS[name].asks(50)) < 50


def test_the_pool_holds_the_largest_workload(toy: Callable[..., Artifact]) -> None:
    """Prefill: 1,025 tokens; throughput: what all its requests have at their ends, each in whole blocks."""
    program = toy().program
    size, groups = program.kv.block_size, len(program.kv.groups)
    assert pool_blocks(["prefill"], program) == groups * -(-1025 // size) + 1
    ends = sum(-(-(p + o) // size) for p, o in throughput_lengths())
    assert pool_blocks(["prefill", "throughput"], program) == groups * ends + 1


def test_latency_figures() -> None:
    """Three tokens after the first in two seconds, at positions 10, 11, 12: 11, 12, 13 keys are read."""
    asks = [Ask(list(range(10)), 4)]
    found = WORKLOADS["latency"].figures(Timeline(0.5, 2.5, 4), asks, COST, LIMITS)
    nbytes = 2_000_000 + 12 * 2 * 2 * 16 * 2
    assert found == {
        "ttft_s": 0.5,
        "decode_tokens_per_s": 1.5,
        "bandwidth_share": pytest.approx(nbytes * 1.5 / 1e9),
    }


def test_prefill_figures() -> None:
    asks = [Ask(list(range(10)), 1)]
    found = WORKLOADS["prefill"].figures(Timeline(0.25, 0.25, 1), asks, COST, LIMITS)
    flops = 10 * 1000 + 500 + 55 * 4 * 4 * 16
    assert found == {"prefill_tokens_per_s": 40.0, "peak_share": pytest.approx(flops * 4 / 1e10)}


@pytest.mark.parametrize("name", ["throughput", "prefix"])
def test_batch_figures(name: str) -> None:
    found = WORKLOADS[name].figures(Timeline(0.5, 4.0, 100), [], COST, LIMITS)
    assert found["output_tokens_per_s"] == 25.0


def test_medians_stand_beside_their_extremes() -> None:
    found = to_json(summarise_all([{"a_per_s": value} for value in (3.0, 1.0, 2.0)]))
    assert found == {"a_per_s": 2.0, "min": {"a_per_s": 1.0}, "max": {"a_per_s": 3.0}}
    assert summarise([1.0, 2.0, 4.0]).spread == 1.5


def test_limits() -> None:
    found = median_limits([Limits(1e9, 4e9), Limits(3e9, 2e9), Limits(2e9, 3e9)])
    assert found == Limits(2e9, 3e9)
    assert found.figures == {"read_bandwidth_gb_per_s": 2.0, "peak_gflops": 3.0}
    assert found.bound_s(4e9, 3e9) == 2.0
    assert found.bound_s(0, 9e9) == 3.0
