"""The CPU device: kernels from a shared library, called by ctypes on 64-byte aligned memory.

The library brings what runs them, too, a team of threads (templates/cpu/step.c). A serving process needs
nothing else: neither torch nor TVM.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.artifact import LIBRARY
from pagec.compiler.dims import BYTE_ALIGN, round_up
from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.runtime.device import ELEMENT_BYTES, Array, KernelCall, copy_runs

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE: Final = 2 << 20
THREADS_VARIABLE: Final = "PAGEC_THREADS"
_MAX_READ: Final = 1 << 30
_MAX_MESSAGE: Final = 512  # of templates/cpu/step.c


def default_threads() -> int:
    """PAGEC_THREADS, or all the cores that this process may use (by affinity and control group)."""
    text = os.environ.get(THREADS_VARIABLE, "")
    if not text:
        return max(1, min(len(os.sched_getaffinity(0)), _group_cores()))
    if not text.isdecimal() or int(text) < 1:
        raise CapacityError(f"{text!r} is not a number of threads", place=THREADS_VARIABLE)
    return int(text)


def aligned_bytes(nbytes: int, *, parts: int = 1) -> Bytes:
    """Zeroed anonymous memory on huge pages. Of several equal parts each begins on small ones: a huge page is
    zeroed whole at its first touch, and for a first token, which touches a little of every part, that would
    take longer than all else."""
    try:
        # Python's default is shared memory, which gets no huge pages.
        size = round_up(max(nbytes, 1), mmap.PAGESIZE) + HUGE_PAGE
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"{nbytes} bytes cannot be allocated ({error})", place="memory") from error
    area.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(area, dtype=np.uint8)  # keeps `area` alive
    start = -raw.ctypes.data % HUGE_PAGE
    for part in range(parts if parts > 1 else 0):
        first = (start + nbytes * part // parts) // mmap.PAGESIZE * mmap.PAGESIZE
        area.madvise(mmap.MADV_NOHUGEPAGE, first, min(HUGE_PAGE, size - first))
    return raw[start : start + nbytes]


class CpuDevice:
    """One CPU. `artifact` is a directory that holds the kernels' library."""

    def __init__(self, artifact: Path, threads: int | None = None) -> None:
        self.num_workers = threads or default_threads()
        self._path = artifact / LIBRARY
        self._library = _load(self._path)
        self._team = _Team(self._library, self.num_workers)

    def allocate(self, nbytes: int, *, parts: int = 1) -> Bytes:
        return aligned_bytes(nbytes, parts=parts)

    def touch_ahead(self, memory: Bytes, parts: int, nbytes: int) -> None:
        self._team.touch_ahead(memory, parts, nbytes)

    def settle(self) -> None:
        while self._team.num_untouched():
            time.sleep(0.001)

    def read_file(self, path: Path, offset: int, nbytes: int) -> Bytes:
        """Reads with several threads: page faults and copies of one thread leave bandwidth unused. Each reads
        its share in one call, for between two calls it might wait for whoever holds Python's lock."""
        memory = aligned_bytes(nbytes)
        share = min(round_up(max(-(-nbytes // self.num_workers), 1), HUGE_PAGE), _MAX_READ)
        target = memory.data
        with path.open("rb") as file, ThreadPoolExecutor(self.num_workers) as pool:
            fd = file.fileno()
            jobs = [
                pool.submit(_read_slice, fd, target[at : at + share], offset + at)
                for at in range(0, nbytes, share)
            ]
            if not all(job.result() for job in jobs):
                raise _cut_short(path)
        return memory

    def map_file(self, path: Path, offset: int, nbytes: int) -> Bytes:
        """The page cache's own pages: starts at once, shared by processes, but 4 KiB pages."""
        if path.stat().st_size < offset + nbytes:
            raise _cut_short(path)
        # Mode "c" is MAP_PRIVATE: DLPack takes no read-only memory.
        return np.memmap(path, np.uint8, "c", offset, (nbytes,)).view(np.ndarray)

    def upload(self, memory: Bytes, array: Array) -> None:
        flat = array.reshape(-1).view(np.uint8)
        memory[: flat.size] = flat

    def download(self, memory: Bytes, dtype: npt.DTypeLike) -> Array:
        return memory.view(dtype).copy()

    def upload_rows(self, memory: Bytes, array: Array, row_bytes: int) -> None:
        num_rows = len(array)
        rows = memory[: num_rows * row_bytes].reshape(num_rows, row_bytes)
        flat = array.reshape(num_rows, -1).view(np.uint8)
        rows[:, : flat.shape[1]] = flat

    def copy_blocks(self, memory: Bytes, spans: int, span_bytes: int, copies: Array) -> None:
        pool = memory.reshape(spans, -1, span_bytes)
        for source, target, count in copy_runs(copies):
            pool[:, target : target + count] = pool[:, source : source + count]

    def read_blocks(
        self,
        memory: Bytes,
        spans: int,
        span_bytes: int,
        blocks: Sequence[int],
        spare: list[Array] | None = None,
    ) -> list[Array]:
        pool = memory.reshape(spans, -1, span_bytes)
        found = []
        for block in blocks:
            array = spare.pop() if spare else np.empty(spans * span_bytes, np.uint8)
            array.reshape(spans, span_bytes)[:] = pool[:, block]
            found.append(array)
        return found

    def write_blocks(
        self, memory: Bytes, spans: int, span_bytes: int, blocks: Sequence[int], data: Sequence[Array]
    ) -> None:
        pool = memory.reshape(spans, -1, span_bytes)
        for block, array in zip(blocks, data, strict=True):
            pool[:, block] = array.reshape(spans, span_bytes)

    def fill_nan(self, memory: Bytes) -> None:
        memory.fill(0xFF)  # all bits set: NaN in float32 and in bf16

    def tensor(self, memory: Bytes, dtype: str) -> CpuTensor:
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"kernels take {', '.join(ELEMENT_BYTES)}, not {dtype}")
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
            raise ValueError("a tensor is a view of contiguous bytes")
        # A misaligned full-vector load is a segmentation fault.
        if memory.ctypes.data % BYTE_ALIGN or memory.nbytes % ELEMENT_BYTES[dtype]:
            raise ValueError(
                f"memory at {memory.ctypes.data:#x}, {memory.nbytes} bytes: kernels need {BYTE_ALIGN}-byte "
                f"aligned addresses and whole elements of {dtype}"
            )
        return CpuTensor(memory, dtype)

    def prepare(self, calls: Sequence[KernelCall]) -> CpuCalls:
        return CpuCalls(calls, self._team, self._address)

    def _address(self, symbol: str) -> int:
        """Where a kernel's packed function is; 0 for no kernel."""
        if not symbol:
            return 0
        try:
            function = getattr(self._library, f"__tvm_ffi_{symbol}")
        except AttributeError as error:
            raise ArtifactError(
                f"has no kernel {symbol}", place=str(self._path), remedy="compile the model again"
            ) from error
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def free_bytes(self) -> int:
        """What the system says is available, within the control group's limit if there is one."""
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _group_free_bytes())
        return _group_free_bytes()


class _DLTensor(ctypes.Structure):
    """DLPack's description of an array, as kernels take it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DL_CPU: Final = 1
_DL_CODES: Final = {"int32": 0, "float32": 2}
# TVM's TVMFFIAny, and the structures of templates/cpu/step.c.
_ANY: Final = np.dtype([("type", "<i4"), ("padding", "<u4"), ("value", "<u8")])
_ANY_DLTENSOR: Final = 7
_VARIANT: Final = np.dtype([("max_rows", "<i8"), ("run", "<u8"), ("shares", "<i8")])
_LAUNCH: Final = np.dtype([("arrays", "<u8"), ("variants", "<u8"), ("num_arrays", "<i4"), ("rows", "<i4")])
_UNBOUNDED: Final = np.iinfo(np.int64).max


class CpuTensor:
    """A flat view of memory that kernels take; keeps the memory alive."""

    def __init__(self, memory: Bytes, dtype: str) -> None:
        self.memory = memory
        self.shape = (memory.nbytes // ELEMENT_BYTES[dtype],)
        self._sizes = (ctypes.c_int64 * 2)(self.shape[0], 1)
        self._header = _DLTensor(
            data=memory.ctypes.data,
            device_type=_DL_CPU,
            ndim=1,
            code=_DL_CODES[dtype],
            bits=8 * ELEMENT_BYTES[dtype],
            lanes=1,
            shape=ctypes.cast(self._sizes, ctypes.POINTER(ctypes.c_int64)),
            strides=ctypes.cast(ctypes.byref(self._sizes, 8), ctypes.POINTER(ctypes.c_int64)),
        )

    @property
    def address(self) -> int:
        """Where the description lies."""
        return ctypes.addressof(self._header)


class _Team:
    """The threads that run kernels; they end when nobody holds the team any more."""

    def __init__(self, library: ctypes.CDLL, num_workers: int) -> None:
        self._library = library
        self._error = ctypes.create_string_buffer(_MAX_MESSAGE)
        self._handle = library.pagec_team_new(num_workers)
        if not self._handle:
            raise CapacityError(
                f"{num_workers} threads cannot be started",
                place="threads",
                remedy="ask for fewer: --threads N",
            )
        weakref.finalize(self, library.pagec_team_free, self._handle).atexit = False

    def run(self, launches: Array, names: Sequence[str], rows: tuple[int, ...], times: int | None) -> None:
        """Runs a list of launches (`_LAUNCH`); ArtifactError if one fails."""
        counts = (ctypes.c_int32 * len(rows))(*rows)
        where = launches.ctypes.data
        failed = self._library.pagec_run(self._handle, where, len(launches), counts, times, self._error)
        if not failed:
            return
        if failed < 0:
            raise ArtifactError(
                "was opened in another process, and its threads are not in this one",
                place="step",
                remedy="open the artifact after the fork",
            )
        why = self._error.value.decode(errors="replace")
        raise ArtifactError(
            f"the kernel of {names[failed - 1]} refused to run{why and f' ({why})'}",
            place="step",
            remedy="compile the model again",
        )

    def touch_ahead(self, memory: Bytes, parts: int, nbytes: int) -> None:
        """As TensorDevice.touch_ahead."""
        self._touched = memory  # the threads may still touch it when nobody else has it
        where = memory.ctypes.data
        self._library.pagec_touch_ahead(self._handle, where, memory.nbytes // parts, parts, nbytes)

    def num_untouched(self) -> int:
        """Pages that the threads will still touch."""
        return int(self._library.pagec_untouched(self._handle))


class CpuCalls:
    """Kernel calls laid out as templates/cpu/step.c reads them."""

    def __init__(self, calls: Sequence[KernelCall], team: _Team, address: Callable[[str], int]) -> None:
        self._team = team
        self._names = [call.name for call in calls]
        self._tensors = [call.tensors for call in calls]
        self._launches = np.zeros(len(calls), _LAUNCH)
        self._parts: list[Array] = []
        for launch, call in zip(self._launches, calls, strict=True):
            arrays = [(_ANY_DLTENSOR, 0, tensor.address) for tensor in call.tensors]
            variants = [
                (limit or _UNBOUNDED, address(symbol), shares)
                for (limit, symbol), shares in zip(call.variants, call.shares or repeat(1), strict=False)
            ]
            for name, dtype, rows in (("arrays", _ANY, arrays), ("variants", _VARIANT, variants)):
                part = np.array(rows, dtype)
                self._parts.append(part)
                launch[name] = part.ctypes.data
            launch["num_arrays"], launch["rows"] = len(arrays), call.rows

    def run(self, *rows: int) -> None:
        self._team.run(self._launches, self._names, rows, None)

    def time_us(self, *rows: int) -> list[float]:
        times = np.zeros(len(self._names) + 1, np.int64)
        self._team.run(self._launches, self._names, rows, times.ctypes.data)
        return [float(us) for us in np.diff(times) / 1e3]


def _load(path: Path) -> ctypes.CDLL:
    """The kernels' library, with the types of step.c's functions."""
    try:
        library = ctypes.CDLL(str(path))
        new, free, run = library.pagec_team_new, library.pagec_team_free, library.pagec_run
        touch, untouched = library.pagec_touch_ahead, library.pagec_untouched
    except (OSError, AttributeError) as error:
        raise ArtifactError(
            f"cannot be loaded: {error}", place=str(path), remedy="compile the model again on this machine"
        ) from error
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    new.argtypes, new.restype = [integer], pointer
    free.argtypes, free.restype = [pointer], None
    run.argtypes, run.restype = [pointer, pointer, integer, pointer, pointer, pointer], integer
    touch.argtypes, touch.restype = [pointer, pointer, long, long, long], None
    untouched.argtypes, untouched.restype = [pointer], long
    return library


def _cut_short(path: Path) -> ArtifactError:
    return ArtifactError("ends before its tensors do", place=str(path), remedy="compile the model again")


def _read_slice(fd: int, target: memoryview, offset: int) -> bool:
    """Fills `target` from the file; False if the file ends before."""
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            return False
        target, offset = target[count:], offset + count
    return True


def _group_free_bytes() -> int:
    limit, used = _group_file("memory.max"), _group_file("memory.current")
    return max(int(limit[0]) - int(used[0]), 0) if limit and used and limit[0] != "max" else sys.maxsize


def _group_cores() -> int:
    """Cores' worth of time that the control group grants."""
    quota = _group_file("cpu.max")  # "max 100000" or "150000 100000", microseconds per period
    return -(-int(quota[0]) // int(quota[1])) if quota and quota[0] != "max" else sys.maxsize


def _group_file(name: str) -> list[str]:
    try:
        return Path("/sys/fs/cgroup", name).read_text().split()
    except OSError:
        return []
