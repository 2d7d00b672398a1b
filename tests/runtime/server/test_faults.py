"""What one request, or the disk, does wrong is nobody else's: the server goes on as before."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import RunningServer

HELLO = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def narrow(artifact: Path) -> Iterator[RunningServer]:
    """Runs two sequences at once, and lets none wait."""
    with RunningServer(artifact, "--max-seqs", "2", "--max-queue", "0") as server:
        yield server


def leave(server: RunningServer, body: dict[str, Any]) -> None:
    """Sends a request and goes away at once."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)


def becomes_free(server: RunningServer) -> bool:
    """Whether a request is taken in the end: what left before it has gone from the books."""
    for _ in range(200):
        status, answer, _ = server.request("POST", "/v1/completions", HELLO)
        if status == 200:
            return True
        assert status == 429, answer
    return False


def test_who_leaves_before_being_accepted_keeps_no_place(narrow: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {f"field{i}": {"enum": [f"{i}-{k}" for k in range(40)]} for i in range(60)},
    }
    for _ in range(8):
        leave(narrow, {**HELLO, "structured_outputs": {"json": schema}})
        leave(narrow, {**HELLO, "prompt": [5] * 900, "n": 2})
        leave(narrow, {**HELLO, "prompt": [5] * 4000})
    assert becomes_free(narrow)
    stats = narrow.get("/stats")
    assert (stats["running"], stats["waiting"], stats["blocks"]["used"]) == ([], [], 0)


def test_choices_that_cannot_run_take_no_place(narrow: RunningServer) -> None:
    error = narrow.refused("/v1/completions", {**HELLO, "n": 1_000_000_000})
    assert error["param"] == "n"
    assert "at most 2" in error["message"]
    error = narrow.refused("/v1/completions", {**HELLO, "use_beam_search": True, "beam_width": 1000})
    assert "at most 2" in error["message"]
    narrow.post("/v1/completions", {**HELLO, "n": 2})


def test_a_full_disk_ends_the_recording_only(artifact: Path) -> None:
    with RunningServer(artifact, "--record", "/dev/full") as server:
        for _ in range(3):
            assert server.post("/v1/completions", HELLO)["choices"][0]["finish_reason"] == "length"
        assert server.get("/health") == {"status": "ok"}
        assert server.stop() == 0


def test_more_prompts_than_the_queue_ever_holds_are_no_matter_of_waiting(narrow: RunningServer) -> None:
    error = narrow.refused("/v1/completions", {**HELLO, "prompt": ["a"] * 4})
    assert error["param"] == "prompt"
    assert "several requests" in error["message"]
