"""Kernel sources -> one shared library, by TVM and LLVM. The only file that imports TVM."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from pagec import templates
from pagec.compiler.artifact import LIBRARY
from pagec.compiler.errors import CompileError
from pagec.compiler.program import Kernel
from pagec.compiler.target import CpuTarget

Progress = Callable[[str, int, int], None]
STEP_SOURCE: Final = Path(templates.__file__).parent / "cpu" / "step.c"


def load_kernel(path: Path, symbol: str) -> Any:
    """The PrimFunc in a source file (TVMScript must be read from a real file)."""
    spec = importlib.util.spec_from_file_location(f"pagec_kernel_{symbol}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, symbol)


def compile_module(kernels: Sequence[Kernel], sources: Path, target: CpuTarget, progress: Progress) -> Any:
    """A TVM module with all kernels, compiled for the target."""
    import tvm

    functions = {}
    # TVM's parser inspects the whole call stack for every kernel: a thread of its own has a short one.
    with ThreadPoolExecutor(1) as parser:
        for done, kernel in enumerate(kernels):
            progress("parse kernels", done, len(kernels))
            path = sources / f"{kernel.key}.py"
            functions[kernel.symbol] = parser.submit(load_kernel, path, kernel.symbol).result()
    progress("parse kernels", len(kernels), len(kernels))
    progress("compile kernels", 0, 1)
    try:
        functions = {name: on_stack(function) for name, function in functions.items()}
        module = tvm.IRModule(functions)
        return tvm.tirx.build(module, tvm.target.Target(dict(target.llvm)), pipeline="tirx")
    finally:
        progress("compile kernels", 1, 1)


def on_stack(function: Any) -> Any:
    """The function with its scratch arrays and scalars on the stack.

    TVM would ask the runtime for each at every call, and LLVM could not keep them in registers.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    def mark(node: Any) -> Any:
        yes = tirx.IntImm("bool", 1)
        return tirx.AllocBuffer(node.buffer, {**node.annotations, "disable_lower_builtin": yes})

    return function.with_body(structural_map(function.body, (tirx.AllocBuffer, mark)))


def build_library(
    kernels: Sequence[Kernel], sources: Path, target: CpuTarget, output: Path, progress: Progress
) -> None:
    """Writes kernels.so, which needs nothing but the C library."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise CompileError(
            "linking the kernels needs a C compiler, and there is none on PATH",
            remedy="install one that is called cc or gcc (Debian: apt install gcc)",
        )
    module = compile_module(kernels, sources, target, progress)
    module.export_library(str(output / LIBRARY), fcompile=link_library)


def link_library(output: str, objects: list[str], **_options: object) -> None:
    """Kernels' objects (or C files) and step.c, which runs lists of them, into a library. What neither
    defines is an error."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    flags = ["-shared", "-fPIC", "-O2", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-pthread", "-Wl,-z,defs"]
    command = [compiler, *flags, "-o", output, *objects, str(STEP_SOURCE), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompileError(f"the C compiler failed: {result.stderr.strip()}", place=compiler)
