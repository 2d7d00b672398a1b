"""A recorded step, and the trace as Chrome reads it. No duration is looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagec.compiler.artifact import Artifact
from pagec.runtime.engine import Engine
from pagec.runtime.trace import Recorder

Toy = Callable[..., Artifact]


def record(toy: Toy, device: Any, *, kernels: bool) -> Recorder:
    """A prompt of 5 tokens and one of 3, two tokens each: a step of prefill, one of decoding."""
    engine = Engine(toy(), device=device, weights="random:0", num_blocks=9, eos_token_ids=())
    engine.trace = recorder = Recorder(kernels=kernels)
    for length in (5, 3):
        engine.add_request(list(range(length)), 2)
    for _ in engine.stream():
        pass
    return recorder


def test_the_parts_of_every_step(toy: Toy, device: Any) -> None:
    recorder = record(toy, device, kernels=False)
    parts = ["schedule", "prepare", "upload", "body", "head", "commit"]
    assert [event.name for event in recorder.events] == parts * 2
    assert [event.step for event in recorder.events] == [0] * 6 + [1] * 6
    assert {event.row for event in recorder.events} == {"engine"}


def test_the_shapes_of_steps(toy: Toy, device: Any) -> None:
    prefill, decode = record(toy, device, kernels=False).steps
    assert prefill.chunks == ((0, 5), (0, 3))
    assert decode.chunks == ((5, 1), (3, 1))
    assert (prefill.num_tokens, prefill.num_tiles, prefill.head_rows) == (8, 2, [2])


def test_kernels_by_launch_key_and_rows(toy: Toy, device: Any) -> None:
    recorder = record(toy, device, kernels=True)
    found = [(e.name, e.args["kernel"], e.args["rows"]) for e in recorder.events if e.row == "kernels"]
    assert found[:3] == [("write", "write", 8), ("attend", "attend", 2), ("head", "head", 2)]
    assert len(found) == 6


def test_chromes_format(toy: Toy, device: Any, tmp_path: Path) -> None:
    recorder = record(toy, device, kernels=True)
    recorder.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {0: "engine", 1: "kernels"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(recorder.events)
    for span in spans:
        assert span.keys() == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert names[span["tid"]] == span["cat"]
    assert [span["ts"] for span in spans] == sorted(span["ts"] for span in spans)
    body = next(span for span in spans if span["name"] == "body")
    assert body["args"] == {"step": 0, "tokens": 8, "sequences": 2, "chunks": [[0, 5], [0, 3]]}


def test_nothing_is_recorded_without_a_recorder(toy: Toy, device: Any) -> None:
    engine = Engine(toy(), device=device, weights="random:0", num_blocks=9, eos_token_ids=())
    assert not engine.trace.kernels
    recorder = record(toy, device, kernels=True)
    recorder.clear()
    assert (recorder.events, recorder.steps) == ([], [])
