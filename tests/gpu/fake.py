"""The checks on a fake GPU, for tests: launches are executed by Triton's interpreter, or only counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from support.fake_cuda import FakeGpu, FakeLaunch, FakeLibrary

from gpu.artifacts import Artifacts
from gpu.device import Loaded, Machine
from gpu.models import Finding, Lengths, nothing_compiled
from gpu.watch import COMPILERS
from pagec.compiler.artifact import GpuArtifact
from pagec.runtime.device.cuda.driver import Driver

SMALL: Final = Lengths(prompts=(1, 18), kept=(12,), strangers=1, stranger=9, last=1)
# Elements that a planted error changes: several rows of the tiny models.
SPOILT: Final = 512
Check = Callable[..., Finding]


class FakeMachine(Machine):
    """`plant`: what the first elements that a launch leaves are multiplied with; 0: it does not run."""

    def __init__(
        self, *, execute: bool = True, plant: Callable[[FakeLibrary, FakeLaunch], float] | None = None
    ) -> None:
        self.fake = FakeGpu()
        self._execute, self._plant = execute, plant
        super().__init__(self.fake, self._library_of)

    def _library_of(self, artifact: GpuArtifact) -> FakeLibrary:
        library = FakeLibrary(artifact, self.fake, execute=self._execute)
        if (plant := self._plant) is not None:
            run = library.on_run

            def spoilt(launch: FakeLaunch) -> None:
                if factor := plant(library, launch):
                    run(launch)
                if factor not in (0, 1):
                    for name, array in library.typed(launch).items():
                        if name.startswith("out"):
                            array[:SPOILT] *= factor

            library.on_run = spoilt
        return library


def load(directory: Path, name: str, **machine: Any) -> Loaded:
    """A tiny artifact, ready."""
    return FakeMachine(**machine).load(Artifacts(directory).open(name), num_blocks=40)


@contextmanager
def exact_dots() -> Iterator[None]:
    """numpy's products of float32 matrices depend on how many rows these have, a GPU's do not: here they are
    the exact ones, rounded."""
    from triton.runtime import interpreter

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        del options
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def planted(template: str, factor: float) -> Callable[[FakeLibrary, FakeLaunch], float]:
    """The first elements of what launches of a template leave are multiplied; 0: they do nothing."""
    return lambda library, launch: factor if template_of(library, launch) == template else 1.0


def template_of(library: FakeLibrary, launch: FakeLaunch) -> str:
    """Of the kernel that is launched."""
    return next(k.template for k in library.artifact.program.kernels if k.key == launch.key)


def check(directory: Path, name: str, what: Check, template: str = "", factor: float = 1.0) -> Finding:
    """A check on a tiny artifact, with an error planted in the launches of a template."""
    with exact_dots():
        return what(load(directory, name, plant=planted(template, factor)), 3, SMALL)


def served(directory: Path, name: str, watched: Path, *, spoil: str = "") -> Finding:
    """Requests on an engine whose launches do nothing; `spoil`: what happens meanwhile that should not."""
    loaded = load(directory, name, execute=False)
    step = loaded.engine.loop.step

    def spoiled() -> Any:
        match spoil:
            case "file":
                (watched / "kernel").write_text("")
            case "module":
                key = next(iter(loaded.artifact.kernels))
                Driver(loaded.library, 0).load(key, key.encode())
            case "process":
                subprocess.run(["true"], check=True)
            case "import":
                sys.modules[COMPILERS[-1]] = sys
        return step()

    loaded.engine.loop.step = spoiled  # type: ignore[method-assign]
    try:
        return nothing_compiled(loaded, 3, [watched], most=12)
    finally:
        sys.modules.pop(COMPILERS[-1], None)
