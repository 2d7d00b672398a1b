"""From a bundle's results to measured entries of tables.

Buckets of an entry are chosen together as far as they have to agree:

    linear, prefill          each bucket for itself
    decode                   one size of cache blocks, by time by sequence that the pool holds
    strict linear            one BK, number of splits and matrix instruction
    strict prefill, decode   one tile of keys, split and matrix instruction for both kernels

Of the sets that slow no bucket down the one with the least mean is chosen by the first half of the rounds; it
stands if in the second half, too, it beats what is untuned by more than the noise, and else the untuned set
does. Buckets that were not measured keep their choice, which says that it was predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from pagec.autotune import decode
from pagec.autotune.bundle import Head, Timed, Timing
from pagec.autotune.database import Database
from pagec.autotune.entries import (
    attention_entries,
    decode_buckets,
    linear_buckets,
    linear_entry,
    prefill_buckets,
    rounded,
)
from pagec.autotune.fingerprint import template_hash
from pagec.autotune.measure import Sample, beats, slows
from pagec.autotune.prediction import Point, roofline_us
from pagec.autotune.problem import Decode, Kind, Linear
from pagec.autotune.shipped import gpu_table
from pagec.autotune.space import SPACES, baseline_of
from pagec.autotune.table import Choice, Entry, Mode, Table
from pagec.compiler.errors import ArtifactError
from pagec.compiler.target import CudaTarget

Measured = Mapping[str, Timed]
# What a timing's set is: trials of different sets do not go together.
SetOf = Callable[[Timing], object]
Cost = Callable[[Timed, Timing], float]


@dataclass(frozen=True, slots=True)
class Picked:
    """A bucket's timing, and the untuned one where it ran."""

    timed: Timed
    timing: Timing
    untuned: Timing | None


def tables_of(head: Head, results: Measured, database: Database, target: CudaTarget) -> list[Table]:
    """Tables with the entries that results have something of; ArtifactError if they no longer hold."""
    for kind, known in head.templates.items():
        if known != template_hash("cuda", kind):
            raise ArtifactError(
                f"the template of {kind} has changed since they were measured",
                place=f"results of {head.target}",
                remedy="prepare a bundle and measure again",
            )
    results = {name: one for name, one in results.items() if any(timing.halves for timing in one.timings)}
    by = {**head.device, **head.versions}
    entries: dict[Kind, dict[str, Entry]] = {kind: {} for kind in SPACES}
    merger = _Merger(database, target, results, by)
    for key in sorted({one.case.key for one in results.values() if one.case.kind == "linear"}):
        entries["linear"][key] = merger.linear(key)
    for key in sorted({one.case.key for one in results.values() if one.case.kind != "linear"}):
        entries["attention_prefill"][key], entries["attention_decode"][key] = merger.attention(key)
    return [gpu_table(target.name, kind, found) for kind, found in entries.items() if found]


def best_set(
    buckets: Sequence[Timed], mode: Mode, set_of: SetOf, cost: Cost | None = None
) -> list[Picked] | None:
    """What is chosen for these buckets together; None if for some nothing ran that goes with the others."""
    cost = cost or (lambda _, one: _us(one, 0))
    fallback = [_untuned(timed, mode) for timed in buckets]
    best: tuple[float, list[Picked]] | None = None
    for members in _sets(buckets, mode, set_of):
        picked = [
            _picked(timed, ones, untuned, cost)
            for timed, ones, untuned in zip(buckets, members, fallback, strict=True)
        ]
        if any(_slower(one, 0) for one in picked):
            continue
        mean = geometric_mean([cost(one.timed, one.timing) for one in picked])
        if best is None or mean < best[0]:
            best = mean, picked
    if best is not None and _wins(best[1]):
        return best[1]
    found = [Picked(timed, one, one) for timed, one in zip(buckets, fallback, strict=True) if one]
    return found if len(found) == len(buckets) else None


def _sets(buckets: Sequence[Timed], mode: Mode, set_of: SetOf) -> Iterable[list[list[Timing]]]:
    """Trials by bucket, for each set that has some in all of them."""
    found: dict[object, list[list[Timing]]] = {}
    for number, timed in enumerate(buckets):
        for one in timed.timings:
            if one.halves and mode in one.trial.modes:
                found.setdefault(set_of(one), [[] for _ in buckets])[number].append(one)
    return [members for members in found.values() if all(members)]


def _picked(timed: Timed, ones: Sequence[Timing], untuned: Timing | None, cost: Cost) -> Picked:
    """The fastest; the untuned one if that is of the set and not beaten twice."""
    best = min(ones, key=lambda one: cost(timed, one))
    if untuned is None or untuned not in ones:
        return Picked(timed, best, untuned)
    twice = all(beats(_half(best, half), _half(untuned, half)) for half in (0, 1))
    return Picked(timed, best if twice else untuned, untuned)


def _wins(picked: Sequence[Picked]) -> bool:
    """Whether the second half says so, too: better somewhere, nowhere worse. Where the untuned one did not
    run, whatever did is better."""
    better = [one.untuned is None or beats(_half(one.timing, 1), _half(one.untuned, 1)) for one in picked]
    return any(better) and not any(_slower(one, 1) for one in picked)


def _slower(one: Picked, half: int) -> bool:
    return one.untuned is not None and slows(_half(one.timing, half), _half(one.untuned, half))


def _half(timing: Timing | None, half: int) -> Sample:
    assert timing is not None
    assert timing.halves is not None
    return timing.halves[half]


def _us(timing: Timing, half: int) -> float:
    return _half(timing, half).median_us


def _untuned(timed: Timed, mode: Mode) -> Timing | None:
    return next((one for one in timed.timings if mode in one.trial.untuned and one.halves), None)


# -------------------------------------------------------------------------------------- entries


def _block(one: Timing) -> object:
    return one.trial.point["block_size"]


def _linear_numbers(one: Timing) -> object:
    return one.trial.point["BK"], one.trial.point["splits"], one.trial.mma


def _attention_numbers(one: Timing) -> object:
    return one.trial.point["BN"], one.trial.point["split"], one.trial.mma


def _each(timed: Mapping[int, Timed]) -> dict[int, Picked]:
    """Each bucket for itself."""
    found = {rows: best_set([one], "default", lambda _: None) for rows, one in timed.items()}
    return {rows: picked[0] for rows, picked in found.items() if picked}


def _together(
    base: Entry,
    timed: Mapping[int, Timed],
    mode: Mode,
    set_of: SetOf,
    cost: Cost | None = None,
) -> dict[int, Picked]:
    """All buckets, or none."""
    if not _all_timed(base, timed):
        return {}
    return dict(zip(timed, best_set(list(timed.values()), mode, set_of, cost) or (), strict=False))


def _all_timed(base: Entry, timed: Mapping[int, Timed]) -> bool:
    return timed.keys() == {one.rows for one in base.sets["default"]}


def _by_sequence(timed: Timed, one: Timing) -> float:
    """The time, and on top the share of the pool that the last blocks of sequences leave empty."""
    problem = timed.case.problem
    assert isinstance(problem, Decode)
    return _us(one, 0) * (1 + decode.empty_share(problem, one.trial.point))


@dataclass(frozen=True, slots=True)
class _Merger:
    """Makes measured entries out of results and of the entries that there are."""

    database: Database
    target: CudaTarget
    results: Measured
    by: Mapping[str, str]

    def linear(self, key: str) -> Entry:
        """Choices of all buckets."""
        timed = self._timed("linear", key)
        one = next(iter(timed.values())).case.problem
        assert isinstance(one, Linear)
        base = self.database.find("linear", key) or linear_entry(linear_buckets(one.N, one.K), self.target)
        strict = _together(base, timed, "strict", _linear_numbers)
        return self._entry(base, _each(timed), strict)

    def attention(self, key: str) -> tuple[Entry, Entry]:
        """Entries of prefill and of decode: both, for their strict choices go together."""
        prefills, decodes = self._timed("attention_prefill", key), self._timed("attention_decode", key)
        first, second = self._attention_bases(key, [*prefills.values(), *decodes.values()])
        strict: dict[int, Picked] = {}
        strict_decode: dict[int, Picked] = {}
        if _all_timed(first, prefills) and _all_timed(second, decodes):
            found = best_set([*prefills.values(), *decodes.values()], "strict", _attention_numbers) or []
            strict = dict(zip(prefills, found, strict=False))
            strict_decode = dict(zip(decodes, found[len(prefills) :], strict=False))
        sharing = _together(second, decodes, "default", _block, _by_sequence)
        return (
            self._entry(first, _each(prefills), strict),
            _in_one_block(self._entry(second, sharing, strict_decode)),
        )

    def _timed(self, kind: Kind, key: str) -> dict[int, Timed]:
        """Results by bucket, in a table's order."""
        found = {
            one.case.rows: one
            for one in self.results.values()
            if (one.case.kind, one.case.key) == (kind, key)
        }
        return dict(sorted(found.items(), key=lambda item: (item[0] == 0, item[0])))

    def _attention_bases(self, key: str, timed: Sequence[Timed]) -> tuple[Entry, Entry]:
        first = self.database.find("attention_prefill", key)
        second = self.database.find("attention_decode", key)
        if first is not None and second is not None:
            return first, second
        one = timed[0].case.problem
        assert not isinstance(one, Linear)
        sizes = one.heads, one.kv_heads, one.head_dim
        return attention_entries(prefill_buckets(*sizes), decode_buckets(*sizes), self.target)

    def _entry(self, base: Entry, default: Mapping[int, Picked], strict: Mapping[int, Picked]) -> Entry:
        """Measured choices by rows, and those of `base` where there are none."""
        sets = {
            mode: tuple(
                self._choice(picked[one.rows]) if one.rows in picked else _kept(one, base)
                for one in base.sets[mode]
            )
            for mode, picked in (("default", default), ("strict", strict))
        }
        return Entry("measured", sets, self.by)

    def _choice(self, picked: Picked) -> Choice:
        """Times are those of the second half, which had no part in the choice of the first."""
        case, trial = picked.timed.case, picked.timing.trial
        ran, untuned = _half(picked.timing, 1), picked.untuned
        least, roof = roofline_us(case.problem, self.target)
        facts: dict[str, Any] = {
            "origin": "measured",
            "weighed_at": dict(case.sizes),
            "rounds": picked.timed.rounds,
            "predicted_us": trial.predicted_us,
            "roofline_us": rounded(least),
            "roofline": roof,
            "registers": trial.registers,
            "shared_bytes": trial.shared_bytes,
            "mma": trial.mma,
        }
        if "block_size" in trial.sizes:
            facts["block_size"] = trial.sizes["block_size"]
        if untuned is None:
            baseline, base = baseline_of(case.problem, self.target), None
        else:
            baseline, base = point_of(case.kind, untuned.trial.point), _half(untuned, 1)
        return Choice(
            case.rows,
            point_of(case.kind, trial.point),
            ran.median_us,
            baseline,
            base.median_us if base else None,
            max(ran.spread_us, base.spread_us if base else 0.0),
            facts,
        )


def point_of(kind: Kind, knobs: Point) -> Point:
    """What a table has of the knobs with which a kernel is launched."""
    names = [*SPACES[kind].knobs, *(("per_sm",) if kind == "attention_decode" else ())]
    return {name: knobs[name] for name in names}


def _kept(one: Choice, base: Entry) -> Choice:
    """A choice that stays, with its origin."""
    return replace(one, facts={"origin": base.origin, **one.facts})


def _in_one_block(entry: Entry) -> Entry:
    """All choices of an entry of decode attention in the default's size of cache blocks, which changes no
    bit; `block_size` of their facts says what they were timed in."""
    size = entry.sets["default"][0].point["block_size"]
    sets = {
        mode: tuple(replace(one, point={**one.point, "block_size": size}) for one in choices)
        for mode, choices in entry.sets.items()
    }
    return replace(entry, sets=sets)
