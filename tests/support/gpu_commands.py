"""Commands of pagec on the fake GPU: to be called by `in_interpreter`, where launches can be executed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from pagec.compiler.artifact import GpuArtifact
from pagec.runtime.device.cuda.device import CudaDevice
from support.fake_cuda import FakeGpu, FakeLaunch, FakeLibrary


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command has printed, and its exit status."""

    status: int
    out: str
    err: str


class MultiplyingGpu(FakeGpu):
    def multiply(self, a: Any, b: Any, product: Any, size: int) -> None:
        x, y, out = (one.view(torch.bfloat16).view(size, size) for one in (a, b, product))
        self.begin(lambda: torch.matmul(x, y, out=out))


def run_command(
    words: list[str], *, broken: tuple[str, ...] = (), changes: Mapping[str, Any] | None = None
) -> Ran:
    """`pagec WORDS`. `broken`: beginnings of kernels that do nothing; `changes`: constants of
    pagec, by dotted name."""
    from pagec.runtime import cli

    out, err = io.StringIO(), io.StringIO()
    with (
        _fake_gpu(broken),
        _changed(changes or {}),
        mock.patch.object(sys, "argv", ["pagec", *words]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ran(status, out.getvalue(), err.getvalue())


@contextmanager
def _fake_gpu(broken: tuple[str, ...]) -> Iterator[None]:
    real = CudaDevice.__init__

    def fake(device: CudaDevice, artifact: GpuArtifact) -> None:
        gpu = MultiplyingGpu()
        library = FakeLibrary(artifact, gpu, execute=True)
        run = library.on_run

        def on_run(launch: FakeLaunch) -> None:
            if not launch.key.startswith(broken):
                run(launch)

        library.on_run = on_run
        real(device, artifact, gpu=gpu, library=library)

    with mock.patch.object(CudaDevice, "__init__", fake):
        yield


@contextmanager
def _changed(changes: Mapping[str, Any]) -> Iterator[None]:
    patches = [mock.patch(name, value) for name, value in changes.items()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
