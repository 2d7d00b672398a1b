"""Runs emitted Triton kernels on numpy arrays, in Triton's interpreter, without a GPU.

The interpreter is chosen when Triton is imported, so it lives in a process of its own: this one may compile.
It cannot do bf16 (3.9 computes with the bits); float16 takes its place.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pagec.compiler.backends.cuda.emit import CudaKernel

KINDS: Mapping[str, Any] = {"f32": np.float32, "f16": np.float16, "i32": np.int32}


def interpret(kernel: CudaKernel, arrays: Mapping[str, Any], counts: Mapping[str, int], sms: int = 3) -> None:
    """Launches the kernel as a GPU of `sms` multiprocessors would; `arrays` are written in place."""
    assert [name for name, _ in kernel.arrays] == list(arrays)
    for name, element in kernel.arrays:
        assert arrays[name].dtype == KINDS[element], f"{name} is {arrays[name].dtype}, not {element}"
    count = counts[kernel.rows.name]
    programs = kernel.grid.programs(count, sms)
    # A bucket has room for more than there is: programs that find nothing to do leave everything as it is.
    programs += (kernel.grid.columns + kernel.grid.extra) * 2
    given = [*arrays.values(), np.array([count], np.int32)]
    results = interpreter_process().submit(_run, kernel.key, kernel.source(), given, programs).result()
    for array, result in zip(arrays.values(), results, strict=False):
        array[...] = result


@functools.cache
def interpreter_process() -> ProcessPoolExecutor:
    """A process in which Triton interprets; the same for all tests."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start)
    atexit.register(pool.shutdown)
    return pool


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _run(symbol: str, source: str, arrays: list[Any], programs: int) -> list[Any]:
    import torch

    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    _function(symbol, source)[(programs,)](*tensors)
    return [tensor.numpy() for tensor in tensors]


@functools.cache
def _function(symbol: str, source: str) -> Any:
    from pagec.compiler.backends.cuda.build import load_function

    directory = tempfile.mkdtemp()
    file = Path(directory) / f"{symbol}.py"
    file.write_text(source)
    return load_function(file, symbol)
