"""The engine process alone, spoken to over its socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagec.compiler.artifact import Artifact
from pagec.runtime.server.messages import (
    Abort,
    AskSnapshot,
    Failed,
    Frames,
    News,
    Ready,
    Snapshot,
    Start,
    Stop,
    Submit,
    ToEngine,
    ToFront,
    frame,
)
from pagec.runtime.server.worker import Connection, Grammars, Worker, open_engine

# Tells at its end what is loaded.
LAUNCHER = """
import atexit, json, sys

@atexit.register
def report():
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))

from pagec.runtime.server.worker import main
main(sys.argv[1:])
"""
HEAVY = {"torch", "transformers", "tvm", "triton", "yaml", "gguf", "safetensors", "fastapi", "tokenizers"}


class Front:
    """The other end of a worker's socket."""

    def __init__(self, mine: socket.socket) -> None:
        self.socket = mine
        self._frames: Frames[ToFront] = Frames(ToFront)
        self._messages: list[ToFront] = []

    def send(self, *messages: ToEngine) -> None:
        """All in one piece."""
        self.socket.sendall(b"".join(map(frame, messages)))

    def next(self) -> Any:
        """The next message; None if the worker has closed its end."""
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._messages += self._frames.feed(data)
        return self._messages.pop(0)

    def until(self, is_wanted: Callable[[Any], bool]) -> list[Any]:
        """Messages up to the first one that is wanted."""
        found: list[Any] = []
        while not found or not is_wanted(found[-1]):
            found.append(self.next())
            assert found[-1] is not None
            assert not isinstance(found[-1], News) or not found[-1].refused, found[-1].refused
        return found

    def snapshot(self) -> Snapshot:
        self.send(AskSnapshot())
        return self.until_snapshot()

    def until_snapshot(self) -> Snapshot:
        snapshot: Snapshot = self.until(lambda m: isinstance(m, Snapshot))[-1]
        return snapshot


@pytest.fixture
def process(artifact: Path) -> Iterator[tuple[subprocess.Popen[str], Front]]:
    """A worker that is ready."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    front = Front(mine)
    front.send(Start(str(artifact), {"num_blocks": 400}))
    assert isinstance(front.next(), Ready)
    yield process, front
    mine.close()
    process.communicate(timeout=60)


def finished(*ids: str) -> Callable[[Any], bool]:
    """True once the requests of these ids are over."""
    left = set(ids)

    def check(message: Any) -> bool:
        left.difference_update(done.id for done in message.finished)
        return not left

    return check


def test_no_compiler_is_ever_loaded(process: tuple[subprocess.Popen[str], Front]) -> None:
    """Case 1: whatever is asked for, nothing is there that could compile."""
    worker, front = process
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1},
        {"n": 3, "logprobs": 4},
        {"prompt_logprobs": 1, "min_tokens": 3},
        {"structured_outputs": {"regex": "[a-f]{4}"}},
    ]
    names = [f"request {i}" for i in range(len(kinds))]
    for name, params in zip(names, kinds, strict=True):
        front.send(Submit(name, [5, 6, 7] * 10, {**params, "max_tokens": 6}))
    front.until(finished(*names))
    front.send(Submit("beams", [5, 6], {}, {"beam_width": 3, "max_tokens": 4}))
    (*_, last) = front.until(finished("beams"))
    assert len(last.finished[0].hypotheses) == 3
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text()
    assert children == ""
    front.send(Stop())
    assert front.next() is None
    loaded = set(json.loads(worker.communicate(timeout=60)[0]))
    assert {"pagec", "numpy", "llguidance"} <= loaded
    assert not loaded & HEAVY


def test_it_ends_with_the_front(process: tuple[subprocess.Popen[str], Front]) -> None:
    worker, front = process
    front.send(Submit("long", [5], {"max_tokens": 2000, "ignore_eos": True}))
    front.until(lambda m: bool(m.tokens))
    front.socket.close()
    assert worker.wait(60) == 0


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "finished", "unknown"])
def test_an_abort_in_any_state(process: tuple[subprocess.Popen[str], Front], state: str) -> None:
    """Case 13: idempotent, and the blocks are back two steps later."""
    _, front = process
    before = front.snapshot()
    long = {"max_tokens": 1500, "ignore_eos": True}
    abort = Abort("aborted")
    if state == "waiting":  # it never runs: submitted and aborted between two steps
        front.send(Submit("aborted", [5, 6], long), abort)
        front.until(finished("aborted"))
    elif state == "prefilling":
        front.send(
            Submit("aborted", [5] * 1000, {"max_tokens": 5}), Submit("other", [5, 6, 7], {"max_tokens": 1})
        )
        front.until(lambda m: bool(m.accepted))
        front.send(abort, abort)
        front.until(finished("aborted", "other"))
    elif state == "decoding":
        front.send(Submit("aborted", [5, 6], {**long, "n": 3}))
        front.until(lambda m: any(tokens.choice == 2 for tokens in m.tokens))
        steps = front.snapshot().totals.steps
        front.send(abort, AskSnapshot(), abort)
        now = front.until_snapshot()
        assert now.totals.steps - steps <= 2 + 1  # the one that ran while the message came
        assert now.running == []
        assert now.blocks.used == 0
    elif state == "finished":
        front.send(Submit("aborted", [5, 6], {"max_tokens": 2}))
        front.until(finished("aborted"))
        front.send(abort)
    else:
        front.send(abort, Abort("aborted", 3))
    after = front.snapshot()
    assert (after.waiting, after.running) == ([], [])
    assert after.blocks.used == before.blocks.used == 0
    assert after.blocks.free + after.blocks.cached + 1 == after.blocks.total


def test_one_choice_is_ended_by_its_reader(process: tuple[subprocess.Popen[str], Front]) -> None:
    _, front = process
    front.send(Submit("r", [5, 6], {"max_tokens": 150, "n": 2, "ignore_eos": True, "seed": 1}))
    front.until(lambda m: any(tokens.choice == 1 for tokens in m.tokens))
    front.send(Abort("r", 0))
    messages = front.until(finished("r"))
    counts = [sum(t.choice == choice for m in messages for t in m.tokens) for choice in range(2)]
    assert counts[0] < counts[1]
    assert messages[-1].finished[0].fault is None


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-m", "pagec.runtime.server.worker", str(theirs.fileno())]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    front = Front(mine)
    front.send(Start(str(tmp_path), {}))
    failed = front.next()
    assert isinstance(failed, Failed)
    assert "not an artifact" in failed.message
    assert failed.remedy == "make one with: pagec compile MODEL"
    assert process.wait(60) == 0


def test_an_idle_engine_waits(artifact: Path) -> None:
    """It asks its socket whether there is something exactly when it has work, and waits for it when not."""

    asked: list[tuple[bool, bool]] = []

    class Watched(Connection):
        def receive(self, wait: bool) -> list[ToEngine]:
            asked.append((wait, engine.has_work))
            return super().receive(wait)

    mine, theirs = socket.socketpair()
    connection, front = Watched(theirs), Front(mine)
    opened = Artifact.open(artifact)
    engine, _ = open_engine(opened, {"num_blocks": 100})
    with engine:
        worker = Worker(engine, connection, Grammars(opened, connection))
        thread = threading.Thread(target=worker.run)
        thread.start()
        front.send(Submit("a", [5], {"max_tokens": 5, "ignore_eos": True}))
        front.until(finished("a"))
        front.send(Submit("b", [5], {"max_tokens": 4, "structured_outputs": {"regex": "[ab]{3}"}}))
        front.until(finished("b"))
        front.send(Stop())
        thread.join(60)
    assert all(wait == (not has_work) for wait, has_work in asked)
    assert len(asked) <= 1 + 5 + 1 + 1 + 5 + 2
    mine.close()
    theirs.close()


def test_the_bell_ends_one_wait() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        connection = Connection(theirs)
        connection.ring()
        assert connection.receive(wait=True) == []
        mine.sendall(frame(Stop()))
        assert connection.receive(wait=True) == [Stop()]
        assert connection.receive(wait=False) == []
        mine.close()
        with pytest.raises(ConnectionError):
            connection.receive(wait=True)
