"""Lists of launches, against a driver that takes every argument apart."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_cuda import FakeGpu, FakeLibrary
from support.gpu_artifacts import bare_artifact

from pagec.compiler.errors import ArtifactError, DeviceError
from pagec.compiler.launch import Counts, GridRule, LaunchMetadata
from pagec.runtime.device.cuda.device import CudaDevice
from pagec.runtime.device.cuda.launch import GpuCall

MOST = (64, 8, 8, 64, 32, 16)

grids = st.builds(
    GridRule,
    rows=st.integers(1, 200),
    columns=st.integers(1, 70),
    per_sm=st.integers(0, 4),
    extra=st.integers(0, 9),
)


@st.composite
def launches(draw: st.DrawFn) -> LaunchMetadata:
    """A kernel of any number of arrays, aligned as it likes; one in two wants scratch memory."""
    num_arrays = draw(st.integers(0, 14))
    align = tuple(draw(st.sampled_from([4, 16])) for _ in range(num_arrays))
    scratch_bytes = draw(st.sampled_from([0, 0, 128, 384]))
    return LaunchMetadata(
        symbol="a_symbol",
        arguments=(*((f"x{i}", "*fp32") for i in range(num_arrays)), ("count", "*i32")),
        align=(*align, 4),
        warps=draw(st.sampled_from([1, 2, 4, 8, 16])),
        shared_bytes=draw(st.sampled_from([0, 1024, 48 << 10, (48 << 10) + 16, 200 << 10])),
        grid=draw(grids),
        scratch_bytes=scratch_bytes,
        scratch_align=128 if scratch_bytes else 1,
    )


def device_for(directory: Path, kernels: dict[str, LaunchMetadata]) -> tuple[CudaDevice, FakeLibrary]:
    artifact, gpu = bare_artifact(directory, kernels), FakeGpu()
    library = FakeLibrary(artifact, gpu)
    return CudaDevice(artifact, gpu=gpu, library=library), library


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_launches_are_what_the_metadata_say(data: st.DataObject) -> None:
    """The fake driver checks block, shared memory, alignment, scratch, stream; here pointers and grids."""
    kernels = {f"k{i}": data.draw(launches()) for i in range(data.draw(st.integers(1, 3)))}
    keys = data.draw(st.lists(st.sampled_from(sorted(kernels)), min_size=1, max_size=5))
    runs = data.draw(st.lists(st.tuples(*(st.integers(0, most) for most in MOST)), max_size=3))
    with tempfile.TemporaryDirectory() as directory:
        device, library = device_for(Path(directory), kernels)
    pool, words = device.allocate(4096), device.allocate(4 * len(Counts))
    calls = []
    for number, key in enumerate(keys):
        starts = [data.draw(st.integers(0, 200)) * align for align in kernels[key].align[:-1]]
        count = data.draw(st.sampled_from(Counts))
        pointers = tuple(pool[start:] for start in starts)
        calls.append(GpuCall(f"call{number}", key, count, pointers, words[4 * count :]))
    prepared = device.prepare(calls, MOST)
    for rows in runs:
        library.launches.clear()
        prepared.run(rows)
        expected = [
            (
                call.kernel,
                kernels[call.kernel].grid.programs(rows[call.count], device.sms),
                tuple(device.address(memory) for memory in (*call.pointers, call.count_at)),
            )
            for call in calls
            if rows[call.count]
        ]
        assert [(one.key, one.programs, one.pointers) for one in library.launches] == expected


def simple(**changes: Any) -> LaunchMetadata:
    given = {
        "symbol": "s",
        "arguments": (("x", "*fp32"), ("count", "*i32")),
        "align": (16, 4),
        "warps": 4,
        "shared_bytes": 0,
        "grid": GridRule(16, 2),
    }
    return LaunchMetadata(**{**given, **changes})  # type: ignore[arg-type]


def call(device: CudaDevice, key: str = "k", count: Counts = Counts.T, offset: int = 0) -> GpuCall:
    return GpuCall(f"{key}'s", key, count, (device.allocate(64)[offset:],), device.allocate(4))


def rows(**counts: int) -> tuple[int, ...]:
    return tuple(counts.get(count.name, 0) for count in Counts)


def test_a_pointer_that_is_not_aligned_is_refused(tmp_path: Path) -> None:
    device, _ = device_for(tmp_path, {"k": simple()})
    with pytest.raises(ArtifactError, match=r"argument x lies at 0x[0-9a-f]+, which is no multiple of 16"):
        device.prepare([call(device, offset=4)], MOST)
    too_many = GpuCall("k's", "k", Counts.T, (device.allocate(64),) * 2, device.allocate(4))
    with pytest.raises(ArtifactError, match="takes 2 pointers, not 3"):
        device.prepare([too_many], MOST)


def test_a_kernel_that_is_not_there_is_named(tmp_path: Path) -> None:
    device, _ = device_for(tmp_path, {"k": simple()})
    with pytest.raises(ArtifactError, match="has no kernel missing"):
        device.prepare([call(device, "missing")], MOST)


def test_a_refused_launch_names_call_and_kernel(tmp_path: Path) -> None:
    device, library = device_for(tmp_path, {"k": simple(), "bad": simple()})
    prepared = device.prepare([call(device), call(device, "bad")], MOST)
    for run in (prepared.run, prepared.time_us):
        library.fail("cuLaunchKernelEx", 700, after=1)
        with pytest.raises(DeviceError) as error:
            run(rows(T=3))
        assert error.value.place == "kernel bad"
        assert "cannot launch bad's: CUDA_ERROR_ILLEGAL_ADDRESS" in error.value.message


def test_another_thread_may_launch(tmp_path: Path) -> None:
    device, library = device_for(tmp_path, {"k": simple()})
    prepared = device.prepare([call(device)], MOST)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(prepared.run, rows(T=3)).result()
    assert len(library.launches) == 1


def test_times_stand_where_the_calls_do(tmp_path: Path) -> None:
    """The fake's operations take a microsecond each."""
    device, library = device_for(tmp_path, {"k": simple()})
    prepared = device.prepare([call(device, count=c) for c in (Counts.T, Counts.R, Counts.T)], MOST)
    assert prepared.time_us(rows(T=3)) == [1.0, 0.0, 1.0]
    assert prepared.time_us(rows(R=3)) == [0.0, 1.0, 0.0]
    assert prepared.time_us(rows()) == [0.0, 0.0, 0.0]
    assert len(library.launches) == 3


def test_scratch_memory_is_for_the_largest_launch_and_shared(tmp_path: Path) -> None:
    small = simple(scratch_bytes=128, scratch_align=128, grid=GridRule(1, 1))
    large = simple(scratch_bytes=256, scratch_align=128, grid=GridRule(4, 3, extra=1))
    device, library = device_for(tmp_path, {"small": small, "large": large, "none": simple()})
    before = device.free_bytes()
    first = device.prepare([call(device, key) for key in ("small", "none", "large")], rows(T=64))
    assert before - device.free_bytes() == 256 * (16 * 3 + 1) + 3 * (64 + 4)
    first.run(rows(T=64))
    used, none, again = (launch.scratch for launch in library.launches)
    assert used == again != 0
    assert none == 0
    before = device.free_bytes()
    second = device.prepare([call(device, "large")], rows(T=8))
    assert before - device.free_bytes() == 64 + 4
    second.run(rows(T=8))
    assert library.launches[-1].scratch == used


def test_a_larger_list_leaves_the_earlier_ones_their_scratch(tmp_path: Path) -> None:
    device, library = device_for(tmp_path, {"k": simple(scratch_bytes=128, scratch_align=128)})
    small = device.prepare([call(device)], rows(T=16))
    large = device.prepare([call(device)], rows(T=64))
    small.run(rows(T=16))
    large.run(rows(T=64))
    assert library.launches[0].scratch != library.launches[1].scratch


def test_rows_beyond_what_was_prepared_are_a_defect(tmp_path: Path) -> None:
    device, _ = device_for(tmp_path, {"k": simple()})
    prepared = device.prepare([call(device)], rows(T=16))
    with pytest.raises(AssertionError):
        prepared.run(rows(T=17))


def test_a_graph_replays_what_was_launched_on_what_the_memory_holds_then(tmp_path: Path) -> None:
    device, library = device_for(tmp_path, {"k": simple()})
    given = call(device)
    prepared = device.prepare([given], MOST)

    def double(launch: Any) -> None:
        x, count = library.typed(launch).values()
        x[: int(count[0])] *= 2

    library.on_run = double
    x, count = given.pointers[0], given.count_at
    graph = device.capture(lambda: prepared.run(rows(T=16)))
    assert library.launches[0].stream != 0
    device.upload(x, np.arange(16, dtype=np.float32))
    assert device.download(x, np.float32)[1] == 1
    for num, expected in ((4, [0, 2, 4, 6, 4]), (2, [0, 4, 4, 6, 4])):
        device.upload(count, np.array([num], np.int32))
        graph.replay()
        assert device.download(x, np.float32)[:5].tolist() == expected
    assert len(library.launches) == 1


def test_a_capture_that_fails_raises_what_its_launches_did(tmp_path: Path) -> None:
    device, library = device_for(tmp_path, {"k": simple()})
    prepared = device.prepare([call(device)], MOST)
    library.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DeviceError, match="cannot launch k's"):
        device.capture(lambda: prepared.run(rows(T=16)))
    prepared.run(rows(T=16))
    assert library.launches[-1].stream == 0
