"""Workloads, kernels and profiles on a small model. Figures are checked for being there and consistent, no
clock's value is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pagec.compiler.artifact import Artifact
from pagec.compiler.errors import ArtifactError, CapacityError, PagecError
from pagec.runtime.bench import limits
from pagec.runtime.bench.bounds import bound, bounds_of
from pagec.runtime.bench.cases import make_entries
from pagec.runtime.bench.gemms import gemms_of
from pagec.runtime.bench.kernels import time_kernels
from pagec.runtime.bench.limits import Limits
from pagec.runtime.bench.probes import open_probes
from pagec.runtime.bench.profile import phases, record_steps
from pagec.runtime.bench.run import run_workloads
from pagec.runtime.bench.startup import first_output_s, measure_startup
from pagec.runtime.engine import Engine

LIMITS = Limits(1e9, 1e10)


@pytest.fixture(scope="module")
def artifact(small: Path) -> Artifact:
    return Artifact.open(small)


@pytest.fixture(scope="module")
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, threads=2, kv_bytes=32 << 20)


@pytest.fixture(autouse=True)
def a_small_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a gigabyte is of no interest here."""
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)


def ignore(*_: object) -> None:
    pass


def test_each_figure_of_each_workload(artifact: Artifact, engine: Engine) -> None:
    reports = run_workloads(artifact, engine, ["latency", "prefill"], 2, ignore)
    latency, prefill = (report.to_json() for report in reports)
    own = {"ttft_s", "decode_tokens_per_s", "bandwidth_share", "gemm_only_decode_tokens_per_s"}
    limits = {"read_bandwidth_gb_per_s", "peak_gflops", "gemm_only_share"}
    assert latency["min"].keys() == latency["max"].keys() == own | limits
    assert prefill["min"].keys() >= {"prefill_tokens_per_s", "peak_share"} | limits
    for report in (latency, prefill):
        assert (report["model"], report["threads"], report["repeat"]) == ("small", 2, 2)
        for name, least in report["min"].items():
            assert 0 < least <= report[name] <= report["max"][name]
    assert not engine.has_work
    assert engine.scheduler.blocks.num_used == 0


def test_matrix_products_alone_are_all_linears(artifact: Artifact, engine: Engine) -> None:
    recorder = record_steps(engine, 5, 2, 1)
    assert gemms_of(engine).seconds(recorder.steps) > 0
    templates = {kernel.template for kernel in artifact.program.kernels}
    assert any("linear" in template for template in templates)


def test_every_kernel_is_timed_at_every_row_count(artifact: Artifact, engine: Engine) -> None:
    rows, _ = time_kernels(artifact, engine, 1, ignore)
    assert {row.kernel for row in rows} == {kernel.key for kernel in artifact.program.kernels}
    attention = [row for row in rows if row.template == "attention"]
    assert {"1 x 1 at 1023", "16 x 1 at 511", "1 x 512 at 512"} <= {row.case for row in attention}
    for row in rows:
        assert row.us > 0
        assert row.to_json().keys() >= {"kernel", "rows", "us", "bound_us", "bound", "share"}
    assert sum(row.launches for row in rows if row.rows == 1 and not row.case) <= len(
        (*artifact.program.body, *artifact.program.head)
    )


def test_bounds(artifact: Artifact) -> None:
    bounds, program = bounds_of(artifact), artifact.program
    kernels = {kernel.key: kernel for kernel in program.kernels}
    linear = next(launch for launch in program.body if kernels[launch.key_for(9)].template == "linear")
    kernel = kernels[linear.key_for(9)]
    assert bounds.of(linear.name, kernel.key, 9, []) == (
        kernel.bytes_fixed + 9 * kernel.bytes_per_row,
        9 * kernel.flops_per_row,
    )
    attention = next(launch for launch in program.body if launch.rows == "tiles")
    kernel = kernels[attention.key_for(1)]
    nbytes, flops = bounds.of(attention.name, kernel.key, 1, [(9, 1), (19, 1)])
    assert nbytes == 30 * 2 * 2 * 16 * 2 + 2 * kernel.bytes_per_row
    assert flops == 30 * 4 * 4 * 16
    assert bound(2e9, 1e10, LIMITS) == (2e6, "memory")
    assert bound(1e9, 3e10, LIMITS) == (3e6, "compute")
    assert bound(0, 0, LIMITS) == (0.0, "")


def test_entries_have_blocks_of_their_own(artifact: Artifact) -> None:
    entries = make_entries(artifact.program, [(40, 3), (0, 16)])
    blocks = [block for e in entries for table in e.sequence.block_tables for block in table]
    assert blocks == [1, 2, 3, 4]
    assert [(e.start, e.num_tokens, len(e.token_ids)) for e in entries] == [(40, 3, 3), (0, 16, 16)]


def test_a_profile_accounts_for_whole_steps(artifact: Artifact, engine: Engine) -> None:
    recorder = record_steps(engine, 20, 3, 4)
    prefill, decode = phases(artifact, recorder, LIMITS)
    assert (prefill.phase, prefill.steps, prefill.tokens) == ("prefill", 1, 60)
    assert (decode.phase, decode.steps, decode.tokens) == ("decode", 4, 3)
    # Short contexts have no splits to merge; nobody wants the logits, or samples.
    launches = [*artifact.program.body, *artifact.program.head]
    run = [launch for launch in launches if launch.rows not in ("merges", "logits", "sampled")]
    assert len(run) < len(launches)
    for phase in (prefill, decode):
        count = sum(row.launches for row in phase.kernels)
        assert count == len(run)
        assert sum(row.launches for row in phase.templates) == count
        total = sum(row.us for row in (*phase.kernels, *phase.engine))
        assert total == pytest.approx(phase.step_us)
        assert sum(row.share for row in (*phase.templates, *phase.engine)) == pytest.approx(1)
        assert [row.us for row in phase.kernels] == sorted((row.us for row in phase.kernels), reverse=True)
        assert {row.name for row in phase.engine} == {"schedule", "prepare", "upload", "launch", "commit"}
    assert prefill.to_json()["kernels"][0].keys() >= {"name", "us", "share", "bound_us", "of_bound"}


def test_too_little_memory_for_the_bandwidth_names_both_numbers(engine: Engine, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(engine.device), "free_bytes", lambda _: 1000)
    with pytest.raises(CapacityError, match=r"1048576 bytes; 1000 are free"):
        open_probes(engine)


def test_startup_waits_for_the_first_byte() -> None:
    assert first_output_s([sys.executable, "-c", "print('x')"]) > 0
    with pytest.raises(PagecError, match="no such luck"):
        first_output_s([sys.executable, "-c", "raise SystemExit('no such luck')"])


def test_startup_needs_a_tokenizer(small: Path) -> None:
    with pytest.raises(ArtifactError, match="no tokenizer"):
        measure_startup(small, [], 1)
