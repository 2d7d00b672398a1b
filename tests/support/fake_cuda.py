"""A GPU of plain host memory, and a CUDA driver that checks what it is told.

FakeGpu       stands for TorchGpu. What is begun runs only when the host waits for it: results that are read
              too early, and pinned memory that is written again too early, are wrong.
FakeLibrary   stands for libcuda. Its functions are called through ctypes, with the types of cuda.h; it takes
              a launch's arguments apart and compares them with what the artifact says of the kernel.

With `execute` launches run in Triton's interpreter, which needs a process that has TRITON_INTERPRET=1 before
Triton is imported; `in_interpreter` runs a function in such a one.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from pagec.compiler.artifact import KERNELS, GpuArtifact
from pagec.compiler.errors import CapacityError
from pagec.compiler.launch import LaunchMetadata
from pagec.runtime.device.cuda.gpu import TorchGpu
from support.interpret import interpreter_process

ALIGN, POISON = 512, 0xA5
CAPTURE_STREAM = 0x5EA0
GRAPH_BYTES = 1 << 16
KINDS: Mapping[str, torch.dtype] = {"*fp32": torch.float32, "*i32": torch.int32}

# ------------------------------------------------------------------------------------------- GPU


@dataclass(frozen=True, slots=True)
class FakeEvent:
    """Happens when so many operations are done."""

    position: int
    timed: bool


class FakeGpu(TorchGpu):
    """`delayed`: False runs everything at once, so that what is overwritten too early is seen instead."""

    def __init__(
        self,
        *,
        capability: tuple[int, int] = (9, 0),
        sms: int = 3,
        total_bytes: int = 1 << 30,
        delayed: bool = True,
    ) -> None:
        self.ordinal, self.name, self.capability, self.sms = 0, "Fake 9000", capability, sms
        self.total_bytes, self.delayed = total_bytes, delayed
        self.num_graphs = 0
        self._starts: list[int] = []  # of what was allocated, ascending
        self._areas: dict[int, Any] = {}
        self._pinned: set[int] = set()
        self._queue: deque[Callable[[], None]] = deque()
        self._begun = self._done = 0
        self._recording: list[Callable[[], None]] | None = None
        self._lock = threading.RLock()

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int) -> Any:
        self._not_while_capturing("allocate")
        free, total = self.memory()
        if nbytes > free:
            raise CapacityError(f"{nbytes} bytes cannot be allocated: {free} of {total} are free")
        tensor = _aligned(nbytes, 0)
        with self._lock:
            bisect.insort(self._starts, tensor.data_ptr())
            self._areas[tensor.data_ptr()] = tensor
        return tensor

    def pinned(self, nbytes: int) -> Any:
        self._not_while_capturing("pin memory")
        tensor = _aligned(nbytes, POISON)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def memory(self) -> tuple[int, int]:
        used = sum(map(len, self._areas.values()))
        return max(self.total_bytes - used - GRAPH_BYTES * self.num_graphs, 0), self.total_bytes

    def behind(self, address: int) -> Any:
        """The GPU's memory from an address to the end of what was allocated there."""
        number = bisect.bisect(self._starts, address) - 1
        start = self._starts[number] if number >= 0 else 0
        tensor = self._areas.get(start, ())
        assert start <= address < start + len(tensor), f"{address:#x} is not memory of the GPU"
        return tensor[address - start :]

    def copy(self, target: Any, source: Any) -> None:
        assert target.shape == source.shape, f"{target.shape} is not {source.shape}"
        for tensor in (target, source):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in self._pinned:
                self.behind(tensor.data_ptr())
        self.begin(lambda: target.copy_(source))

    def fill(self, memory: Any, byte: int) -> None:
        self.begin(lambda: memory.fill_(byte))

    def read(self, memory: Any) -> None:
        self.begin(lambda: memory.sum())

    # ---------------------------------------------------------------------------------- stream

    def begin(self, operation: Callable[[], Any]) -> None:
        """Puts an operation into the stream."""
        with self._lock:
            if self._recording is not None:
                self._recording.append(operation)
                return
            self._queue.append(operation)
            self._begun += 1
            if not self.delayed:
                self._run_to(self._begun)

    def _run_to(self, position: int) -> None:
        with self._lock:
            while self._done < position:
                self._done += 1
                self._queue.popleft()()

    def stream(self) -> int:
        return 0 if self._recording is None else CAPTURE_STREAM

    def record(self, *, timed: bool = False) -> FakeEvent:
        self._not_while_capturing("record an event")
        with self._lock:
            return FakeEvent(self._begun, timed)

    def wait(self, event: FakeEvent) -> None:
        self._not_while_capturing("wait")
        self._run_to(event.position)

    def elapsed_us(self, before: FakeEvent, after: FakeEvent) -> float:
        """As if each operation took a microsecond."""
        assert before.timed, "not timed"
        assert after.timed, "not timed"
        assert self._done >= after.position, "has not happened"
        return float(after.position - before.position)

    def synchronize(self) -> None:
        self._not_while_capturing("wait")
        self._run_to(self._begun)

    def _not_while_capturing(self, what: str) -> None:
        if self._recording is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    # ---------------------------------------------------------------------------------- graphs

    def capture(self, run: Callable[[], None]) -> list[Callable[[], None]]:
        self._not_while_capturing("capture")
        self.synchronize()
        graph: list[Callable[[], None]] = []
        self._recording = graph
        try:
            run()
        finally:
            self._recording = None
        self.num_graphs += 1
        return graph

    def replay(self, graph: list[Callable[[], None]]) -> None:
        for operation in graph:
            self.begin(operation)


def _aligned(nbytes: int, byte: int) -> Any:
    raw = torch.full((nbytes + ALIGN,), byte, dtype=torch.uint8)
    return raw[-raw.data_ptr() % ALIGN :][:nbytes]


# ---------------------------------------------------------------------------------------- driver

# CUresult, as in cuda.h.
ERRORS = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"),
    500: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
}
INVALID_VALUE, INVALID_CONTEXT, NOT_FOUND = 1, 201, 500
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
SHARED_BYTES_WITHOUT_ASKING = 48 << 10

# CUlaunchConfig: grid, block, shared memory; stream, attributes, how many.
CONFIG = struct.Struct("7I4xQQI4x")

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_void_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


@dataclass(frozen=True, slots=True)
class FakeLaunch:
    """A launch, taken apart. `pointers`: the kernel's own, count last."""

    key: str
    programs: int
    pointers: tuple[int, ...]
    scratch: int
    stream: int


class FakeFunction:
    """A C function that calls a Python one. What goes wrong in there is raised to the caller."""

    def __init__(self, name: str, function: Callable[..., int]) -> None:
        self.error: BaseException | None = None
        self.restype: Any = None

        def safely(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except BaseException as error:
                self.error = error
                return 0

        self._pointer = CFUNCTYPE(c_int, *SIGNATURES[name])(safely)
        self._argtypes: Any = None

    @property
    def argtypes(self) -> Any:
        return self._argtypes

    @argtypes.setter
    def argtypes(self, kinds: Any) -> None:
        self._argtypes = self._pointer.argtypes = kinds

    def __call__(self, *arguments: Any) -> int:
        assert self._argtypes is not None, "ctypes would pass handles as ints of 32 bits"
        result = self._pointer(*arguments)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return int(result)


class FakeLibrary:
    """libcuda for one artifact. `launches` lists what was launched, those into graphs as well; `calls` the
    names of all functions called. `on_run` is called when a launch runs."""

    def __init__(self, artifact: GpuArtifact, gpu: FakeGpu, *, execute: bool = False) -> None:
        self.artifact, self.gpu = artifact, gpu
        self.calls: list[str] = []
        self.launches: list[FakeLaunch] = []
        self.on_run: Callable[[FakeLaunch], None] = self._interpret if execute else lambda _: None
        self.shared_bytes: dict[str, int] = {}
        self.images: list[bytes] = []
        self._failures: dict[str, tuple[int, int]] = {}
        self._functions: dict[int, str] = {}
        self._threads = threading.local()
        self._texts: list[Any] = []
        for name in SIGNATURES:
            setattr(self, name, FakeFunction(name, functools.partial(self._called, name)))

    def fail(self, name: str, result: int, after: int = 0) -> None:
        """Makes a function fail once, with this CUresult, after so many more calls that do not."""
        self._failures[name] = (after, result)

    def _called(self, name: str, *arguments: Any) -> int:
        self.calls.append(name)
        if name in self._failures:
            after, result = self._failures.pop(name)
            if after == 0:
                return result
            self._failures[name] = (after - 1, result)
        needs_context = name.startswith(("cuModule", "cuFunc", "cuLaunch"))
        if needs_context and not getattr(self._threads, "current", False):
            return INVALID_CONTEXT
        implementation: Callable[..., int] = getattr(self, f"_{name}")
        return implementation(*arguments)

    # ---------------------------------------------------------------------------------- driver

    def _cuInit(self, flags: int) -> int:  # noqa: N802
        return 0 if flags == 0 else INVALID_VALUE

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device[0] = ordinal + 40
        return 0

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        assert device == self.gpu.ordinal + 40
        context[0] = 0xC0
        return 0

    def _cuCtxSetCurrent(self, context: int) -> int:  # noqa: N802
        assert context == 0xC0
        self._threads.current = True
        return 0

    def _cuModuleLoadData(self, module: Any, image: int) -> int:  # noqa: N802
        self.images.append(ctypes.string_at(image))
        module[0] = 0x1000 + len(self.images) - 1
        return 0

    def _cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> int:  # noqa: N802
        key = self.images[module - 0x1000].decode().removeprefix("ptx ")
        if name.decode() != self.artifact.kernels[key].launch.symbol:
            return NOT_FOUND
        handle = 0x7F00_0000_0000 + len(self._functions)  # more than 32 bits
        self._functions[handle] = key
        function[0] = handle
        return 0

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> int:  # noqa: N802
        assert attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared_bytes[self._functions[function]] = value
        return 0

    def _cuLaunchKernelEx(self, config: int, function: int, places: int, extra: Any) -> int:  # noqa: N802
        *sizes, shared, stream, attributes, num_attributes = CONFIG.unpack(
            ctypes.string_at(config, CONFIG.size)
        )
        assert attributes == num_attributes == 0
        key = self._functions[function]
        metadata = self.artifact.kernels[key].launch
        programs = sizes[0]
        assert sizes[1:] == [1, 1, 32 * metadata.warps, 1, 1], f"{key}: grid and block are {sizes}"
        assert shared == metadata.shared_bytes, f"{key}: {shared} bytes of shared memory"
        assert extra is None
        assert stream == self.gpu.stream(), f"{key}: goes to stream {stream}"
        if programs == 0 or shared > self.shared_bytes.get(key, SHARED_BYTES_WITHOUT_ASKING):
            return INVALID_VALUE
        launch = self._taken_apart(key, metadata, programs, places, stream)
        self.launches.append(launch)
        self.gpu.begin(lambda: self.on_run(launch))
        return 0

    def _taken_apart(
        self, key: str, metadata: LaunchMetadata, programs: int, places: int, stream: int
    ) -> FakeLaunch:
        addresses = (c_void_p * (len(metadata.arguments) + 2)).from_address(places)
        *pointers, scratch, profile = (c_uint64.from_address(at or 0).value for at in addresses)
        assert profile == 0
        for (name, _), align, pointer in zip(metadata.arguments, metadata.align, pointers, strict=True):
            assert pointer % align == 0, f"{key}: {name} at {pointer:#x}"
            self.gpu.behind(pointer)
        if metadata.scratch_bytes:
            assert scratch % metadata.scratch_align == 0
            assert len(self.gpu.behind(scratch)) >= metadata.scratch_bytes * programs
        else:
            assert scratch == 0
        return FakeLaunch(key, programs, tuple(pointers), scratch, stream)

    def _cuGetErrorName(self, result: int, text: Any) -> int:  # noqa: N802
        return self._give(text, result, 0)

    def _cuGetErrorString(self, result: int, text: Any) -> int:  # noqa: N802
        return self._give(text, result, 1)

    def _give(self, text: Any, result: int, which: int) -> int:
        if result not in ERRORS:
            return INVALID_VALUE
        kept = ctypes.create_string_buffer(ERRORS[result][which].encode())
        self._texts.append(kept)
        ctypes.cast(text, POINTER(c_void_p))[0] = ctypes.addressof(kept)
        return 0

    # ------------------------------------------------------------------------------- execution

    def typed(self, launch: FakeLaunch) -> dict[str, Any]:
        """What a launch works on, by argument: from its pointer to the end of that memory."""
        found = {}
        for (name, kind), pointer in zip(
            self.artifact.kernels[launch.key].launch.arguments, launch.pointers, strict=True
        ):
            memory = self.gpu.behind(pointer)
            found[name] = memory[: len(memory) // 4 * 4].view(KINDS[kind])
        return found

    def _interpret(self, launch: FakeLaunch) -> None:
        _kernel_function(self.artifact, launch.key)[(launch.programs,)](*self.typed(launch).values())


_FUNCTIONS: dict[tuple[str, str], Any] = {}


def _kernel_function(artifact: GpuArtifact, key: str) -> Any:
    """A kernel's source as Triton's interpreter runs it."""
    from pagec.compiler.backends.cuda.build import load_function

    assert os.environ.get("TRITON_INTERPRET") == "1", "see in_interpreter"
    name = str(artifact.path), key
    if name not in _FUNCTIONS:
        _FUNCTIONS[name] = load_function(artifact.path / KERNELS / f"{key}.py", key)
    return _FUNCTIONS[name]


def in_interpreter(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module in tests/support returns, in a process where launches can be executed."""
    return interpreter_process().submit(function, *arguments).result()
