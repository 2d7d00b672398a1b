"""The tables that pagec ships for GPUs, predicted: `python -m pagec.autotune.shipped` writes them anew.

Entries that were measured (`pagec tune merge --into`) stay while their template is the same.

The same cost model gives the same bytes, which a test checks. Choices are weighed at the sizes of entries.py;
what a program has is looked up by shape alone. With `--compile` every choice is compiled, and
what spills or does not fit is put on record (RECORDS) and is no choice any more, also without the compiler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from pagec.autotune.database import shipped_root
from pagec.autotune.entries import (
    Compiler,
    attention_entries,
    decode_buckets,
    linear_buckets,
    linear_entry,
    prefill_buckets,
)
from pagec.autotune.fingerprint import MODEL_VERSION, template_hash
from pagec.autotune.occupancy import why_not
from pagec.autotune.prediction import Point
from pagec.autotune.problem import Kind, Problem
from pagec.autotune.table import Entry, Table, read_table, table_path
from pagec.compiler.backends.cuda.resources import Resources
from pagec.compiler.backends.targets import GPUS, load_cuda_target
from pagec.compiler.target import CudaTarget

RECORDS: Final = "spills.json"
ATTENTION: Final = ("attention_prefill", "attention_decode")
HEAD_DIMS: Final = (64, 128, 256)
GROUPS: Final = (1, 2, 4, 8)
PREFILL_HEADS: Final = 32
DECODE_KV_HEADS: Final = 8
# (N, K) as pagec merges them: q, k and v; output; gate and up; down; logits.
LINEARS: Final[Mapping[str, tuple[tuple[int, int], ...]]] = {
    "Llama 1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "Llama 8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "an eighth of Llama 70B": ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192)),
}


class Recorded:
    """A compiler that knows only which points it was told not to compile well."""

    def __init__(self, records: Sequence[Mapping[str, Any]], target: CudaTarget) -> None:
        self._known = [record for record in records if record["sm"] == target.sm]

    def resources(self, asked: Sequence[tuple[Problem, Point]]) -> list[tuple[Problem, Point, Resources]]:
        """Those of the points asked for that are on record, once."""
        given, left = [], []
        for record in self._known:
            found = next((one for one in asked if _is(record, *one)), None)
            if found is None:
                left.append(record)
            else:
                given.append((*found, Resources(**record["resources"])))
        self._known = left
        return given


def _is(record: Mapping[str, Any], problem: Problem, point: Point) -> bool:
    return (record["kind"], record["key"], record["point"]) == (problem.kind, problem.key, point)


class Recording:
    """Compiles what is asked, and keeps `records` of what the target cannot run or what spills."""

    def __init__(self, compiler: Compiler, target: CudaTarget) -> None:
        self._compiler, self._target = compiler, target
        self.records: list[dict[str, Any]] = []

    def resources(self, asked: Sequence[tuple[Problem, Point]]) -> list[tuple[Problem, Point, Resources]]:
        """What they take; estimates stand where the compiler has nothing against them."""
        bad = [
            (problem, point, held)
            for problem, point, held in self._compiler.resources(asked)
            if why_not(held, point["warps"], self._target)
        ]
        self.records += [
            {
                "sm": self._target.sm,
                "kind": problem.kind,
                "key": problem.key,
                "point": dict(point),
                "resources": asdict(held),
            }
            for problem, point, held in bad
        ]
        return bad


def read_records(root: Path) -> list[dict[str, Any]]:
    """The points that are known not to compile well."""
    path = root / RECORDS
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return found


def tables(name: str, compiler: Compiler) -> list[Table]:
    """The tables of a GPU."""
    target = load_cuda_target(name)
    prefills, decodes, linears = dict[str, Entry](), dict[str, Entry](), dict[str, Entry]()
    for head_dim in HEAD_DIMS:
        for group in GROUPS:
            first = prefill_buckets(PREFILL_HEADS, PREFILL_HEADS // group, head_dim)
            second = decode_buckets(DECODE_KV_HEADS * group, DECODE_KV_HEADS, head_dim)
            key = first[0][1].key
            prefills[key], decodes[key] = attention_entries(first, second, target, compiler)
    for n, k in sorted({shape for shapes in LINEARS.values() for shape in shapes}):
        buckets = linear_buckets(n, k)
        linears[buckets[0][1].key] = linear_entry(buckets, target, compiler)
    kinds: tuple[tuple[Kind, dict[str, Entry]], ...] = (
        ("attention_prefill", prefills),
        ("attention_decode", decodes),
        ("linear", linears),
    )
    return [gpu_table(name, kind, entries) for kind, entries in kinds]


def gpu_table(target: str, kind: Kind, entries: Mapping[str, Entry]) -> Table:
    """A table of the cost model's choices, and of measured ones that stand beside them."""
    versions = {"cost model": str(MODEL_VERSION)}
    return Table(target, kind, template_hash("cuda", kind), versions, entries)


def write_all(root: Path, names: Iterable[str] = GPUS) -> list[Path]:
    """Writes the tables of all GPUs below a directory, by the cost model and what is on record; measured
    entries of the shipped ones stay."""
    records = read_records(shipped_root())
    return [
        table.write(root)
        for name in names
        for table in keep_measured(tables(name, Recorded(records, load_cuda_target(name))), shipped_root())
    ]


def keep_measured(found: Sequence[Table], root: Path) -> list[Table]:
    """Tables with the measured entries of those below `root`, as far as templates are the same. Prefill and
    decode go together: strict programs have the same tiles of keys in both."""
    old = {table.kind: known for table in found if (known := _holds(table, root)) is not None}
    kept = []
    for table in found:
        together = ATTENTION if table.kind in ATTENTION else (table.kind,)
        entries = dict(table.entries)
        if all(kind in old for kind in together):
            there = old[table.kind].entries
            entries |= {key: entry for key, entry in there.items() if entry.origin == "measured"}
        kept.append(replace(table, entries=entries))
    return kept


def _holds(table: Table, root: Path) -> Table | None:
    """The table in place of which another is written, if it is of the same template."""
    path = table_path(root, table.target, table.kind)
    known = read_table(path) if path.is_file() else None
    return known if known is not None and known.template == table.template else None


def compile_all_choices(root: Path, cache: Path, names: Iterable[str] = GPUS) -> None:
    """Compiles every choice of every GPU, and writes anew what is on record."""
    from pagec.autotune.compiled import PointCompiler

    records: list[dict[str, Any]] = []
    for name in names:
        target = load_cuda_target(name)
        compiler = Recording(PointCompiler(target, cache, 0, lambda *_: None), target)
        tables(name, compiler)
        records += [record for record in compiler.records if record not in records]
    root.mkdir(parents=True, exist_ok=True)
    (root / RECORDS).write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if "--compile" in sys.argv[1:]:
        from pagec.compiler.driver import cache_root

        compile_all_choices(shipped_root(), cache_root() / "cubins")
    write_all(shipped_root())
