"""Tuning by measurement: variants give the same bits, tables cover all rows, what differs is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs import llama_text

pytest.importorskip("tvm")

from pagec.autotune import cpu, cpu_space
from pagec.autotune.cpu_bench import Bench, Case, step_arrays
from pagec.autotune.cpu_space import shape_key, subjects, variants
from pagec.autotune.fingerprint import machine_name, template_hash
from pagec.autotune.table import MODES, Table
from pagec.compiler.backends.cpu.build import build_library
from pagec.compiler.backends.cpu.emit import emit_all
from pagec.compiler.backends.targets import load_target
from pagec.compiler.driver import CompileOptions, find_source, plan_model
from pagec.compiler.program import Kernel, Program
from pagec.runtime.device.cpu import CpuDevice

TARGET = load_target("cpu")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    spec = tmp_path_factory.mktemp("spec") / "tiny.yaml"
    spec.write_text(llama_text(layers=1, max_len=256, head_dim=32))
    return CompileOptions(model=str(spec), weights="random:0", max_step_tokens=24, max_seqs=8)


@pytest.fixture(scope="module")
def program(options: CompileOptions) -> Program:
    return plan_model(find_source(options).spec, options, TARGET)[1].program


@pytest.fixture(scope="module")
def kernels(program: Program) -> dict[str, Kernel]:
    """A linear and the attention, each with its variants."""
    own = {kernel.key: kernel for kernel in program.kernels}
    chosen = [own[subject.launches[0].variants[-1][1]] for subject in _two(program)]
    return {one.key: one for kernel in chosen for one in (kernel, *_some(kernel))}


@pytest.fixture(scope="module")
def bench(program: Program, kernels: dict[str, Kernel], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("kernels")
    for name, text in emit_all(tuple(kernels.values()), TARGET).items():
        (path / name).write_text(text)
    build_library(tuple(kernels.values()), path, TARGET, path, lambda *_: None)
    return Bench(program, CpuDevice(path, 2))


def _two(program: Program) -> list[cpu_space.Subject]:
    found = subjects(program)
    return [next(one for one in found if one.kind == kind) for kind in ("linear", "attention")]


def _some(kernel: Kernel) -> list[Kernel]:
    """Variants, of attention's a few: each takes a second to compile."""
    found = list(variants(kernel, TARGET))
    return found[:: max(1, len(found) // 4)]


CASES = {
    "linear": [Case(rows, "") for rows in (1, 3, 5, 7, 24)],
    "attention": [
        Case(1, "decode, its splits apart", ((200, 1),)),
        Case(6, "decode", ((200, 1), (3, 1), (64, 1), (0, 1), (130, 1), (255, 1))),
        Case(2, "a prompt and a chunk", ((0, 9), (70, 8))),
    ],
}


@pytest.mark.parametrize("number", [0, 1], ids=["linear", "attention"])
def test_variants_give_the_same_bits(
    number: int, program: Program, kernels: dict[str, Kernel], bench: Bench
) -> None:
    subject = _two(program)[number]
    own = kernels[subject.launches[0].variants[-1][1]]
    others = _some(own)
    assert others
    for case in CASES[subject.kind]:
        expected = bench.result(subject.launches[0], own, case)
        assert any(set(stored) - {0xFF} for stored in expected), "nothing was stored"
        for kernel in others:
            assert bench.result(subject.launches[0], kernel, case) == expected, kernel.key


def test_keys_are_those_of_lowering(program: Program) -> None:
    """A linear's variant of as many rows as another bucket has is that bucket's kernel."""
    kernels = {kernel.key: kernel for kernel in program.kernels}
    for subject in subjects(program):
        first, last = (kernels[subject.launches[0].variants[end][1]] for end in (0, -1))
        if subject.kind == "linear" and not first.params["before"]:
            assert first in list(variants(last, TARGET))
        assert shape_key(last) == subject.key


def test_a_norm_done_by_the_linear_keeps_its_rows(program: Program) -> None:
    normed = [k for k in program.kernels if k.template == "linear" and k.params["before"]]
    assert normed
    assert not [one for kernel in normed for one in variants(kernel, TARGET)]


def test_steps_list_the_longest_tiles_first(program: Program) -> None:
    arrays = step_arrays(program, ((100, 1), (0, 20)))
    assert arrays["query_start"].tolist() == [0, 1, 21]
    assert arrays["seq_lens"].tolist() == [101, 20]
    assert arrays["tiles"][0].tolist() == [0, 0]
    size = program.kv.block_size
    used = [
        set(row[: -(-length // size)]) for row, length in zip(arrays["block_tables"], (101, 20), strict=True)
    ]
    assert not used[0] & used[1]


class _MadeUp(Bench):
    """A bench whose times and results the test makes up."""

    slow: Callable[[Kernel, Case], float] = staticmethod(lambda *_: 1.0)
    stored: Callable[[Kernel], bytes] = staticmethod(lambda _: b"")

    def run(self, _launches: Sequence[Any], kernel: Kernel, case: Case) -> Callable[[], float]:
        return lambda: 1e-6 * type(self).slow(kernel, case)

    def result(self, _launch: Any, kernel: Kernel, _case: Case) -> tuple[bytes, ...]:
        return (type(self).stored(kernel),)


def _tuned(options: CompileOptions, monkeypatch: pytest.MonkeyPatch, budget: float = 0) -> dict[str, Table]:
    """The tables of the first linear and attention."""
    monkeypatch.setattr(cpu, "subjects", _two)
    monkeypatch.setattr(cpu, "_build", lambda *_: None)
    monkeypatch.setattr(cpu, "CpuDevice", lambda *_: SimpleNamespace(num_workers=2))
    monkeypatch.setattr(cpu, "Bench", _MadeUp)
    return {table.kind: table for table in cpu.tune_cpu(options, "quick", budget, lambda *_: None)}


def test_tables_hold_winners_for_every_number_of_rows(
    options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of three rows are best; attention is best as it is."""

    def slow(kernel: Kernel, case: Case) -> float:
        return case.rows * (1 if kernel.params.get("MB") == 3 else 2)

    monkeypatch.setattr(_MadeUp, "slow", staticmethod(slow))
    tables = _tuned(options, monkeypatch)
    assert {table.machine for table in tables.values()} == {machine_name()}
    assert tables["linear"].template == template_hash("cpu", "linear")
    (entry,) = tables["linear"].entries.values()
    assert set(entry.sets) == set(MODES)
    # No bucket spans two untuned kernels.
    assert [choice.rows for choice in entry.sets["strict"]] == [1, 2, 4, 0]
    assert [choice.point["MB"] for choice in entry.sets["default"]] == [1, 2, 3, 3]
    (attention,) = tables["attention"].entries.values()
    assert attention.choice(1, "default").point == attention.choice(1, "default").baseline


def test_a_tile_that_is_poor_between_a_buckets_ends_does_not_win(
    options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of three rows are best but for 12 and 16 rows, which tiles of four divide."""

    def slow(kernel: Kernel, case: Case) -> float:
        return 3 if case.rows in (12, 16) and kernel.params.get("MB") == 3 else kernel.params.get("MB") != 3

    monkeypatch.setattr(_MadeUp, "slow", staticmethod(lambda *both: 1 + slow(*both)))
    (entry,) = _tuned(options, monkeypatch)["linear"].entries.values()
    assert [choice.point["MB"] for choice in entry.sets["default"]] == [1, 2, 3, 4]
    assert entry.sets["default"][-1].facts["timed"] == ["5 rows", "12 rows", "16 rows", "24 rows"]


def test_attention_is_timed_for_few_tokens_and_many(
    options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = _tuned(options, monkeypatch)["attention"].entries.values()
    decoding = ["1 x 1 at 63", "1 x 1 at 255", "8 x 1 at 63", "8 x 1 at 255"]
    assert entry.choice(1, "default").facts["timed"] == [*decoding, "1 x 24 at 0"]


def test_a_variant_with_other_bits_is_dropped(
    options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = staticmethod(lambda kernel: bytes([kernel.params.get("MB") == 3]))
    monkeypatch.setattr(_MadeUp, "stored", three)
    fast = staticmethod(lambda kernel, _case: 1.0 if kernel.params.get("MB") == 3 else 2.0)
    monkeypatch.setattr(_MadeUp, "slow", fast)
    (entry,) = _tuned(options, monkeypatch)["linear"].entries.values()
    assert all(choice.point == choice.baseline for choice in entry.sets["default"])


def test_nothing_is_timed_after_the_budget(options: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(not table.entries for table in _tuned(options, monkeypatch, 1e-9).values())


def test_a_real_run(options: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, run, compared and timed; whatever wins is a legal choice."""
    monkeypatch.setattr(cpu, "subjects", lambda program: _two(program)[:1])
    monkeypatch.setitem(cpu.ROWS, "quick", ())
    table, _ = cpu.tune_cpu(options, "quick", 0, lambda *_: None, threads=1)
    (entry,) = table.entries.values()
    for choice in entry.sets["default"]:
        assert choice.us > 0
        assert choice.point == choice.baseline or choice.us < choice.baseline_us - choice.spread_us
