"""What the compiler said of every shipped kernel: tests/goldens/cuda/compiled.json, a line for each.

    {"sm_90/<key>": {"sha256", "registers", "stack_bytes", "shared_bytes", "mma", "copies_ahead"}}

`sha256` is of all that decides the kernel's code (source, warps, stages, architecture, Triton's version): a
record of another one is stale. Registers that are spilled lie on the stack, so no stack means no spill.
`copies_ahead`: tiles are loaded by 16 bytes at a time, while others are computed on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pagec.compiler.backends.cuda.build import Cubin, compile_all, digest
from pagec.compiler.backends.cuda.knobs import GROUP_ROWS, GROUP_WARPS
from pagec.compiler.backends.cuda.resources import Resources, check
from pagec.compiler.errors import CompileError
from support.cuda_shipped import Shipped

MATRIX_TEMPLATES: Final = ("attention_prefill", "attention_decode", "linear", "grouped_linear")
PATH: Final = Path(__file__).parent.parent / "goldens" / "cuda" / "compiled.json"


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a compiled kernel."""

    sha256: str
    resources: Resources
    copies_ahead: bool

    def to_json(self) -> dict[str, object]:
        return {"sha256": self.sha256, **asdict(self.resources), "copies_ahead": self.copies_ahead}

    @staticmethod
    def from_json(data: Mapping[str, object]) -> Record:
        rest = dict(data)
        sha256, ahead = rest.pop("sha256"), rest.pop("copies_ahead")
        return Record(str(sha256), Resources(**rest), bool(ahead))  # type: ignore[arg-type]


Records = dict[str, Record]


def read_records() -> Records:
    """Those that are stored."""
    if not PATH.is_file():
        return {}
    return {name: Record.from_json(data) for name, data in json.loads(PATH.read_text()).items()}


def write_records(records: Mapping[str, Record]) -> None:
    """Sorted, so that the same kernels give the same file."""
    lines = (f"{json.dumps(name)}: {json.dumps(records[name].to_json())}" for name in sorted(records))
    PATH.parent.mkdir(parents=True, exist_ok=True)
    part = PATH.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(PATH)


def hashes(shipped: Mapping[str, Shipped]) -> dict[str, str]:
    """By name; nothing is compiled."""
    with tempfile.TemporaryDirectory() as directory:
        return {name: digest(one.kernel.write(Path(directory)), one.target) for name, one in shipped.items()}


def compile_records(shipped: Mapping[str, Shipped], cache: Path | None = None) -> Records:
    """Compiles them, clean or not, where the cache has none of them."""
    found: Records = {}
    with tempfile.TemporaryDirectory() as directory:
        for target in dict.fromkeys(one.target for one in shipped.values()):
            mine = {name: one for name, one in shipped.items() if one.target == target}
            requests = {
                name: replace(one.kernel.write(Path(directory)), checked=False) for name, one in mine.items()
            }
            cubins = compile_all(list(requests.values()), target, cache=cache)
            found |= {
                name: _record(digest(request, target), cubins[request.key])
                for name, request in requests.items()
            }
    return found


def _record(sha256: str, cubin: Cubin) -> Record:
    return Record(sha256, cubin.resources, "cp.async.cg.shared.global" in cubin.ptx)


def faults(shipped: Mapping[str, Shipped], records: Mapping[str, Record]) -> list[str]:
    """What is wrong with which: a stack, a multiprocessor that cannot hold it, matrix products without the
    chip's own instructions or whose tiles are not loaded ahead."""
    return [f"{name}: {fault}" for name, one in shipped.items() if (fault := _fault(one, records[name]))]


def _fault(one: Shipped, record: Record) -> str:
    kernel, mma = one.kernel, record.resources.mma
    try:
        check(record.resources, kernel.warps, one.target, one.name)
    except CompileError as error:
        return error.message
    if kernel.template not in MATRIX_TEMPLATES:
        return ""
    groups = one.target.sm >= 90 and kernel.params["BM"] >= GROUP_ROWS and kernel.warps >= GROUP_WARPS
    if not mma or (groups and mma != "HGMMA"):
        return f"its products are by {mma or 'no matrix instruction'}"
    return "" if record.copies_ahead else "its tiles are not loaded ahead"
