"""From times to measured entries: noise, what has to agree, buckets without a measurement, what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bundles import H200, bundle_of

from pagec.autotune.bundle import Bundle, Head, Timed, Timing, Trial
from pagec.autotune.bundle_merge import tables_of
from pagec.autotune.bundle_prepare import attention_subject, linear_subject
from pagec.autotune.database import Database
from pagec.autotune.measure import Sample
from pagec.autotune.model import Attention
from pagec.autotune.shipped import keep_measured
from pagec.autotune.table import MODES, Entry, Table
from pagec.compiler.errors import ArtifactError

LINEAR, ATTENTION = "n4096_k4096", "d128_g4"
KINDS = ("attention_prefill", "attention_decode", "linear")
# Microseconds in both halves of the rounds, and the spread; None for one that computed something else.
Times = Callable[[Timed, Trial], tuple[float, float, float] | None]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of entries that pagec ships."""
    shape = Attention(32, 8, 128)
    subjects = [attention_subject(shape, shape), linear_subject(4096, 4096)]
    return bundle_of(tmp_path_factory.mktemp("bundle"), subjects, best=2)


def timed(bundle: Bundle, times: Times) -> dict[str, Timed]:
    """Results by case."""
    found = {}
    for case in bundle.cases:
        timings = []
        for trial in case.trials:
            told = times(Timed(case, ()), trial)
            halves = told and (Sample(told[0], told[2]), Sample(told[1], told[2]))
            timings.append(Timing(trial, halves or None, "" if told else "wrong"))
        one = Timed(case, tuple(timings), rounds=20)
        found[case.name] = Timed.from_json(one.to_json())  # as a file of results has it
    return found


def head(bundle: Bundle, **changes: Any) -> Head:
    device = {"name": "NVIDIA H200", "driver_version": "580.1"}
    return replace(Head(bundle.digest, "h200", bundle.versions, bundle.templates, device), **changes)


def tables(bundle: Bundle, results: Mapping[str, Timed]) -> dict[str, Table]:
    return {t.kind: t for t in tables_of(head(bundle), results, Database("h200", "cuda"), H200)}


def entries(bundle: Bundle, times: Times) -> dict[str, Entry]:
    """By kind, each of the one key."""
    found = tables(bundle, timed(bundle, times))
    return {kind: next(iter(table.entries.values())) for kind, table in found.items()}


def same(us: float, spread: float = 0.5) -> tuple[float, float, float]:
    return us, us, spread


def test_a_winner_beats_the_untuned_point_by_more_than_the_noise(bundle: Bundle) -> None:
    won = entries(bundle, lambda _, trial: same(100 if trial.untuned else 99))["linear"]
    for choice in won.sets["default"]:
        assert (choice.us, choice.baseline_us, choice.spread_us) == (99, 100, 0.5)
        assert choice.point != choice.baseline
        assert choice.facts["origin"] == "measured"
    lost = entries(bundle, lambda _, trial: same(100 if trial.untuned else 99, 2.0))["linear"]
    for mode in MODES:
        for choice in lost.sets[mode]:
            assert (choice.us, choice.baseline_us) == (100, 100)
            assert choice.point == choice.baseline
    assert won.origin == lost.origin == "measured"
    assert won.by == {"name": "NVIDIA H200", "driver_version": "580.1", "triton": bundle.versions["triton"]}


def test_luck_in_one_half_of_the_rounds_is_not_enough(bundle: Bundle) -> None:
    def lucky(_: Timed, trial: Trial) -> tuple[float, float, float]:
        return same(100) if trial.untuned else (50, 100, 0.5)

    for entry in entries(bundle, lucky).values():
        assert all(choice.us == 100 for mode in MODES for choice in entry.sets[mode])


def test_what_computed_something_else_is_no_choice(bundle: Bundle) -> None:
    def times(_: Timed, trial: Trial) -> tuple[float, float, float] | None:
        if trial.untuned:
            return same(100)
        return None if trial.point["stages"] == 2 else same(50)

    for choice in entries(bundle, times)["linear"].sets["default"]:
        assert choice.point["stages"] != 2
        assert choice.us == (100 if choice.point == choice.baseline else 50)


def test_where_the_untuned_point_does_not_run_another_stands(bundle: Bundle) -> None:
    entry = entries(bundle, lambda _, trial: None if trial.untuned else same(50))["linear"]
    assert {(choice.us, choice.baseline_us) for choice in entry.sets["default"]} == {(50, None)}


def test_buckets_without_a_measurement_keep_their_choice(bundle: Bundle) -> None:
    results = timed(bundle, lambda _, trial: same(100 if trial.untuned else 50))
    del results[f"linear/{LINEAR}/64"]
    entry = tables(bundle, results)["linear"].entries[LINEAR]
    shipped = Database("h200", "cuda").find("linear", LINEAR)
    assert shipped is not None
    origins = {choice.rows: choice.facts["origin"] for choice in entry.sets["default"]}
    assert origins == {16: "measured", 64: "predicted", 256: "measured", 1024: "measured", 0: "measured"}
    kept = entry.choice(64, "default")
    assert (kept.point, kept.us) == (shipped.choice(64, "default").point, shipped.choice(64, "default").us)
    # Strict choices go together: all measured, or none.
    assert {choice.facts["origin"] for choice in entry.sets["strict"]} == {"predicted"}


def test_strict_linears_have_the_numbers_that_are_best_together(bundle: Bundle) -> None:
    """One set is best by far for few rows, and bad for many: it is not taken for the few alone."""

    linears = [case for case in bundle.cases if case.kind == "linear"]
    good, bad, *_ = sorted(
        {numbers(t) for t in linears[0].trials if t.modes == ("strict",) and not t.untuned}
    )

    def times(one: Timed, trial: Trial) -> tuple[float, float, float]:
        if one.case.kind != "linear" or trial.untuned or numbers(trial) not in (good, bad):
            return same(100)
        if numbers(trial) == good:
            return same(90)
        return same(10 if one.case.rows == 16 else 110)

    strict = entries(bundle, times)["linear"].sets["strict"]
    assert {(c.point["BK"], c.point["splits"], c.facts["mma"]) for c in strict} == {good}
    assert [choice.us for choice in strict] == [90] * len(linears)


def numbers(trial: Trial) -> tuple[int, int, str]:
    """What of a linear can change a bit."""
    return trial.point["BK"], trial.point["splits"], trial.mma


def test_decode_has_blocks_of_one_size(bundle: Bundle) -> None:
    """Larger blocks are best in one bucket, others in two: what is best over all of them is taken by all."""
    sizes = sorted({t.point["block_size"] for c in bundle.cases for t in c.trials if c.kind == KINDS[1]})

    def times(one: Timed, trial: Trial) -> tuple[float, float, float]:
        if one.case.kind != "attention_decode" or trial.untuned or "default" not in trial.modes:
            return same(100)
        large = trial.point["block_size"] == sizes[-1]
        return same(50 if large == (one.case.rows == 1) else 60)

    entry = entries(bundle, times)["attention_decode"]
    assert {choice.point["block_size"] for mode in MODES for choice in entry.sets[mode]} == {sizes[-2]}
    assert [choice.us for choice in entry.sets["default"]] == [60, 50, 50]


def test_a_case_that_failed_is_one_without_a_measurement(bundle: Bundle) -> None:
    results = timed(bundle, lambda _, trial: same(100 if trial.untuned else 50))
    failed = {
        name: one if one.case.rows != 16 else Timed(one.case, (), failed="out of memory")
        for name, one in results.items()
    }
    found = tables(bundle, {name: Timed.from_json(one.to_json()) for name, one in failed.items()})
    origins = {
        kind: [choice.facts["origin"] for entry in table.entries.values() for choice in entry.sets["default"]]
        for kind, table in found.items()
    }
    assert origins["linear"] == ["predicted", *["measured"] * 4]
    assert origins["attention_decode"] == ["predicted"] * 3  # blocks of one size, or none
    assert origins["attention_prefill"] == ["measured"]
    assert tables(bundle, {name: Timed(one.case, (), failed="x") for name, one in results.items()}) == {}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32), wrong=st.floats(0, 1))
def test_whatever_the_times_are_entries_are_whole(bundle: Bundle, seed: int, wrong: float) -> None:
    """Every bucket has a choice, what has to agree agrees, and no choice is slower than what is untuned by
    more than the noise."""
    chance = random.Random(seed)

    def times(_: Timed, __: Trial) -> tuple[float, float, float] | None:
        if chance.random() < wrong:
            return None
        return chance.uniform(1, 200), chance.uniform(1, 200), chance.uniform(0, 20)

    found = {kind: table.entries for kind, table in tables(bundle, timed(bundle, times)).items()}
    strict = [c for kind in KINDS[:2] if kind in found for c in found[kind][ATTENTION].sets["strict"]]
    assert len({(c.point["BN"], c.point["split"]) for c in strict}) <= 1
    for kind, by_key in found.items():
        for entry in by_key.values():
            assert Entry.from_json(entry.to_json()) == entry
            check_entry(kind, entry)


def check_entry(kind: str, entry: Entry) -> None:
    """Of a table of this kind."""
    for mode in MODES:
        choices = entry.sets[mode]
        if kind == "attention_decode":
            assert len({choice.point["block_size"] for choice in choices}) == 1
        if kind == "linear" and mode == "strict":
            assert len({(c.point["BK"], c.point["splits"], c.facts["mma"]) for c in choices}) == 1
        for choice in choices:
            if choice.facts["origin"] == "measured" and choice.baseline_us is not None:
                assert choice.us <= choice.baseline_us + max(choice.spread_us, 0.01 * choice.baseline_us)


def test_results_of_another_template_are_refused(bundle: Bundle) -> None:
    stale = head(bundle, templates={**bundle.templates, "linear": "0" * 16})
    with pytest.raises(ArtifactError, match="has changed since"):
        tables_of(stale, {}, Database("h200", "cuda"), H200)


# -------------------------------------------------------------------------------------- keeping


@pytest.fixture(scope="module")
def measured(bundle: Bundle) -> dict[str, Table]:
    return tables(bundle, timed(bundle, lambda _, trial: same(100 if trial.untuned else 50)))


def predicted(measured: Mapping[str, Table]) -> list[Table]:
    """Tables with the shipped entries of the same keys."""
    database, found = Database("h200", "cuda"), []
    for table in measured.values():
        known = {key: entry for key in table.entries if (entry := database.find(table.kind, key))}
        found.append(replace(table, entries=known))
    return found


def test_tables_that_are_written_anew_keep_what_was_measured(
    measured: dict[str, Table], tmp_path: Path
) -> None:
    new = predicted(measured)
    assert keep_measured(new, tmp_path) == new
    for table in measured.values():
        table.write(tmp_path)
    kept = keep_measured(new, tmp_path)
    assert [table.entries for table in kept] == [measured[table.kind].entries for table in new]


def test_what_was_measured_of_another_template_is_not_kept(
    measured: dict[str, Table], tmp_path: Path
) -> None:
    """Nor is what strict programs take together with it."""
    for table in measured.values():
        stale = table.kind == "attention_decode"
        replace(table, template="0" * 16 if stale else table.template).write(tmp_path)
    kept = {table.kind: table.entries for table in keep_measured(predicted(measured), tmp_path)}
    assert kept["linear"] == measured["linear"].entries
    origins = {entry.origin for kind in KINDS[:2] for entry in kept[kind].values()}
    assert origins == {"predicted"}
