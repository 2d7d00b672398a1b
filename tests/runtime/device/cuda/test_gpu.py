"""TorchGpu on a stand-in for torch that has the names and signatures of the real one, and no GPU."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

from pagec.compiler.errors import CapacityError, DeviceError
from pagec.runtime.device.cuda.gpu import TorchGpu


class FakeStream:
    """As torch.cuda.Stream; `cuda_stream` is its handle."""

    def __init__(self, device: Any = None, handle: int = 77) -> None:
        self.device, self.cuda_stream = device, handle


class FakeEvent:
    """As torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.error = enable_timing, ""
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed
        assert end.timed
        return 0.25


class FakeGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.replayed = 0

    def replay(self) -> None:
        self.replayed += 1


class FakeCuda:
    """As torch.cuda; calls are checked against the signatures that torch has."""

    def __init__(self) -> None:
        self.available, self.streams = True, [FakeStream(handle=0)]
        self.captures: list[Any] = []
        self.end_fails = False
        self.Event, self.CUDAGraph, self.Stream = FakeEvent, FakeGraph, FakeStream

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 1

    def get_device_properties(self, device: Any) -> Any:
        assert device == 1
        return type("Properties", (), {"name": "Tester", "multi_processor_count": 132})

    def get_device_capability(self, device: Any) -> tuple[int, int]:
        assert device == 1
        return 9, 0

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        assert device == torch.device("cuda", 1)
        return 300, 400

    def graph_pool_handle(self) -> tuple[int, int]:
        return 5, 6

    def current_stream(self, device: Any) -> FakeStream:
        assert device == torch.device("cuda", 1)
        return self.streams[-1]

    def synchronize(self, device: Any) -> None:
        assert device == torch.device("cuda", 1)

    def graph(self, *arguments: Any, **named: Any) -> Any:
        given = inspect.signature(torch.cuda.graph.__init__).bind(self, *arguments, **named).arguments
        fake = self

        class Capture:
            def __enter__(self) -> None:
                fake.streams.append(given["stream"])

            def __exit__(self, *error: object) -> None:
                fake.streams.pop()
                if fake.end_fails:
                    raise RuntimeError("CUDA error: operation failed due to a previous error\nadvice")

        self.captures.append(given)
        return Capture()


class FakeTorch:
    """As torch, with memory of the host."""

    uint8, device, OutOfMemoryError = torch.uint8, torch.device, torch.OutOfMemoryError

    def __init__(self) -> None:
        self.cuda, self.pinned = FakeCuda(), 0

    def zeros(self, nbytes: int, *, dtype: Any, device: Any) -> Any:
        assert device == torch.device("cuda", 1)
        if nbytes > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(nbytes, dtype=dtype)

    def empty(self, nbytes: int, *, dtype: Any, pin_memory: bool) -> Any:
        self.pinned += pin_memory
        return torch.empty(nbytes, dtype=dtype)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize("name", [n for n in dir(FakeCuda) if not n.startswith("_")])
def test_the_stand_in_has_torchs_signatures(name: str) -> None:
    """Each argument of the stand-in may be given to torch's own function, by the same name."""
    assert hasattr(torch.cuda, name)
    if name != "graph":
        mine = list(inspect.signature(getattr(FakeCuda, name)).parameters)[1:]
        assert mine == list(inspect.signature(getattr(torch.cuda, name)).parameters)[: len(mine)]


def test_events_and_graphs_are_torchs() -> None:
    for mine, own in ((FakeEvent, torch.cuda.Event), (FakeGraph, torch.cuda.CUDAGraph)):
        assert all(hasattr(own, name) for name in dir(mine) if not name.startswith("_"))
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters


@pytest.mark.usefixtures("fake")
def test_it_tells_what_the_gpu_is() -> None:
    gpu = TorchGpu()
    assert (gpu.ordinal, gpu.name, gpu.capability, gpu.sms) == (1, "Tester", (9, 0), 132)
    assert gpu.memory() == (300, 400)


def test_memory_is_bytes_and_too_much_is_refused(fake: FakeTorch) -> None:
    gpu = TorchGpu()
    memory, host = gpu.allocate(10), gpu.pinned(10)
    assert memory.dtype == host.dtype == torch.uint8
    assert fake.pinned == 1
    gpu.fill(host, 3)
    gpu.copy(memory, host)
    assert memory.tolist() == [3] * 10
    with pytest.raises(CapacityError, match="memory of Tester: 101 bytes cannot be allocated: 300 of 400"):
        gpu.allocate(101)


def test_events_are_recorded_and_timed_on_demand(fake: FakeTorch) -> None:
    gpu = TorchGpu()
    assert gpu.record().stream is fake.cuda.streams[0]
    assert not gpu.record().timed
    before, after = gpu.record(timed=True), gpu.record(timed=True)
    gpu.wait(after)
    assert gpu.elapsed_us(before, after) == 250.0


@pytest.mark.usefixtures("fake")
def test_what_a_kernel_broke_is_said_without_torchs_advice() -> None:
    gpu, event = TorchGpu(), FakeEvent()
    event.error = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"
    with pytest.raises(DeviceError) as error:
        gpu.wait(event)
    assert error.value.message == "failed to run: CUDA error: an illegal memory access was encountered"
    assert "CUDA_LAUNCH_BLOCKING=1" in error.value.remedy


def test_graphs_share_memory_and_a_stream(fake: FakeTorch) -> None:
    gpu = TorchGpu()
    seen: list[int] = []
    graphs = [gpu.capture(lambda: seen.append(gpu.stream())) for _ in range(2)]
    assert seen == [77, 77]
    assert gpu.stream() == 0
    one, two = fake.cuda.captures
    assert one["stream"] is two["stream"]
    assert one["pool"] == two["pool"] == (5, 6)
    assert one["capture_error_mode"] == "thread_local"
    gpu.replay(graphs[0])
    assert [graph.replayed for graph in graphs] == [1, 0]


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_broken_capture_says_what_broke_it(fake: FakeTorch, end_fails: bool) -> None:
    gpu = TorchGpu()
    fake.cuda.end_fails = end_fails

    def broken() -> None:
        raise DeviceError("no launch")

    with pytest.raises(DeviceError, match="no launch"):
        gpu.capture(broken)
    if end_fails:
        with pytest.raises(DeviceError, match="failed to capture a graph: CUDA error: operation failed"):
            gpu.capture(lambda: None)


def test_without_a_gpu_it_says_so(fake: FakeTorch) -> None:
    fake.cuda.available = False
    with pytest.raises(DeviceError, match="torch finds no NVIDIA GPU") as error:
        TorchGpu()
    assert "nvidia-smi" in error.value.remedy


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="torch, which is not installed"):
        TorchGpu()
