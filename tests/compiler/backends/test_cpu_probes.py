"""The probes: what they compute is right, so what they are timed for is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.goldens import Golden

from pagec.compiler.backends.cpu.build import build_library
from pagec.compiler.backends.cpu.emit import emit_all, emit_kernel
from pagec.compiler.backends.cpu.probes import probe_kernels
from pagec.compiler.backends.targets import PREFERENCE, load_target
from pagec.compiler.dims import DType
from pagec.compiler.packing import to_bf16
from pagec.compiler.probes import (
    PROBE_OPERAND_BYTES,
    PROBE_PEAK,
    PROBE_PEAK_FLOPS,
    PROBE_READ,
    PROBE_READ_BYTES,
    PROBE_SCRATCH_BYTES,
)
from pagec.compiler.target import host
from pagec.runtime.device import KernelCall
from pagec.runtime.device.cpu import CpuDevice

WORKERS = 2


@pytest.fixture(
    scope="module", params=[("cpu", "bf16"), ("cpu-avx2", "bf16"), ("cpu-avx2", "f32")], ids="-".join
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CpuDevice, Any]:
    """A device with the two probes, and the parameters of probe_peak."""
    name, dtype = request.param
    target = load_target(name)
    missing = set(target.requires) - host().flags
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    path = tmp_path_factory.mktemp("probes")
    kernels = probe_kernels(target, dtype)
    for file, text in emit_all(kernels, target).items():
        (path / file).write_text(text)
    build_library(kernels, path, target, path, lambda *_: None)
    return CpuDevice(path, WORKERS), {**kernels[1].params, "L": target.lanes}


def run(device: CpuDevice, symbol: str, x: Any, out: Any, rows: int) -> Any:
    memory = [device.allocate(a.nbytes) for a in (x, out)]
    for piece, array in zip(memory, (x, out), strict=True):
        device.upload(piece, array)
    tensors = (device.tensor(memory[0], "int32"), device.tensor(memory[1], out.dtype.name))
    device.prepare([KernelCall(symbol, 0, ((0, symbol),), tensors)]).run(rows)
    return device.download(memory[1], out.dtype).reshape(WORKERS, -1)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_every_word_is_read_once(built: tuple[CpuDevice, Any], rows: int) -> None:
    x = np.random.default_rng(rows).integers(-1000, 1000, rows * PROBE_READ_BYTES // 4, np.int32)
    out = run(built[0], PROBE_READ, x, np.zeros(WORKERS * PROBE_SCRATCH_BYTES // 4, np.int32), rows)
    assert out.sum() == x.sum()


@pytest.mark.parametrize("rows", [1, 3])
def test_every_dot_product_is_done(built: tuple[CpuDevice, Any], rows: int) -> None:
    device, params = built
    lanes, rounds, sums = params["L"], params["rounds"], params["sums"]
    unit = 2 if params["dtype"] == "bf16" else 1
    values = np.ones((PROBE_OPERAND_BYTES // 4, unit), np.float32)
    x = (to_bf16(values) if unit == 2 else values).view(np.int32)
    out = run(device, PROBE_PEAK, x, np.zeros(WORKERS * PROBE_SCRATCH_BYTES // 4, np.float32), rows)
    assert (out[:, : sums * lanes].sum(axis=0) == rows * rounds * unit).all()
    assert out.sum() * 2 == rows * PROBE_PEAK_FLOPS


@pytest.mark.parametrize("target", [*PREFERENCE, "cpu-neon"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_costs_per_row_are_as_promised(target: str, dtype: DType) -> None:
    read, peak = probe_kernels(load_target(target), dtype)
    assert (read.key, read.bytes_per_row) == (PROBE_READ, PROBE_READ_BYTES)
    assert (peak.key, peak.flops_per_row) == (PROBE_PEAK, PROBE_PEAK_FLOPS)


@pytest.mark.parametrize(("target", "dtype"), [("cpu-avx512-bf16", "bf16"), ("cpu-avx2", "f32")])
def test_the_probes_are_golden(golden: Golden, target: str, dtype: DType) -> None:
    for kernel in probe_kernels(load_target(target), dtype):
        golden.check(f"kernels/{target}/{kernel.key}.py.txt", emit_kernel(kernel, load_target(target)))
