"""Which tuned choice a kernel takes: the user's own tables first, then those that pagec ships.

A table whose template has changed since, or that was measured on another CPU or with other tools, is not
taken; `notices` says so once. Where there is no entry the kernel takes its baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pagec import configs
from pagec.autotune.fingerprint import Backend, machine_name, template_hash
from pagec.autotune.prediction import Point
from pagec.autotune.table import Entry, Mode, Table, read_table, table_path
from pagec.compiler.errors import ArtifactError

DIRECTORY: Final = "tuned"


def shipped_root() -> Path:
    """The tables that come with pagec."""
    return configs.root() / DIRECTORY


class Database:
    """Tables of one target. `cache`: the directory that holds the user's ("tuned" below it); `versions`: of
    the tools at hand, by name; a table that names another version of one is not taken."""

    def __init__(
        self,
        target: str,
        backend: Backend,
        *,
        cache: Path | None = None,
        shipped: Path | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.target, self.backend = target, backend
        self._roots = [cache / DIRECTORY] if cache else []
        self._roots.append(shipped or shipped_root())
        self._versions = dict(versions or {})
        self._tables: dict[str, list[Table]] = {}
        self.notices: list[str] = []

    def find(self, kind: str, key: str) -> Entry | None:
        """The entry of exactly this key, measured ones first; None if there is none."""
        found = [table.entries[key] for table in self.tables(kind) if key in table.entries]
        measured = [entry for entry in found if entry.origin == "measured"]
        return next(iter(measured or found), None)

    def keys(self, kind: str) -> list[str]:
        """All keys that there is an entry of, sorted."""
        return sorted({key for table in self.tables(kind) for key in table.entries})

    def choices(self, kinds: Iterable[str], mode: Mode) -> dict[str, tuple[tuple[int, Point], ...]]:
        """What compiling takes: by "kind/key" points for ascending numbers of rows, the last for any (0)."""
        found = {}
        for kind in kinds:
            for key in self.keys(kind):
                entry = self.find(kind, key)
                assert entry is not None
                found[f"{kind}/{key}"] = tuple((one.rows, one.point) for one in entry.sets[mode])
        return found

    def tables(self, kind: str) -> list[Table]:
        """The tables of a kernel that may be used, the user's first."""
        if kind not in self._tables:
            paths = [table_path(root, self.target, kind) for root in self._roots]
            self._tables[kind] = [table for path in paths if (table := self._usable(path, kind))]
        return self._tables[kind]

    def _usable(self, path: Path, kind: str) -> Table | None:
        if not path.is_file():
            return None
        try:
            table = read_table(path)
            reason = self._why_not(table, kind)
        except ArtifactError as error:
            reason = error.message
        if reason:
            self.notices.append(f"{path}: not used: {reason}")
            return None
        return table

    def _why_not(self, table: Table, kind: str) -> str:
        if (table.target, table.kind) != (self.target, kind):
            return f"it is of {table.kind} on {table.target}"
        if table.template != template_hash(self.backend, kind):
            return f"the template of {kind} has changed since; tune again"
        if table.machine and table.machine != machine_name():
            return f"it was measured on another CPU ({table.machine}); tune again on this one"
        for tool, version in table.versions.items():
            mine = self._versions.get(tool, version)
            if mine != version:
                return f"it was measured with {tool} {version}, this is {mine}; tune again"
        return ""
