"""Random workloads on a small model with real kernels: whoever finishes has, bit for bit, the tokens and log
probabilities that it has alone and without a cache.

Tiny pools, shared beginnings, all policies, priorities, aborts, one step or two in flight. PAGEC_WORKLOADS
says how many (2,000 take about a minute of CPU time).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.small import small_artifact

from pagec.runtime.engine import Engine
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.kv.stats import TierStats
from pagec.runtime.kv.store import BlockStore
from pagec.runtime.kv.swap import HostSwapper
from pagec.runtime.kv.tiers import Tiers
from pagec.runtime.loop import Loop
from pagec.runtime.policies import POLICIES
from pagec.runtime.preemption import PreemptionCost
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.scheduler import Limits, Scheduler
from pagec.runtime.sequence import Request

# Greedy, with the log probabilities of the tokens.
TOP_1 = SamplingParams(temperature=0.0, logprobs=1, max_tokens=None)

NUM_WORKLOADS = int(os.environ.get("PAGEC_WORKLOADS", "1000"))
POOL = 64
BLOCK_SIZE = 16
OUTPUT = 40
Answer = tuple[list[int], list[float]]


def renew(
    engine: Engine,
    num_blocks: int,
    limits: Limits,
    policy: str,
    depth: int,
    cache: bool,
    tiers: Tiers | None = None,
) -> None:
    """Another scheduler on the engine's runner; all keys and values that it left are poisoned."""
    engine.runner.fill_kv_with_nan()
    blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_cache=cache, tiers=tiers)
    now = iter(range(1 << 30))
    engine.scheduler = Scheduler(
        blocks,
        limits,
        POLICIES[policy](),
        clock=lambda: next(now) * 0.01,
        depth=depth,
        cost=PreemptionCost(1000.0, 1.0, 10000.0, 0.002),  # swaps more than 5 tokens
        swapper=HostSwapper(blocks, tiers) if tiers else None,
    )
    engine.loop = Loop(
        engine.scheduler,
        engine.runner,
        engine._prepare,
        vocab=engine.program.vocab,
        depth=depth,
        wait=tiers.wait if tiers else lambda: None,
    )


def alone(engine: Engine, prompt: tuple[int, ...]) -> Answer:
    """A prompt's answer without anyone else, nor a cache."""
    renew(engine, POOL, Limits(engine.program.capacity.T, 1, 512), "fcfs", 1, cache=False)
    request = engine.add_request(prompt, OUTPUT, params=TOP_1)
    for _ in engine.stream():
        pass
    return request.output, request.logprobs


def prompts(vocab: int, count: int) -> list[tuple[int, ...]]:
    """Beginnings of three texts, with ends of their own."""
    rng = random.Random(0)
    texts = [[rng.randrange(vocab) for _ in range(90)] for _ in range(3)]
    lengths = (0, 5, 16, 31, 32, 48, 64, 90)
    return [
        (
            *rng.choice(texts)[: rng.choice(lengths)],
            *(rng.randrange(vocab) for _ in range(rng.randrange(1, 20))),
        )
        for _ in range(count)
    ]


def play(
    engine: Engine, rng: random.Random, choices: list[tuple[int, ...]], kv_dir: Path | None
) -> list[Request]:
    """One workload: requests arrive over time, some are aborted."""
    limits = Limits(rng.choice((4, 24, 64, 512)), rng.choice((2, 5, 8)), 512, rng.choice((None, None, 7, 32)))
    depth, policy = rng.choice((1, 2)), rng.choice(sorted(POLICIES))
    num_blocks, cache = rng.choice((12, 16, 24, POOL)), rng.random() < 0.9
    tiers = None
    if kv_dir is not None:
        size = engine.program.kv.block_bytes
        store = BlockStore(kv_dir, bytes(32), size, 60 * size) if rng.random() < 0.8 else None
        tiers = Tiers(engine.runner, size, host_bytes=rng.choice((0, 4, 20, 100)) * size, store=store)
    renew(engine, num_blocks, limits, policy, depth, cache, tiers)
    requests: list[Request] = []
    to_come = rng.randrange(2, 9)
    while to_come or engine.has_work:
        if to_come and rng.random() < 0.4:
            to_come -= 1
            requests.append(
                engine.add_request(
                    rng.choice(choices),
                    rng.randrange(1, OUTPUT + 1),
                    params=TOP_1,
                    priority=rng.randrange(3),
                    salt=rng.choice(("", "", "x")),
                )
            )
        if requests and rng.random() < 0.01:
            engine.abort(rng.choice(requests))
        engine.step()
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.num_used == 0
    if tiers is not None:
        host = tiers.stats().get("host", TierStats())
        assert host.used_bytes == 0
        assert host.cached_bytes <= host.limit_bytes
        engine.scheduler.blocks.close()
    return requests


def compare(engine: Engine, num_workloads: int, num_prompts: int, kv_dir: Path | None = None) -> None:
    """Plays workloads and holds every answer against the one alone."""
    choices = prompts(engine.program.vocab, num_prompts)
    answers = {prompt: alone(engine, prompt) for prompt in choices}
    finished = preempted = hits = 0
    for seed in range(num_workloads):
        for request in play(engine, random.Random(seed), choices, kv_dir):
            tokens, logprobs = answers[tuple(request.prompt)]
            preempted += request.num_preemptions > 0
            hits += request.num_cached_tokens > 0
            if request.finish_reason == "abort":
                continue
            assert request.error is None, seed
            count = request.max_tokens
            assert request.output == tokens[:count], seed
            assert request.logprobs == logprobs[:count], seed
            finished += 1
    assert finished > 3 * num_workloads
    assert preempted > num_workloads / 10
    assert hits > num_workloads / 4


def test_everyone_answers_as_alone() -> None:
    compare(Engine(small_artifact(), threads=1, num_blocks=POOL, eos_token_ids=()), NUM_WORKLOADS, 60)


def test_everyone_answers_as_alone_over_tiers(tmp_path: Path) -> None:
    """Host memory of any size, a directory that outlives each workload, requests swapped out."""
    engine = Engine(small_artifact(), threads=1, num_blocks=POOL, eos_token_ids=())
    compare(engine, NUM_WORKLOADS // 5, 60, tmp_path)


@pytest.mark.slow
def test_everyone_answers_as_alone_on_smollm2(smollm2: Path) -> None:
    compare(Engine(smollm2, num_blocks=POOL, eos_token_ids=()), 20, 16)
