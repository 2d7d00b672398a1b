"""GET /metrics: what Prometheus reads. Requests are counted here, the engine's own numbers are those of a
snapshot made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagec.compiler.errors import PagecError
from pagec.runtime.server.errors import EngineDead
from pagec.runtime.server.generation import Generation
from pagec.runtime.server.messages import Snapshot
from pagec.runtime.server.meter import STEP_BOUNDS
from pagec.runtime.server.service import Service

_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counts calls (an Observer of the service) and writes everything in Prometheus' text format."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine = _Engine()
        registry.register(self._engine)
        self._requests = Counter(
            "pagec_requests", "Requests that are over, by what ended them.", ["outcome"], registry=registry
        )
        for outcome in ("stop", "length", "abort", "error", "refused"):
            self._requests.labels(outcome)
        self._prompt = Counter("pagec_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter(
            "pagec_cached_prompt_tokens", "Tokens of prompts found in the cache.", registry=registry
        )
        self._generated = Counter("pagec_generated_tokens", "Tokens generated.", registry=registry)

        def seconds(name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"pagec_{name}_seconds", help, buckets=bounds, registry=registry)

        self._first = seconds("time_to_first_token", "From the request to its first token.", _LONG)
        self._each = seconds("time_per_output_token", "Mean time between a request's tokens.", _SHORT)
        self._queue = seconds("queue_time", "From the request to its first step.", _LONG)
        self._total = seconds("request_duration", "From the request to its end.", _LONG)

    def refused(self, error: PagecError) -> None:
        """A call was not taken."""
        del error
        self._requests.labels("refused").inc()

    def finished(self, generation: Generation) -> None:
        """A generation is over."""
        self._requests.labels(generation.outcome or "abort").inc()
        usage = generation.usage
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._total.observe(generation.total_s)
        if generation.timings is not None:
            self._queue.observe(generation.timings.queue_s)
        if generation.first_token_at is not None:
            first = generation.first_token_at - generation.began
            self._first.observe(first)
            steps = max(len(choice.reader.token_ids) for choice in generation.choices) - 1
            if steps > 0:
                self._each.observe((generation.total_s - first) / steps)

    async def text(self, service: Service) -> bytes:
        """Everything; of an engine that is dead, that it is."""
        try:
            self._engine.snapshot = (await service.stats()).engine
        except EngineDead:
            self._engine.snapshot = None
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's numbers as of the last snapshot."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        now = self.snapshot
        yield GaugeMetricFamily(
            "pagec_engine_up", "1 if the engine process lives.", value=float(now is not None)
        )
        if now is None:
            return
        requests = GaugeMetricFamily("pagec_requests_open", "Requests by state.", labels=["state"])
        requests.add_metric(["running"], len(now.running))
        requests.add_metric(["waiting"], len(now.waiting))
        yield requests
        yield from _kv(now)
        yield CounterMetricFamily("pagec_preemptions", "Times a request had to make way.", now.preemptions)
        totals = now.totals
        bounds = [*map(str, STEP_BOUNDS), "+Inf"]
        steps = HistogramMetricFamily("pagec_step_seconds", "How long the engine's steps take.")
        steps.add_metric([], list(zip(bounds, map(float, totals.buckets), strict=True)), totals.seconds)
        yield steps
        yield CounterMetricFamily(
            "pagec_computed_prompt_tokens", "Tokens of prompts that were computed.", totals.prompt_tokens
        )


def _kv(now: Snapshot) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "pagec_kv_blocks", "Blocks of the KV pool; shared ones are used ones.", labels=["state"]
    )
    for state in ("free", "cached", "used", "shared"):
        blocks.add_metric([state], getattr(now.blocks, state))
    yield blocks
    yield CounterMetricFamily("pagec_kv_asked_tokens", "Tokens that sequences began with.", now.asked_tokens)
    yield CounterMetricFamily("pagec_kv_hit_tokens", "Of these, those the cache had.", now.hit_tokens)
    yield GaugeMetricFamily("pagec_kv_hit_rate", "The part of them that the cache had.", now.hit_rate)
    tiers = GaugeMetricFamily("pagec_kv_tier_bytes", "Bytes below the pool.", labels=["tier", "kind"])
    hits = CounterMetricFamily("pagec_kv_tier_hit_tokens", "Tokens found below the pool.", labels=["tier"])
    for name, tier in now.tiers.items():
        for kind in ("limit", "used", "cached"):
            tiers.add_metric([name, kind], getattr(tier, f"{kind}_bytes"))
        hits.add_metric([name], tier.hit_tokens)
    yield tiers
    yield hits
