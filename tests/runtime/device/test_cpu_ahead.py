"""Memory that idle threads touch before it is used."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pagec.runtime.device import KernelCall
from pagec.runtime.device.cpu import HUGE_PAGE, CpuDevice


def resident_pages(memory: np.ndarray) -> np.ndarray:
    """Which pages of memory that begins with one are there (mincore)."""
    found = np.zeros(-(-memory.nbytes // mmap.PAGESIZE), np.uint8)
    where = ctypes.c_void_p(memory.ctypes.data)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(where, ctypes.c_size_t(memory.nbytes), found.ctypes.data_as(ctypes.c_void_p)):
        raise OSError(ctypes.get_errno(), "mincore")
    return found & 1


def test_idle_threads_touch_what_will_be_used(library: Path) -> None:
    """The beginning of every part, and more when more is asked for; what lies there stays."""
    device = CpuDevice(library, threads=3)
    parts, part = 3, 12 << 20
    memory = device.allocate(parts * part, parts=parts)
    memory[::part] = 7
    for asked, there in ((1, 4 << 10), (1 << 20, 1 << 20), (5 << 20, 5 << 20), (100 << 20, part)):
        device.touch_ahead(memory, parts, asked)
        device.settle()
        pages = resident_pages(memory).reshape(parts, -1)
        assert pages[:, : there // mmap.PAGESIZE].all(), asked
        # A huge page comes whole.
        assert not pages[:, (there + HUGE_PAGE) // mmap.PAGESIZE :].any(), asked
    assert memory[::part].tolist() == [7] * parts
    assert np.count_nonzero(memory) == parts


def test_steps_come_before_touching(library: Path) -> None:
    """A step that comes while pages are touched runs, and so do all after it; then the rest is touched."""
    device = CpuDevice(library, threads=2)
    memory, counts = device.allocate(256 << 20), device.allocate(128)
    tensors = (device.tensor(counts, "int32"),)
    calls = device.prepare([KernelCall("count", 0, ((0, "count"),), tensors)])
    for number in range(30):
        device.touch_ahead(memory, 1, (number + 1) << 23)
        time.sleep(0.003)  # a worker who waits so long begins to touch
        for _ in range(10):
            calls.run(1)
    assert device.download(counts, np.int32)[::16].tolist() == [300, 300]
    device.settle()
    assert resident_pages(memory)[: (30 << 23) // mmap.PAGESIZE].all()


def test_touching_ends_with_the_team_or_for_other_memory(library: Path) -> None:
    """Also where the memory is gone, and in a process that has none of the threads."""
    code = f"""
import gc, os
from pathlib import Path
from pagec.runtime.device.cpu import CpuDevice
device = CpuDevice(Path({str(library)!r}), threads=2)
for _ in range(5):
    device.touch_ahead(device.allocate(1 << 30), 1, 1 << 30)
device.touch_ahead(device.allocate(1 << 12), 1, 1 << 12)
device.settle()
device.touch_ahead(device.allocate(1 << 30), 1, 1 << 30)
child = os.fork()
if not child:
    device.settle()
    device.touch_ahead(device.allocate(1 << 12), 1, 1 << 12)
    device.settle()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
del device
gc.collect()
while len(os.listdir("/proc/self/task")) > 1: pass  # the system counts a joined thread for a moment
device = CpuDevice(Path({str(library)!r}), threads=2)
device.touch_ahead(device.allocate(1 << 30), 1, 1 << 30)
# The interpreter ends meanwhile.
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_nobody_waits_for_one_worker_to_touch(library: Path) -> None:
    device = CpuDevice(library, threads=1)
    memory = device.allocate(64 << 20)
    device.touch_ahead(memory, 1, 64 << 20)
    device.settle()
    assert not resident_pages(memory).any()
