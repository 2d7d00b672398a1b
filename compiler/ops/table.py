"""The rows of the table: pagec's own ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagec.compiler.ops import meanings, sampling, shapes
from pagec.compiler.ops.op import Op, Param, register

_X = Param("x", "value")
_STEP = (Param("positions", "step"), Param("sequences", "step"))
_MASK = (
    Param("scale", "scalar", type="positive"),
    Param("window", "scalar", None, "size"),
    Param("softcap", "scalar", None, "positive"),
)


def _binary(name: str, meaning: Callable[[Any, Any], Any]) -> Op:
    """x op y, where y is a value or a weight, or x op scalar where there is no y."""
    return Op(
        name,
        (_X, Param("y", "either", None), Param("scalar", "scalar", None, "number")),
        shapes.arithmetic,
        lambda x, y=None, *, scalar=None: meaning(x, meanings.operand(y, scalar)),
        rowwise=True,
    )


for _op in (
    Op("embed", (Param("ids", "value"), Param("w", "weight")), shapes.embed, lambda ids, w: w[ids.long()]),
    Op(
        "linear",
        (_X, Param("w", "weight"), Param("b", "weight", None), Param("split", "scalar", None, "size")),
        shapes.linear,
        meanings.linear,
    ),
    Op(
        "rmsnorm",
        (
            _X,
            Param("w", "weight", None),
            Param("eps", "scalar", type="number"),
            Param("offset", "scalar", 0, "number"),
        ),
        shapes.norm,
        meanings.rmsnorm,
        rowwise=True,
    ),
    Op(
        "layernorm",
        (
            _X,
            Param("w", "weight", None),
            Param("b", "weight", None),
            Param("eps", "scalar", type="number"),
            Param("offset", "scalar", 0, "number"),
        ),
        shapes.norm,
        meanings.layernorm,
        rowwise=True,
    ),
    Op(
        "heads_of",
        (_X, Param("head_dim", "scalar", type="size")),
        shapes.heads_of,
        lambda x, *, head_dim: x.unflatten(1, (-1, head_dim)),
    ),
    Op(
        "rope",
        (Param("q", "value"), Param("k", "value"), Param("positions", "value"), Param("rope", "rope")),
        shapes.rope,
        meanings.rope,
    ),
    Op(
        "attention",
        (Param("q", "value"), Param("k", "value"), Param("v", "value"), *_STEP, *_MASK),
        shapes.attention,
        meanings.attention,
    ),
    Op(
        "activation",
        (_X, Param("name", "scalar", type="activation")),
        shapes.activation,
        meanings.activation,
        rowwise=True,
    ),
    Op(
        "softcap",
        (_X, Param("cap", "scalar", type="positive")),
        shapes.same,
        lambda x, *, cap: cap * (x / cap).tanh(),
        rowwise=True,
    ),
    Op("softmax", (_X,), shapes.same, lambda x: x.softmax(-1), rowwise=True),
    Op(
        "top_k_of",
        (_X, Param("k", "scalar", type="size"), Param("normalize", "scalar", False, "flag")),
        shapes.top_k,
        meanings.top_k,
    ),
    Op(
        "expert_linear",
        (_X, Param("w", "weight"), Param("experts", "value"), Param("b", "weight", None)),
        shapes.expert_linear,
        meanings.expert_linear,
    ),
    Op(
        "weighted_sum",
        (Param("y", "value"), Param("w", "value")),
        shapes.weighted_sum,
        meanings.weighted_sum,
        rowwise=True,
    ),
    _binary("add", lambda x, y: x + y),
    _binary("sub", lambda x, y: x - y),
    _binary("mul", lambda x, y: x * y),
    _binary("div", lambda x, y: x / y),
    _binary("rsub", lambda x, y: y - x),
    _binary("rdiv", lambda x, y: y / x),
    # Made by passes.
    Op(
        "cast",
        (_X, Param("dtype", "scalar")),
        shapes.cast,
        meanings.cast,
        rowwise=True,
        internal=True,
    ),
    Op(
        "regroup",  # heads_of where heads are padded in memory
        (_X, Param("head_dim", "scalar")),
        shapes.heads_of,
        lambda x, *, head_dim: x.unflatten(1, (-1, head_dim)),
        rowwise=True,
        internal=True,
    ),
    Op(
        "take_rows",
        (_X, Param("rows", "value")),
        shapes.take_rows,
        lambda x, rows: x[rows.long()],
        internal=True,
    ),
    Op(
        "slice",
        (
            _X,
            Param("start", "scalar"),
            Param("stop", "scalar"),
            Param("drop_axis", "scalar", False),
        ),
        shapes.slice_of,
        meanings.slice_of,
        internal=True,
    ),
    Op(
        "kv_write",
        (Param("cache", "value"), Param("k", "value"), Param("v", "value"), *_STEP),
        shapes.kv_write,
        meanings.kv_write,
        internal=True,
    ),
    Op(
        "paged_attention",
        (Param("q", "value"), Param("cache", "value"), *_STEP, *_MASK),
        shapes.paged_attention,
        meanings.paged_attention,
        internal=True,
    ),
    Op(
        "expert_lists",
        (_X, Param("experts", "scalar")),
        shapes.expert_lists,
        meanings.expert_lists,
        internal=True,
    ),
    Op(
        "grouped_linear",
        (
            _X,
            Param("w", "weight"),
            Param("experts", "value"),
            Param("lists", "value"),
            Param("b", "weight", None),
        ),
        lambda types, attrs: shapes.expert_linear([*types[:3], *types[4:]], attrs),
        lambda x, w, experts, lists, b=None: meanings.expert_linear(x, w, experts, b),  # noqa: ARG005
        internal=True,
    ),
    Op("argmax", (_X,), shapes.argmax, lambda x: x.argmax(-1), internal=True),
    Op(
        "sample",
        (_X, Param("settings", "value"), Param("edits", "value"), Param("masks", "value")),
        sampling.shape,
        sampling.sample,
        internal=True,
    ),
):
    register(_op)
