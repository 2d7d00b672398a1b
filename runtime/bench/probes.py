"""What measures a device's limits: on a CPU the artifact's own kernels (see compiler/probes.py) with all
threads, on a GPU a copy within its memory and torch's product of matrices."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from pagec.compiler.probes import (
    PROBE_OPERAND_BYTES,
    PROBE_PEAK,
    PROBE_PEAK_FLOPS,
    PROBE_READ,
    PROBE_READ_BYTES,
    PROBE_SCRATCH_BYTES,
)
from pagec.runtime.bench import limits
from pagec.runtime.bench.limits import CACHES_BYTES, PASSES, Limits, Probes, check_room
from pagec.runtime.device import KernelCall, Prepared, TensorDevice
from pagec.runtime.engine import Engine

if TYPE_CHECKING:
    from pagec.runtime.device.cuda.device import CudaDevice

# About ten milliseconds on a core of today.
PEAK_ROWS_PER_WORKER: Final = 2048


def open_probes(engine: Engine) -> Probes:
    """Those of an engine's device."""
    from pagec.runtime.device.cpu import CpuDevice

    if isinstance(engine.device, CpuDevice):
        return CpuProbes(engine.device, limits.READ_BYTES)
    from pagec.runtime.device.cuda.device import CudaDevice

    assert isinstance(engine.device, CudaDevice)
    return GpuProbes(engine.device, limits.READ_BYTES)


class CpuProbes:
    """As limits.Probes."""

    def __init__(self, device: TensorDevice, read_bytes: int) -> None:
        check_room(device, read_bytes)
        area = device.allocate(read_bytes)
        device.fill_nan(area)  # untouched memory is one page of zeros
        operands = device.allocate(PROBE_OPERAND_BYTES)
        # As floats, small numbers, whatever the width: 0x3F803F80 is 1.0 twice in bf16, 1.002 in float32.
        device.upload(operands, np.full(PROBE_OPERAND_BYTES // 4, 0x3F803F80, np.int32))
        scratch = device.allocate(device.num_workers * PROBE_SCRATCH_BYTES)
        self._read = _prepare(device, PROBE_READ, (area, "int32"), (scratch, "int32"))
        scratch = device.allocate(device.num_workers * PROBE_SCRATCH_BYTES)
        self._peak = _prepare(device, PROBE_PEAK, (operands, "int32"), (scratch, "float32"))
        self._read_rows = read_bytes // PROBE_READ_BYTES
        self._peak_rows = PEAK_ROWS_PER_WORKER * device.num_workers

    def measure(self, passes: int = PASSES) -> Limits:
        reads = [seconds(self._read, self._read_rows) for _ in range(passes)]
        peaks = [seconds(self._peak, self._peak_rows) for _ in range(passes)]
        return Limits(
            self._read_rows * PROBE_READ_BYTES / statistics.median(reads),
            self._peak_rows * PROBE_PEAK_FLOPS / statistics.median(peaks),
        )

    def empty_caches(self) -> None:
        self._read.run(min(self._read_rows, CACHES_BYTES // PROBE_READ_BYTES))


class GpuProbes:
    """As limits.Probes. A copy both reads and writes; all its bytes count."""

    def __init__(self, device: CudaDevice, read_bytes: int) -> None:
        from pagec.runtime.device.cuda.probes import CudaProbes

        check_room(device, 2 * read_bytes)
        self._probes = CudaProbes(device, read_bytes)

    def measure(self, passes: int = PASSES) -> Limits:
        copies = [self._probes.copy_us() for _ in range(passes)]
        products = [self._probes.product_us() for _ in range(passes)]
        return Limits(
            1e6 * self._probes.copy_bytes / statistics.median(copies),
            1e6 * self._probes.product_flops / statistics.median(products),
        )

    def empty_caches(self) -> None:
        self._probes.touch(CACHES_BYTES)


def seconds(calls: Prepared, *rows: int) -> float:
    """How long one run takes."""
    began = time.perf_counter()
    calls.run(*rows)
    return time.perf_counter() - began


def _prepare(device: TensorDevice, symbol: str, *arrays: tuple[object, str]) -> Prepared:
    tensors = tuple(device.tensor(memory, dtype) for memory, dtype in arrays)
    return device.prepare([KernelCall(symbol, 0, ((0, symbol),), tensors)])
