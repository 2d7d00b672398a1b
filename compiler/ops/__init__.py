"""The closed set of ops: for each one its parameters, its shape rule and its meaning in torch float32.

An op's row is all that the spec language, the verifier, the passes and the reference interpreter know of
it. `OPS` is the table; a user's own ops join it through `register` (`--ops FILE.py`).

Shapes are written rows first: x[T,K] has T rows of K elements. Meanings compute in float32 whatever the
dtypes are; `cast` alone rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pagec.compiler.ops.table  # noqa: F401  (fills OPS)
from pagec.compiler.ops.op import (
    ACTIVATIONS,
    OPS,
    REQUIRED,
    Attrs,
    Meaning,
    Op,
    Param,
    ShapeError,
    ShapeRule,
    infer,
    register,
    run,
)
from pagec.compiler.ops.shapes import elementwise_rule, same


def elementwise(name: str, params: Sequence[Param], *, meaning: Meaning, scalar: str) -> Op:
    """An op that works element by element: its result has the shape of its first operand.

    Further operands are values of that shape, or weights that spread over its last axis. `scalar` is the
    expression of one element: "x * sigmoid(beta * x)".
    """
    return Op(name, tuple(params), elementwise_rule, meaning, rowwise=True, scalar=scalar)


BUILT_IN: Final = frozenset(OPS)

__all__ = [
    "ACTIVATIONS",
    "BUILT_IN",
    "OPS",
    "REQUIRED",
    "Attrs",
    "Meaning",
    "Op",
    "Param",
    "ShapeError",
    "ShapeRule",
    "elementwise",
    "infer",
    "register",
    "run",
    "same",
]
