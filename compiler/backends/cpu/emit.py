"""A kernel -> its source. Needs jinja2 alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagec.compiler.program import Kernel
from pagec.compiler.target import CpuTarget
from pagec.templates import render, render_text

VECTOR_FILE: Final = "vector.ll"


def emit_kernel(kernel: Kernel, target: CpuTarget) -> str:
    """The TVMScript of one kernel."""
    names = {"key": kernel.key, "symbol": kernel.symbol, "L": target.lanes}
    if "text" in kernel.params:  # an op of a user's
        return render_text(kernel.params["text"], **names, **kernel.params)
    return render(f"cpu/{kernel.template}.py", **names, **kernel.params)


def emit_vector_library(target: CpuTarget) -> str:
    """The LLVM IR that every kernel imports."""
    return render(
        f"cpu/{VECTOR_FILE}",
        L=target.lanes,
        lane_bits=target.lanes.bit_length() - 1,
        target=target.name,
        bf16_dot=target.bf16_dot,
    )


def emit_all(kernels: tuple[Kernel, ...], target: CpuTarget) -> Mapping[str, str]:
    """File name -> source, for all kernels of a program."""
    sources = {f"{kernel.key}.py": emit_kernel(kernel, target) for kernel in kernels}
    return {VECTOR_FILE: emit_vector_library(target), **sources}
