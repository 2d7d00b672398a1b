"""Compiling for a CPU with tables: the choices are taken, no bit changes, and stale tables are said aloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphs import llama_text
from typer.testing import CliRunner

pytest.importorskip("tvm")

from pagec.autotune.cpu_space import Subject, point_of, subjects
from pagec.autotune.fingerprint import cpu_versions, machine_name, template_hash
from pagec.autotune.table import MODES, Choice, Entry, Table
from pagec.compiler.artifact import Artifact
from pagec.compiler.backends.cpu.knobs import attention_points, linear_points
from pagec.compiler.backends.targets import best_for_this_machine
from pagec.compiler.driver import CompileOptions, compile_model, find_source, plan_model
from pagec.compiler.plan import Plan
from pagec.compiler.program import Kernel
from pagec.runtime.cli.app import make_app
from pagec.runtime.cli.tuned import tuned_choices
from pagec.runtime.device.cpu import default_threads
from pagec.runtime.engine import Engine

TARGET = best_for_this_machine()
VOCAB = 200


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the test's own; the model stands in small.yaml: heads and groups of SmolLM2."""
    path = tmp_path_factory.mktemp("tuned")
    text = llama_text(vocab=VOCAB, hidden=144, heads=9, kv_heads=3, head_dim=64, inter=160, max_len=512)
    (path / "small.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEC_CACHE", str(path / "cache"))
        yield path


@pytest.fixture(scope="module")
def options(home: Path) -> CompileOptions:
    return CompileOptions(str(home / "small.yaml"), weights="random:1", max_step_tokens=64, max_seqs=8)


@pytest.fixture(scope="module")
def plan(options: CompileOptions) -> Plan:
    """Without tables."""
    return plan_model(find_source(options).spec, options, TARGET)[1]


@pytest.fixture(scope="module")
def tables(home: Path, plan: Plan) -> list[Table]:
    """Tables in the cache: for every kernel tiles that it does not take by itself."""
    work = subjects(plan.program)
    kernels = {kernel.key: kernel for kernel in plan.program.kernels}
    found = []
    for kind in ("linear", "attention"):
        entries = {one.key: _entry(one, kernels) for one in work if one.kind == kind}
        versions = cpu_versions(default_threads())
        found.append(Table(TARGET.name, kind, template_hash("cpu", kind), versions, entries, machine_name()))
        found[-1].write(home / "cache" / "tuned")
    return found


def _entry(subject: Subject, kernels: dict[str, Kernel]) -> Entry:
    """Of linears another tile for each bucket; of attention the last one, which is far from the default."""
    kernel = kernels[subject.launches[0].variants[-1][1]]
    own = point_of(kernel)
    if subject.kind == "attention":
        others = [p for p in attention_points(TARGET, kernel.params["DP"]) if p["RM"] != own["RM"]]
        limits = [0]
    else:
        others = [p for p in linear_points(TARGET) if p != own]
        limits = [1, 2, 3, 5, 9, 20, 40, 0]
    points = [others[(3 + n) % len(others)] for n in range(len(limits))]
    choices = (Choice(*both, 1.0, own, 2.0) for both in zip(limits, points, strict=True))
    return Entry("measured", dict.fromkeys(MODES, tuple(choices)))


@pytest.fixture(scope="module")
def artifacts(options: CompileOptions, tables: list[Table]) -> tuple[Path, Path]:
    """Without tuned choices and with them."""
    assert all(table.entries for table in tables)
    plain = compile_model(options, lambda *_: None)
    tuned = compile_model(replace(options, tuned=tuned_choices("cpu")), lambda *_: None)
    assert plain.path != tuned.path, "the cache takes one for the other"
    return plain.path, tuned.path


def keys(tables: list[Table]) -> set[str]:
    return {f"{table.kind}/{key}" for table in tables for key in table.entries}


# ------------------------------------------------------------------------------------- compiling


@pytest.mark.usefixtures("home")
def test_every_kernel_that_can_be_tuned_is(artifacts: tuple[Path, Path], tables: list[Table]) -> None:
    plain, tuned = (Artifact.open(path) for path in artifacts)
    assert plain.manifest["tuned"] == {}
    assert set(tuned.manifest["tuned"]) == keys(tables)
    assert plain.manifest["numerics"] == tuned.manifest["numerics"]
    assert plain.program.weights == tuned.program.weights
    kernels = {kernel.key: kernel for kernel in tuned.program.kernels}
    for subject in subjects(tuned.program):
        (entry,) = (t.entries[subject.key] for t in tables if subject.key in t.entries)
        for rows in (1, 2, 3, 4, 5, 6, 9, 10, 20, 21, 40, 41, 64):
            kernel = subject.kernel(kernels, rows)
            if not kernel.params.get("before"):
                assert point_of(kernel) == entry.choice(rows, "default").point


def ask(engine: Engine, length: int, companions: int) -> bytes:
    """All logits of a prompt and of the tokens after it, beside others that decode."""
    engine.runner.fill_kv_with_nan()
    rng = np.random.default_rng(length)
    others = [
        engine.add_request(rng.integers(0, VOCAB, 9 + 40 * n).tolist(), 60, ignore_eos=True)
        for n in range(companions)
    ]
    while any(not other.output for other in others):
        engine.step()
    prompt = rng.integers(0, VOCAB, length).tolist()
    request = engine.add_request(prompt, 4, ignore_eos=True, prompt_logits=True)
    while not request.is_finished:
        engine.step()
    for other in others:
        engine.abort(other)
    logits = np.concatenate(request.logits)
    assert np.isfinite(logits).all()
    return logits.tobytes()


def test_the_logits_are_the_same_bytes(artifacts: tuple[Path, Path]) -> None:
    """Steps of one row up to full ones, alone and in company, with contexts of several splits."""
    plain, tuned = (Engine(path, num_blocks=200, threads=2) for path in artifacts)
    for length in (1, 3, 17, 63, 300):
        for companions in (0, 6):
            assert ask(tuned, length, companions) == ask(plain, length, companions), (length, companions)


# ----------------------------------------------------------------------------------- the commands


def pagec(*words: str | Path) -> Any:
    said = CliRunner().invoke(make_app(), [str(word) for word in words])
    assert said.exit_code == 0, said.output
    return said


def test_compile_takes_tables_unless_told_not_to(home: Path, tables: list[Table]) -> None:
    words = ["compile", home / "small.yaml", "--weights", "random:1", "--max-step-tokens", "64"]
    for option, expected in (("--no-tuned", set()), ("--tuned", keys(tables))):
        found = json.loads(pagec(*words, "--max-seqs", "8", option, "--json").stdout)
        assert set(Artifact.open(Path(found["path"])).manifest["tuned"]) == expected


def test_show_says_what_is_tuned(home: Path, artifacts: tuple[Path, Path], tables: list[Table]) -> None:
    for what in (home / "small.yaml", artifacts[1]):
        launches = json.loads(pagec("show", "plan", what, "--json").stdout)["launches"]
        assert {launch["tuned"] for launch in launches} == {None, *keys(tables)}
        kernels = json.loads(pagec("show", "kernels", what, "--json").stdout)
        assert {kernel["tuned"] for kernel in kernels} == {None, *keys(tables)}
        lines = pagec("show", "plan", what).stdout.splitlines()
        assert any("attention_" in line and line.endswith(", tuned") for line in lines)
        assert "# Tuned: attention/" in pagec("show", "kernels", what).stdout
    assert "tuned" not in pagec("show", "plan", artifacts[0]).stdout


@pytest.mark.parametrize(
    "changes",
    [{"template": "0" * 16}, {"machine": "another CPU"}, {"versions": {"threads": "99"}}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_stale_table_is_said_aloud_and_defaults_are_taken(
    tables: list[Table],
    options: CompileOptions,
    plan: Plan,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PAGEC_CACHE", str(tmp_path))
    for table in tables:
        replace(table, **changes).write(tmp_path / "tuned")
    found = tuned_choices("cpu")
    said = capsys.readouterr().err
    for kind in ("linear", "attention"):
        assert f"{kind}.json: not used: " in said
    assert "tune again" in said
    assert not set(found) & keys(tables)
    _, again = plan_model(find_source(options).spec, replace(options, tuned=found), TARGET)
    assert again.program == plan.program
