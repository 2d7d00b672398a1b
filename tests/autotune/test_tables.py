"""Tables and the database: round trips, refusals, no surprises by nearest keys or stale entries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagec.autotune.database import Database
from pagec.autotune.fingerprint import machine_name, template_hash
from pagec.autotune.table import Choice, Entry, Table, merge, read_table, table_path
from pagec.compiler.errors import ArtifactError

POINTS = st.dictionaries(st.sampled_from(["BM", "BN", "warps"]), st.integers(0, 512), min_size=1)


@st.composite
def entries(draw: Any) -> Entry:
    limits = sorted(draw(st.sets(st.integers(1, 4096), max_size=4)))
    sets = {
        mode: tuple(
            Choice(
                rows,
                draw(POINTS),
                draw(st.floats(0.1, 1e6)),
                draw(POINTS),
                draw(st.none() | st.floats(0.1, 1e6)),
            )
            for rows in (*limits, 0)
        )
        for mode in ("default", "strict")
    }
    return Entry(draw(st.sampled_from(["predicted", "measured"])), sets)


def table(entries: dict[str, Entry] | None = None, **changes: Any) -> Table:
    made = Table("h100", "linear", template_hash("cuda", "linear"), {"cost model": "1"}, entries or {})
    return replace(made, **changes)


def entry(us: float, origin: Any = "predicted", rows: tuple[int, ...] = (0,)) -> Entry:
    choices = tuple(Choice(n, {"BM": n or 128}, us, {"BM": 64}, 2 * us) for n in rows)
    return Entry(origin, {"default": choices, "strict": choices})


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text("nk_0123456789", min_size=1), entries(), max_size=3))
def test_a_table_comes_back_as_it_was_written(tmp_path_factory: Any, found: dict[str, Entry]) -> None:
    root = tmp_path_factory.mktemp("tuned")
    path = table(found).write(root)
    assert path == table_path(root, "h100", "linear")
    back = read_table(path)
    assert back.text() == table(found).text() == path.read_text()
    assert back.entries.keys() == found.keys()


@given(entries(), st.integers(1, 10000))
def test_every_number_of_rows_has_the_choice_of_its_bucket(one: Entry, rows: int) -> None:
    limits = [choice.rows for choice in one.sets["default"]]
    expected = next((limit for limit in limits[:-1] if rows <= limit), 0)
    assert one.choice(rows, "default").rows == expected


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([16, 64], "do not cover"),
        ([64, 16, 0], "do not cover"),
        ([], "do not cover"),
        ([0, 16, 0], "do not cover"),
    ],
)
def test_choices_that_leave_rows_out_are_refused(tmp_path: Path, rows: list[int], said: str) -> None:
    data = json.loads(table({"n1_k1": entry(1.0)}).text())
    choice = data["entries"]["n1_k1"]["sets"]["default"][0]
    data["entries"]["n1_k1"]["sets"]["default"] = [{**choice, "rows": n} for n in rows]
    path = tmp_path / "linear.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=said):
        read_table(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "{",
        lambda _: "[]",
        lambda data: json.dumps({**data, "entries": {"n1_k1": {}}}),
        lambda data: json.dumps({**data, "format": 99}),
        lambda data: json.dumps({key: value for key, value in data.items() if key != "template"}),
        lambda data: json.dumps(data).replace('"BM": 128', '"BM": "128"'),
    ],
)
def test_damage_is_refused_with_a_remedy(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "linear.json"
    path.write_text(damage(json.loads(table({"n1_k1": entry(1.0)}).text())))
    with pytest.raises(ArtifactError) as error:
        read_table(path)
    assert "pagec tune" in error.value.remedy


def database(tmp_path: Path, shipped: Table, user: Table | None = None, **options: Any) -> Database:
    shipped.write(tmp_path / "shipped")
    if user is not None:
        user.write(tmp_path / "cache" / "tuned")
    return Database("h100", "cuda", cache=tmp_path / "cache", shipped=tmp_path / "shipped", **options)


def test_only_the_exact_key_is_found(tmp_path: Path) -> None:
    found = database(tmp_path, table({"n4096_k4096": entry(1.0)}))
    assert found.find("linear", "n4096_k4096") == entry(1.0)
    assert found.find("linear", "n4096_k4095") is None
    assert found.find("attention_decode", "n4096_k4096") is None
    assert found.notices == []


def test_choices_are_plain_data(tmp_path: Path) -> None:
    found = database(tmp_path, table({"n1_k1": entry(1.0, rows=(16, 0)), "n2_k1": entry(1.0)}))
    assert found.choices(["linear", "attention_decode"], "strict") == {
        "linear/n1_k1": ((16, {"BM": 16}), (0, {"BM": 128})),
        "linear/n2_k1": ((0, {"BM": 128}),),
    }


def test_the_users_table_goes_first_and_a_measurement_before_all(tmp_path: Path) -> None:
    ours = {"a": entry(1.0), "b": entry(1.0, "measured"), "c": entry(1.0)}
    users = {"a": entry(2.0), "b": entry(2.0)}
    found = database(tmp_path, table(ours), table(users))
    times = {}
    for key in found.keys("linear"):
        one = found.find("linear", key)
        assert one is not None
        times[key] = one.choice(1, "default").us
    assert times == {"a": 2.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "0" * 16}, "has changed since"),
        ({"machine": "another CPU"}, "measured on another CPU"),
        ({"versions": {"triton": "3.6.0"}}, "triton 3.6.0, this is 3.9.0"),
    ],
)
def test_a_stale_table_is_not_taken_and_says_so(tmp_path: Path, changes: Any, said: str) -> None:
    stale = table({"n1_k1": entry(9.0, "measured")}, **changes)
    found = database(tmp_path, table({"n1_k1": entry(1.0)}), stale, versions={"triton": "3.9.0"})
    one = found.find("linear", "n1_k1")
    assert one == entry(1.0)
    found.find("linear", "n1_k1")
    (notice,) = found.notices
    assert said in notice
    assert str(tmp_path / "cache") in notice


def test_a_damaged_table_is_not_taken_and_says_so(tmp_path: Path) -> None:
    found = database(tmp_path, table({"n1_k1": entry(1.0)}))
    path = table_path(tmp_path / "cache" / "tuned", "h100", "linear")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert found.find("linear", "n1_k1") == entry(1.0)
    assert len(found.notices) == 1


def test_a_table_of_this_machine_is_taken(tmp_path: Path) -> None:
    mine = table({"n1_k1": entry(2.0, "measured")}, machine=machine_name())
    found = database(tmp_path, table(), mine)
    assert found.find("linear", "n1_k1") == entry(2.0, "measured")


def test_merging_keeps_measurements() -> None:
    old = table({"a": entry(1.0, "measured"), "b": entry(1.0), "c": entry(1.0, "measured")})
    new = table({"a": entry(2.0), "b": entry(2.0), "c": entry(2.0, "measured"), "d": entry(2.0)})
    merged = merge(old, new)
    times = {key: one.choice(1, "default").us for key, one in merged.entries.items()}
    assert times == {"a": 1.0, "b": 2.0, "c": 2.0, "d": 2.0}
    assert merge(None, new) == new
    assert merge(merged, merged) == merged


@pytest.mark.parametrize(
    "changes",
    [{"target": "a100"}, {"kind": "x"}, {"template": "x"}, {"versions": {}}, {"machine": "x"}],
)
def test_what_does_not_compare_is_not_merged(changes: Any) -> None:
    with pytest.raises(ArtifactError, match="do not go together"):
        merge(table(), table(**changes))


def test_a_templates_hash_covers_what_it_imports() -> None:
    kinds = ["attention_decode", "attention_prefill", "linear"]
    assert len({template_hash("cuda", kind) for kind in kinds}) == len(kinds)
    assert template_hash("cpu", "linear") == template_hash("cpu", "linear")
