"""Sees whether anything is compiled or loaded while a server serves.

modules of the driver   by a library in the driver's place that counts
compilers' caches       by the files in them
processes               by the interpreter's audit events
Triton, TVM             by what has been imported
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

LOAD: Final = "cuModuleLoadData"
COMPILERS: Final = ("triton", "tvm", "torch._inductor")
PROCESSES: Final = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system"})


def caches() -> tuple[Path, ...]:
    """Where compilers keep what they made: pagec, Triton, the driver, torch."""
    home = Path.home()
    given = {
        "PAGEC_CACHE": home / ".cache" / "pagec",
        "TRITON_CACHE_DIR": home / ".triton",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
        "TORCHINDUCTOR_CACHE_DIR": Path("/tmp") / f"torchinductor_{os.environ.get('USER', 'root')}",
    }
    return tuple(Path(os.environ.get(name, path)) for name, path in given.items())


class _Counted:
    """A function of a library that counts its calls; its types are the function's own."""

    def __init__(self, function: Any) -> None:
        self.count = 0
        self._function = function

    @property
    def argtypes(self) -> Any:
        return self._function.argtypes

    @argtypes.setter
    def argtypes(self, kinds: Any) -> None:
        self._function.argtypes = kinds

    @property
    def restype(self) -> Any:
        return self._function.restype

    @restype.setter
    def restype(self, kind: Any) -> None:
        self._function.restype = kind

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self._function(*arguments)


class CountingLibrary:
    """libcuda, or what stands for it, with the modules counted that it loads."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._load = _Counted(getattr(library, LOAD))

    @property
    def loads(self) -> int:
        return self._load.count

    def __getattr__(self, name: str) -> Any:
        return self._load if name == LOAD else getattr(self._library, name)


class Watch:
    """Sees what happens from now on. One at a time is enough; an audit hook cannot be removed."""

    def __init__(self, library: CountingLibrary, directories: Sequence[Path] | None = None) -> None:
        self._library = library
        self._directories = caches() if directories is None else directories
        self._processes: list[str] = []
        self._loads, self._files, self._modules = library.loads, self._found(), set(sys.modules)
        self._over = False
        sys.addaudithook(self._heard)

    def seen(self) -> list[str]:
        """What happened that should not have; ends the watch."""
        self._over = True
        found = [f"{n} modules were loaded" for n in [self._library.loads - self._loads] if n]
        found += [f"{path} was written" for path in sorted(self._found() - self._files)]
        imported = set(sys.modules) - self._modules
        found += [f"{name} was imported" for name in COMPILERS if name in imported]
        return found + [f"a process was started ({event})" for event in self._processes]

    def _found(self) -> set[Path]:
        return {file for directory in self._directories for file in directory.rglob("*") if file.is_file()}

    def _heard(self, event: str, _: Any) -> None:
        if not self._over and event in PROCESSES:
            self._processes.append(event)
