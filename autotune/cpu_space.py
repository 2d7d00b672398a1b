"""What can be tuned of a CPU program, and a kernel's variants (see compiler/backends/cpu/knobs.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pagec.autotune.prediction import Point
from pagec.compiler.backends.cpu.calls import kernel_name
from pagec.compiler.backends.cpu.knobs import KNOBS, attention_points, linear_points
from pagec.compiler.program import Kernel, Launch, Program
from pagec.compiler.target import CpuTarget

_KEY: Final = re.compile(r"^[a-z]+_(.+?)(?:_m\d+)?_[0-9a-f]{6}$")


@dataclass(frozen=True, slots=True)
class Subject:
    """Launches that share their kernels. `kind`: the template."""

    kind: str
    key: str
    launches: tuple[Launch, ...]

    def kernel(self, kernels: Mapping[str, Kernel], rows: int) -> Kernel:
        """What they take untuned."""
        return kernels[self.launches[0].key_for(rows)]


def subjects(program: Program) -> list[Subject]:
    """What can be tuned: the linears and attentions of a program."""
    kernels = {kernel.key: kernel for kernel in program.kernels}
    groups: dict[tuple[str, str, tuple[tuple[int, str], ...]], list[Launch]] = {}
    for launch in (*program.body, *program.head):
        last = kernels[launch.variants[-1][1]]
        if last.template in KNOBS:
            groups.setdefault((last.template, shape_key(last), launch.variants), []).append(launch)
    return [Subject(kind, key, tuple(launches)) for (kind, key, _), launches in groups.items()]


def shape_key(kernel: Kernel) -> str:
    """A kernel's key without its template, rows and hash: what names it in the tables."""
    found = _KEY.match(kernel.key)
    assert found is not None, kernel.key
    return found.group(1)


def point_of(kernel: Kernel) -> Point:
    """The knobs that a kernel has."""
    return {knob: int(kernel.params[knob]) for knob in KNOBS[kernel.template]}


def variants(kernel: Kernel, target: CpuTarget) -> Iterator[Kernel]:
    """The other kernels that compute the same."""
    own = point_of(kernel)
    for point in _points(kernel, target):
        if point != own:
            yield variant(kernel, point, target)


def variant(kernel: Kernel, point: Point, target: CpuTarget) -> Kernel:
    """The kernel with other knobs."""
    params = {**kernel.params, **point}
    # As lowering names them: the same kernel has the same key.
    words = shape_key(kernel) + (f"_m{point['MB']}" if kernel.template == "linear" else "")
    key = kernel_name(kernel.template, words, {**params, "L": target.lanes})
    return replace(kernel, key=key, symbol=key, params=params)


def _points(kernel: Kernel, target: CpuTarget) -> list[Point]:
    if kernel.template == "attention":
        return attention_points(target, kernel.params["DP"])
    # With a norm before it a linear keeps the normed rows of one tile.
    return [] if kernel.params["before"] else linear_points(target)
