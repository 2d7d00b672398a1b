"""A bundle on a GPU that is none: its numbers in Triton's interpreter, its times as they are told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import bundles
from support.bundles import Emulated, TimedGpu, attention_subject, bundle_of, linear_subject, results, run
from support.fake_cuda import in_interpreter

from pagec.autotune import bundle_run
from pagec.autotune.bundle import Bundle, read_bundle, read_image
from pagec.compiler.errors import ArtifactError, DeviceError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    bundle_of(directory, [linear_subject()])
    return directory


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Bundle:
    return read_bundle(shutil.copytree(made, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_run, "MOST_ROUNDS", 8)


def test_a_bundle_comes_back_as_it_was_written(tmp_path: Path, bundle: Bundle) -> None:
    again = bundle_of(tmp_path / "again", [linear_subject()])
    assert again == bundle == read_bundle(tmp_path / "again")
    assert again.text() == (tmp_path / "bundle" / "bundle.json").read_text()
    for kernel in bundle.kernels.values():
        assert read_image(tmp_path / "bundle", kernel) == kernel.file.encode()
        assert (tmp_path / "bundle" / "kernels" / f"{kernel.file}.py").is_file()
    assert all("default" in case.trials[0].untuned for case in bundle.cases)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}', '{"format": 1}'])
def test_what_is_no_bundle_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ArtifactError, match=r"bundle\.json") as error:
        read_bundle(tmp_path)
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(ArtifactError) as error:
        read_bundle(tmp_path)
    assert "pagec tune prepare" in error.value.remedy


@pytest.mark.usefixtures("bundle")
def test_a_damaged_kernel_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    next((directory / "kernels").glob("*.cubin")).write_bytes(b"no kernel")
    with pytest.raises(ArtifactError, match="damaged"):
        run(directory, tmp_path / "out.jsonl", Emulated(directory, TimedGpu()))


@pytest.mark.slow
def test_every_kernel_computes_what_torch_does(tmp_path: Path) -> None:
    """Inputs, arguments and references of all three kinds belong together: the kernels' sources say so."""
    directory, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    made = bundle_of(directory, [attention_subject(), linear_subject((8,))], best=1)
    assert any(trial.sizes.get("splits", 1) > 1 for case in made.cases for trial in case.trials)
    in_interpreter(bundles.run_interpreted, directory, output)
    found = results(output)
    assert found.keys() == {case.name for case in made.cases}
    for timed in found.values():
        assert not timed.failed
        for timing in timed.timings:
            assert not timing.wrong, (timed.case.name, timing.trial.point)
            assert timing.halves


def test_what_computes_something_else_is_not_timed(tmp_path: Path, bundle: Bundle) -> None:
    """One product of sixty-four too many in a single element, or an element that is not written."""

    def spoil(key: str, out: Any) -> None:
        if key in bad:
            out[5] += 0.25
        if key in idle:
            out[7] = float("nan")

    trials = bundle.cases[0].trials
    bad, idle = ({trials[number].launches[-1].kernel} for number in (0, 1))
    directory, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    library = Emulated(directory, TimedGpu(), spoilt=spoil)
    assert run(directory, output, library) == 0
    found = results(output)[bundle.cases[0].name].timings
    for trial, timing in zip(trials, found, strict=True):
        wrong = trial.launches[-1].kernel in bad | idle
        assert (timing.halves is None) == wrong
        assert timing.wrong.startswith("1 of 512 results are wrong") == wrong


def test_times_are_those_of_a_trials_own_launches(tmp_path: Path, bundle: Bundle) -> None:
    directory, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    us = {name: 3.0 + number for number, name in enumerate(sorted(bundle.kernels))}
    run(directory, output, Emulated(directory, TimedGpu(), us=us.__getitem__))
    for case in bundle.cases:
        timed = results(output)[case.name]
        assert timed.rounds == 8
        for trial, timing in zip(case.trials, timed.timings, strict=True):
            assert timing.halves is not None
            expected = sum(us[launch.kernel] for launch in trial.launches)
            assert [half.median_us for half in timing.halves] == [expected, expected]
            assert [half.spread_us for half in timing.halves] == [0, 0]


def test_other_memory_fills_the_cache_before_every_timed_launch(tmp_path: Path, bundle: Bundle) -> None:
    directory, gpu = tmp_path / "bundle", TimedGpu()
    run(directory, tmp_path / "out.jsonl", Emulated(directory, gpu))
    events = [number for number, what in enumerate(gpu.log) if what == "event"]
    begins = events[::2]
    assert len(begins) == sum(9 * len(case.trials) for case in bundle.cases)
    assert {gpu.log[number - 1] for number in begins} == {f"read {2 * bundles.H200.l2_bytes}"}


def test_trials_take_turns_over_changing_inputs(tmp_path: Path, bundle: Bundle) -> None:
    directory, gpu = tmp_path / "bundle", TimedGpu()
    library = Emulated(directory, gpu)
    run(directory, tmp_path / "out.jsonl", library)
    places: dict[str, set[int]] = {}
    for launch in library.launches:
        if "out0" in {name for name, _ in bundle.kernels[launch.key].launch.arguments}:
            places.setdefault(launch.key, set()).add(launch.pointers[0])
    assert all(len(found) >= 2 for found in places.values())


# ----------------------------------------------------------------------------------- going on


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_run_goes_on_where_another_ended(tmp_path: Path, bundle: Bundle) -> None:
    directory, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    assert run(directory, output, Emulated(directory, TimedGpu()), budget_s=1, clock=Clock()) == 2
    assert run(directory, output, Emulated(directory, TimedGpu()), budget_s=1.5, clock=Clock()) == 1
    first = output.read_text().splitlines()
    assert len(first) == 2
    output.write_text(output.read_text() + '{"kind": "lin')  # the machine went away
    assert run(directory, output, Emulated(directory, TimedGpu())) == 0
    lines = output.read_text().splitlines()
    assert lines[:2] == first
    assert len(lines) == 3
    assert results(output).keys() == {case.name for case in bundle.cases}
    assert run(directory, output, Emulated(directory, TimedGpu())) == 0
    assert output.read_text().splitlines() == lines


def test_a_case_that_the_gpu_fails_at_is_left_out_the_next_time(tmp_path: Path, bundle: Bundle) -> None:
    directory, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    library = Emulated(directory, TimedGpu())
    library.fail("cuLaunchKernelEx", 700, after=3)
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        run(directory, output, library)
    assert run(directory, output, Emulated(directory, TimedGpu())) == 0
    first, second = (results(output)[case.name] for case in bundle.cases)
    assert "ILLEGAL_ADDRESS" in first.failed
    assert not second.failed


@pytest.mark.usefixtures("bundle")
def test_another_gpu_is_refused(tmp_path: Path) -> None:
    directory, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    for changes in ({"capability": (8, 0)}, {"sms": 66}, {"name": "NVIDIA H100 80GB HBM3"}):
        gpu = TimedGpu()
        for name, value in changes.items():
            setattr(gpu, name, value)
        with pytest.raises(ArtifactError, match="made for h200") as error:
            run(directory, output, Emulated(directory, gpu))
        assert "pagec tune prepare --target" in error.value.remedy
    assert not output.exists()


def test_results_of_another_bundle_are_not_gone_on_with(tmp_path: Path, bundle: Bundle) -> None:
    other, output = tmp_path / "other", tmp_path / "out.jsonl"
    assert bundle_of(other, [linear_subject((8,))]).digest != bundle.digest
    run(other, output, Emulated(other, TimedGpu()))
    with pytest.raises(ArtifactError, match="another bundle"):
        run(tmp_path / "bundle", output, Emulated(tmp_path / "bundle", TimedGpu()))
    output.write_text(json.dumps({"some": "file"}) + "\n")
    with pytest.raises(ArtifactError, match="holds no results"):
        run(tmp_path / "bundle", output, Emulated(tmp_path / "bundle", TimedGpu()))


def test_the_runner_needs_the_standard_library_numpy_and_torch(tmp_path: Path) -> None:
    blocked = ["triton", "tvm", "tvm_ffi", "yaml", "typer", "rich", "jinja2", "tokenizers", "safetensors"]
    program = (
        f"import sys; sys.modules |= dict.fromkeys({blocked})\n"
        "from pagec.autotune import bundle_run\n"
        f"sys.exit(bundle_run.main([{str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "bundle.json" in done.stderr
    assert "Traceback" not in done.stderr
