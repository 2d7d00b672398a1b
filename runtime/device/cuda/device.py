"""One NVIDIA GPU as a device: an artifact's kernels, ready to launch, and memory that hosts and GPU exchange.

All work goes to one stream and runs there in the order in which it was begun, whichever thread began it; the
host waits only where it says so. Copies between host and GPU go through pinned memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from pagec.compiler.artifact import GpuArtifact
from pagec.compiler.errors import ArtifactError
from pagec.runtime.device import Array, Memory, copy_runs
from pagec.runtime.device.cuda.driver import Driver, open_library
from pagec.runtime.device.cuda.gpu import Graph, TorchGpu, address
from pagec.runtime.device.cuda.kernels import LoadedKernel, load_kernels
from pagec.runtime.device.cuda.launch import GpuCall, GpuCalls, scratch_bytes

__all__ = ["CapturedGraph", "CudaDevice", "Fetch", "GpuCall", "GpuCalls"]

Bytes = npt.NDArray[np.uint8]

MAX_WORKERS: Final = 8
# Pinned memory of one copy; longer ones go in slices.
_SLICE: Final = 16 << 20
# Of the blocks that are read or written at once.
_BLOCKS_BYTES: Final = 64 << 20


class CudaDevice:
    """torch's current GPU, with all kernels of `artifact` loaded. ArtifactError if they are for another GPU.

    `gpu` and `library` (libcuda) may be replaced by tests. `notices`: what a user should be told.
    """

    def __init__(
        self, artifact: GpuArtifact, *, gpu: TorchGpu | None = None, library: Any | None = None
    ) -> None:
        self._gpu = gpu or TorchGpu()
        self._driver = Driver(library or open_library(), self._gpu.ordinal)
        self._kernels, self.notices = load_kernels(
            artifact, self._driver, self._gpu.capability, self._gpu.name
        )
        self.num_workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.sms = self._gpu.sms
        self._scratch = self._gpu.allocate(0)

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int, *, parts: int = 1) -> Memory:
        """Zeroed memory of the GPU, at a multiple of 256 bytes; CapacityError if there is not as much."""
        del parts  # what is not touched takes its place all the same
        return self._gpu.allocate(nbytes)

    def address(self, memory: Memory) -> int:
        """Where memory begins, as kernels see it."""
        return address(memory)

    def free_bytes(self) -> int:
        """Bytes that may still be allocated."""
        return self._gpu.memory()[0]

    def read_file(self, path: Path, offset: int, nbytes: int) -> Memory:
        """Reads slices with several threads, each into pinned memory of its own."""
        memory = self._gpu.allocate(nbytes)
        with path.open("rb") as file, ThreadPoolExecutor(self.num_workers) as pool:
            fd = file.fileno()
            jobs = [
                pool.submit(self._read_slice, fd, offset + at, memory[at : at + _SLICE])
                for at in range(0, nbytes, _SLICE)
            ]
            if not all(job.result() for job in jobs):
                raise ArtifactError(
                    "ends before its tensors do", place=str(path), remedy="compile the model again"
                )
        return memory

    def _read_slice(self, fd: int, offset: int, memory: Memory) -> bool:
        """Fills `memory` from the file; False if the file ends before. Waits, so that the thread's next slice
        finds the same pinned memory free."""
        pinned = self._gpu.pinned(len(memory))
        target = memoryview(pinned.numpy())
        while target:
            count = os.preadv(fd, [target], offset)
            if count == 0:
                return False
            target, offset = target[count:], offset + count
        self._gpu.copy(memory, pinned)
        self._gpu.wait(self._gpu.record())
        return True

    def map_file(self, path: Path, offset: int, nbytes: int) -> Memory:
        """Refused: kernels read the GPU's own memory."""
        del offset, nbytes
        raise ArtifactError(
            "a GPU cannot compute on a file's pages", place=str(path), remedy="use --weights-memory copy"
        )

    # ---------------------------------------------------------------------------------- copies

    def upload(self, memory: Memory, array: Array) -> None:
        """Begins to copy a contiguous host array to the start of `memory`; the array is free at once."""
        flat = array.reshape(-1).view(np.uint8)
        for at in range(0, flat.size, _SLICE):
            part = flat[at : at + _SLICE]
            self._gpu.copy(memory[at : at + part.size], self._pinned(part))
            if part.size < flat.size:
                self._gpu.wait(self._gpu.record())  # else all of a large array would be pinned at once

    def download(self, memory: Memory, dtype: npt.DTypeLike) -> Array:
        """A host copy of `memory`, flat. Waits for all that was begun before it."""
        return self.fetch(memory, dtype).array()

    def upload_rows(self, memory: Memory, array: Array, row_bytes: int) -> None:
        """Begins to copy the rows of a host array [n, k] into `memory`, `row_bytes` apart."""
        num_rows = len(array)
        rows = array.reshape(num_rows, -1).view(np.uint8)
        target = memory[: num_rows * row_bytes].view(num_rows, row_bytes)[:, : rows.shape[1]]
        self._gpu.copy(target, self._pinned(rows.reshape(-1)).view(rows.shape))

    def copy(self, target: Memory, source: Memory) -> None:
        """Begins a copy within the GPU."""
        self._gpu.copy(target, source)

    def fill_nan(self, memory: Memory) -> None:
        """Begins to fill memory with NaN, whatever its float type."""
        self._gpu.fill(memory, 0xFF)  # all bits set: NaN in float32 and in bf16

    def fetch(self, memory: Memory, dtype: npt.DTypeLike) -> Fetch:
        """Begins to copy memory to the host."""
        return Fetch(self._gpu, memory, dtype)

    def _pinned(self, flat: Bytes) -> Memory:
        pinned = self._gpu.pinned(flat.size)
        pinned.numpy()[:] = flat
        return pinned

    # ---------------------------------------------------------------------------------- blocks

    def copy_blocks(self, memory: Memory, spans: int, span_bytes: int, copies: Array) -> None:
        """As Device.copy_blocks; only begins."""
        pool = memory.view(spans, -1, span_bytes)
        for source, target, count in copy_runs(copies):
            self._gpu.copy(pool[:, target : target + count], pool[:, source : source + count])

    def read_blocks(
        self,
        memory: Memory,
        spans: int,
        span_bytes: int,
        blocks: Sequence[int],
        spare: list[Array] | None = None,
    ) -> list[Array]:
        """As Device.read_blocks; waits for the copies."""
        pool = memory.view(spans, -1, span_bytes)
        found: list[Array] = []
        for part in _parts(blocks, spans * span_bytes):
            pinned = [self._gpu.pinned(spans * span_bytes) for _ in part]
            for block, host in zip(part, pinned, strict=True):
                self._gpu.copy(host.view(spans, span_bytes), pool[:, block])
            self._gpu.wait(self._gpu.record())
            for host in pinned:
                array = spare.pop() if spare else np.empty(spans * span_bytes, np.uint8)
                array[:] = host.numpy()
                found.append(array)
        return found

    def write_blocks(
        self, memory: Memory, spans: int, span_bytes: int, blocks: Sequence[int], data: Sequence[Array]
    ) -> None:
        """As Device.write_blocks; the arrays are free at once."""
        pool = memory.view(spans, -1, span_bytes)
        parts = zip(_parts(blocks, spans * span_bytes), _parts(data, spans * span_bytes), strict=True)
        for number, (part, arrays) in enumerate(parts):
            if number:
                self._gpu.wait(self._gpu.record())  # else all blocks would be pinned at once
            for block, array in zip(part, arrays, strict=True):
                host = self._pinned(array.reshape(-1))
                self._gpu.copy(pool[:, block], host.view(spans, span_bytes))

    # -------------------------------------------------------------------------------- launches

    def prepare(self, calls: Sequence[GpuCall], most: Sequence[int]) -> GpuCalls:
        """A list of calls; `most`: for each of launch.Counts the most rows of a run. Allocates scratch memory
        if the kernels want more than there is."""
        found = [(call, self._kernel(call)) for call in calls]
        need = max((scratch_bytes(kernel, most[call.count], self.sms) for call, kernel in found), default=0)
        if need > len(self._scratch):
            self._scratch = self._gpu.allocate(need)
        return GpuCalls(found, most, driver=self._driver, gpu=self._gpu, scratch=self._scratch)

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """What `run` launches, as a graph to be replayed with whatever the memory holds then. Run it once
        before: what a first launch prepares cannot be captured."""
        return CapturedGraph(self._gpu, self._gpu.capture(run))

    def synchronize(self) -> None:
        """Waits for all that was begun."""
        self._gpu.synchronize()

    # ------------------------------------------------------------------------------- measuring

    def time_us(self, run: Callable[[], None]) -> float:
        """Microseconds that the GPU takes for what `run` begins; waits for it."""
        before = self._gpu.record(timed=True)
        run()
        after = self._gpu.record(timed=True)
        self._gpu.wait(after)
        return self._gpu.elapsed_us(before, after)

    def multiply(self, a: Memory, b: Memory, product: Memory, size: int) -> None:
        """Begins torch's product of two matrices of bf16, [size, size]."""
        self._gpu.multiply(a, b, product, size)

    def _kernel(self, call: GpuCall) -> LoadedKernel:
        if call.kernel not in self._kernels:
            raise ArtifactError(
                f"has no kernel {call.kernel}", place=call.name, remedy="compile the model again"
            )
        return self._kernels[call.kernel]


class Fetch:
    """A copy to the host that has begun."""

    def __init__(self, gpu: TorchGpu, memory: Memory, dtype: npt.DTypeLike) -> None:
        self._gpu, self._dtype = gpu, dtype
        self._pinned = gpu.pinned(len(memory))
        gpu.copy(self._pinned, memory)
        self._done = gpu.record()

    def array(self) -> Array:
        """Waits for it; a flat array of its own."""
        self._gpu.wait(self._done)
        return np.array(self._pinned.numpy().view(self._dtype))


class CapturedGraph:
    """Launches that start as one."""

    def __init__(self, gpu: TorchGpu, graph: Graph) -> None:
        self._gpu, self._graph = gpu, graph

    def replay(self) -> None:
        """Begins to run them, in order, on the current stream."""
        self._gpu.replay(self._graph)


_T = TypeVar("_T")


def _parts(items: Sequence[_T], item_bytes: int) -> Iterator[Sequence[_T]]:
    """As many items at a time as may be pinned, of so many bytes each."""
    most = max(1, _BLOCKS_BYTES // max(item_bytes, 1))
    return (items[at : at + most] for at in range(0, len(items), most))
