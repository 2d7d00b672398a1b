"""What a live server says about itself: /health, /metrics, /stats, the page's files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.serving import RunningServer

LONG = {"prompt": "y" * 40, "max_tokens": 1900, "ignore_eos": True, "n": 3, "stream": True}


def samples(server: RunningServer) -> dict[tuple[str, str], float]:
    """(name, value of its label) -> number."""
    text = server.get("/metrics").decode()
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_a_request(server: RunningServer) -> None:
    before = samples(server)
    asked = {"prompt": "metrics, metrics, metrics, metrics!", "max_tokens": 9, "ignore_eos": True}
    server.post("/v1/completions", {**asked, "cache_salt": "metrics"})
    server.post("/v1/completions", {**asked, "cache_salt": "metrics"})
    after = samples(server)
    assert after[("pagec_engine_up", "")] == 1
    expected = {
        ("pagec_requests_total", "length"): 2,
        ("pagec_prompt_tokens_total", ""): 70,
        ("pagec_cached_prompt_tokens_total", ""): 32,
        ("pagec_computed_prompt_tokens_total", ""): 70 - 32,
        ("pagec_generated_tokens_total", ""): 18,
        ("pagec_kv_asked_tokens_total", ""): 70,
        ("pagec_kv_hit_tokens_total", ""): 32,
        ("pagec_preemptions_total", ""): 0,
        ("pagec_step_seconds_count", ""): 18,
        **{
            (f"pagec_{name}_seconds_count", ""): 2
            for name in ("time_to_first_token", "time_per_output_token", "queue_time", "request_duration")
        },
    }
    assert {name: after[name] - before[name] for name in expected} == expected
    assert after[("pagec_step_seconds_bucket", "+Inf")] == after[("pagec_step_seconds_count", "")]
    assert after[("pagec_requests_open", "running")] == after[("pagec_requests_open", "waiting")] == 0
    blocks = {state: after[("pagec_kv_blocks", state)] for state in ("free", "cached", "used", "shared")}
    total = server.get("/stats")["blocks"]["total"]
    assert blocks["free"] + blocks["cached"] + blocks["used"] + 1 == total


def stats_events(server: RunningServer) -> Iterator[dict[str, Any]]:
    connection = server.connect()
    connection.request("GET", "/stats/stream")
    response = connection.getresponse()
    assert response.getheader("content-type", "").startswith("text/event-stream")
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_stats_while_something_runs(server: RunningServer) -> None:
    stream = server.events("/v1/completions", LONG)
    answer_id = next(stream)["id"]
    stats = server.get("/stats")
    while not stats["blocks"]["shared"]:  # until its choices have forked
        stats = server.get("/stats")
        assert len(stats["running"]) == 1
    stream.close()
    (running,) = stats["running"]
    assert running["id"] == answer_id
    assert running["prompt_tokens"] == 40
    assert 3 <= running["output_tokens"] <= 5700
    owned = stats["blocks"]["owners"][answer_id]
    assert len(owned) == len(set(owned)) == running["blocks"]
    picture = stats["blocks"]["map"]
    assert len(picture) == stats["blocks"]["total"]
    assert picture[0] == "#"
    counts = Counter(picture)
    assert counts["."] == stats["blocks"]["free"]
    assert counts["c"] == stats["blocks"]["cached"]
    assert counts["u"] + counts["s"] == stats["blocks"]["used"]
    assert counts["s"] == stats["blocks"]["shared"] == 2  # of 40 tokens two blocks are full
    assert {picture[block] for block in owned} == {"u", "s"}
    assert stats["tokens_per_s"] > 0
    assert stats["step_ms"]["recent"][-1] == stats["step_ms"]["last"] > 0
    assert stats["step_ms"]["mean"] <= max(stats["step_ms"]["recent"])
    while stats["running"]:
        stats = server.get("/stats")


def test_the_stats_stream(server: RunningServer) -> None:
    events = stats_events(server)
    first, second = next(events), next(events)
    events.close()  # type: ignore[attr-defined]
    assert first["model"] == "small"
    assert second["uptime_s"] > first["uptime_s"]
    keys = "waiting running blocks tokens_per_s prompt_tokens_per_s hit_rate step_ms preemptions tiers"
    assert set(keys.split()) <= set(first)


def test_the_page_is_open_and_whole(server: RunningServer) -> None:
    status, page, headers = server.request("GET", "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in headers["content-security-policy"]
    assert b"<html" in page.lower()


def test_the_apis_own_description(server: RunningServer) -> None:
    description = server.get("/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(description["paths"])
    fields = description["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["temperature"]["type"] == "number"
    assert description["components"]["schemas"]["CompletionBody"]["additionalProperties"] is False
