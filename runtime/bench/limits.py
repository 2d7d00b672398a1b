"""The machine's limits, measured by the artifact's own probes with all threads (see compiler/probes.py)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagec.compiler.errors import CapacityError
from pagec.compiler.probes import (
    PROBE_OPERAND_BYTES,
    PROBE_PEAK,
    PROBE_PEAK_FLOPS,
    PROBE_READ,
    PROBE_READ_BYTES,
    PROBE_SCRATCH_BYTES,
)
from pagec.runtime.device import Device, KernelCall, Prepared

# More than any cache holds.
READ_BYTES: Final = 1 << 30
CACHES_BYTES: Final = 1 << 28
PASSES: Final = 5
# About ten milliseconds on a core of today.
PEAK_ROWS_PER_WORKER: Final = 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second that all threads read from memory, FLOPs per second that they do in registers."""

    read_bytes_per_s: float
    flops_per_s: float

    @property
    def figures(self) -> dict[str, float]:
        """As reports have them."""
        return {
            "read_bandwidth_gb_per_s": self.read_bytes_per_s / 1e9,
            "peak_gflops": self.flops_per_s / 1e9,
        }

    def bound_s(self, nbytes: float, flops: float) -> float:
        """Seconds that this much traffic and arithmetic takes at least, if they overlap."""
        return max(nbytes / self.read_bytes_per_s, flops / self.flops_per_s)


def median_limits(measured: list[Limits]) -> Limits:
    """The median of each limit."""
    return Limits(
        statistics.median(limits.read_bytes_per_s for limits in measured),
        statistics.median(limits.flops_per_s for limits in measured),
    )


class Probes:
    """The two probes with their memory. Holds `read_bytes` while it lives."""

    def __init__(self, device: Device, read_bytes: int = READ_BYTES) -> None:
        if read_bytes > device.free_bytes():
            raise CapacityError(
                f"measuring the read bandwidth takes {read_bytes} bytes; {device.free_bytes()} are free",
                place="memory",
            )
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
        """The median of a few passes each."""
        reads = [seconds(self._read, self._read_rows) for _ in range(passes)]
        peaks = [seconds(self._peak, self._peak_rows) for _ in range(passes)]
        return Limits(
            self._read_rows * PROBE_READ_BYTES / statistics.median(reads),
            self._peak_rows * PROBE_PEAK_FLOPS / statistics.median(peaks),
        )

    def empty_caches(self) -> None:
        """Reads enough other memory for the caches to hold nothing else."""
        self._read.run(min(self._read_rows, CACHES_BYTES // PROBE_READ_BYTES))


def seconds(calls: Prepared, *rows: int) -> float:
    """How long one run takes."""
    began = time.perf_counter()
    calls.run(*rows)
    return time.perf_counter() - began


def _prepare(device: Device, symbol: str, *arrays: tuple[object, str]) -> Prepared:
    tensors = tuple(device.tensor(memory, dtype) for memory, dtype in arrays)
    return device.prepare([KernelCall(symbol, 0, ((0, symbol),), tensors)])
