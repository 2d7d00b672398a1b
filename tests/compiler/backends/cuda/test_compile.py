"""Whole models compiled for GPUs, on a machine without one: what the artifact holds, what a second
compilation does, strict programs, what is refused, what `show kernels` says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.graphs import llama_text
from typer.testing import CliRunner

from pagec.compiler import artifact as artifacts
from pagec.compiler.artifact import Artifact, GpuArtifact, look_at
from pagec.compiler.backends.cuda import build
from pagec.compiler.driver import CompileOptions, compile_model
from pagec.compiler.errors import ArtifactError, CompileError, DeviceError
from pagec.compiler.packing import unpack
from pagec.compiler.program import PackedWeight
from pagec.runtime.cli.app import make_app
from pagec.runtime.engine import Engine

pytest.importorskip("triton")

ABSENT = ("torch", "tvm", "tvm_ffi", "transformers", "safetensors", "gguf")
SIZES = {"max_step_tokens": 64, "max_seqs": 16}


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """A small llama for h100; kernels are kept where all tests' are."""
    spec = tmp_path_factory.mktemp("spec") / "small.yaml"
    spec.write_text(llama_text(hidden=128, heads=4, kv_heads=2, head_dim=64, inter=256, vocab=512))
    return CompileOptions(str(spec), weights="random:1", target="h100", **SIZES)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiled(options: CompileOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_model(replace(options, output=tmp_path_factory.mktemp("gpu") / "out"), quiet).path


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(request: build.CompileRequest, *_: object) -> Any:
        raise AssertionError(f"{request.key} is compiled again")

    monkeypatch.setattr(build, "_compile", compiles)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


def opened(path: Path) -> GpuArtifact:
    found = look_at(path)
    assert isinstance(found, GpuArtifact)
    return found


def test_an_artifact_holds_what_a_launcher_needs(compiled: Path) -> None:
    found, program = opened(compiled), opened(compiled).program
    assert found.target.name == "h100"
    assert found.has_weights
    found.check_weights()
    assert {kernel.key for kernel in program.kernels} == set(found.kernels)
    for kernel in program.kernels:
        launch = found.kernels[kernel.key].launch
        files = [compiled / "kernels" / f"{kernel.key}.{kind}" for kind in ("py", "cubin", "json")]
        assert all(file.is_file() for file in files)
        assert files[1].read_bytes()[:4] == b"\x7fELF"
        assert launch.symbol == kernel.key
        assert [name for name, _ in launch.arguments] == [*(name for name, _ in kernel.arrays), "count"]


def test_every_argument_of_every_launch_is_there(compiled: Path) -> None:
    """Each names a weight, a buffer, ... that the program has, and each kernel gets as many as it takes."""
    program = opened(compiled).program
    kernels = {kernel.key: kernel for kernel in program.kernels}
    known = {
        "buffer": {b.name for b in program.buffers},
        "weight": {w.name for w in program.weights},
        "table": {t.name for t in program.tables},
        "kv": {str(layer) for group in program.kv.groups for layer in group.layers},
        "partial": {"stats", "sums"},
    }
    made: set[str] = set()
    for span in (*program.body, *program.head, replace(program.body[0], launches=(program.copy,))):
        for launch in span.launches:
            assert len(launch.args) == len(kernels[launch.kernel].arrays), launch
            for kind, _, name in (arg.partition(":") for arg in launch.args):
                assert kind in ("step", "scratch", "pool") or name in known[kind], launch
                made |= {name} if kind == "buffer" else set()
    assert made == known["buffer"]


def test_spans_hold_every_number_of_rows(compiled: Path) -> None:
    program = opened(compiled).program
    assert program.buckets == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    for spans, most in ((program.body, 64), (program.head, 16)):
        rows = [span.rows for span in spans]
        assert rows == sorted(set(rows))
        assert rows[-1] == most
        assert all(a.launches != b.launches for a, b in pairwise(spans))
    assert program.span(1) is program.body[0]
    assert program.span(64) is program.body[-1]


def test_buffers_share_room_but_never_while_both_live(compiled: Path) -> None:
    """A buffer's first launch makes it; no other is made in its slot until its last has read it."""
    program = opened(compiled).program
    slots = {b.name: b.slot for b in program.buffers}
    assert len(set(slots.values())) < len(slots)
    for body in program.body:
        holds: dict[int, str] = {}
        seen: set[str] = set()
        for launch in (*body.launches, *program.head[-1].launches):
            for name in (arg[7:] for arg in launch.args if arg.startswith("buffer:")):
                if name not in seen:
                    holds[slots[name]] = name
                    seen.add(name)
            assert all(holds[slots[arg[7:]]] == arg[7:] for arg in launch.args if arg.startswith("buffer:"))


def test_weights_are_the_models_own_as_rows(compiled: Path) -> None:
    """Matrices of a GPU are [N, K]; unpacked they have the shapes of the graph's weights."""
    found = opened(compiled)
    shapes = {name: t.inner for name, t in found.graph().weights.items()}

    def check(weight: PackedWeight) -> None:
        packed = artifacts.read_packed(compiled / artifacts.WEIGHTS, found.program.weights, weight.name)
        for name, own in unpack(weight, packed).items():
            assert own.shape == shapes.pop(name)

    for weight in found.program.weights:
        check(weight)
    assert not shapes


@pytest.mark.usefixtures("nothing_compiles")
def test_the_same_input_gives_the_same_bytes_and_compiles_nothing(
    options: CompileOptions, compiled: Path, tmp_path: Path
) -> None:
    again = compile_model(replace(options, output=tmp_path / "again"), quiet)
    assert again.compiled  # into a directory that was not there; of cached kernels
    one, two = contents(compiled), contents(again.path)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


@pytest.mark.usefixtures("nothing_compiles")
def test_without_a_directory_the_cache_has_it(
    options: CompileOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cubins").symlink_to(Path(os.environ["PAGEC_CACHE"]) / "cubins")
    monkeypatch.setenv("PAGEC_CACHE", str(tmp_path))
    first = compile_model(options, quiet)
    second = compile_model(options, quiet)
    assert (first.compiled, second.compiled) == (True, False)
    assert first.path == second.path


def test_compiling_needs_neither_torch_nor_tvm(
    options: CompileOptions, compiled: Path, tmp_path: Path
) -> None:
    """The command, where these cannot be imported, gives the same artifact."""
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        "from pagec.runtime.cli import main\n"
        "main()"
    )
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = [sys.executable, "-c", program, "compile", options.model, "--weights", "random:1"]
    command += ["--target", "h100", "--no-tuned", *sizes, "-o", str(tmp_path / "out")]
    subprocess.run(command, check=True)
    assert contents(tmp_path / "out") == contents(compiled)


def test_tuned_knobs_are_taken_where_they_compile(options: CompileOptions, tmp_path: Path) -> None:
    """One table's point is taken; one that spills is refused, and the default stands in for it."""
    good = {"BM": 64, "BN": 64, "BK": 128, "warps": 4, "stages": 2, "group_m": 1, "splits": 1, "tma": 0}
    bad = {**good, "BM": 128, "BN": 256, "warps": 4}
    tuned = {"linear/n128_k256": ((0, good),), "linear/n512_k128": ((16, bad), (0, good))}
    plain = replace(options, weights="none", tuned=tuned, output=tmp_path / "out")
    found = opened(compile_model(plain, quiet).path)
    linears = [kernel.params for kernel in found.program.kernels if kernel.template == "linear"]
    assert {p["BM"] for p in linears if (p["NP"], p["KP"]) == (128, 256) and p["BK"] == 128} == {64}
    assert all((p["BM"], p["BN"]) != (128, 256) for p in linears)
    assert not found.has_weights


# --------------------------------------------------------------------------------------- strict


@pytest.mark.parametrize("target", ["a100", "h100"])
def test_a_strict_program_makes_numeric_choices_once(
    options: CompileOptions, target: str, tmp_path: Path
) -> None:
    strict = replace(options, target=target, strict=True, weights="none", output=tmp_path / "out")
    numerics = opened(compile_model(strict, quiet).path).manifest["numerics"]
    assert numerics["strict"]
    assert {len(choices) for choices in numerics["choices"].values()} == {1}
    (attention,) = numerics["choices"]["attention"]
    assert attention["split"] > 0
    assert {one["mma"] for (one,) in numerics["choices"].values()} == {
        "HGMMA" if target == "h100" else "HMMA"
    }
    ptx = list((tmp_path / "out" / "kernels").glob("*.ptx"))
    assert bool(ptx) == (target == "a100")


def test_tables_that_are_not_strict_are_refused(options: CompileOptions, tmp_path: Path) -> None:
    point = {"BM": 64, "BN": 64, "BK": 64, "warps": 4, "stages": 2, "group_m": 1, "splits": 1, "tma": 0}
    tuned = {"linear/n128_k256": ((16, point), (0, {**point, "BK": 128}))}
    with pytest.raises(CompileError, match="not strict: linear 128x256"):
        compile_model(replace(options, strict=True, tuned=tuned, output=tmp_path / "out"), quiet)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- refusals


def test_a_machine_without_a_gpu_refuses_it(compiled: Path) -> None:
    with pytest.raises(ArtifactError, match=r"made for h100, an NVIDIA GPU.*for CPUs only") as error:
        Artifact.open(compiled)
    assert "--target cpu" in error.value.remedy
    with pytest.raises(DeviceError, match="torch finds no NVIDIA GPU"):
        Engine(compiled)
    said = CliRunner().invoke(make_app(), ["generate", str(compiled), "--prompt", "x"])
    assert said.exit_code != 0


def test_a_damaged_kernel_is_refused(compiled: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(compiled, tmp_path / "copy"))
    cubin = next((copy / "kernels").glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match="changed after compiling"):
        look_at(copy)


def test_what_gpus_do_not_do_is_said(options: CompileOptions) -> None:
    with pytest.raises(CompileError, match="GPUs compute in bf16"):
        compile_model(replace(options, dtype="f32"), quiet)
    with pytest.raises(CompileError, match="48 is no power of two"):
        compile_model(replace(options, block_size=48), quiet)


def test_without_triton_it_says_so(options: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    with pytest.raises(CompileError, match="Triton, which is not installed"):
        compile_model(options, quiet)


# ----------------------------------------------------------------------------------------- show


def test_show_kernels_tells_what_they_occupy(compiled: Path) -> None:
    said = CliRunner().invoke(make_app(), ["show", "kernels", str(compiled), "--json"])
    assert said.exit_code == 0, said.output
    rows = json.loads(said.stdout)
    assert [row["key"] for row in rows] == [kernel.key for kernel in opened(compiled).program.kernels]
    for row in rows:
        assert {"registers", "shared_bytes", "spills", "occupancy", "predicted_us", "mma"} <= set(row)
        assert row["spills"] == 0
        assert row["occupancy"] >= 1
        modelled = row["template"] in ("linear", "attention_prefill", "attention_decode")
        assert (row["predicted_us"] is not None) == modelled
        assert (row["mma"] != "") == modelled
    for what in ("kernels", "plan", "fused", "manifest"):
        said = CliRunner().invoke(make_app(), ["show", what, str(compiled)])
        assert said.exit_code == 0, said.output
        assert "attention" in said.stdout or what == "fused"
        if what == "plan":
            assert "linear + add + cast" in said.stdout
            assert "programs write" in said.stdout
    said = CliRunner().invoke(make_app(), ["show", "plan", str(compiled), "--json"])
    assert json.loads(said.stdout)["fusion"].keys() == {"taken", "apart"}
