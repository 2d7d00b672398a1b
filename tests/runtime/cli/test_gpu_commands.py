"""`pagec bench`, `profile` and `verify` of an artifact for a GPU, on the fake one: each from end to end.

An operation of the fake takes a microsecond, so no figure means anything; what is there, and whether the
kernels get what they can work on, is checked.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fake_cuda import in_interpreter
from support.gpu_artifacts import gpu_artifact
from support.gpu_commands import Ran, run_command
from support.graphs import llama_text

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

LIMITS = {"read_bandwidth_gb_per_s", "peak_gflops"}
# What would take minutes in the interpreter.
CHANGES: dict[str, Any] = {
    "pagec.runtime.bench.limits.READ_BYTES": 1 << 20,
    "pagec.runtime.device.cuda.probes.PRODUCT_SIZE": 32,
    "pagec.runtime.bench.workloads.LATENCY_PROMPT": 30,
    "pagec.runtime.bench.workloads.LATENCY_OUTPUT": 3,
    "pagec.runtime.bench.cases.ROW_COUNTS": (1,),
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = llama_text(max_len=64, layers=1, vocab=64)
    return gpu_artifact(text, tmp_path_factory.mktemp("gpu") / "out", T=24, S=4, R=4).path


def pagec(*words: str | Path, broken: tuple[str, ...] = (), status: int = 0) -> Ran:
    command = partial(run_command, [str(word) for word in words], broken=broken, changes=CHANGES)
    found: Ran = in_interpreter(command)
    assert found.status == status, found.err
    return found


def test_a_workload_beside_the_gpus_limits(artifact: Path) -> None:
    found = json.loads(pagec("bench", "latency", artifact, "--repeat", "1", "--json").out)
    own = {"decode_tokens_per_s", "bandwidth_share", "gemm_only_decode_tokens_per_s", "gemm_only_share"}
    assert found.keys() >= own | LIMITS
    assert all(found[name] > 0 for name in own | LIMITS)
    assert found["memory"]["graphs_bytes"] > 0


def test_no_graphs_are_captured_if_none_are_wanted(artifact: Path) -> None:
    found = json.loads(pagec("bench", "latency", artifact, "--repeat", "1", "--graphs", "0", "--json").out)
    assert found["memory"]["graphs_bytes"] == 0
    assert found["gemm_only_share"] > 0


def test_each_kernel_that_a_step_launches_is_timed(artifact: Path) -> None:
    found = json.loads(pagec("bench", "kernels", artifact, "--repeat", "1", "--json").out)
    assert found.keys() >= LIMITS | {"kernels", "threads"}
    program = json.loads((artifact / "program.json").read_text())
    launched = {one["kernel"] for part in ("body", "head") for s in program[part] for one in s["launches"]}
    assert {row["kernel"] for row in found["kernels"]} == launched
    assert all(row["us"] > 0 for row in found["kernels"])
    cases = {row["case"] for row in found["kernels"] if row["template"] == "attention_decode"}
    assert cases == {"1 x 1 at 63", "4 x 1 at 63"}


def test_a_profile_of_both_phases(artifact: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ("--prompt-tokens", "20", "--batch", "2", "--steps", "2", "-o", trace, "--json")
    found = json.loads(pagec("profile", artifact, *words).out)
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode"]
    assert found.keys() >= LIMITS
    templates = [{row["name"] for row in phase["templates"]} for phase in found["phases"]]
    assert "attention_prefill" in templates[0]
    assert "attention_decode" in templates[1]
    bounds = {row["name"]: row["bound_us"] for row in found["phases"][1]["templates"]}
    assert bounds["linear"] > 0
    assert bounds["attention_decode"] > 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"schedule", "prepare", "upload", "body", "head", "commit"} <= names


def test_what_is_right_is_verified(artifact: Path) -> None:
    rows = json.loads(pagec("verify", artifact, "--seed", "0", "--json").out)
    assert [row for row in rows if not row["ok"]] == []
    program = json.loads((artifact / "program.json").read_text())
    subjects = {row["subject"] for row in rows}
    assert subjects >= {kernel["key"] for kernel in program["kernels"]} | {"captured steps"}


def test_a_kernel_that_does_nothing_is_out_of_bounds(artifact: Path) -> None:
    """Each is fed with the reference's values, so that one does not spoil the others; of attention's kernels
    all are named."""
    idle = ("rowwise_rmsnorm", "attention_merge", "take_tokens", "copy_blocks")
    rows = json.loads(pagec("verify", artifact, "--seed", "0", "--json", broken=idle, status=1).out)
    wrong = {row["subject"] for row in rows if not row["ok"] and row["subject"] != "captured steps"}
    kernels = {subject for subject in wrong if not subject.startswith("model")}
    assert len(kernels) < len(wrong)
    assert all(any(key.startswith(name) for key in kernels) for name in idle)
    assert all(key.startswith((*idle, "attention")) for key in kernels)


def test_what_the_pool_holds_is_told_of_a_gpu_program_too(tmp_path: Path) -> None:
    long = gpu_artifact(llama_text(max_len=2048, layers=1), tmp_path / "out", T=512, S=64).path
    assert json.loads(pagec("bench", "memory", long, "--json").out)["blocks_saved"] >= 0.6
