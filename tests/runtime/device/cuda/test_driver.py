"""The driver's functions: types, contexts of threads, and what is said when one fails."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cuda import SIGNATURES, FakeGpu, FakeLibrary
from support.gpu_artifacts import bare_artifact

from pagec.compiler.errors import DeviceError
from pagec.compiler.launch import GridRule, LaunchMetadata
from pagec.runtime.device.cuda import driver as drivers
from pagec.runtime.device.cuda.driver import Driver

KIB = 1024


def metadata(shared_bytes: int = 0) -> LaunchMetadata:
    return LaunchMetadata("k", (("x", "*fp32"), ("count", "*i32")), (16, 4), 4, shared_bytes, GridRule(1, 1))


@pytest.fixture
def library(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(bare_artifact(tmp_path, {"k": metadata()}), FakeGpu())


def shape(kind: Any) -> Any:
    """How a type is passed: its size, and whether it is an address."""
    is_address = kind in (ctypes.c_char_p, ctypes.c_void_p) or hasattr(kind, "contents")
    return ctypes.sizeof(kind), is_address


def test_functions_have_the_types_of_cuda_h(library: FakeLibrary) -> None:
    """A handle passed as an int would lose its upper half."""
    Driver(library, 0)
    for name, kinds in SIGNATURES.items():
        function = getattr(library, name)
        assert [shape(kind) for kind in function.argtypes] == [shape(kind) for kind in kinds], name
        assert function.restype is ctypes.c_int


def test_a_kernel_is_found_under_its_symbol(library: FakeLibrary) -> None:
    driver = Driver(library, 0)
    function = driver.function("k", driver.load("k", b"k"), "k", 0)
    assert function.value is not None
    assert function.value >= 1 << 32
    with pytest.raises(DeviceError, match="kernel k: cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"):
        driver.function("k", driver.load("k", b"k"), "other", 0)


@pytest.mark.parametrize(("size", "asked"), [(0, False), (48 * KIB, False), (48 * KIB + 1, True)])
def test_much_shared_memory_is_asked_for(library: FakeLibrary, size: int, asked: bool) -> None:
    driver = Driver(library, 0)
    driver.function("k", driver.load("k", b"k"), "k", size)
    assert library.shared_bytes == ({"k": size} if asked else {})


def test_each_thread_gets_the_context_once(library: FakeLibrary) -> None:
    driver = Driver(library, 0)
    driver.use()
    assert library.calls.count("cuCtxSetCurrent") == 1
    results: list[Any] = []

    def other() -> None:
        with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_CONTEXT"):
            driver.load("k", b"k")
        driver.use()
        driver.use()
        results.append(driver.load("k", b"k"))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(results) == 1
    assert library.calls.count("cuCtxSetCurrent") == 2


@pytest.mark.parametrize(
    ("name", "result", "said"),
    [
        ("cuModuleLoadData", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image is available"),
        ("cuModuleLoadData", 200, "CUDA_ERROR_INVALID_IMAGE (device kernel image is invalid)"),
        ("cuFuncSetAttribute", 1, "CUDA_ERROR_INVALID_VALUE (invalid argument)"),
        ("cuModuleGetFunction", 999, "CUDA error 999 (unknown)"),
    ],
)
def test_an_error_names_kernel_function_and_meaning(
    library: FakeLibrary, name: str, result: int, said: str
) -> None:
    driver = Driver(library, 0)
    library.fail(name, result)
    with pytest.raises(DeviceError) as error:
        driver.function("k", driver.load("k", b"k"), "k", 64 * KIB)
    assert error.value.place == "kernel k"
    assert error.value.message.startswith(f"{name}: {said}")
    assert error.value.remedy


def test_a_driver_that_does_not_start_is_named(library: FakeLibrary) -> None:
    library.fail("cuInit", 700)
    with pytest.raises(DeviceError, match="the CUDA driver: cuInit: CUDA_ERROR_ILLEGAL_ADDRESS"):
        Driver(library, 0)


def test_what_is_no_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="has no function cuInit"):
        Driver(SimpleNamespace(), 0)
    monkeypatch.setattr(drivers, "LIBRARY", "libnothing.so.0")
    with pytest.raises(DeviceError, match=r"libnothing\.so\.0: cannot be loaded") as error:
        drivers.open_library()
    assert "driver" in error.value.remedy
