"""What is used of torch.cuda, in one class: memory, copies, events, graphs. Tests put another in its place.

Memory is a flat tensor of bytes. Everything that is told to run goes to torch's current stream, which is the
default stream in every thread (while a graph is captured: the stream of the capture), and so runs in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pagec.compiler.errors import CapacityError, DeviceError
from pagec.runtime.device import Memory

Event = Any
Graph = Any
_PLACE: Final = "the GPU"


def address(memory: Memory) -> int:
    """Where memory begins, as kernels see it."""
    return int(memory.data_ptr())


class TorchGpu:
    """torch's current GPU. DeviceError if there is none."""

    def __init__(self) -> None:
        self._torch: Any = _import_torch()
        cuda = self._torch.cuda
        self.ordinal = int(cuda.current_device())
        properties = cuda.get_device_properties(self.ordinal)
        self.name = str(properties.name)
        self.capability: tuple[int, int] = cuda.get_device_capability(self.ordinal)
        self.sms = int(properties.multi_processor_count)
        self._device = self._torch.device("cuda", self.ordinal)
        self.allocate(1)  # torch makes the GPU's context current in this thread when it first needs it
        self._capturing: Any = cuda.Stream(self._device)
        self._graph_memory: Any = cuda.graph_pool_handle()

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed memory of the GPU, at a multiple of 256 bytes."""
        try:
            return self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError as error:
            free, total = self.memory()
            raise CapacityError(
                f"{nbytes} bytes cannot be allocated: {free} of {total} are free",
                place=f"memory of {self.name}",
                remedy="give the KV pool less memory, or end what else uses the GPU",
            ) from error

    def pinned(self, nbytes: int) -> Memory:
        """Memory of the host that the GPU can copy to and from while the host goes on.

        torch reuses it only once the copies from and to it that `copy` has begun are done.
        """
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU."""
        free, total = self._torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def copy(self, target: Memory, source: Memory) -> None:
        """Begins a copy between tensors of the same shape, in the GPU or pinned."""
        with _told("copy"):
            target.copy_(source, non_blocking=True)

    def fill(self, memory: Memory, byte: int) -> None:
        """Begins to fill memory of the GPU."""
        with _told("fill memory"):
            memory.fill_(byte)

    def multiply(self, a: Memory, b: Memory, product: Memory, size: int) -> None:
        """Begins a product of two matrices of bf16, [size, size]."""
        x, y, out = (one.view(self._torch.bfloat16).view(size, size) for one in (a, b, product))
        with _told("multiply matrices"):
            self._torch.matmul(x, y, out=out)

    def read(self, memory: Memory) -> None:
        """Begins to read memory of the GPU, whole words of it: caches are full of it then, and clean."""
        with _told("read memory"):
            self._torch.sum(memory.view(self._torch.int32))

    # ---------------------------------------------------------------------------------- stream

    def stream(self) -> int:
        """The handle of the current stream."""
        return int(self._stream().cuda_stream)

    def _stream(self) -> Any:
        return self._torch.cuda.current_stream(self._device)

    def record(self, *, timed: bool = False) -> Event:
        """An event that happens when all that was begun so far is done."""
        event = self._torch.cuda.Event(enable_timing=timed)
        event.record(self._stream())
        return event

    def wait(self, event: Event) -> None:
        """Returns once the event has happened."""
        with _told("run"):
            event.synchronize()

    def elapsed_us(self, before: Event, after: Event) -> float:
        """Microseconds between two timed events that have happened."""
        return float(before.elapsed_time(after)) * 1e3

    def synchronize(self) -> None:
        """Returns once all that was begun is done."""
        with _told("run"):
            self._torch.cuda.synchronize(self._device)

    # ---------------------------------------------------------------------------------- graphs

    def capture(self, run: Callable[[], None]) -> Graph:
        """What `run` launches, as a graph; nothing runs yet. All graphs share memory and a stream."""
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            # Other threads may copy blocks meanwhile.
            with cuda.graph(
                graph,
                pool=self._graph_memory,
                stream=self._capturing,
                capture_error_mode="thread_local",
            ):
                try:
                    run()
                except Exception as error:  # a capture that was broken off fails at its end too
                    failure = error
        except RuntimeError as error:
            raise failure or _failed("capture a graph", error) from error
        if failure is not None:
            raise failure
        return graph

    def replay(self, graph: Graph) -> None:
        """Begins to run a graph."""
        with _told("replay a graph"):
            graph.replay()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """torch raises RuntimeError, or a kind of it, for whatever CUDA reports."""
    try:
        yield
    except RuntimeError as error:
        raise _failed(what, error) from error


def _failed(what: str, error: RuntimeError) -> DeviceError:
    text = str(error).partition("\n")[0]  # the other lines are torch's advice on debugging
    return DeviceError(
        f"failed to {what}: {text}",
        place=_PLACE,
        remedy="start again; if it fails again, CUDA_LAUNCH_BLOCKING=1 in the environment names the kernel",
    )


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DeviceError(
            "artifacts for GPUs run on torch, which is not installed",
            place=_PLACE,
            remedy="install a build of torch for CUDA",
        ) from error
    if not torch.cuda.is_available():
        raise DeviceError(
            "torch finds no NVIDIA GPU",
            place=_PLACE,
            remedy="see whether nvidia-smi lists one and whether torch is a build for CUDA "
            "(torch.version.cuda), or compile the model for this CPU (--target cpu)",
        )
    return torch
