"""The CUDA driver by ctypes: loads compiled kernels and launches them. Signatures are those of cuda.h."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from typing import Any, Final

from pagec.compiler.errors import DeviceError

LIBRARY: Final = "libcuda.so.1"
# A kernel may use this much dynamic shared memory without asking.
FREE_SHARED_BYTES: Final = 48 << 10
_MAX_DYNAMIC_SHARED_SIZE_BYTES: Final = 8  # CUfunction_attribute

# Handles (CUcontext, CUmodule, CUfunction, CUstream) are pointers; CUdevice, CUresult and enums are ints.
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    # a LaunchConfig, function, arguments, extra: ctypes converts four arguments in a third of the time that
    # it takes for the eleven of cuLaunchKernel
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


def open_library() -> Any:
    """The driver's library; DeviceError if there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"cannot be loaded: {error}", place=LIBRARY, remedy="install NVIDIA's driver on this machine"
        ) from error


class Driver:
    """The driver's functions for one GPU, `ordinal` as torch counts. `library` has the functions of libcuda.

    They work on the context that torch uses, the GPU's primary one, which must be current in each thread
    that calls them: see `use`.
    """

    def __init__(self, library: Any, ordinal: int) -> None:
        self._functions = {name: _function(library, name, kinds) for name, kinds in _SIGNATURES.items()}
        self._threads = threading.local()
        self._call("cuInit", 0)
        device = c_int()
        self._call("cuDeviceGet", device, ordinal)
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", self._context, device)
        # Bare, so that a list of launches can call it in a loop; each result goes to `check`.
        self.launch: Callable[..., int] = self._functions["cuLaunchKernelEx"]
        self.use()

    def use(self) -> None:
        """Makes the GPU's context current in this thread, once."""
        if not hasattr(self._threads, "current"):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.current = True

    def load(self, key: str, image: bytes) -> c_void_p:
        """A module of a kernel's machine code, or of its PTX, which the driver compiles now."""
        module = c_void_p()
        self._call("cuModuleLoadData", module, image, place=f"kernel {key}")
        return module

    def function(self, key: str, module: c_void_p, symbol: str, shared_bytes: int) -> c_void_p:
        """A module's function, ready for launches with so many bytes of dynamic shared memory."""
        function = c_void_p()
        self._call("cuModuleGetFunction", function, module, symbol.encode(), place=f"kernel {key}")
        if shared_bytes > FREE_SHARED_BYTES:
            attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, shared_bytes, place=f"kernel {key}")
        return function

    def check(self, result: int, what: str, place: str) -> None:
        """Raises what a function's result other than 0 means."""
        if result == 0:
            return
        name, text = (self._text(function, result) for function in ("cuGetErrorName", "cuGetErrorString"))
        raise DeviceError(
            f"{what}: {name or f'CUDA error {result}'} ({text or 'unknown'})",
            place=place,
            remedy=_REMEDIES.get(name, "see what `nvidia-smi` says of the GPU, then start again"),
        )

    def _call(self, name: str, *arguments: Any, place: str = "the CUDA driver") -> None:
        self.check(self._functions[name](*arguments), name, place)

    def _text(self, function: str, result: int) -> str:
        text = c_char_p()
        self._functions[function](result, text)
        return (text.value or b"").decode()


# By the errors that a user can do something about.
_REMEDIES: Final = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile the model again for this GPU (--target)",
    "CUDA_ERROR_INVALID_IMAGE": "install a newer driver (580 or later for sm_90), or compile the model again",
    "CUDA_ERROR_NOT_FOUND": "compile the model again",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "install a newer driver, or compile for this GPU (--target)",
    "CUDA_ERROR_OUT_OF_MEMORY": "give the KV pool less memory, or end what else uses the GPU",
}


def _function(library: Any, name: str, kinds: tuple[Any, ...]) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise DeviceError(
            f"has no function {name}", place=LIBRARY, remedy="install a newer NVIDIA driver"
        ) from error
    function.argtypes, function.restype = kinds, c_int
    return function
