"""`pagec tune prepare`, `merge` of results and `--measure`, and a bundle that is really compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.bundles import H200, Emulated, TimedGpu, bundle_of, linear_subject, run
from typer.testing import CliRunner

from pagec.autotune import bundle_run
from pagec.autotune.bundle import read_bundle, read_image
from pagec.autotune.bundle_choice import attention_picks, linear_picks
from pagec.autotune.bundle_prepare import Subject, prepare, shipped_subjects, subjects_of
from pagec.autotune.model import Attention, Shapes
from pagec.autotune.problem import Decode, Linear, Prefill
from pagec.autotune.table import read_table
from pagec.compiler.backends.targets import load_cuda_target
from pagec.runtime.cli import tune_gpu
from pagec.runtime.cli.app import make_app
from pagec.runtime.device.cuda import gpu as cuda_gpu


def refused(*words: str) -> str:
    """What `pagec tune` says on stderr, as a process."""
    command = [sys.executable, "-m", "pagec.runtime.cli", "tune", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.slow
def test_what_is_prepared_is_compiled_for_the_gpu(tmp_path: Path) -> None:
    """Attention and a linear of one bucket each: every kernel is machine code that the target can launch."""
    linears = [(0, Linear(64, 128, 128))]
    prefills, decodes = [(0, Prefill(4, 2, 64))], [(0, Decode(4, 2, 64, 8, 512))]
    subjects = [
        Subject(lambda ranking, best: linear_picks(linears, ranking, best)),
        Subject(lambda ranking, best: attention_picks(prefills, decodes, ranking, best)),
    ]
    cache = Path(os.environ["PAGEC_CACHE"]) / "cubins"
    made = prepare(subjects, load_cuda_target("h200"), tmp_path, best=1, cache=cache)
    assert read_bundle(tmp_path) == made
    assert {case.kind for case in made.cases} == {"linear", "attention_prefill", "attention_decode"}
    for case in made.cases:
        assert {mode for trial in case.trials for mode in trial.untuned} == {"default", "strict"}
        for trial in case.trials:
            assert {launch.kernel for launch in trial.launches} <= made.kernels.keys()
    for kernel in made.kernels.values():
        assert read_image(tmp_path, kernel).startswith(b"\x7fELF")
        assert kernel.launch.shared_bytes <= H200.shared_bytes_per_block
    # Strict decode attention takes the instructions of prefill.
    strict = [t for case in made.cases[1:] for t in case.trials if "strict" in t.modes]
    assert {trial.mma for trial in strict} == {"HGMMA"}


def test_without_a_model_a_part_of_the_shipped_tables_is_prepared() -> None:
    assert len(shipped_subjects()) == 9 + 5
    shapes = [
        Shapes("a", {(64, 128): 3, (128, 64): 1}, {Attention(4, 2, 64): 2}),
        Shapes("b", {(64, 128): 1}, {Attention(4, 2, 64): 1, Attention(4, 4, 64): 1}),
    ]
    assert len(subjects_of(shapes)) == 2 + 2


def test_results_become_measured_entries_of_tables(tmp_path: Path) -> None:
    directory, output, tables = tmp_path / "bundle", tmp_path / "results.jsonl", tmp_path / "tables"
    made = bundle_of(directory, [linear_subject((16, 64, 256, 1024, 4096))])
    untuned = {
        launch.kernel for case in made.cases for t in case.trials if t.untuned for launch in t.launches
    }
    run(directory, output, Emulated(directory, TimedGpu(), us=lambda key: 9.0 if key in untuned else 3.0))
    words = ["tune", "merge", str(output), "--into", str(tables)]
    done = CliRunner().invoke(make_app(), words)
    assert done.exit_code == 0, done.output
    table = read_table(tables / "h200" / "linear.json")
    entry = table.entries["n64_k1024"]
    assert entry.origin == "measured"
    assert entry.by["name"] == "NVIDIA H200"
    assert all(choice.us < (choice.baseline_us or 0) for choice in entry.sets["default"])
    before = (tables / "h200" / "linear.json").read_bytes()
    assert CliRunner().invoke(make_app(), words).exit_code == 0
    assert (tables / "h200" / "linear.json").read_bytes() == before


def test_a_gpu_that_is_here_is_measured_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared, run and merged, by one command."""
    asked, gpu = list[tuple[object, ...]](), TimedGpu()
    prepared = list[Path]()

    def prepare_small(models: list[str], target: str, directory: Path, best: int, ops: object) -> None:
        asked.append((models, target, best, ops))
        prepared.append(directory)
        bundle_of(directory, [linear_subject((16, 64, 256, 1024, 4096))], best=1)

    monkeypatch.setattr(tune_gpu, "prepare", prepare_small)
    for module in (cuda_gpu, bundle_run):
        monkeypatch.setattr(module, "TorchGpu", lambda: gpu)
    monkeypatch.setattr(bundle_run, "open_library", lambda: Emulated(prepared[0], gpu))
    monkeypatch.setattr(bundle_run, "MOST_ROUNDS", 2)
    (table,) = tune_gpu.measured("some-model", "h200", 60, "full", [])
    assert asked == [(["some-model"], "h200", 12, [])]
    assert table.entries["n64_k1024"].origin == "measured"
    assert not prepared[0].exists()


def test_a_gpu_that_is_not_here_cannot_be_measured() -> None:
    said = refused("smollm2-135m", "--target", "h200", "--measure")
    assert "--measure: h200 cannot be measured here" in said
    assert "pagec tune prepare --target h200" in said


def test_a_cpu_has_no_bundle(tmp_path: Path) -> None:
    assert "name one of a100, h100, h200" in refused("prepare", "--target", "cpu", "-o", str(tmp_path))


def test_a_damaged_file_of_results_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({"bundle": "0", "format": 1}) + "\n{}\n")
    assert "holds no results" in refused("merge", str(file))
