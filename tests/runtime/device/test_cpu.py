"""The CPU device: aligned memory, checked tensors, kernels of a small library, no heavy imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagec.compiler.errors import ArtifactError, CapacityError
from pagec.runtime.device import KernelCall, copy_runs
from pagec.runtime.device.cpu import CpuDevice, CpuTensor, aligned_bytes, default_threads


def call(symbol: str, *tensors: CpuTensor, rows: int = 0, shares: int = 1) -> KernelCall:
    return KernelCall(symbol, rows, ((0, symbol),), tensors, (shares,))


def test_a_kernel_runs_on_device_memory(library: Path) -> None:
    device = CpuDevice(library, threads=2)
    memory = device.allocate(64)
    x = device.tensor(memory, "int32")
    calls = device.prepare([call("add", x, rows=0), call("add", x, rows=1)])
    calls.run(3, 1)
    assert device.download(memory, np.int32)[:5].tolist() == [4, 2, 2, 0, 0]
    times = calls.time_us(3, 1)
    assert len(times) == 2
    assert min(times) >= 0
    assert device.download(memory, np.int32)[:5].tolist() == [8, 4, 4, 0, 0]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_has_nothing_to_do_is_passed_over(library: Path, threads: int) -> None:
    """No rows, or a variant without a kernel for so few; what follows runs, and times are kept in step."""
    device = CpuDevice(library, threads=threads)
    memory = device.allocate(64)
    x = device.tensor(memory, "int32")
    few = KernelCall("few", 0, ((2, ""), (0, "add")), (x,))
    calls = device.prepare([few, call("add", x, rows=1), call("fail", x, rows=2)])
    calls.run(2, 1, 0)
    assert device.download(memory, np.int32)[:3].tolist() == [threads, 0, 0]
    calls.run(3, 0, 0)
    assert device.download(memory, np.int32)[:3].tolist() == [2 * threads, threads, threads]
    assert len(calls.time_us(2, 1, 0)) == 3


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("shares", [2, 16])
def test_each_share_is_done_once(library: Path, threads: int, shares: int) -> None:
    device = CpuDevice(library, threads=threads)
    memory = device.allocate(64 * threads * shares)
    x = device.tensor(memory, "int32")
    device.prepare([call("count", x, shares=shares)] * 100).run(8)
    assert device.download(memory, np.int32)[::16].tolist() == [100] * (threads * shares)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_are_not_cut_into_many_shares(library: Path, rows: int) -> None:
    device = CpuDevice(library, threads=2)
    memory = device.allocate(64 * 32)
    x = device.tensor(memory, "int32")
    device.prepare([call("count", x, shares=16)]).run(rows)
    assert device.download(memory, np.int32)[::16].tolist() == [1] * (4 * rows) + [0] * (32 - 4 * rows)


def test_one_worker_does_all_at_once(library: Path) -> None:
    device = CpuDevice(library, threads=1)
    memory = device.allocate(64 * 8)
    x = device.tensor(memory, "int32")
    device.prepare([call("count", x, shares=8)] * 3).run(1)
    assert device.download(memory, np.int32)[::16].tolist() == [3] + [0] * 7


@pytest.mark.parametrize("threads", [2, 3])
def test_who_is_done_takes_what_others_have_not_begun(library: Path, threads: int) -> None:
    """Whose first share takes long has all others done for him; if they were his own, this would not end."""
    device = CpuDevice(library, threads=threads)
    memory = device.allocate(64 * 4 * threads)
    x = device.tensor(memory, "int32")
    device.prepare([call("wait", x, shares=4), call("count", x, shares=4)]).run(2)
    assert device.download(memory, np.int32)[::16].tolist() == [2] * (4 * threads)


def test_a_share_that_fails_stops_the_list(library: Path) -> None:
    """The shares of a later list are whole again."""
    device = CpuDevice(library, threads=2)
    memory = device.allocate(64 * 8)
    x = device.tensor(memory, "int32")
    for _ in range(50):
        with pytest.raises(ArtifactError, match="kernel of fail refused to run"):
            device.prepare([call("fail", x, shares=4), call("count", x)]).run(2)
    device.prepare([call("count", x, shares=4)]).run(2)
    assert device.download(memory, np.int32)[::16].tolist() == [1] * 8


def test_a_missing_kernel_is_named(library: Path) -> None:
    device = CpuDevice(library, threads=1)
    with pytest.raises(ArtifactError, match="no kernel subtract"):
        device.prepare([call("subtract", device.tensor(device.allocate(64), "int32"))])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_that_fails_stops_the_list(library: Path, threads: int) -> None:
    device = CpuDevice(library, threads=threads)
    memory = device.allocate(64)
    x = device.tensor(memory, "int32")
    with pytest.raises(ArtifactError, match=r"kernel of fail refused to run \(ValueError: x is no good\)"):
        device.prepare([call("add", x), call("fail", x), call("add", x)]).run(1)
    assert device.download(memory, np.int32)[0] == threads


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        CpuDevice(tmp_path)
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        CpuDevice(tmp_path)


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("nbytes", [0, 1, 64, 5_000_000, 50_000_000])
def test_memory_is_zeroed_and_aligned(nbytes: int, parts: int) -> None:
    memory = aligned_bytes(nbytes, parts=parts)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % (2 << 20) == 0 or nbytes == 0
    assert not memory.any()


def test_parts_begin_on_small_pages() -> None:
    """And go on on huge ones, whatever lies before their first whole one."""

    def flags(at: int) -> list[str]:
        found = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if "-" in first:
                start, end = (int(x, 16) for x in first.split("-"))
                found = start <= at < end
            elif found and first == "VmFlags:":
                return line.split()[1:]
        raise AssertionError("not mapped")

    memory = aligned_bytes(30 << 20, parts=3)
    for part in range(3):
        start = memory.ctypes.data + part * (10 << 20)
        assert "nh" in flags(start)
        assert "nh" in flags(start + (1 << 20))
        assert "hg" in flags(start + (3 << 20))


def test_a_misaligned_tensor_is_refused(library: Path) -> None:
    device = CpuDevice(library, threads=1)
    memory = device.allocate(256)
    with pytest.raises(ValueError, match="64-byte aligned"):
        device.tensor(memory[4:], "int32")
    with pytest.raises(ValueError, match="whole elements"):
        device.tensor(memory[:65], "int32")
    with pytest.raises(ValueError, match="not float64"):
        device.tensor(memory, "float64")
    with pytest.raises(ValueError, match="contiguous bytes"):
        device.tensor(memory[::2], "int32")
    assert device.tensor(memory[64:128], "int32").shape == (16,)


def test_files_are_read_in_slices(library: Path, tmp_path: Path) -> None:
    device = CpuDevice(library, threads=2)
    data = np.random.default_rng(0).integers(0, 256, (40 << 20) + 3, dtype=np.uint8)
    file = tmp_path / "data"
    data.tofile(file)
    assert np.array_equal(device.read_file(file, 3, 40 << 20), data[3:])
    with pytest.raises(ArtifactError, match="ends before"):
        device.read_file(file, 4, 40 << 20)


def test_a_mapped_file_is_aligned_and_never_written(library: Path, tmp_path: Path) -> None:
    device = CpuDevice(library, threads=1)
    data = np.arange(3000, dtype=np.int32)
    file = tmp_path / "data"
    file.write_bytes(bytes(4096) + data.tobytes())
    memory = device.map_file(file, 4096, data.nbytes)
    assert type(memory) is np.ndarray
    assert memory.ctypes.data % 4096 == 0
    x = device.tensor(memory, "int32")
    device.prepare([call("add", x)]).run(2)
    assert device.download(memory, np.int32)[:3].tolist() == [1, 2, 2]
    assert file.read_bytes()[4096:] == data.tobytes()
    with pytest.raises(ArtifactError, match="ends before"):
        device.map_file(file, 4096, data.nbytes + 1)


def test_upload_copies_and_nan_poisons_both_float_types(library: Path) -> None:
    device = CpuDevice(library, threads=1)
    memory = device.allocate(64)
    device.upload(memory, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert device.download(memory, np.int32)[:7].tolist() == [0, 1, 2, 3, 4, 5, 0]
    device.fill_nan(memory)
    assert np.isnan(device.download(memory, np.float32)).all()
    assert np.isnan(np.repeat(device.download(memory, np.uint16), 2).astype(np.uint16).view(np.float32)).all()


def test_rows_are_uploaded_apart_and_what_lies_between_stays(library: Path) -> None:
    device = CpuDevice(library, threads=1)
    memory = device.allocate(64)
    memory.fill(9)
    device.upload_rows(memory, np.array([[1, 2], [3, 4]], np.int32), 12)
    nine = 0x09090909
    assert device.download(memory, np.int32)[:7].tolist() == [1, 2, nine, 3, 4, nine, nine]


BLOCKS = 9


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    copies=st.lists(
        st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1), st.integers(1, 4)), max_size=6
    )
)
def test_runs_of_copies_do_what_single_ones_do(library: Path, copies: list[tuple[int, int, int]]) -> None:
    device = CpuDevice(library, threads=1)
    pairs = [
        (source + n, target + n)
        for source, target, count in copies
        for n in range(min(count, BLOCKS - source, BLOCKS - target))
    ]
    array = np.array(pairs, np.int32).reshape(-1, 2)
    memory = device.allocate(3 * BLOCKS * 64)
    memory[:] = np.arange(len(memory)) % 251
    pool = memory.reshape(3, BLOCKS, 64).copy()
    for source, target in pairs:
        pool[:, target] = pool[:, source]
    device.copy_blocks(memory, 3, 64, array)
    assert np.array_equal(memory.reshape(pool.shape), pool)
    assert [(s + n, t + n) for s, t, count in copy_runs(array) for n in range(count)] == pairs


def test_neighbours_are_copied_as_one_range() -> None:
    copies = np.array([(1, 5), (2, 6), (3, 7), (8, 1), (1, 2), (2, 3)])
    assert list(copy_runs(copies)) == [(1, 5, 3), (8, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_a_second_artifact_and_tvm_itself_load_in_the_same_process(library: Path, tmp_path: Path) -> None:
    shutil.copy(library / "kernels.so", tmp_path)
    code = f"""
from pathlib import Path
from pagec.runtime.device.cpu import CpuDevice
for path in {str(library)!r}, {str(tmp_path)!r}:
    CpuDevice(Path(path)).prepare([])
import tvm
CpuDevice(Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_worker_has_its_share_of_every_step(library: Path, threads: int) -> None:
    """Whether the team is awake, asleep or on its way there when the next step comes."""
    device = CpuDevice(library, threads=threads)
    memory = device.allocate(64 * threads)
    calls = device.prepare([call("count", device.tensor(memory, "int32"))] * 3)
    pauses = [0.0] * 200 + [0.0019, 0.002, 0.0021, 0.004] * 20
    for pause in pauses:
        time.sleep(pause)
        calls.run(1)
    assert device.download(memory, np.int32)[::16].tolist() == [3 * len(pauses)] * threads


def test_a_team_ends_with_its_device(library: Path) -> None:
    """In a process of its own, whose threads are nobody else's."""
    code = f"""
import gc, os
from pathlib import Path
from pagec.runtime.device import KernelCall
from pagec.runtime.device.cpu import CpuDevice
def num_threads():
    return len(os.listdir("/proc/self/task"))
before = num_threads()
device = CpuDevice(Path({str(library)!r}), threads=4)
x = device.tensor(device.allocate(256), "int32")
calls = device.prepare([KernelCall("count", 0, ((0, "count"),), (x,))])
del device
gc.collect()
calls.run(1)  # prepared calls keep the team
assert num_threads() == before + 3, num_threads()
del calls
gc.collect()
while num_threads() != before: pass  # the system counts a joined thread for a moment
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_steps_of_several_threads_take_turns(library: Path) -> None:
    device = CpuDevice(library, threads=2)
    memory = device.allocate(128)
    calls = device.prepare([call("count", device.tensor(memory, "int32"))] * 10)
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(calls.run, 1) for _ in range(200)]:
            job.result()
    assert device.download(memory, np.int32)[::16].tolist() == [2000, 2000]


def test_devices_of_one_library_have_teams_of_their_own(library: Path) -> None:
    for threads in (1, 3, 2):
        device = CpuDevice(library, threads=threads)
        memory = device.allocate(256)
        device.prepare([call("count", device.tensor(memory, "int32"))]).run(1)
        assert device.download(memory, np.int32)[::16].tolist() == [1] * threads + [0] * (4 - threads)


def test_more_threads_than_there_can_be_are_refused(library: Path) -> None:
    code = f"""
import os, resource
from pathlib import Path
from pagec.compiler.errors import CapacityError
from pagec.runtime.device.cpu import CpuDevice
CpuDevice(Path({str(library)!r}), threads=1)
before = len(os.listdir("/proc/self/task"))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
try:
    CpuDevice(Path({str(library)!r}), threads=64)
except CapacityError as error:
    assert "64 threads cannot be started" in str(error) and "--threads" in str(error), error
while len(os.listdir("/proc/self/task")) > before: pass  # the system counts a joined thread for a moment
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_forked_process_is_told_that_it_has_no_threads(library: Path) -> None:
    """In a process of its own, for a fork with other threads may hang."""
    code = f"""
import os
from pathlib import Path
from pagec.compiler.errors import ArtifactError
from pagec.runtime.device import KernelCall
from pagec.runtime.device.cpu import CpuDevice
device = CpuDevice(Path({str(library)!r}), threads=2)
x = device.tensor(device.allocate(128), "int32")
calls = device.prepare([KernelCall("count", 0, ((0, "count"),), (x,))])
child = os.fork()
try:
    calls.run(1)
    assert child
except ArtifactError as error:
    assert not child and "another process" in str(error)
finally:
    if not child:
        del calls, device
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_free_bytes_is_a_plausible_number(library: Path) -> None:
    assert 1 << 20 < CpuDevice(library, threads=1).free_bytes() < 1 << 60


def test_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEC_THREADS", "3")
    assert default_threads() == 3
    monkeypatch.setenv("PAGEC_THREADS", "many")
    with pytest.raises(CapacityError, match="PAGEC_THREADS"):
        default_threads()


def test_a_process_with_a_device_holds_no_compiler(library: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from pagec.runtime.device.cpu import CpuDevice
device = CpuDevice(Path({str(library)!r}), threads=2)
heavy = {{"torch", "tvm", "tvm_ffi", "transformers", "triton", "yaml"}}
loaded = heavy & {{name.split(".")[0] for name in sys.modules}}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocks_leave_a_pool_and_return(device: CpuDevice) -> None:
    spans, span_bytes = 3, 64
    memory = device.allocate(spans * 10 * span_bytes)
    device.upload(memory, np.random.default_rng(0).integers(0, 256, memory.nbytes, np.uint8))
    before = memory.reshape(spans, 10, span_bytes).copy()
    data = device.read_blocks(memory, spans, span_bytes, [7, 2])
    memory.fill(0)
    assert [array.tobytes() for array in data] == [before[:, b].tobytes() for b in (7, 2)]
    device.write_blocks(memory, spans, span_bytes, [1, 2], data)
    after = memory.reshape(spans, 10, span_bytes)
    assert after[:, 1].tobytes() == before[:, 7].tobytes()
    assert after[:, 2].tobytes() == before[:, 2].tobytes()
    assert not after[:, [0, *range(3, 10)]].any()
