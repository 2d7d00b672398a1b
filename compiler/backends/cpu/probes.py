"""The kernels that measure a machine's limits in the artifact's own instructions (see compiler/probes.py)."""

from __future__ import annotations

from typing import Any, Final

from pagec.compiler.dims import WORD_ELEMENTS, DType
from pagec.compiler.probes import (
    PROBE_PEAK,
    PROBE_PEAK_FLOPS,
    PROBE_READ,
    PROBE_READ_BYTES,
    PROBE_SCRATCH_BYTES,
)
from pagec.compiler.program import Kernel
from pagec.compiler.target import CpuTarget

_READ_ACCUMULATORS: Final = 8


def probe_kernels(target: CpuTarget, dtype: DType) -> tuple[Kernel, ...]:
    """probe_read and probe_peak for a target; `dtype` is that of the linears' inputs."""
    unit, lanes = WORD_ELEMENTS[dtype], target.lanes
    # Enough independent sums to hide the latency of a dot product; the rest holds operands.
    sums = 24 if target.vector_registers >= 32 else 12
    flops = sums * 2 * unit * lanes
    assert PROBE_PEAK_FLOPS % flops == 0
    assert sums * lanes * 4 <= PROBE_SCRATCH_BYTES
    read = {"kind": "read", "sums": _READ_ACCUMULATORS, "words": PROBE_READ_BYTES // 4}
    peak = {"kind": "peak", "sums": sums, "dtype": dtype, "rounds": PROBE_PEAK_FLOPS // flops}
    return (
        _kernel(PROBE_READ, read, "int32", bytes_per_row=PROBE_READ_BYTES),
        _kernel(PROBE_PEAK, peak, "float32", flops_per_row=PROBE_PEAK_FLOPS),
    )


def _kernel(
    name: str, params: dict[str, Any], out: str, *, flops_per_row: int = 0, bytes_per_row: int = 0
) -> Kernel:
    return Kernel(
        key=name,
        symbol=name,
        template="probe",
        params={**params, "scratch": PROBE_SCRATCH_BYTES // 4, "arrays": [["x", "int32"], ["out", out]]},
        signature=("int32", out),
        flops_per_row=flops_per_row,
        bytes_per_row=bytes_per_row,
        bytes_fixed=0,
    )
