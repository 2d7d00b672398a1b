"""Probes: two kernels that every library carries beside the program's own, to measure the machine.

    probe_read   x[rows * 1024] -> sums          reads PROBE_READ_BYTES per row, once, in order
    probe_peak   operands, sums -> sums          PROBE_PEAK_FLOPS per row, all operands in registers

Both take int32 words first and a scratch of PROBE_SCRATCH_BYTES per worker second (int32 for probe_read,
float32 for probe_peak), then the three integers of every kernel. They are no part of a program's launches.
"""

from __future__ import annotations

from typing import Final

PROBE_READ: Final = "probe_read"
PROBE_PEAK: Final = "probe_peak"
PROBE_READ_BYTES: Final = 4096
# Divides by 12 and 24 accumulators times any vector length.
PROBE_PEAK_FLOPS: Final = 3 << 18
PROBE_OPERAND_BYTES: Final = 128
PROBE_SCRATCH_BYTES: Final = 4096
