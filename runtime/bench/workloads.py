"""The workloads: what is asked, and which figures come of it.

    latency      one prompt of 128 tokens, 128 generated        ttft_s, decode_tokens_per_s, bandwidth_share
    prefill      one prompt of 1,024 tokens                     prefill_tokens_per_s, peak_share
    throughput   64 requests at once, of drawn lengths          output_tokens_per_s
    prefix       32 requests that share their first 512 tokens  output_tokens_per_s

Greedy, the end of text ignored. Token ids are drawn anew for every repetition, so no cache hits by accident.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagec.compiler.program import Memory
from pagec.runtime.bench.cost import ModelCost
from pagec.runtime.bench.limits import Limits
from pagec.runtime.engine import Engine

# The first ids of a vocabulary are often special tokens.
FIRST_TOKEN_ID: Final = 100

LATENCY_PROMPT: Final = 128
LATENCY_OUTPUT: Final = 128
PREFILL_PROMPT: Final = 1024
THROUGHPUT_REQUESTS: Final = 64
PREFIX_REQUESTS: Final = 32
PREFIX_SHARED: Final = 512
PREFIX_OWN: Final = 32
PREFIX_OUTPUT: Final = 32


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt's token ids, and how many tokens to generate."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When tokens came, in seconds since all requests were made.

    `first_s`: the first token of any request; `end_s`: the last of all; `num_tokens`: all that were
    generated.
    """

    first_s: float
    end_s: float
    num_tokens: int


Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """`make` draws the requests of one repetition; `figures` are what is reported of it."""

    name: str
    title: str
    make: Callable[[np.random.Generator, int], list[Ask]]
    figures: Callable[[Timeline, Sequence[Ask], ModelCost, Limits], Figures]

    def asks(self, vocab: int, seed: int | None = None) -> list[Ask]:
        """A repetition's requests; without a seed, others every time."""
        return self.make(np.random.default_rng(seed), vocab)


def pool_blocks(names: Iterable[str], program: Memory) -> int:
    """Blocks that hold each of these workloads' requests at once: so the pool is used over and over again, as
    it is by a service that has run for a while, and not touched anew by every repetition."""
    size, groups = program.kv.block_size, max(len(program.kv.groups), 1)
    needs = [
        sum(-(-(len(ask.prompt) + ask.max_tokens) // size) for ask in WORKLOADS[name].asks(program.vocab, 0))
        for name in names
    ]
    return groups * max(needs) + 1


# ------------------------------------------------------------------------------------- requests


def _tokens(rng: np.random.Generator, vocab: int, count: int) -> list[int]:
    first = FIRST_TOKEN_ID if vocab > FIRST_TOKEN_ID else 0
    return [int(token) for token in rng.integers(first, vocab, count)]


def throughput_lengths() -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request: drawn once and for all, so that runs compare."""
    drawn = np.random.RandomState(0)
    prompts = drawn.randint(32, 257, THROUGHPUT_REQUESTS)
    outputs = drawn.randint(16, 257, THROUGHPUT_REQUESTS)
    return [(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def _latency(rng: np.random.Generator, vocab: int) -> list[Ask]:
    return [Ask(_tokens(rng, vocab, LATENCY_PROMPT), LATENCY_OUTPUT)]


def _prefill(rng: np.random.Generator, vocab: int) -> list[Ask]:
    return [Ask(_tokens(rng, vocab, PREFILL_PROMPT), 1)]


def _throughput(rng: np.random.Generator, vocab: int) -> list[Ask]:
    return [Ask(_tokens(rng, vocab, prompt), output) for prompt, output in throughput_lengths()]


def _prefix(rng: np.random.Generator, vocab: int) -> list[Ask]:
    shared = _tokens(rng, vocab, PREFIX_SHARED)
    prompts = [shared + _tokens(rng, vocab, PREFIX_OWN) for _ in range(PREFIX_REQUESTS)]
    return [Ask(prompt, PREFIX_OUTPUT) for prompt in prompts]


# -------------------------------------------------------------------------------------- figures


def latency_figures(line: Timeline, asks: Sequence[Ask], cost: ModelCost, limits: Limits) -> Figures:
    """Decoding counts from the first token on, which prefill brought."""
    (ask,) = asks
    rate = (line.num_tokens - 1) / (line.end_s - line.first_s)
    # Generated token i is fed back at position prompt + i; the last one never is.
    positions = range(len(ask.prompt), len(ask.prompt) + ask.max_tokens - 1)
    nbytes = sum(map(cost.decode_bytes, positions)) / len(positions)
    return {
        "ttft_s": line.first_s,
        "decode_tokens_per_s": rate,
        "bandwidth_share": nbytes * rate / limits.read_bytes_per_s,
    }


def prefill_figures(line: Timeline, asks: Sequence[Ask], cost: ModelCost, limits: Limits) -> Figures:
    (ask,) = asks
    flops = cost.flops([(0, len(ask.prompt))], num_logits=1)
    return {
        "prefill_tokens_per_s": len(ask.prompt) / line.first_s,
        "peak_share": flops / line.first_s / limits.flops_per_s,
    }


def batch_figures(line: Timeline, asks: Sequence[Ask], cost: ModelCost, limits: Limits) -> Figures:
    del asks, cost, limits
    return {"ttft_s": line.first_s, "output_tokens_per_s": line.num_tokens / line.end_s}


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("latency", "one stream, 128 + 128 tokens", _latency, latency_figures),
        Workload("prefill", "one prompt of 1,024 tokens", _prefill, prefill_figures),
        Workload("throughput", "64 requests at once", _throughput, batch_figures),
        Workload("prefix", "32 requests that share 512 tokens", _prefix, batch_figures),
    )
}


# -------------------------------------------------------------------------------------- running


def run_asks(engine: Engine, asks: Sequence[Ask]) -> Timeline:
    """Makes all requests at once and runs them to their end."""
    began = time.perf_counter()
    requests = [engine.add_request(ask.prompt, ask.max_tokens, ignore_eos=True) for ask in asks]
    first = 0.0
    while engine.has_work:
        if engine.step() and not first:
            first = time.perf_counter() - began
    end = time.perf_counter() - began
    for request in requests:
        if request.error is not None:
            raise request.error
    return Timeline(first, end, sum(len(request.output) for request in requests))
