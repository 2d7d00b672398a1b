"""Policies compared: the real scheduler and block manager, and step times by a cost model (roofline.py).

Requests arrive at random, at `load` times the rate at which continuous batching is saturated by them.
Seven of ten are interactive, the others want to be done some time; priorities and targets say so. "static"
is what engines did before: a batch is filled, runs until its last request ends, and holds memory for the
longest request in each of its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from pagec.runtime.bench.dry import VOCAB, dry_loop
from pagec.runtime.bench.roofline import Accelerator, ModelSize, work_of
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.policies import FcfsPolicy, Policy, make_policy
from pagec.runtime.scheduler import Entry, Limits, Scheduler
from pagec.runtime.sequence import Request

BLOCK_SIZE: Final = 16
STEP_TOKENS: Final = 2048
MAX_SEQS: Final = 256
MAX_PROMPT: Final = 2048
MAX_OUTPUT: Final = 1024
NUM_REQUESTS: Final = 10_000
# So many requests tell at which rate a device is saturated.
NUM_PROBES: Final = 2000
LOAD: Final = 1.1
NAMES: Final = ("static", "fcfs", "priority", "deadline")


class StaticPolicy(FcfsPolicy):
    """A new batch starts when the last one has ended."""

    name = "static"

    def may_start(self, num_running: int) -> bool:
        return num_running == 0


@dataclass(frozen=True, slots=True)
class Case:
    """A request to come. Interactive ones have targets that a reader would set."""

    arrival: float
    prompt: list[int]
    max_tokens: int
    is_interactive: bool
    ttft_s: float

    def request(self, number: int) -> Request:
        return Request(
            number,
            self.prompt,
            self.max_tokens,
            1,
            priority=0 if self.is_interactive else 2,
            ttft_s=self.ttft_s,
            token_s=0.1 if self.is_interactive else 0.5,
        )


def draw_cases(num_requests: int, per_s: float, seed: int = 0) -> list[Case]:
    """Poisson arrivals at a rate (all at once if it is 0); lengths are lognormal, medians 256 and 128."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, num_requests)
    arrivals = np.cumsum(gaps) / per_s if per_s else np.zeros(num_requests)
    prompts = np.clip(rng.lognormal(np.log(256), 0.9, num_requests), 8, MAX_PROMPT).astype(int)
    outputs = np.clip(rng.lognormal(np.log(128), 0.8, num_requests), 1, MAX_OUTPUT).astype(int)
    interactive = rng.random(num_requests) < 0.7
    targets = np.where(interactive, rng.uniform(0.5, 2.0, num_requests), 30.0)
    return [
        Case(float(a), rng.integers(0, VOCAB, p).tolist(), int(o), bool(i), float(t))
        for a, p, o, i, t in zip(arrivals, prompts, outputs, interactive, targets, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of the requests. Percentiles are over requests: seconds to the first token, and
    seconds for each further one on average; `goodput_per_s`: requests that met their targets."""

    policy: str
    device: str
    requests: int
    seconds: float
    output_tokens_per_s: float
    goodput_per_s: float
    goodput_share: float
    ttft_s: dict[str, float]
    token_s: dict[str, float]
    steps: int
    preemptions: int
    host_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Simulation:
    """One policy on one device."""

    def __init__(self, device: Accelerator, model: ModelSize, policy: str) -> None:
        self.now = 0.0
        self.steps = 0
        self._device, self._model = device, model
        self._is_static = policy == StaticPolicy.name
        chosen: Policy = StaticPolicy() if self._is_static else make_policy(policy)
        tokens = device.kv_tokens(model)
        length = MAX_PROMPT + MAX_OUTPUT
        rows = min(MAX_SEQS, tokens // length) if self._is_static else MAX_SEQS
        self.scheduler = Scheduler(
            BlockManager(tokens // BLOCK_SIZE, BLOCK_SIZE),
            # A static batch computes all its prompts in its first step.
            Limits(rows * MAX_PROMPT if self._is_static else STEP_TOKENS, rows, length),
            chosen,
            clock=lambda: self.now,
        )
        self._loop = dry_loop(self.scheduler, self._prepare, self._end_step)
        self._step_s = 0.0
        self._rows = 0

    def run(self, cases: Sequence[Case]) -> list[Request]:
        """Plays the cases to their end; the finished requests."""
        requests = []
        for number, case in enumerate(cases):
            while self._loop.has_work and self.now < case.arrival:
                self._loop.step()
            self.now = max(self.now, case.arrival)
            requests.append(case.request(number))
            self.scheduler.add(requests[-1], case.arrival)
        for _ in self._loop.stream():
            pass
        return requests

    def _prepare(self, entries: Sequence[Entry]) -> int:
        tokens, keys, pairs = work_of(entries)
        if self._is_static:  # rows that have ended are computed until the batch has
            self._rows = max(self._rows, len(entries)) if self.scheduler.running else 0
            self._rows = len(entries) if any(e.start == 0 for e in entries) else self._rows
            tokens += max(self._rows - len(entries), 0)
        self._step_s = self._device.step_s(self._model, tokens, keys, pairs)
        return sum([entry.num_logits for entry in entries])

    def _end_step(self) -> None:
        self.now += self._step_s
        self.steps += 1


def saturation_per_s(device: Accelerator, model: ModelSize, num_requests: int = NUM_PROBES) -> float:
    """Requests per second that continuous batching ends while others wait: all are there from the
    beginning, and what is counted is the time in which the second half of them starts."""
    requests = Simulation(device, model, "fcfs").run(draw_cases(num_requests, 0.0, seed=1))
    starts = sorted(map(_first, requests))
    half, last = starts[len(starts) // 2], starts[-1]
    ends = [request.finished_at for request in requests if request.finished_at is not None]
    return max(sum(half < end <= last for end in ends), 1) / max(last - half, 1e-9)


def simulate(device: Accelerator, model: ModelSize, policy: str, cases: Sequence[Case]) -> Outcome:
    """One policy's outcome."""
    began = time.process_time()
    simulation = Simulation(device, model, policy)
    requests = simulation.run(cases)
    host_s = time.process_time() - began
    assert all(request.finish_reason == "length" for request in requests)
    good = sum(request.met_targets for request in requests)
    return Outcome(
        policy,
        device.name,
        len(requests),
        round(simulation.now, 2),
        round(sum(request.num_emitted for request in requests) / simulation.now, 1),
        round(good / simulation.now, 2),
        round(good / len(requests), 4),
        _percentiles([_first(r) - r.arrival for r in requests]),
        _percentiles([_each(r) for r in requests if r.num_emitted > 1]),
        simulation.steps,
        simulation.scheduler.num_preemptions,
        round(host_s, 2),
    )


def compare(
    device: Accelerator,
    model: ModelSize,
    names: Sequence[str] = NAMES,
    num_requests: int = NUM_REQUESTS,
    load: float = LOAD,
    progress: Callable[[int], None] = lambda done: None,  # noqa: ARG005
) -> list[Outcome]:
    """All policies with the same requests."""
    rate = saturation_per_s(device, model, min(NUM_PROBES, num_requests))
    cases = draw_cases(num_requests, load * rate)
    outcomes = []
    for done, name in enumerate(names):
        progress(done)
        outcomes.append(simulate(device, model, name, cases))
    progress(len(names))
    return outcomes


def _first(request: Request) -> float:
    assert request.first_token_at is not None
    return request.first_token_at


def _each(request: Request) -> float:
    assert request.finished_at is not None
    return (request.finished_at - _first(request)) / (request.num_emitted - 1)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, (50, 90, 99))
    return {f"p{p}": round(float(v), 4) for p, v in zip((50, 90, 99), found, strict=True)}
