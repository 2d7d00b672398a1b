"""The comparison's arithmetic, and its protocol with the one engine that is always there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from support.small import small_artifact

from pagec.runtime.bench.workloads import Ask


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load("peers")


def test_ratios_are_taken_turn_by_turn() -> None:
    rates = {
        "latency": {"pagec": [10.0, 30.0, 20.0], "other": [5.0, 10.0, 20.0]},
        "startup": {"pagec": [0.5], "other": [2.0]},
    }
    report = peers.compare(rates)
    other = report["latency"]["other"]
    assert other["decode_tokens_per_s"] == {"median": 10.0, "min": 5.0, "max": 20.0}
    assert other["pagec_ratio"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert report["latency"]["pagec"]["pagec_ratio"]["median"] == 1.0
    assert report["startup"]["other"]["pagec_ratio"]["median"] == 4.0
    peers.print_report(report)


def test_rates() -> None:
    line = {"first_s": 0.5, "end_s": 2.5, "num_tokens": 9}
    asks = [Ask([1] * 10, 9)]
    assert peers.rate("latency", asks, line) == 4.0
    assert peers.rate("prefill", asks, line) == 20.0
    assert peers.rate("throughput", asks, line) == 3.6


def test_a_peer_that_is_absent_is_left_out_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = peers.argparse.Namespace(
        artifact=tmp_path,
        models=tmp_path,
        llama_python=None,
        vllm_python=sys.executable,
        transformers_python=None,
    )
    assert list(peers.find_engines(options)) == ["pagec"]
    said = capsys.readouterr().err
    assert "llama.cpp is left out: no --llama-python" in said
    assert "vllm is left out: no " in said


def test_a_worker_answers_and_says_why_it_cannot(tmp_path: Path) -> None:
    worker = peers.Worker("pagec", sys.executable, small_artifact(), 1)
    for _ in range(2):
        answer = worker.run([Ask([1, 2, 3], 4), Ask([5], 2)])
        assert answer["num_tokens"] == 6
        assert 0 < answer["first_s"] <= answer["end_s"]
    worker.close()
    worker = peers.Worker("pagec", sys.executable, tmp_path, 1)
    with pytest.raises(SystemExit, match=r"no manifest.json"):
        worker.run([Ask([1], 1)])
