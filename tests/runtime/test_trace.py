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


def record(toy: Toy, device: Any, *, kernels: bool, depth: int = 1) -> Recorder:
    """A prompt of 5 tokens and one of 3, two tokens each: a step of prefill, one of decoding."""
    engine = Engine(toy(), device=device, weights="random:0", num_blocks=9, eos_token_ids=(), depth=depth)
    engine.trace = recorder = Recorder(kernels=kernels)
    for length in (5, 3):
        engine.add_request(list(range(length)), 2)
    for _ in engine.stream():
        pass
    return recorder


def test_the_parts_of_every_step(toy: Toy, device: Any) -> None:
    recorder = record(toy, device, kernels=False)
    parts = ["schedule", "prepare", "upload", "body", "commit"]
    events = [event for event in recorder.events if event.row == "engine"]
    assert [event.name for event in events] == parts * 2
    assert [event.step for event in events] == [0] * 5 + [1] * 5


def test_what_each_step_computes(toy: Toy, device: Any) -> None:
    recorder = record(toy, device, kernels=False)
    steps = [event for event in recorder.events if event.row == "steps"]
    assert [event.args for event in steps] == [
        {"requests": [0, 1], "decode_tokens": 0, "prefill_tokens": 8},
        {"requests": [0, 1], "decode_tokens": 2, "prefill_tokens": 0},
    ]
    for step in steps:
        inner = [e for e in recorder.events if e.step == step.step and e.name in ("prepare", "body")]
        assert all(step.start_us <= e.start_us for e in inner)
        assert all(e.start_us + e.duration_us <= step.start_us + step.duration_us for e in inner)


def test_two_steps_in_flight_overlap(toy: Toy, device: Any) -> None:
    recorder = record(toy, device, kernels=False, depth=2)
    first, second = (event for event in recorder.events if event.row == "steps")
    assert (first.step, second.step) == (0, 1)
    assert first.start_us < second.start_us < first.start_us + first.duration_us
    commits = [event.step for event in recorder.events if event.name == "commit"]
    assert commits == [0, 1]


def test_the_blocks_after_each_step(toy: Toy, device: Any) -> None:
    recorder = record(toy, device, kernels=False)
    blocks = [count.values for count in recorder.counts if count.name == "blocks"]
    assert blocks == [{"used": 2, "cached": 0, "free": 6}, {"used": 0, "cached": 0, "free": 8}]
    events = [count.values for count in recorder.counts if count.name == "block events"]
    assert all(found["copied"] == found["evicted"] == found["hit_tokens"] == 0 for found in events)


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
    assert names == {0: "engine", 1: "steps", 2: "kernels"}
    counts = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [count["args"]["used"] for count in counts if count["name"] == "blocks"] == [2, 0]
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
