"""Static against continuous batching on an engine: the requests of `throughput`, ROWS of them at a time."""

from __future__ import annotations

import statistics
from typing import Final

from pagec.runtime.bench.schedule import StaticPolicy
from pagec.runtime.bench.summary import Summary, summarise_all
from pagec.runtime.bench.workloads import WORKLOADS, Ask
from pagec.runtime.engine import Engine
from pagec.runtime.policies import FcfsPolicy

ROWS: Final = 16
REPEAT: Final = 3


def measure_batching(
    engine: Engine, repeat: int = REPEAT, asks: list[Ask] | None = None
) -> dict[str, Summary]:
    """Output tokens per second and the median time to the first token of both, measured in turns."""
    asks = asks or WORKLOADS["throughput"].asks(engine.program.vocab)
    policies = {"static": StaticPolicy(), "continuous": FcfsPolicy()}
    turns = []
    for _ in range(repeat + 1):  # the first one does not count
        figures: dict[str, float] = {}
        for name, policy in policies.items():
            engine.scheduler.policy = policy
            rate, first = _run(engine, asks)
            figures[f"{name}_output_tokens_per_s"] = rate
            figures[f"{name}_ttft_s"] = first
        figures["ratio"] = figures["continuous_output_tokens_per_s"] / figures["static_output_tokens_per_s"]
        turns.append(figures)
    return summarise_all(turns[1:])


def _run(engine: Engine, asks: list[Ask]) -> tuple[float, float]:
    """Nothing is found in the cache: every run has a salt of its own."""
    clock = engine.scheduler.clock
    began = clock()
    salt = str(began)
    requests = [engine.add_request(a.prompt, a.max_tokens, ignore_eos=True, salt=salt) for a in asks]
    for _ in engine.stream():
        pass
    took = clock() - began
    firsts = []
    for request in requests:
        if request.error is not None:
            raise request.error
        assert request.first_token_at is not None
        firsts.append(request.first_token_at - request.arrival)
    return sum(request.num_emitted for request in requests) / took, statistics.median(firsts)
