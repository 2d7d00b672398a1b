"""Memory and copies of the GPU device, on a GPU that runs late, and on one that runs at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_cuda import FakeGpu, FakeLibrary
from support.gpu_artifacts import bare_artifact

from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.compiler.launch import Counts, GridRule, LaunchMetadata
from pagec.runtime.device.cuda import device as devices
from pagec.runtime.device.cuda.device import CudaDevice, GpuCall

KERNEL = LaunchMetadata("s", (("count", "*i32"),), (4,), 1, 0, GridRule(1, 1))


def make(directory: Path, **gpu: Any) -> CudaDevice:
    artifact, fake = bare_artifact(directory, {"k": KERNEL}), FakeGpu(**gpu)
    return CudaDevice(artifact, gpu=fake, library=FakeLibrary(artifact, fake))


@pytest.fixture(params=[True, False], ids=["late", "at once"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> CudaDevice:
    return make(tmp_path, delayed=request.param)


# ------------------------------------------------------------------------------------- artifacts


@pytest.mark.parametrize(
    ("target", "capability", "portable", "image"),
    [
        ("h100", (9, 0), False, b"k"),
        ("a100", (8, 0), True, b"k"),
        ("a100", (8, 6), False, b"k"),
        ("a100", (9, 0), True, b"ptx k"),
        ("a100", (12, 0), True, b"ptx k"),
    ],
)
def test_the_right_code_is_loaded(
    tmp_path: Path, target: str, capability: tuple[int, int], portable: bool, image: bytes
) -> None:
    artifact = bare_artifact(tmp_path, {"k": KERNEL}, target=target, portable=portable)
    gpu = FakeGpu(capability=capability)
    library = FakeLibrary(artifact, gpu)
    made = CudaDevice(artifact, gpu=gpu, library=library)
    assert library.images == [image]
    assert bool(made.notices) == image.startswith(b"ptx")
    for notice in made.notices:
        assert "made for a100 (sm_80)" in notice
        assert "the driver has compiled its kernels" in notice


@pytest.mark.parametrize(
    ("target", "capability", "portable"),
    [
        ("h100", (8, 0), False),
        ("h100", (8, 0), True),
        ("h100", (10, 0), False),
        ("a100", (7, 5), True),
        ("a100", (9, 0), False),
    ],
)
def test_code_for_another_gpu_is_refused(
    tmp_path: Path, target: str, capability: tuple[int, int], portable: bool
) -> None:
    artifact = bare_artifact(tmp_path, {"k": KERNEL}, target=target, portable=portable)
    gpu = FakeGpu(capability=capability)
    with pytest.raises(ArtifactError, match=rf"made for {target} \(sm_\d+\), this GPU is a Fake") as error:
        CudaDevice(artifact, gpu=gpu, library=FakeLibrary(artifact, gpu))
    assert "--target" in error.value.remedy


def test_a_missing_cubin_is_named(tmp_path: Path) -> None:
    artifact = bare_artifact(tmp_path, {"k": KERNEL})
    (tmp_path / "kernels" / "k.cubin").unlink()
    gpu = FakeGpu()
    with pytest.raises(ArtifactError, match=r"kernels/k\.cubin: kernel cannot be read"):
        CudaDevice(artifact, gpu=gpu, library=FakeLibrary(artifact, gpu))


def test_nothing_is_loaded_later(tmp_path: Path) -> None:
    artifact, gpu = bare_artifact(tmp_path, {"k": KERNEL}), FakeGpu()
    library = FakeLibrary(artifact, gpu)
    made = CudaDevice(artifact, gpu=gpu, library=library)
    loaded = len(library.calls)
    ones = tuple(1 for _ in Counts)
    made.prepare([GpuCall("a", "k", Counts.T, (), made.allocate(4))] * 3, ones).run(ones)
    assert set(library.calls[loaded:]) == {"cuLaunchKernelEx"}


# ---------------------------------------------------------------------------------------- memory


def test_memory_is_zeroed_aligned_and_counted(device: CudaDevice) -> None:
    before = device.free_bytes()
    memory = device.allocate(1000)
    assert device.address(memory) % 256 == 0
    assert device.address(memory[24:]) == device.address(memory) + 24
    assert not device.download(memory, np.uint8).any()
    assert before - device.free_bytes() == 1000


def test_too_much_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"5000 bytes cannot be allocated: \d+ of 4096"):
        make(tmp_path, total_bytes=4096).allocate(5000)


def test_a_file_is_read_in_slices(
    device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_SLICE", 1000)
    content = np.random.default_rng(0).integers(0, 256, 5 * 1000 + 17, np.uint8)
    content.tofile(tmp_path / "file")
    for offset, nbytes in ((0, len(content)), (7, 2000), (5000, 17), (3, 0)):
        memory = device.read_file(tmp_path / "file", offset, nbytes)
        assert (device.download(memory, np.uint8) == content[offset : offset + nbytes]).all()
    with pytest.raises(ArtifactError, match="ends before its tensors do"):
        device.read_file(tmp_path / "file", 20, len(content))


def test_a_file_cannot_be_mapped(device: CudaDevice, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="a GPU cannot compute on a file's pages") as error:
        device.map_file(tmp_path / "weights", 0, 10)
    assert error.value.remedy == "use --weights-memory copy"


# ---------------------------------------------------------------------------------------- copies


def test_an_uploaded_array_is_free_at_once(device: CudaDevice) -> None:
    """Two uploads before the first has run: the device sees both, in order."""
    one, two = device.allocate(64), device.allocate(64)
    array = np.arange(16, dtype=np.int32)
    device.upload(one, array)
    device.copy(two, one)
    array[:] = -1
    device.upload(one, array[:8])
    assert device.download(two, np.int32).tolist() == list(range(16))
    assert device.download(one, np.int32).tolist() == [-1] * 8 + list(range(8, 16))


def test_a_large_array_is_uploaded_in_slices(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_SLICE", 100)
    array = np.random.default_rng(0).integers(0, 1 << 30, (5, 17), np.int32)
    memory = device.allocate(array.nbytes + 10)
    device.upload(memory, array)
    got = device.download(memory, np.uint8)
    assert got[:-10].tobytes() == array.tobytes()
    assert not got[-10:].any()


def test_what_is_fetched_is_what_was_there_when_it_began(device: CudaDevice) -> None:
    memory = device.allocate(12)
    device.upload(memory, np.array([1, 2, 3], np.int32))
    before = device.fetch(memory, np.int32)
    device.upload(memory, np.array([4], np.int32))
    after = device.fetch(memory[:8], np.int32)
    assert after.array().tolist() == [4, 2]
    first = before.array()
    first[:] = 0  # its own
    assert before.array().tolist() == [1, 2, 3]
    assert device.fetch(memory[:0], np.int32).array().shape == (0,)


def test_rows_lie_apart(device: CudaDevice) -> None:
    memory = device.allocate(5 * 16)
    device.fill_nan(memory)
    device.upload_rows(memory, np.array([[1, 2], [3, 4], [5, 6]], np.int32), 16)
    assert device.download(memory, np.int32).reshape(5, 4).tolist() == [
        [1, 2, -1, -1],
        [3, 4, -1, -1],
        [5, 6, -1, -1],
        [-1] * 4,
        [-1] * 4,
    ]
    assert np.isnan(device.download(memory, np.float32)[2:4]).all()


def test_uploads_of_several_threads_do_not_mix(device: CudaDevice) -> None:
    memory = device.allocate(64 * 400)
    barrier = threading.Barrier(4)

    def upload(thread: int) -> None:
        barrier.wait()
        for i in range(thread, 64, 4):
            device.upload(memory[400 * i :], np.full(100, i, np.int32))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upload, range(4)))
    assert (device.download(memory, np.int32).reshape(64, 100) == np.arange(64)[:, None]).all()


# ---------------------------------------------------------------------------------------- blocks

SPANS, BLOCKS, SPAN_BYTES = 3, 8, 32


def pool_of(device: CudaDevice) -> tuple[Any, Any]:
    """A pool in which every byte says where it is, and the same on the host."""
    host = np.random.default_rng(0).integers(0, 256, (SPANS, BLOCKS, SPAN_BYTES), np.uint8)
    memory = device.allocate(host.size)
    device.upload(memory, host)
    return memory, host


def contents(device: CudaDevice, memory: Any) -> Any:
    return device.download(memory, np.uint8).reshape(SPANS, BLOCKS, SPAN_BYTES)


pairs = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(copies=pairs)
def test_blocks_are_copied_one_after_the_other(device: CudaDevice, copies: list[tuple[int, int]]) -> None:
    memory, host = pool_of(device)
    device.copy_blocks(memory, SPANS, SPAN_BYTES, np.array(copies, np.int32).reshape(-1, 2))
    for source, target in copies:
        host[:, target] = host[:, source]
    assert (contents(device, memory) == host).all()


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
def test_blocks_come_and_go(device: CudaDevice, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_BLOCKS_BYTES", at_a_time * SPANS * SPAN_BYTES)
    memory, host = pool_of(device)
    spare = [np.zeros(SPANS * SPAN_BYTES, np.uint8)]
    kept = spare[0]
    blocks = [5, 0, 7, 2]
    found = device.read_blocks(memory, SPANS, SPAN_BYTES, blocks, spare)
    assert [one.tobytes() for one in found] == [host[:, block].tobytes() for block in blocks]
    assert found[0] is kept
    assert not spare
    device.write_blocks(memory, SPANS, SPAN_BYTES, [1, 2, 3, 4], found)
    for one in found:
        one[:] = 0  # free at once
    host[:, [1, 2, 3, 4]] = host[:, blocks]
    assert (contents(device, memory) == host).all()
    assert device.read_blocks(memory, SPANS, SPAN_BYTES, []) == []


def test_blocks_are_read_as_the_work_before_left_them(device: CudaDevice) -> None:
    memory, _ = pool_of(device)
    device.fill_nan(memory)
    with ThreadPoolExecutor(1) as pool:
        (block,) = pool.submit(device.read_blocks, memory, SPANS, SPAN_BYTES, [4]).result()
    assert (block == 0xFF).all()
