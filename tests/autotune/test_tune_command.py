"""`pagec tune`, as a process: tables for a model, the shipped ones, merging, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def tune(cache: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagec.runtime.cli", "tune", *words]
    environment = {**os.environ, "PAGEC_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tables(cache: Path) -> list[dict[str, object]]:
    """SmolLM2's, by the cost model."""
    words = ["smollm2-135m", "--target", "h100", "--offline", "--effort", "quick", "--json"]
    found: list[dict[str, object]] = json.loads(tune(cache, *words).stdout)
    return found


def test_a_model_is_tuned_into_the_users_tables(cache: Path, tables: list[dict[str, object]]) -> None:
    keys = {table["kind"]: set(table["entries"]) for table in tables}  # type: ignore[call-overload]
    assert keys["attention_decode"] == keys["attention_prefill"] == {"d64_g3"}
    assert {"n960_k576", "n576_k1536", "n49152_k576"} <= keys["linear"]
    files = sorted(path.name for path in (cache / "tuned" / "h100").iterdir())
    assert files == ["attention_decode.json", "attention_prefill.json", "linear.json"]


@pytest.mark.usefixtures("tables")
def test_show_prints_choices_beside_the_baseline_and_public_tiles(cache: Path) -> None:
    said = tune(cache, "show", "--target", "h100").stdout
    assert "d64_g3" in said
    assert "n28672_k4096" in said
    assert "BM 192" not in said
    assert "192 x 128, 12 warps" in said
    found = json.loads(tune(cache, "show", "--target", "h100", "--json").stdout)
    assert {"target", "kind", "key", "origin", "sets"} == set(found[0])


@pytest.mark.usefixtures("tables")
def test_tables_can_be_merged_into_another_cache(cache: Path, tmp_path: Path) -> None:
    source = cache / "tuned" / "h100" / "linear.json"
    tune(tmp_path, "merge", str(source))
    copy = tmp_path / "tuned" / "h100" / "linear.json"
    assert copy.read_bytes() == source.read_bytes()
    tune(tmp_path, "merge", str(source))
    assert copy.read_bytes() == source.read_bytes()


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("[]")
    assert "is no table" in tune(tmp_path, "merge", str(file), code=2).stderr


def test_what_cannot_be_done_says_what_can(tmp_path: Path) -> None:
    done = tune(tmp_path, "smollm2-135m", "--target", "a100", "--measure", code=2)
    assert "leave it out" in done.stderr
    done = tune(tmp_path, "smollm2-135m", "--offline", code=2)
    assert "there is no cost model of CPUs" in done.stderr
    done = tune(tmp_path, "smollm2-135m", "--target", "b200", code=2)
    assert "there is no target" in done.stderr
    assert "there is no target" in tune(tmp_path, "show", "--target", "b200", code=2).stderr


def test_help() -> None:
    done = tune(Path(), "--help")
    assert "--offline" in done.stdout
