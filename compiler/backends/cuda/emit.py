"""A kernel of the NVIDIA backend, and its source. Needs jinja2 alone."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pagec.compiler.backends.cuda.build import CompileRequest
from pagec.compiler.launch import Counts, GridRule
from pagec.templates import render

# Element types as Triton's language has them, and as its signatures have them. f16 is for tests: the
# interpreter cannot do bf16.
ELEMENTS: Final[Mapping[str, str]] = {
    "f32": "tl.float32",
    "bf16": "tl.bfloat16",
    "f16": "tl.float16",
    "i32": "tl.int32",
}
POINTERS: Final[Mapping[str, str]] = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "i32": "*i32"}


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A template of templates/cuda with its parameters; `arrays` are (name, element type), in order.

    Behind them every kernel takes `count`, a pointer to how many `rows` there are (a name of launch.Counts).
    `warps` and `stages` are knobs that do not show in the source; nor does `rows`, of which one kernel may
    serve several.
    """

    key: str
    template: str
    params: Mapping[str, Any]
    arrays: tuple[tuple[str, str], ...]
    rows: Counts
    grid: GridRule
    warps: int
    stages: int

    def source(self) -> str:
        """The Triton source; the function is called as the key."""
        text = render(
            f"cuda/{self.template}.py",
            key=self.key,
            symbol=self.key,
            arrays=self.arrays,
            **self.params,
        )
        # Templates leave blank lines where parts of them are empty.
        return re.sub(r"\n\n+(?= )", "\n", text).rstrip() + "\n"

    def write(self, directory: Path) -> CompileRequest:
        """The source in a file, and what is to be compiled."""
        file = directory / f"{self.key}.py"
        file.write_text(self.source())
        arguments = (*self.arrays, ("count", "i32"))
        return CompileRequest(
            key=self.key,
            file=file,
            symbol=self.key,
            signature=tuple((name, POINTERS[element]) for name, element in arguments),
            divisible=tuple(name for name, _ in self.arrays),
            grid=self.grid,
            warps=self.warps,
            stages=self.stages,
        )


def make_kernel(
    template: str,
    words: str,
    params: Mapping[str, Any],
    arrays: tuple[tuple[str, str], ...],
    rows: Counts,
    grid: GridRule,
    warps: int,
    stages: int = 1,
) -> CudaKernel:
    """A kernel; its key is readable, and different for different parameters."""
    text = json.dumps([params, arrays, asdict(grid), warps, stages], sort_keys=True)
    key = f"{template}_{words}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return CudaKernel(key, template, params, arrays, rows, grid, warps, stages)
