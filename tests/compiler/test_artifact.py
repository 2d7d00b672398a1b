"""An artifact that is damaged, changed, of another format or for another machine is refused, with a remedy;
and compiling twice gives the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.graphs import llama_text

from pagec.compiler.artifact import FORMAT, LIBRARY, MANIFEST, WEIGHTS, Artifact, look_at
from pagec.compiler.errors import ArtifactError


def start_compiling(directory: Path, hash_seed: int) -> subprocess.Popen[bytes]:
    """`pagec compile` in a process of its own, in this directory; the artifact is `directory`/out."""
    directory.mkdir()
    (directory / "small.yaml").write_text(llama_text(hidden=32, inter=64))
    words = ["small.yaml", "--weights", "random:3", "--max-step-tokens", "16", "-o", "out"]
    return subprocess.Popen(
        [sys.executable, "-m", "pagec.runtime.cli", "compile", *words],
        cwd=directory,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model compiled by two processes in two directories."""
    pytest.importorskip("tvm")
    root = tmp_path_factory.mktemp("compiled")
    jobs = {root / f"{seed}": start_compiling(root / f"{seed}", seed) for seed in (1, 2)}
    for job in jobs.values():
        _, errors = job.communicate()
        assert job.returncode == 0, errors.decode()
    one, two = (directory / "out" for directory in jobs)
    return one, two


@pytest.fixture
def artifact(compiled: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(compiled[0], tmp_path / "artifact"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


def test_two_compilations_give_the_same_bytes(compiled: tuple[Path, Path]) -> None:
    one, two = map(contents, compiled)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
    assert {MANIFEST, WEIGHTS, LIBRARY, "spec.yaml", "graph.json", "program.json"} < set(one)


def test_it_names_no_directory_of_the_machine(compiled: tuple[Path, Path]) -> None:
    for name, data in contents(compiled[0]).items():
        assert str(compiled[0].parent).encode() not in data, name


def test_an_intact_artifact_opens(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    opened.check_weights()
    assert opened.has_weights
    assert opened.graph().nodes


# ------------------------------------------------------------------------------------- refusals


def first_kernel(artifact: Path) -> Path:
    return min((artifact / "kernels").glob("*.py"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit(artifact: Path, **changes: Any) -> None:
    """Changes keys of the manifest; None takes a key away."""
    manifest = {**json.loads((artifact / MANIFEST).read_text()), **changes}
    (artifact / MANIFEST).write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


def target_of(artifact: Path) -> dict[str, Any]:
    target: dict[str, Any] = json.loads((artifact / MANIFEST).read_text())["target"]
    return target


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated library": (lambda a: truncate(a / LIBRARY), "bytes, the manifest says"),
    "truncated weights": (lambda a: truncate(a / WEIGHTS), "bytes, the manifest says"),
    "truncated program": (lambda a: truncate(a / "program.json"), "bytes, the manifest says"),
    "truncated manifest": (lambda a: truncate(a / MANIFEST), "not a manifest"),
    "changed kernel source": (lambda a: flip(first_kernel(a)), "changed after compiling"),
    "longer kernel source": (lambda a: first_kernel(a).open("a").write("# hello\n"), "the manifest says"),
    "changed library": (lambda a: flip(a / LIBRARY), "changed after compiling"),
    "changed graph": (lambda a: flip(a / "graph.json"), "changed after compiling"),
    "missing library": (lambda a: (a / LIBRARY).unlink(), "the file is missing"),
    "missing kernel": (lambda a: first_kernel(a).unlink(), "the file is missing"),
    "missing weights": (lambda a: (a / WEIGHTS).unlink(), "the file is missing"),
    "missing manifest": (lambda a: (a / MANIFEST).unlink(), "not an artifact"),
    "manifest is a list": (lambda a: (a / MANIFEST).write_text("[]"), "not a manifest"),
    "manifest is no JSON": (lambda a: (a / MANIFEST).write_text("{"), "not a manifest"),
    "manifest without files": (lambda a: edit(a, files=None), "lacks files"),
    "manifest with odd files": (lambda a: edit(a, files={LIBRARY: {}}), "not a manifest"),
    "manifest with odd target": (lambda a: edit(a, target={"name": "cpu"}), "not a manifest"),
    "newer format": (lambda a: edit(a, format=FORMAT + 1), f"has format {FORMAT + 1}"),
    "older format": (lambda a: edit(a, format=0), "has format 0"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_with_a_remedy(artifact: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(artifact)
    with pytest.raises(ArtifactError, match=message) as refused:
        Artifact.open(artifact)
    assert "compile" in refused.value.remedy
    assert refused.value.place.startswith(str(artifact))


def test_changed_weights_are_found_by_their_digest(artifact: Path) -> None:
    flip(artifact / WEIGHTS)
    opened = Artifact.open(artifact)  # too large to read at every start
    with pytest.raises(ArtifactError, match="digest") as refused:
        opened.check_weights()
    assert "compile" in refused.value.remedy


def test_another_instruction_set_is_refused(artifact: Path) -> None:
    target = target_of(artifact)
    edit(artifact, target={**target, "name": "cpu-odd", "requires": [*target["requires"], "no_such_flag"]})
    with pytest.raises(ArtifactError, match="cpu-odd, this CPU lacks no_such_flag") as refused:
        Artifact.open(artifact)
    assert "--target cpu" in refused.value.remedy
    look_at(artifact)  # to look at it is fine


def test_another_architecture_is_refused(artifact: Path) -> None:
    edit(artifact, target={**target_of(artifact), "machine": "s390x"})
    with pytest.raises(ArtifactError, match="made for s390x, this machine is"):
        Artifact.open(artifact)


def test_the_command_line_refuses_it_without_a_traceback(artifact: Path) -> None:
    edit(artifact, target={**target_of(artifact), "requires": ["no_such_flag"]})
    words = ["generate", str(artifact), "--prompt", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "pagec.runtime.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "lacks no_such_flag" in done.stderr
    assert "Traceback" not in done.stderr
