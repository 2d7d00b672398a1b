"""The CPU device: kernels from a shared library, called through tvm_ffi on 64-byte aligned memory.

A serving process imports neither torch nor the TVM compiler: tvm_ffi is loaded with torch kept out, and
`libtvm_runtime.so` (beside the kernels) brings the thread pool. TVM keeps one pool per calling thread, so
kernels should be launched from the thread that made the device.
"""

from __future__ import annotations

import ctypes
import filecmp
import importlib.util
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.artifact import LIBRARY, RUNTIME_LIBRARY
from pagec.compiler.dims import BYTE_ALIGN, round_up
from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.runtime.device import ELEMENT_BYTES, Array, KernelCall, copy_runs

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE: Final = 2 << 20
THREADS_VARIABLE: Final = "PAGEC_THREADS"
_READ_SLICE: Final = 16 << 20
_CONFIGURE_POOL: Final = "runtime.config_threadpool"
_POOL_ON_BIG_CORES: Final = 1  # TVM's AffinityMode kBig
_LOADED: Final[list[Path]] = []  # TVM's runtime library in this process


def default_threads() -> int:
    """PAGEC_THREADS, or all the cores that this process may use (by affinity and control group)."""
    text = os.environ.get(THREADS_VARIABLE, "")
    if not text:
        return max(1, min(len(os.sched_getaffinity(0)), _group_cores()))
    if not text.isdecimal() or int(text) < 1:
        raise CapacityError(f"{text!r} is not a number of threads", place=THREADS_VARIABLE)
    return int(text)


def import_tvm_ffi() -> ModuleType:
    """tvm_ffi without torch: it imports torch if it can, which costs a second and is not needed."""
    if "tvm_ffi" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("tvm_ffi")
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        return importlib.import_module("tvm_ffi")
    finally:
        del sys.modules["torch"]


def aligned_bytes(nbytes: int, *, huge_pages: bool = True) -> Bytes:
    """Zeroed anonymous memory that starts on a huge page and is backed by such if they are wanted."""
    try:
        # Python's default is shared memory, which gets no huge pages.
        size = round_up(max(nbytes, 1), mmap.PAGESIZE) + HUGE_PAGE
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"{nbytes} bytes cannot be allocated ({error})", place="memory") from error
    area.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    raw = np.frombuffer(area, dtype=np.uint8)  # keeps `area` alive
    start = -raw.ctypes.data % HUGE_PAGE
    return raw[start : start + nbytes]


class CpuDevice:
    """One CPU. `artifact` is a directory that holds the kernels' library and TVM's runtime library."""

    def __init__(self, artifact: Path, threads: int | None = None) -> None:
        self.num_workers = threads or default_threads()
        # The pool is made with this many threads on first use; TVM would take half of the cores.
        os.environ.setdefault("TVM_NUM_THREADS", str(max(self.num_workers, os.cpu_count() or 1)))
        # Pinned threads of two engines on one machine would fight for the same cores.
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        self._ffi = import_tvm_ffi()
        self._module = _load(self._ffi, artifact)
        self._path = artifact / LIBRARY
        self._library = ctypes.CDLL(str(self._path))  # the same library, for the addresses of its functions
        self._run = _runner(self._library, self._path)
        self._ffi.get_global_func(_CONFIGURE_POOL)(_POOL_ON_BIG_CORES, self.num_workers)

    def allocate(self, nbytes: int, *, sparse: bool = False) -> Bytes:
        """A huge page is zeroed whole at its first touch: too much where little is touched."""
        return aligned_bytes(nbytes, huge_pages=not sparse)

    def read_file(self, path: Path, offset: int, nbytes: int) -> Bytes:
        """Reads with several threads: page faults and copies of one thread leave bandwidth unused."""
        memory = aligned_bytes(nbytes)
        target = memory.data
        with path.open("rb") as file, ThreadPoolExecutor(self.num_workers) as pool:
            fd = file.fileno()
            jobs = [
                pool.submit(_read_slice, fd, target[at : at + _READ_SLICE], offset + at)
                for at in range(0, nbytes, _READ_SLICE)
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
        return CpuCalls(calls, self._run, self._address, self.num_workers)

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
_VARIANT: Final = np.dtype([("max_rows", "<i8"), ("run", "<u8")])
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


class CpuCalls:
    """Kernel calls laid out as templates/cpu/step.c reads them; a run is one call and one parallel region."""

    def __init__(
        self,
        calls: Sequence[KernelCall],
        run: Callable[..., int],
        address: Callable[[str], int],
        num_workers: int,
    ) -> None:
        self._run, self._num_workers = run, num_workers
        self._names = [call.name for call in calls]
        self._tensors = [call.tensors for call in calls]
        self._launches = np.zeros(len(calls), _LAUNCH)
        self._parts: list[Array] = []
        for launch, call in zip(self._launches, calls, strict=True):
            arrays = [(_ANY_DLTENSOR, 0, tensor.address) for tensor in call.tensors]
            variants = [(limit or _UNBOUNDED, address(symbol)) for limit, symbol in call.variants]
            for name, dtype, rows in (("arrays", _ANY, arrays), ("variants", _VARIANT, variants)):
                part = np.array(rows, dtype)
                self._parts.append(part)
                launch[name] = part.ctypes.data
            launch["num_arrays"], launch["rows"] = len(arrays), call.rows

    def run(self, *rows: int) -> None:
        self._start(rows, None)

    def time_us(self, *rows: int) -> list[float]:
        times = np.zeros(len(self._names) + 1, np.int64)
        self._start(rows, times.ctypes.data)
        return [float(us) for us in np.diff(times) / 1e3]

    def _start(self, rows: tuple[int, ...], times: int | None) -> None:
        counts = (ctypes.c_int32 * len(rows))(*rows)
        failed = self._run(self._launches.ctypes.data, len(self._launches), counts, self._num_workers, times)
        if failed:
            what = f"the kernel of {self._names[failed - 1]}" if failed > 0 else "the thread pool"
            raise ArtifactError(f"{what} refused to run", place="step", remedy="compile the model again")


def _runner(library: ctypes.CDLL, path: Path) -> Callable[..., int]:
    """step.c's entry point."""
    try:
        run = library.pagec_run
    except AttributeError as error:
        raise ArtifactError(
            "cannot be loaded: it has no pagec_run", place=str(path), remedy="compile the model again"
        ) from error
    run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    run.restype = ctypes.c_int32
    return run


def _load(ffi: ModuleType, artifact: Path) -> Any:
    """The kernels' module. The runtime library goes first, its symbols visible to the kernels."""
    try:
        _load_runtime(ffi, artifact / RUNTIME_LIBRARY)
        return ffi.load_module(str(artifact / LIBRARY))
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"cannot be loaded: {error}",
            place=str(artifact),
            remedy="compile the model again on this machine",
        ) from error


def _load_runtime(ffi: ModuleType, library: Path) -> None:
    """Loads TVM's runtime library once per process.

    A second copy under another path would register everything twice, which aborts the process. So where
    TVM is installed and the artifact's copy is the same, TVM's own file is taken: tvm may be imported later.
    """
    spec = importlib.util.find_spec("tvm")  # imports nothing
    installed = Path(spec.origin).parent / "lib" / library.name if spec and spec.origin else None
    if installed and installed.is_file() and filecmp.cmp(installed, library, shallow=False):
        library = installed
    if any(library == known or filecmp.cmp(library, known, shallow=False) for known in _LOADED):
        return
    if library != installed and ffi.get_global_func(_CONFIGURE_POOL, allow_missing=True) is not None:
        raise ArtifactError(
            "needs another TVM runtime than this process has loaded",
            place=str(library),
            remedy="compile the model again with this TVM, or open the artifact in a process of its own",
        )
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    _LOADED.append(library)


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
