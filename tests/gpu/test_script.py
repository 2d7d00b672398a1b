"""The script where there is no GPU and no compiler; what it needs made beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu import build
from gpu.__main__ import main
from gpu.artifacts import ROOT, Artifacts
from gpu.fake import FakeMachine
from gpu.quick import Check
from gpu.results import Line
from gpu.rows import Row
from pagec.compiler.driver import CompileOptions, CompileResult
from pagec.compiler.errors import ArtifactError


def test_weights_are_random_and_the_same_for_a_seed(artifacts: Artifacts) -> None:
    found = []
    for seed in (0, 0, 1):
        loaded = FakeMachine(execute=False).load(artifacts.open("1b"), seed=seed, num_blocks=8)
        memory = loaded.runner.memory.weights
        found.append(b"".join(bytes(memory[w.name].numpy()) for w in loaded.artifact.program.weights))
        norm = next(w for w in loaded.artifact.program.weights if len(w.shape) == 1)
        assert (memory[norm.name].numpy().view("float32") == 1).all()
    assert found[0] == found[1] != found[2]


def test_what_is_made_is_named_sized_and_limited(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[CompileOptions] = []

    def compiled(options: CompileOptions, _: Any) -> CompileResult:
        asked.append(options)
        return CompileResult(artifacts.directory / "1b", True, 1.0)

    monkeypatch.setattr(build, "compile_model", compiled)
    words = ["--target", "h100", "-o", str(tmp_path), "--only", "1b-strict", "1b-short"]
    assert build.main(words) == 0
    assert [(one.target, one.strict, one.max_len) for one in asked] == [
        ("h100", True, None),
        ("h100", False, 1024),
    ]
    assert build.size_of(tmp_path) == 2 * build.size_of(artifacts.directory / "1b")
    assert Artifacts(tmp_path).open("1b-short").program.max_len == 160
    monkeypatch.setattr(build, "LIMIT_BYTES", build.size_of(tmp_path))
    assert build.main(words) == 1  # the repository has its bytes, too
    assert "at most" in capsys.readouterr().out


def test_artifacts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="make gpu-artifacts"):
        Artifacts(tmp_path).open("1b")


@pytest.mark.parametrize("mode", ["quick", "bench", "tune"])
def test_every_mode_writes_its_results(
    mode: str, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One thing is wrong, or left, in each."""

    def setting(options: Any) -> tuple[FakeMachine, Artifacts, Path, Line]:
        return FakeMachine(execute=False), artifacts, options.results / f"{mode}.jsonl", {"gpu": "Fake"}

    def left(_: Path, output: Path, budget_s: float, **options: Any) -> int:
        assert (budget_s, set(options)) == (7.0, {"say"})
        output.write_text("{}\n")
        return 3

    def fails(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("gpu.__main__._setting", setting)
    monkeypatch.setattr("pagec.autotune.bundle_run.run_bundle", left)
    monkeypatch.setattr("gpu.quick.checks", lambda _: [Check("one", None, fails)])
    monkeypatch.setattr("gpu.bench.all_rows", lambda _: [Row("one", ("1b",), fails)])
    monkeypatch.setattr("gpu.bench.copy_speed", lambda *_: 1.0)
    words = ["--artifacts", str(artifacts.directory), "--results", str(tmp_path)]
    # Bench wants more than that for a row.
    status = main([mode, *words, "--budget", "7" if mode == "tune" else "100"])
    assert status == {"quick": 1, "bench": 3, "tune": 3}[mode]
    made = {file.name for file in tmp_path.iterdir()}
    assert made == ({f"{mode}.jsonl", f"{mode}.md"} if mode != "tune" else {"tune-h100.jsonl"})
    if mode != "tune":
        assert "one" in (tmp_path / f"{mode}.md").read_text()


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["quick", "--results", str(tmp_path)]) == 2
    assert "torch finds no NVIDIA GPU" in capsys.readouterr().err


BLOCKED = (
    *("yaml", "typer", "rich", "jinja2", "tokenizers", "llguidance", "msgspec"),
    *("triton", "tvm", "tvm_ffi", "transformers", "safetensors"),
)
# As on a machine where pagec is not installed, nor most of what it needs elsewhere.
BARE = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError(name + " is not to be imported here")
sys.meta_path[:] = [Blocked(), *(one for one in sys.meta_path if "ditable" not in repr(one))]
"""


def run_script(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """check.sh with this Python, made bare."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = [str(ROOT / "tests" / "gpu" / "check.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_script_says_how_it_is_used(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "everything")
    assert ran.returncode == 2
    assert "check.sh quick" in ran.stderr


@pytest.mark.parametrize("mode", ["quick", "bench", "tune"])
def test_the_script_needs_no_compiler_and_nothing_installed(mode: str, tmp_path: Path) -> None:
    """An import that fails would leave a traceback, and 1."""
    ran = run_script(tmp_path, mode, "--artifacts", str(tmp_path), "--results", str(tmp_path / "results"))
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.startswith("error: "), ran.stderr
