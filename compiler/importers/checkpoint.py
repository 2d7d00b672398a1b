"""A checkpoint's tensors, and a model's weights out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pagec.compiler.errors import CheckpointError
from pagec.compiler.spec.model import ModelSpec
from pagec.compiler.spec.weights import WeightSpec

F32 = npt.NDArray[np.float32]
_MAX_LISTED: Final = 20


class Checkpoint(Protocol):
    """Named tensors in files. Shapes read rows first, whatever the file's own order is."""

    path: Path

    def names(self) -> set[str]:
        """All tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""

    def read(self, name: str) -> F32:
        """A tensor in float32: widened exactly, or dequantised."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A model's weights, read from a checkpoint."""

    spec: ModelSpec
    checkpoint: Checkpoint

    def check(self) -> None:
        """CheckpointError lists the tensors that are missing, surplus, or of another shape."""
        problems = self.problems()
        if problems:
            more = [f"... and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
            raise CheckpointError(
                "the checkpoint does not fit the model:\n  " + "\n  ".join([*problems[:_MAX_LISTED], *more]),
                place=str(self.checkpoint.path),
                remedy="say in the weights section, by name and shape, what the model has; null drops an "
                "inherited weight",
            )

    def problems(self) -> list[str]:
        """What does not fit, tensor by tensor."""
        found = [p for weight in self.spec.weights.values() for p in self._problems_of(weight)]
        return found + self._surplus()

    def get(self, name: str) -> F32:
        """A weight in its logical shape, float32, contiguous. `name` may be an alias."""
        weight = self.spec.weights[self.spec.aliases.get(name, name)]
        pattern = self._present(weight)
        if pattern is None:
            raise CheckpointError(self._missing(weight), place=str(self.checkpoint.path))
        tensors = [self.checkpoint.read(tensor) for tensor in weight.tensor_names(pattern)]
        for tensor in tensors:
            problem = shape_problem(weight, pattern, tensor.shape)
            if problem:
                raise CheckpointError(problem, place=str(self.checkpoint.path))
        if weight.stack is None:
            return _logical(tensors[0], weight)
        experts = tensors if "{e}" in pattern else list(tensors[0])
        return np.stack([_logical(expert, weight) for expert in experts])

    def _present(self, weight: WeightSpec) -> str | None:
        """The first of a weight's tensor names that the checkpoint has."""
        there = self.checkpoint.names()
        return next((t for t in weight.tensors if there >= set(weight.tensor_names(t))), None)

    def _missing(self, weight: WeightSpec) -> str:
        same = self.spec.outline.weights[weight.name.rsplit(".", 1)[-1]].targets()
        hint = (
            f" (is it meant to be the same as {' or '.join(same)}? then say so in the params)" if same else ""
        )
        return f"missing: {' or '.join(weight.tensors)} for {weight.name}{hint}"

    def _problems_of(self, weight: WeightSpec) -> list[str]:
        pattern = self._present(weight)
        if pattern is None:
            return [self._missing(weight)]
        shapes = {t: self.checkpoint.shape(t) for t in weight.tensor_names(pattern)}
        found = [p for tensor, shape in shapes.items() if (p := shape_problem(weight, tensor, shape))]
        return found or self._unequal_twins(weight, pattern)

    def _unequal_twins(self, weight: WeightSpec, pattern: str) -> list[str]:
        """Other tensors that are there for the same weight (tied ones): harmless if they are equal."""
        there = self.checkpoint.names()
        return [
            f"{other} differs from {pattern}, the spec takes them for one weight ({weight.name})"
            for other in weight.tensors
            if other != pattern and other in there and not self._equal(pattern, other)
        ]

    def _equal(self, a: str, b: str) -> bool:
        return self.checkpoint.shape(a) == self.checkpoint.shape(b) and np.array_equal(
            self.checkpoint.read(a), self.checkpoint.read(b)
        )

    def _surplus(self) -> list[str]:
        read: dict[str, int] = {}
        for weight in self.spec.weights.values():
            for pattern in weight.tensors:
                for tensor in weight.tensor_names(pattern):
                    read[tensor] = max(read.get(tensor, 0), weight.rows[1] if weight.rows else -1)
        surplus = [
            f"surplus: {name} {list(self.checkpoint.shape(name))}"
            for name in sorted(self.checkpoint.names() - read.keys())
            if not any(fnmatchcase(name, pattern) for pattern in self.spec.ignored)
        ]
        return surplus + self._unread_rows()

    def _unread_rows(self) -> list[str]:
        """Fused tensors of which no weight reads the last rows."""
        ends: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for weight in self.spec.weights.values():
            pattern = self._present(weight)
            if weight.rows and pattern and not weight.stack:
                shape = self.checkpoint.shape(pattern)
                whole = shape[-1] if "transposed" in weight.stored else shape[0]
                sizes[pattern] = weight.every or whole
                ends[pattern] = max(ends.get(pattern, 0), weight.rows[1])
        return [
            f"surplus: rows {end} to {sizes[tensor]} of {tensor}"
            for tensor, end in ends.items()
            if end < sizes[tensor]
        ]


def shape_problem(weight: WeightSpec, tensor: str, shape: tuple[int, ...]) -> str | None:
    """What is wrong with the shape of a tensor for a weight; None if it fits."""
    found = shape
    if weight.stack is not None and "{e}" not in tensor and len(shape) == len(weight.shape):
        if shape[0] != weight.stack:
            return f"{tensor} is {list(shape)}, {weight.name} has {weight.stack} experts"
        found = shape[1:]
    if "transposed" in weight.stored:
        found = found[::-1]
    wanted = weight.one_shape
    if weight.rows and len(found) == len(wanted) and _has_rows(weight, weight.rows, found[0]):
        found = (wanted[0], *found[1:])
    if found == wanted:
        return None
    part = f" as rows {weight.rows[0]} to {weight.rows[1]}" if weight.rows else ""
    part += f" of every {weight.every}" if weight.every else ""
    return f"{tensor} is {list(shape)}, {weight.name} needs {list(wanted)}{part}" + (
        f" stored {' and '.join(weight.stored)}" if weight.stored else ""
    )


def _has_rows(weight: WeightSpec, rows: tuple[int, int], count: int) -> bool:
    """Whether a tensor of `count` rows holds those of the weight."""
    first, end = rows
    if weight.every is None:
        return count >= end
    return count == weight.one_shape[0] // (end - first) * weight.every


def _logical(x: F32, weight: WeightSpec) -> F32:
    """One expert's tensor (or the only one) as the model means it."""
    if "transposed" in weight.stored:
        x = x.T
    if weight.rows:
        blocks = x.reshape(-1, weight.every or len(x), *x.shape[1:])
        x = blocks[:, weight.rows[0] : weight.rows[1]].reshape(-1, *x.shape[1:])
    for way in weight.stored:
        x = _UNDO[way](x, weight)
    return np.ascontiguousarray(x, dtype=np.float32)


def _unpaired(x: F32, weight: WeightSpec) -> F32:
    """Rows of each head from pairs [h, d/2, 2] back to halves [h, 2, d/2]."""
    heads = x.reshape(-1, weight.head_dim // 2, 2, *x.shape[1:])
    return heads.swapaxes(1, 2).reshape(x.shape)


_UNDO: Final[Mapping[str, Callable[[F32, WeightSpec], F32]]] = {
    "transposed": lambda x, weight: x,  # noqa: ARG005  (undone first: rows are cut after it)
    "rotary_interleaved": _unpaired,
    "plus_one": lambda x, weight: x - np.float32(1),  # noqa: ARG005
}
