"""`pagec top` as a process against a server that works, and the picture that it draws."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import RunningServer
from support.terminal import Terminal

from pagec.runtime.cli.top import STYLES, condensed, frame, sparkline

COMMAND = [sys.executable, "-m", "pagec.runtime.cli", "top"]
KEY = {"authorization": "Bearer secret"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def working(server: RunningServer) -> Iterator[None]:
    """The server generates a long text meanwhile."""
    connection: http.client.HTTPConnection = server.connect()
    body = {"prompt": "x" * 100, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {**KEY, "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    yield
    response.close()
    connection.close()


def test_one_frame(server: RunningServer) -> None:
    with working(server):
        done = run(server.url, "--once", "--api-key", "secret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bytes   up ")
    assert "tokens/s" in done.stdout
    (row,) = [line.split() for line in done.stdout.splitlines() if "running" in line and "cmpl-" in line]
    assert row[1:3] == ["running", "100"]
    assert int(row[3]) > 0
    assert int(row[4]) >= 7  # 100 tokens in blocks of 16


def test_json(server: RunningServer) -> None:
    """What --json prints is what the server says."""
    done = run(server.url, "--once", "--json", "--api-key", "secret")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    _, stats, _ = server.request("GET", "/stats", headers=KEY)
    assert found.keys() == stats.keys()
    assert found["blocks"]["total"] == stats["blocks"]["total"]
    words = [*COMMAND, server.url, "--json", "--api-key", "secret"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        frames = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.kill()
    assert frames[0]["uptime_s"] < frames[1]["uptime_s"]


def test_live_in_a_terminal(server: RunningServer) -> None:
    """It redraws as the engine works, and Ctrl-C ends it."""
    with Terminal([*COMMAND, server.url], env={"PAGEC_API_KEY": "secret"}) as terminal:
        terminal.expect("bytes")
        with working(server):
            terminal.expect("cmpl-")
        terminal.expect("0 running")
        terminal.type("\x03")
        assert terminal.wait() == 0


def test_live_without_a_server() -> None:
    """It waits for one."""
    with Terminal([*COMMAND, "http://127.0.0.1:1"]) as terminal:
        terminal.expect("no connection")
        terminal.type("\x03")
        assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: no connection"),
        (["127.0.0.1:8000"], "'127.0.0.1:8000' is no URL of a server"),
    ],
)
def test_no_server(words: list[str], message: str) -> None:
    done = run(*words, "--once")
    assert done.returncode == 2
    assert message in done.stderr


def test_the_key_is_needed(server: RunningServer) -> None:
    done = run(server.url, "--once")
    assert done.returncode == 2
    assert "a valid API key is needed" in done.stderr


# --------------------------------------------------------------------------------------- frames


@given(
    states=st.text(alphabet=list(STYLES), min_size=1, max_size=3000),
    width=st.integers(8, 200),
    rows=st.integers(1, 6),
)
def test_a_condensed_map_fits_and_hides_no_busy_block(states: str, width: int, rows: int) -> None:
    found = condensed(states, width, rows)
    assert len(found) <= rows
    assert all(len(row) == width for row in found[:-1])
    assert 0 < len(found[-1]) <= width
    busiest = min(states, key=list(STYLES).index)
    assert busiest in "".join(found)
    if len(states) <= width * rows:
        assert "".join(found) == states


@given(values=st.lists(st.floats(1e-3, 1e6), max_size=50), width=st.integers(1, 40))
def test_a_sparkline_shows_the_latest_values(values: list[float], width: int) -> None:
    bars = sparkline(values, width)
    assert len(bars) == min(len(values), width)
    if values:
        assert bars[values[-width:].index(max(values[-width:]))] == "█"


def shown(stats: dict[str, Any], width: int, height: int | None) -> list[str]:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame(stats, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("num", [0, 1, 30])
def test_a_frame_fits_its_terminal(num: int) -> None:
    stats = {
        "model": "m",
        "uptime_s": 93784.2,
        "running": [{"id": f"r{i}", "prompt_tokens": 5, "output_tokens": 7, "blocks": 2} for i in range(num)],
        "waiting": [{"id": f"w{i}", "prompt_tokens": 5, "waited_s": 0.25} for i in range(num)],
        "blocks": {
            "total": 5000,
            "block_size": 16,
            "free": 4000,
            "cached": 500,
            "used": 500,
            "shared": 9,
            "map": "#" + "u" * 500 + "." * 4499,
            "owners": {},
        },
        "tokens_per_s": 12.34,
        "prompt_tokens_per_s": 567.8,
        "hit_rate": 0.25,
        "step_ms": {"last": 1.0, "mean": 2.0, "p99": 3.0, "recent": [1.0, 2.0, 3.0] if num else []},
        "preemptions": 0,
        "tiers": {},
    }
    lines = shown(stats, 100, 24)
    assert len(lines) <= 24
    assert all(len(line) <= 100 for line in lines)
    assert lines[0] == "m   up 1 d 2 h"
    assert lines[1].split()[:2] == ["12.3", "tokens/s"]
    whole = shown(stats, 100, None)
    assert [line.split()[0] for line in whole[-2 * num :] if num] == [
        *(f"r{i}" for i in range(num)),
        *(f"w{i}" for i in range(num)),
    ]
    if num == 30:
        assert lines[-1].startswith("and ")
