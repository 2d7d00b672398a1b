"""Lists of launches: everything that does not change from step to step is packed once.

A kernel's arguments are given as an array of addresses, one for each argument, at which the driver finds the
argument's bytes. Here all are pointers of 8 bytes; which ones, and in which order, is in compiler/launch.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint64
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from pagec.compiler.errors import ArtifactError
from pagec.compiler.launch import Counts, GridRule
from pagec.runtime.device import Memory
from pagec.runtime.device.cuda.driver import Driver, LaunchConfig
from pagec.runtime.device.cuda.gpu import TorchGpu, address
from pagec.runtime.device.cuda.kernels import LoadedKernel

THREADS_PER_WARP: Final = 32
POINTER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class GpuCall:
    """A kernel's place in a list: the kernel's key, which of the row counts it takes, its arrays in order,
    and the word of the device array `counts` that says how many rows there really are."""

    name: str
    kernel: str
    count: Counts
    pointers: tuple[Memory, ...]
    count_at: Memory


def pack_arguments(kernel: LoadedKernel, pointers: tuple[int, ...], scratch: int) -> Any:
    """What the driver takes as arguments: checked pointers, then scratch memory, then null."""
    kernel.launch.check_pointers(pointers)
    if scratch % kernel.launch.scratch_align:
        raise ArtifactError(
            f"scratch memory at {scratch:#x} is no multiple of {kernel.launch.scratch_align}",
            place=f"kernel {kernel.key}",
            remedy="compile the model again",
        )
    given = (*pointers, scratch, 0)
    # Addresses, then the bytes that they name, in one piece.
    words = (c_uint64 * (2 * len(given)))()
    first = ctypes.addressof(words) + POINTER_BYTES * len(given)
    words[:] = [*(first + POINTER_BYTES * i for i in range(len(given))), *given]
    return words


class GpuCalls:
    """Calls that are ready to run, in order, on torch's current stream. For one thread at a time.

    `most`: for each of launch.Counts the most rows that a run will have; `scratch`: memory for as many
    programs as that makes, 0 bytes where no kernel wants any.
    """

    def __init__(
        self,
        calls: Sequence[tuple[GpuCall, LoadedKernel]],
        most: Sequence[int],
        *,
        driver: Driver,
        gpu: TorchGpu,
        scratch: Memory,
    ) -> None:
        self.calls = tuple(call for call, _ in calls)
        self._most, self._driver, self._gpu = tuple(most), driver, gpu
        self._scratch = scratch  # and the calls' memory: alive as long as its address is packed
        # Stream and grid change from run to run; calls that agree in all of it share one.
        self._configs: dict[tuple[Counts, GridRule, int, int], LaunchConfig] = {}
        self._arguments: list[Any] = []
        self._launches = [(int(call.count), self._pack(call, kernel)) for call, kernel in calls]

    def run(self, rows: Sequence[int]) -> None:
        """Launches all calls; rows[c] for c of launch.Counts: how many, 0 for calls that are left out."""
        self._set(rows)
        launch = self._driver.launch
        for number, (count, arguments) in enumerate(self._launches):
            if rows[count] and (result := launch(*arguments)):
                self._refused(number, result)

    def time_us(self, rows: Sequence[int]) -> list[float]:
        """Launches all calls and waits; microseconds that each took, 0 for those that were left out.

        A kernel that is faster than the host launches the next one seems to take as long as that.
        """
        self._set(rows)
        events = [self._gpu.record(timed=True)]
        launched = [number for number, (count, _) in enumerate(self._launches) if rows[count]]
        for number in launched:
            if result := self._driver.launch(*self._launches[number][1]):
                self._refused(number, result)
            events.append(self._gpu.record(timed=True))
        self._gpu.wait(events[-1])
        times = [0.0] * len(self.calls)
        for number, (before, after) in zip(launched, pairwise(events), strict=True):
            times[number] = self._gpu.elapsed_us(before, after)
        return times

    def _set(self, rows: Sequence[int]) -> None:
        """Puts the stream, and how many programs there are for so many rows, where the launches have them."""
        assert all(0 <= n <= most for n, most in zip(rows, self._most, strict=True)), (rows, self._most)
        self._driver.use()
        stream, sms = self._gpu.stream(), self._gpu.sms
        for (count, rule, _, _), config in self._configs.items():
            config.stream = stream
            config.grid[0] = rule.programs(rows[count], sms)

    def _pack(self, call: GpuCall, kernel: LoadedKernel) -> tuple[int | None, ...]:
        """All arguments of cuLaunchKernelEx, as addresses."""
        launch = kernel.launch
        pointers = tuple(address(memory) for memory in (*call.pointers, call.count_at))
        scratch = address(self._scratch) if launch.scratch_bytes else 0
        arguments = pack_arguments(kernel, pointers, scratch)
        self._arguments.append(arguments)
        config = self._configs.setdefault(
            (call.count, launch.grid, launch.warps, launch.shared_bytes),
            LaunchConfig((1, 1, 1), (THREADS_PER_WARP * launch.warps, 1, 1), launch.shared_bytes),
        )
        return ctypes.addressof(config), kernel.function.value, ctypes.addressof(arguments), None

    def _refused(self, number: int, result: int) -> None:
        call = self.calls[number]
        self._driver.check(result, f"cannot launch {call.name}", f"kernel {call.kernel}")


def scratch_bytes(kernel: LoadedKernel, most_rows: int, sms: int) -> int:
    """Scratch memory of a launch with up to so many rows."""
    if kernel.launch.scratch_bytes == 0 or most_rows == 0:
        return 0
    return kernel.launch.scratch_bytes * kernel.launch.grid.programs(most_rows, sms)
