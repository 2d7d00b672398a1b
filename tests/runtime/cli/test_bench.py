"""`pagec bench` and `pagec profile` as commands, on a small artifact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.small import small_artifact


@pytest.fixture(scope="module")
def artifact() -> Path:
    return small_artifact()


def pagec(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagec.runtime.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


KEYS = {
    "latency": {"ttft_s", "decode_tokens_per_s", "bandwidth_share"},
    "prefill": {"prefill_tokens_per_s", "peak_share"},
    "throughput": {"output_tokens_per_s"},
    "prefix": {"output_tokens_per_s"},
}
LIMITS = {"read_bandwidth_gb_per_s", "peak_gflops"}


def test_all_as_json(artifact: Path) -> None:
    done = pagec("bench", "all", artifact, "--repeat", "1", "--threads", "1", "--json", "--verbose")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.keys() == KEYS.keys()
    for name, keys in KEYS.items():
        report = found[name]
        assert report["workload"] == name
        assert report.keys() >= keys | LIMITS | {"min", "max", "repeat", "threads", "model", "memory"}
        assert report["min"].keys() == report["max"].keys() >= keys | LIMITS
        assert report["memory"]["weights_memory"] == "copy"
    assert "no tokenizer" in done.stderr
    assert "workspace" in done.stderr


def test_one_workload_for_people(artifact: Path) -> None:
    done = pagec("bench", "prefill", artifact, "--repeat", "1", "--weights-memory", "mmap", "--verbose")
    assert "prefill_tokens_per_s" in done.stdout
    assert "mapped from the file" in done.stderr


def test_kernels_as_json(artifact: Path) -> None:
    found = json.loads(pagec("bench", "kernels", artifact, "--repeat", "1", "--json").stdout)
    assert found.keys() >= LIMITS | {"kernels", "threads"}
    assert {"attention", "linear"} <= {row["template"] for row in found["kernels"]}


@pytest.mark.slow
def test_startup(smollm2: Path) -> None:
    found = json.loads(pagec("bench", "startup", smollm2, "--repeat", "1", "--json").stdout)
    assert found.keys() >= {"ttft_s", "min", "max"}
    assert "no tokenizer" in pagec("bench", "startup", small_artifact(), code=2).stderr


def test_profile_and_its_trace(artifact: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ["--prompt-tokens", "20", "--batch", "2", "--steps", "2"]
    done = pagec("profile", artifact, *words, "-o", trace, "--json")
    found = json.loads(done.stdout)
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode"]
    assert found.keys() >= LIMITS
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"schedule", "prepare", "upload", "body", "commit"} <= names


def test_profile_for_people(artifact: Path) -> None:
    done = pagec("profile", artifact, "--steps", "1")
    assert "decode: 1 steps of 1 tokens" in done.stdout
    assert "attention" in done.stdout


def test_no_compiler_is_imported(artifact: Path) -> None:
    code = f"""
import sys
sys.argv = ["pagec", "profile", {str(artifact)!r}, "--steps", "1", "--json"]
from pagec.runtime.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
heavy = {{"torch", "tvm", "transformers", "triton", "yaml"}} & {{name.split(".")[0] for name in sys.modules}}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_schedule_as_json_and_as_a_picture(tmp_path: Path) -> None:
    words = ("--device", "h100", "--requests", "60", "--svg", tmp_path / "picture.svg", "--json")
    found = json.loads(pagec("bench", "schedule", *words).stdout)
    assert [o["policy"] for o in found["outcomes"]] == ["static", "fcfs", "priority", "deadline"]
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")
    assert "a100, h100" in pagec("bench", "schedule", "--device", "b200", code=2).stderr


def test_memory_as_json(artifact: Path) -> None:
    found = json.loads(pagec("bench", "memory", artifact, "--json").stdout)
    assert found["waste"] < 0.04
    assert found["blocks_saved"] >= 0.6


def test_host_for_people() -> None:
    lines = pagec("bench", "host", "--sequences", "4").stdout.splitlines()
    assert sum(any(part in line for part in ("schedule", "prepare", "commit")) for line in lines) == 3
