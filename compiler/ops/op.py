"""What an op is: its parameters, its shape rule, its meaning; and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pagec.compiler.ir import Attr, ValueType

Attrs = Mapping[str, Attr]
ShapeRule = Callable[[Sequence[ValueType], Attrs], Sequence[ValueType]]
Meaning = Callable[..., Any]

# How a parameter is given. "value": an expression with rows; "weight": `$name`; "either": one of both;
# "scalar": a constant; "rope": a map of rope settings, flattened into attributes; "step": filled in by
# the compiler from the step's own inputs (positions, sequences).
ParamKind = Literal["value", "weight", "either", "scalar", "rope", "step"]
# What a scalar is: a finite number (given as a float), one above zero, a positive whole number, true or
# false, a word, the name of an activation, or whatever an op of a user's takes.
ScalarType = Literal["number", "positive", "size", "flag", "word", "activation", "any"]
REQUIRED: Final = object()


# Activations by the names that Hugging Face configs use, and our name for each.
ACTIVATIONS: Final[Mapping[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


class ShapeError(Exception):
    """Operands of an op do not agree; the message names the sizes."""


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of an op. A tensor whose default is None may be absent, a scalar may be none."""

    name: str
    kind: ParamKind
    default: object = REQUIRED
    type: ScalarType = "any"


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table.

    `infer(types, attrs)` gives the result types or raises ShapeError. `meaning(*tensors, **attrs)` gives
    one tensor, or a tuple of as many as there are results. `rowwise`: each row's result depends on that
    row alone, element by element or through a reduction over the last axis. `internal`: made by passes,
    not to be written in a spec.

    How a backend computes an op of a user's: `scalar`, an expression over its parameters for one element (for
    ops that work element by element), or `templates`, a kernel template for each backend ("cpu").
    """

    name: str
    params: tuple[Param, ...]
    infer: ShapeRule
    meaning: Meaning
    rowwise: bool = False
    internal: bool = False
    scalar: str = ""
    templates: Mapping[str, Path] = field(default_factory=dict)

    def tensor_params(self) -> tuple[Param, ...]:
        """The parameters that stand in a node's `inputs`, in order."""
        return tuple(p for p in self.params if p.kind not in ("scalar", "rope"))


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Adds an op to the table; ValueError if its name is taken, or something that it needs is missing."""
    if op.name in OPS:
        raise ValueError(f"there is already an op named {op.name!r}")
    if not op.name.isidentifier() or op.name.startswith("_"):
        raise ValueError(f"an op cannot be named {op.name!r}")
    names = [param.name for param in op.params]
    if len(set(names)) != len(names):
        raise ValueError(f"op {op.name!r} has two parameters of one name")
    for what, rule in (("shape rule", op.infer), ("meaning", op.meaning)):
        if not callable(rule):
            raise ValueError(f"op {op.name!r} has no {what}: {rule!r} is no function")
    for template in op.templates.values():
        if not template.is_file():
            raise ValueError(f"op {op.name!r} has no template: there is no file {str(template)!r}")
    OPS[op.name] = op
    return op


def infer(name: str, types: Sequence[ValueType], attrs: Attrs) -> tuple[ValueType, ...]:
    """Result types of an op on operands of these types."""
    return tuple(OPS[name].infer(types, attrs))


def run(name: str, tensors: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Results of an op by its meaning."""
    result = OPS[name].meaning(*tensors, **attrs)
    return result if isinstance(result, tuple) else (result,)
