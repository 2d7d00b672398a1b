"""Shape rules: the types of an op's results from the types of its operands, or ShapeError."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagec.compiler.dims import ROW_ALIGN, DType, round_up
from pagec.compiler.ir import CacheType, Type, ValueType
from pagec.compiler.ops.op import ACTIVATIONS, Attrs, ShapeError


def _tensor(t: ValueType, what: str) -> Type:
    if not isinstance(t, Type):
        raise ShapeError(f"{what} is a cache, not a tensor")
    return t


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ShapeError(message)


def _flat(t: Type) -> int:
    return math.prod(t.inner)


def same(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x = _tensor(types[0], "x")
    return [Type(x.rows, x.inner, "f32")]


def elementwise_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    """Further operands have the shape of the first, or spread over its last axes."""
    for other in types[1:]:
        arithmetic([types[0], other], attrs)
    return same(types, attrs)


def arithmetic(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x = _tensor(types[0], "the left operand")
    if len(types) == 1:
        _check("scalar" in attrs, "arithmetic needs two operands")
        return [Type(x.rows, x.inner, "f32")]
    y = _tensor(types[1], "the right operand")
    if y.rows is None:
        fits = len(y.inner) <= len(x.inner) and x.inner[len(x.inner) - len(y.inner) :] == y.inner
        _check(fits, f"a weight of {y} does not spread over {x}")
    else:
        _check(x.rows == y.rows and x.inner == y.inner, f"operands differ: {x} and {y}")
    return [Type(x.rows, x.inner, "f32")]


def embed(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    ids, w = _tensor(types[0], "ids"), _tensor(types[1], "the table")
    _check(ids.dtype == "i32" and not ids.inner, f"ids must be whole numbers, one per row, not {ids}")
    _check(len(w.inner) == 2, f"an embedding table is [rows, width], not {w}")
    return [Type(ids.rows, (w.inner[1],), "f32")]


def linear(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x, w = _tensor(types[0], "x"), _tensor(types[1], "the weight")
    _check(len(w.inner) == 2, f"a linear weight is [N, K], not {w}")
    n, k = w.inner
    _check(_flat(x) == k, f"x has {_flat(x)} elements a row, the weight [N={n}, K={k}] takes {k}")
    if len(types) > 2:
        b = _tensor(types[2], "the bias")
        _check(b.inner == (n,), f"the bias is {b}, the weight gives {n} elements")
    split = attrs.get("split")
    if split is None:
        return [Type(x.rows, (n,), "f32")]
    assert isinstance(split, int)
    _check(n % split == 0, f"{n} elements do not divide by {split}")
    return [Type(x.rows, (n // split, split), "f32")]


def norm(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x = _tensor(types[0], "x")
    _check(bool(x.inner), "a norm needs an inner axis")
    for what, t in zip(("weight", "bias"), types[1:], strict=False):
        w = _tensor(t, what).inner
        _check(
            bool(w) and x.inner[-len(w) :] == w,
            f"the norm's {what} is {t}, the last axis of x has {x.inner[-1]} elements",
        )
    return [Type(x.rows, x.inner, "f32")]


def heads_of(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x, d = _tensor(types[0], "x"), attrs["head_dim"]
    _check(isinstance(d, int) and d > 0, f"head_dim must be a positive whole number, not {d!r}")
    assert isinstance(d, int)
    _check(len(x.inner) == 1, f"heads_of takes flat rows, not {x}")
    _check(x.inner[0] % d == 0, f"{x.inner[0]} elements do not divide into heads of {d}")
    return [Type(x.rows, (x.inner[0] // d, d), x.dtype)]


def rope(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    q, k = _tensor(types[0], "q"), _tensor(types[1], "k")
    dims = attrs["dims"]
    if len(types) > 2:
        positions = _tensor(types[2], "positions")
        _check(
            positions.dtype == "i32" and not positions.inner,
            f"positions must be whole numbers, not {positions}",
        )
    for name, t in (("q", q), ("k", k)):
        _check(len(t.inner) == 2, f"rope's {name} must be [T, heads, head_dim], not {t}; use heads_of")
        assert isinstance(dims, int)
        _check(0 < dims <= t.inner[1] and dims % 2 == 0, f"rope turns {dims} of {t.inner[1]} dims of {name}")
    return [Type(q.rows, q.inner, "f32"), Type(k.rows, k.inner, "f32")]


def attention(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    q, k, v = (_tensor(t, n) for t, n in zip(types[:3], "qkv", strict=True))
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check(len(t.inner) == 2, f"attention's {name} must be [T, heads, head_dim], not {t}; use heads_of")
    _check(k.inner == v.inner, f"k is {k}, v is {v}")
    _check(q.inner[1] == k.inner[1], f"q has heads of {q.inner[1]}, k of {k.inner[1]}")
    _check(q.inner[0] % k.inner[0] == 0, f"{q.inner[0]} query heads do not divide by {k.inner[0]} KV heads")
    return [Type(q.rows, q.inner, "f32")]


def top_k(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x, k = _tensor(types[0], "x"), attrs["k"]
    assert isinstance(k, int)
    _check(len(x.inner) == 1, f"top_k_of takes flat rows, not {x}")
    _check(k <= x.inner[0], f"the {k} greatest of {x.inner[0]} elements")
    return [Type(x.rows, (k,), "f32"), Type(x.rows, (k,), "i32")]


def expert_linear(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x, w, chosen = (_tensor(t, n) for t, n in zip(types, ("x", "the weight", "the choice"), strict=False))
    _check(len(w.inner) == 3, f"the weight of experts is [E, N, K], not {w}")
    _check(chosen.dtype == "i32" and len(chosen.inner) == 1, f"experts are chosen by top_k_of, not {chosen}")
    (count, n, k), (chosen_count,) = w.inner, chosen.inner
    fits = x.inner == (k,) or x.inner == (chosen_count, k)
    _check(fits, f"x is {x}, the weight takes {k} elements, or those of {chosen_count} experts")
    for bias in types[3:]:
        b = _tensor(bias, "the bias")
        _check(b.inner == (count, n), f"the bias is {b}, the weight gives {count} x {n}")
    return [Type(x.rows, (chosen_count, n), "f32")]


def weighted_sum(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    y, w = _tensor(types[0], "y"), _tensor(types[1], "the weights")
    _check(len(y.inner) == 2 and w.inner == y.inner[:1], f"y is {y}, its weights are {w}")
    return [Type(y.rows, y.inner[1:], "f32")]


def expert_lists_width(experts: int, k: int) -> int:
    """Elements of a row of expert_lists: enough for all of it if there is one row only."""
    return round_up(1 + 3 * experts + k, ROW_ALIGN)


def expert_lists(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    chosen, experts = _tensor(types[0], "the choice"), attrs["experts"]
    assert isinstance(experts, int)
    return [Type(chosen.rows, (expert_lists_width(experts, chosen.inner[0]),), "i32")]


def take_rows(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x, rows = _tensor(types[0], "x"), _tensor(types[1], "rows")
    return [Type(rows.rows, x.inner, x.dtype)]


def slice_of(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x = _tensor(types[0], "x")
    start, stop = attrs["start"], attrs["stop"]
    assert isinstance(start, int)
    assert isinstance(stop, int)
    _check(len(x.inner) == 2 and 0 <= start < stop <= x.inner[0], f"groups {start}:{stop} of {x}")
    one = attrs.get("drop_axis")
    return [Type(x.rows, x.inner[1:] if one else (stop - start, x.inner[1]), x.dtype)]


def cast(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x = _tensor(types[0], "x")
    dtype: DType = "bf16" if attrs["dtype"] == "bf16" else "f32"
    return [Type(x.rows, x.inner, dtype)]


def argmax(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x = _tensor(types[0], "x")
    return [Type(x.rows, (), "i32")]


def kv_write(types: Sequence[ValueType], attrs: Attrs) -> Sequence[ValueType]:  # noqa: ARG001
    cache, k = types[0], _tensor(types[1], "k")
    assert isinstance(cache, CacheType)
    _check(k.inner == (cache.kv_heads, cache.head_dim), f"k is {k}, the {cache}")
    return [cache]


def paged_attention(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    q, cache = _tensor(types[0], "q"), types[1]
    assert isinstance(cache, CacheType)
    _check(q.inner[1] == cache.head_dim and q.inner[0] % cache.kv_heads == 0, f"q is {q}, the {cache}")
    return [Type(q.rows, q.inner, "f32")]


def activation(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    known = sorted(set(ACTIVATIONS.values()))
    _check(attrs["name"] in known, f"no activation {attrs['name']!r}; known: {', '.join(known)}")
    return same(types, attrs)
