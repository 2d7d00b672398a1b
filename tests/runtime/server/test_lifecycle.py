"""Servers under stress: full queues, clients that go away, the end of either process, shutting down."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.serving import RunningServer

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Stream:
    """A streamed completion that has begun. `logprobs` make its steps slow enough to watch."""

    def __init__(self, server: RunningServer, **more: Any) -> None:
        self.connection = server.connect()
        body = json.dumps({**LONG, "logprobs": 20, **more})
        self.connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        self.response: http.client.HTTPResponse | None = None

    def open(self) -> Stream:
        """Waits for the answer's head."""
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        return self

    def events(self) -> Iterator[Any]:
        """All that comes until the end of the answer; "[DONE]" as it is."""
        assert self.response is not None
        for line in self.response:
            if line.startswith(b"data: "):
                text = line[6:].strip()
                yield text.decode() if text == b"[DONE]" else json.loads(text)

    def started(self) -> Stream:
        """Waits for a token."""
        self.open()
        next(self.events())
        return self

    def close(self) -> None:
        """Goes away."""
        if self.response is not None:
            self.response.close()
        self.connection.close()


def until(server: RunningServer, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Asks for /stats, each time between two steps of the engine, until they are as expected."""
    while True:
        stats: dict[str, Any] = server.get("/stats")
        if is_reached(stats):
            return stats


def is_idle(stats: dict[str, Any]) -> bool:
    return not stats["running"] and not stats["waiting"] and not stats["blocks"]["used"]


@pytest.fixture(scope="module")
def narrow(artifact: Path) -> Iterator[RunningServer]:
    """One sequence runs, one may wait."""
    with RunningServer(artifact, "--max-seqs", "1", "--max-queue", "1") as server:
        yield server


def test_a_client_that_goes_away(narrow: RunningServer) -> None:
    """Case 13: what runs ends, and its blocks come back."""
    free = until(narrow, is_idle)["blocks"]["free"]
    stream = Stream(narrow).started()
    (running,) = until(narrow, lambda stats: bool(stats["running"]))["running"]
    assert running["blocks"] >= 1
    assert running["id"].startswith("cmpl-")
    stream.close()
    after = until(narrow, is_idle)
    assert after["blocks"]["free"] + after["blocks"]["cached"] == free
    assert after["totals"]["generated_tokens"] < 1900


def test_a_client_that_goes_away_from_the_queue(narrow: RunningServer) -> None:
    """Case 13, queued: it never runs, the others do not notice."""
    first = Stream(narrow).started()
    second = Stream(narrow, prompt="never run", stream=False)
    (waiting,) = until(narrow, lambda stats: bool(stats["waiting"]))["waiting"]
    assert waiting["prompt_tokens"] == 9
    assert waiting["waited_s"] >= 0
    second.close()
    stats = until(narrow, lambda stats: not stats["waiting"])
    assert len(stats["running"]) == 1
    first.close()
    until(narrow, is_idle)


def test_the_queue_is_bounded(narrow: RunningServer) -> None:
    first = Stream(narrow).started()
    second = Stream(narrow)
    until(narrow, lambda stats: bool(stats["waiting"]))
    status, body, headers = narrow.request("POST", "/v1/completions", {"prompt": "x"})
    assert status == 429
    assert body["error"]["code"] == "queue_full"
    assert body["error"]["type"] == "rate_limit_error"
    assert 1 <= int(headers["retry-after"]) <= 60
    first.close()
    assert next(second.open().events())["choices"]  # its turn has come
    second.close()
    until(narrow, is_idle)
    narrow.post("/v1/completions", {"prompt": "x", "max_tokens": 1})


def test_requests_are_counted_by_what_ended_them(narrow: RunningServer) -> None:
    def counts() -> dict[str, float]:
        text = narrow.get("/metrics").decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.labels["outcome"]: s.value for s in samples if s.name == "pagec_requests_total"}

    before = counts()
    narrow.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "ignore_eos": True})
    narrow.refused("/v1/completions", {"prompt": ""})
    Stream(narrow).started().close()
    until(narrow, is_idle)
    after = counts()
    assert set(after) == {"stop", "length", "abort", "error", "refused"}
    changes = {outcome: after[outcome] - before[outcome] for outcome in after}
    assert changes == {"stop": 0, "length": 1, "abort": 1, "error": 0, "refused": 1}


def test_the_engine_dies(artifact: Path) -> None:
    with RunningServer(artifact) as server:
        stream = Stream(server).started()
        whole = Stream(server, stream=False)
        until(server, lambda stats: len(stats["running"]) == 2)
        os.kill(server.engine_pid, signal.SIGKILL)
        (*_, last) = stream.events()
        assert last["error"]["code"] == "engine_dead"
        assert "signal 9" in last["error"]["message"]
        answer = whole.connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "engine_dead")
        status, body, _ = server.request("GET", "/health")
        assert (status, body["error"]["code"]) == (503, "engine_dead")
        for path in ("/v1/completions", "/v1/chat/completions"):
            asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
            assert server.refused(path, asked, 503)["type"] == "server_error"
        assert server.request("GET", "/stats")[0] == 503
        assert b"\npagec_engine_up 0.0\n" in server.get("/metrics")


def test_the_front_dies(artifact: Path) -> None:
    with RunningServer(artifact) as server:
        Stream(server).started()
        engine = os.pidfd_open(server.engine_pid)
        server.process.kill()
        assert select.select([engine], [], [], 60)[0], "the engine has outlived the front"
        os.close(engine)


def test_a_graceful_end(artifact: Path, tmp_path: Path) -> None:
    """What runs is finished, what is new is refused, what is cached is kept."""
    options = ("--kv-dir", str(tmp_path / "kv"))
    prompt = "a prompt of more than sixteen tokens"
    with RunningServer(artifact, *options) as server:
        stream = Stream(server, prompt=prompt, max_tokens=500).started()
        server.process.send_signal(signal.SIGTERM)
        while server.request("GET", "/health")[0] == 200:
            pass
        assert server.refused("/v1/completions", {"prompt": "x"}, 503)["code"] == "shutting_down"
        *rest, last = stream.events()
        assert last == "[DONE]"
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
    with RunningServer(artifact, *options) as server:
        found = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_an_end_that_does_not_wait(artifact: Path) -> None:
    with RunningServer(artifact, "--drain-seconds", "0") as server:
        stream = Stream(server).started()
        server.process.send_signal(signal.SIGTERM)
        (*_, last) = stream.events()
        assert last["error"]["code"] == "shutting_down"
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_at_once(artifact: Path) -> None:
    with RunningServer(artifact, "--drain-seconds", "1000") as server:
        stream = Stream(server).started()
        server.process.send_signal(signal.SIGINT)
        while server.request("GET", "/health")[0] == 200:
            pass
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert "[DONE]" not in list(stream.events())
