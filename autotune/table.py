"""Tables of tuned choices: sorted JSON, one file for each target and kernel.

    {"format", "target", "kind", "template", "versions", "machine", "entries": {key: {"origin", "sets"}}}

`sets` holds "default" and "strict", each a list of choices for ascending numbers of rows, the last for any
number (0): there is no number of rows that a table has no choice for, and no key but the exact one is ever
taken for another. Beside each choice stands the baseline that it was compared with. `template` is the hash of
the kernel's template: a table of another one is stale. `machine` is the CPU on which a table was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from pagec.autotune.prediction import Point
from pagec.compiler.errors import ArtifactError

FORMAT: Final = 1
Origin = Literal["predicted", "measured"]
Mode = Literal["default", "strict"]
MODES: Final[tuple[Mode, ...]] = ("default", "strict")
REMEDY: Final = "delete it and tune again (pagec tune)"


@dataclass(frozen=True, slots=True)
class Choice:
    """The point for up to `rows` rows (0: any number) and what is known of it.

    `us` and `baseline_us` are medians where they were measured, `spread_us` the greater of both spreads;
    `baseline_us` is None if the baseline does not fit the target. `facts`: sizes at which it was weighed,
    what bounds it, the roofline, registers and the like, for people.
    """

    rows: int
    point: Point
    us: float
    baseline: Point
    baseline_us: float | None
    spread_us: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "point": dict(self.point),
            "us": self.us,
            "baseline": dict(self.baseline),
            "baseline_us": self.baseline_us,
            "spread_us": self.spread_us,
            "facts": dict(self.facts),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choice:
        points = (data["point"], data["baseline"])
        if not all(isinstance(value, int) for point in points for value in point.values()):
            raise TypeError("knobs are integers")
        return Choice(**data)


@dataclass(frozen=True, slots=True)
class Entry:
    """The choices for one key. `by`: the GPU and the tools that they were measured with; there each choice's
    facts say its own origin, for buckets that were not measured keep what was predicted."""

    origin: Origin
    sets: Mapping[str, tuple[Choice, ...]]
    by: Mapping[str, str] = field(default_factory=dict)

    def choice(self, rows: int, mode: Mode) -> Choice:
        """For so many rows."""
        return next(one for one in self.sets[mode] if one.rows == 0 or rows <= one.rows)

    def to_json(self) -> dict[str, Any]:
        sets = {mode: [one.to_json() for one in choices] for mode, choices in self.sets.items()}
        return {"origin": self.origin, "sets": sets, **({"by": dict(self.by)} if self.by else {})}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Entry:
        sets = {m: tuple(Choice.from_json(one) for one in found) for m, found in data["sets"].items()}
        if set(sets) != set(MODES) or data["origin"] not in ("predicted", "measured"):
            raise ValueError("no entry")
        for mode, choices in sets.items():
            rows = [one.rows for one in choices]
            if not rows or rows[-1] != 0 or rows[:-1] != sorted({*rows[:-1]} - {0}):
                raise ValueError(f"{mode}: choices for {rows} rows do not cover all numbers")
        return Entry(data["origin"], sets, data.get("by", {}))


@dataclass(frozen=True, slots=True)
class Table:
    """All that is known of a kernel on a target."""

    target: str
    kind: str
    template: str
    versions: Mapping[str, str]
    entries: Mapping[str, Entry]
    machine: str = ""

    def text(self) -> str:
        """The file: the same table gives the same bytes."""
        data = {
            "format": FORMAT,
            "target": self.target,
            "kind": self.kind,
            "template": self.template,
            "versions": dict(self.versions),
            "machine": self.machine,
            "entries": {key: entry.to_json() for key, entry in self.entries.items()},
        }
        return json.dumps(data, indent=1, sort_keys=True) + "\n"

    def write(self, root: Path) -> Path:
        """Writes root/<target>/<kind>.json; a reader sees the old file or the new one."""
        path = table_path(root, self.target, self.kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(self.text())
        part.replace(path)
        return path


def table_path(root: Path, target: str, kind: str) -> Path:
    """Where a table lies below a directory of tables."""
    return root / target / f"{kind}.json"


def read_table(path: Path) -> Table:
    """The table in a file; ArtifactError if it is none, or of another format."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ArtifactError(
                f"is a table of format {data['format']}, this pagec reads {FORMAT}",
                place=str(path),
                remedy=REMEDY,
            )
        entries = {key: Entry.from_json(entry) for key, entry in data["entries"].items()}
        names = ("target", "kind", "template", "versions", "machine")
        return Table(entries=entries, **{name: data[name] for name in names})
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error}", place=str(path), remedy="name a table") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"is no table of tuned choices ({error})", place=str(path), remedy=REMEDY
        ) from error


def merge(old: Table | None, new: Table) -> Table:
    """Both tables' entries; of one key the measured one, of two alike the new one.

    ArtifactError if they are of different kernels, templates, versions or machines: their times do not
    compare.
    """
    if old is None:
        return new
    for name in ("target", "kind", "template", "versions", "machine"):
        mine, other = getattr(old, name), getattr(new, name)
        if mine != other:
            raise ArtifactError(
                f"tables of different {name} do not go together: {mine!r} and {other!r}",
                place=f"{new.target}/{new.kind}",
                remedy="tune both with the same pagec on the same machine, or delete the older table",
            )
    entries = dict(old.entries)
    for key, entry in new.entries.items():
        known = entries.get(key)
        if known is None or entry.origin == "measured" or known.origin == "predicted":
            entries[key] = entry
    return replace(old, entries=entries)
