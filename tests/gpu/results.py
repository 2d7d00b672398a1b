"""Results, kept line by line: a run that was interrupted goes on where it was.

<name>.jsonl    a head that says what ran where, then a line for each row or check
<name>.md       the same for people
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

Line = dict[str, Any]
# Whose text decides what a result says.
SOURCES: Final = ("compiler", "runtime", "autotune", "tests/gpu")


def source_hash(root: Path, artifacts: Path) -> str:
    """Of pagec's own code and of the artifacts' manifests."""
    found = sha256()
    files = [file for name in SOURCES for file in (root / name).rglob("*.py")]
    for file in sorted(files) + sorted(artifacts.glob("*/manifest.json")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]


class Results:
    """A file of results. Lines of another `head` are dropped, and so is one that was cut off."""

    def __init__(self, path: Path, head: Line) -> None:
        self.path, self.head = path, head
        self.lines: dict[str, Line] = {}
        for line in _read(path, head):
            self.lines[line["name"]] = line
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *self.lines.values())))

    def add(self, line: Line) -> None:
        """Keeps a line, whole and at once."""
        self.lines[line["name"]] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pending(self, names: Iterable[str]) -> list[str]:
        """Those without a result: first those never tried, then those that failed."""
        left = [name for name in names if "error" in self.lines.get(name, {"error": ""})]
        return sorted(left, key=lambda name: name in self.lines)

    def write_markdown(self, title: str, columns: Mapping[str, Callable[[Line], str]]) -> Path:
        """A table of all lines, by columns, beside the file."""
        rows = [[text(line) for text in columns.values()] for line in self.lines.values()]
        facts = ", ".join(f"{name} {value}" for name, value in self.head.items())
        path = self.path.with_suffix(".md")
        path.write_text(f"# {title}\n\n{facts}\n\n{table(list(columns), rows)}")
        return path


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _read(path: Path, head: Line) -> list[Line]:
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]
    found = [json.loads(line) for line in lines]
    return found[1:] if found and found[0] == head else []
