"""The machine's limits, measured in the same run as what is compared with them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final, Protocol

from pagec.compiler.errors import CapacityError
from pagec.runtime.device import Device

# More than any cache holds.
READ_BYTES: Final = 1 << 30
CACHES_BYTES: Final = 1 << 28
PASSES: Final = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second that come from memory, FLOPs per second of dot products."""

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


class Probes(Protocol):
    """Measures limits, with memory that it holds while it lives."""

    def measure(self, passes: int = PASSES) -> Limits:
        """The median of a few passes each."""

    def empty_caches(self) -> None:
        """Touches enough other memory for the caches to hold nothing else."""


def check_room(device: Device, nbytes: int) -> None:
    """Refuses to measure where there is less memory than that takes."""
    if nbytes > device.free_bytes():
        raise CapacityError(
            f"measuring the read bandwidth takes {nbytes} bytes; {device.free_bytes()} are free",
            place="memory",
        )
