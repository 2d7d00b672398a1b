"""What quick makes of its checks; nothing is compiled while an engine serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_cuda import FakeGpu, FakeLibrary
from support.gpu_artifacts import gpu_artifact
from support.graphs import llama_text

from gpu import kernels, quick
from gpu.artifacts import KERNELS, MODELS, ROOT, Artifacts
from gpu.fake import FakeMachine, served
from gpu.models import Finding
from gpu.quick import Check, run_quick
from gpu.results import Line, Results
from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.errors import ArtifactError
from pagec.runtime.cli.verification.row import Row as Compared
from pagec.runtime.device.cuda.device import CudaDevice
from pagec.runtime.gpu.runner import GpuRunner
from pagec.runtime.loading import LoadOptions

HEAD: Line = {"gpu": "Fake 9000", "sources": "abc"}


def finished(checks: list[Check], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: Any) -> Any:
    monkeypatch.setattr(quick, "checks", lambda _: checks)
    results = Results(tmp_path / "quick.jsonl", HEAD)
    given: dict[str, Any] = {"seed": 1, "budget_s": 1e6, "say": lambda _: None} | options
    failed = run_quick(Artifacts(tmp_path), FakeMachine(), results, **given)
    return failed, results.lines


def test_what_is_wrong_or_breaks_off_fails_and_the_rest_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> Finding:
        raise ValueError("shapes")

    def refused(*_: Any) -> Finding:
        raise ArtifactError("is damaged", place="1b")

    checks = [
        Check("wrong", None, lambda *_: Finding(("one bit differs",), "x")),
        Check("broken", None, broken),
        Check("refused", None, refused),
        Check("good", None, lambda *_: Finding((), "all the same")),
    ]
    failed, lines = finished(checks, monkeypatch, tmp_path)
    assert failed == 3
    assert {name: (line["ok"], line["detail"]) for name, line in lines.items()} == {
        "wrong": (False, "one bit differs"),
        "broken": (False, "ValueError: shapes"),
        "refused": (False, "1b: is damaged"),
        "good": (True, "all the same"),
    }


def test_checks_for_which_no_time_is_left_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = [Check(name, None, lambda *_: Finding(())) for name in "abc"]
    ticks = iter(range(0, 1000, 10))
    failed, lines = finished(
        checks, monkeypatch, tmp_path, budget_s=25.0 + quick.CHECK_S, clock=lambda: float(next(ticks))
    )
    assert failed == 2
    assert [line["ok"] for line in lines.values()] == [True, False, False]
    assert "no time" in lines["c"]["detail"]


def test_all_that_is_asked_for_is_checked() -> None:
    checks = quick.checks(Artifacts(ROOT))
    assert {check.model for check in checks[:4]} == {"1b", "1b-strict"}
    assert len(checks) == 4 + len(KERNELS)
    assert set(MODELS) == {"1b", "1b-strict", "8b", "1b-short"}


def test_a_gpu_that_computes_nothing_fails_all_checks_of_numbers(tmp_path: Path) -> None:
    text = llama_text(
        vocab=192, hidden=64, heads=4, kv_heads=2, head_dim=16, inter=128, layers=1, max_len=256
    )
    for name in ("1b", "1b-strict"):
        gpu_artifact(text, tmp_path / name, T=32, S=6, R=8, strict=name.endswith("strict"))
    results = Results(tmp_path / "quick.jsonl", HEAD)
    artifacts = Artifacts(tmp_path, kernels={})
    machine = FakeMachine(execute=False)
    run_quick(artifacts, machine, results, seed=1, budget_s=1e6, say=lambda _: None)
    assert [name for name, line in results.lines.items() if line["ok"]] == []
    details = [line["detail"] for line in results.lines.values()]
    assert sum("not finite" in detail for detail in details) == 3
    assert "failed" in details[2]  # an engine takes a token that is none for a request's failure


def test_kernels_out_of_bounds_or_not_compared_are_named(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = artifacts.open("1b")
    good = [Compared(key, 3, 0.0, 0.5) for key in artifact.kernels]
    given: list[Compared] = []

    class Verification:
        def run(self, _: Any) -> list[Compared]:
            return given

    monkeypatch.setattr(kernels, "_verification", lambda *_: Verification())
    given[:] = good
    assert kernels.kernels_beside_reference(artifact, 1).wrong == ()
    given[:] = [replace(good[0], of_bound=float("nan")), *good[2:]]
    wrong = kernels.kernels_beside_reference(artifact, 1).wrong
    assert len(wrong) == 2
    assert wrong[0].startswith(f"{good[0].subject} with 3 rows: nan")
    assert wrong[1] == f"{good[1].subject} was not compared"


def test_requests_compile_and_load_nothing(artifacts: Artifacts, tmp_path: Path) -> None:
    finding = served(artifacts.directory, "1b", tmp_path)
    assert finding.wrong == ()
    assert "12 requests" in finding.detail


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("file", "kernel was written"),
        ("module", "modules were loaded"),
        ("process", "a process was started"),
        ("import", "torch._inductor was imported"),
    ],
)
def test_what_is_compiled_or_loaded_meanwhile_is_seen(
    artifacts: Artifacts, tmp_path: Path, spoil: str, said: str
) -> None:
    assert any(said in wrong for wrong in served(artifacts.directory, "1b", tmp_path, spoil=spoil).wrong)


def test_kernels_are_compared_with_random_weights(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in the GPU's memory where nothing is padded."""

    def load(artifact: GpuArtifact, options: LoadOptions) -> tuple[CudaDevice, GpuRunner]:
        gpu = FakeGpu()
        device = CudaDevice(artifact, gpu=gpu, library=FakeLibrary(artifact, gpu))
        return device, GpuRunner(artifact, device, weights=options.weights, num_blocks=options.num_blocks)

    monkeypatch.setattr("pagec.runtime.cli.verification.model.load", load)
    verification = kernels._verification(artifacts.open("1b"), 3)
    assert float(verification.weight("embed").std()) == pytest.approx(0.02, rel=0.05)
    assert (verification.weight("final_norm") == 1).all()
