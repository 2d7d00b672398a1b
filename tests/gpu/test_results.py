"""Results that are kept line by line, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

from gpu import quick
from gpu.results import Line, Results, source_hash, table

HEAD: Line = {"gpu": "Fake 9000", "sources": "abc"}


def test_results_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results" / "bench.jsonl"
    first = Results(path, HEAD)
    first.add({"name": "a", "ours": 1})
    first.add({"name": "b", "error": "no"})
    with path.open("a") as file:
        file.write('{"name": "c", "our')  # it was interrupted here
    second = Results(path, HEAD)
    assert second.pending(["d", "b", "a", "c"]) == ["d", "c", "b"]
    second.add({"name": "b", "ours": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        HEAD,
        {"name": "a", "ours": 1},
        {"name": "b", "error": "no"},
        {"name": "b", "ours": 2},
    ]
    assert Results(path, HEAD).lines["b"] == {"name": "b", "ours": 2}


def test_results_of_other_sources_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    Results(path, HEAD).add({"name": "a", "ours": 1})
    assert Results(path, HEAD | {"sources": "def"}).pending(["a"]) == ["a"]


def test_sources_and_artifacts_decide_the_hash(tmp_path: Path) -> None:
    root, artifacts = tmp_path / "root", tmp_path / "artifacts"
    (root / "runtime").mkdir(parents=True)
    (artifacts / "1b").mkdir(parents=True)
    seen = set()
    for file, text in (
        (root / "runtime" / "engine.py", "1"),
        (root / "runtime" / "engine.py", "2"),
        (artifacts / "1b" / "manifest.json", "{}"),
    ):
        file.write_text(text)
        seen.add(source_hash(root, artifacts))
    assert len(seen) == 3


def test_a_table_in_markdown(tmp_path: Path) -> None:
    results = Results(tmp_path / "quick.jsonl", HEAD)
    results.add({"name": "a|b", "model": "1b", "ok": False, "detail": "two\nlines", "seconds": 1.5})
    text = results.write_markdown("Checks", quick.COLUMNS).read_text()
    assert text.startswith("# Checks\n\ngpu Fake 9000, sources abc\n\n| check | model |")
    assert "| a/b | 1b | **failed** | 1.5 | two lines |\n" in text
    assert table(["x"], [["1"]]) == "| x |\n| --- |\n| 1 |\n"
