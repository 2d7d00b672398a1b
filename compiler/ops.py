"""The closed set of ops: for each one its parameters, its shape rule and its meaning in torch float32.

An op's row is all that the spec language, the verifier, the passes and the reference interpreter know of
it. `OPS` is the table; a user's own ops join it through `register` (`--ops FILE.py`).

Shapes are written rows first: x[T,K] has T rows of K elements. Meanings compute in float32 whatever the
dtypes are; `cast` alone rounds. (torch is imported only where a meaning runs.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pagec.compiler.dims import DType
from pagec.compiler.ir import Attr, CacheType, Type, ValueType
from pagec.compiler.rope import RopeConfig, cos_sin

if TYPE_CHECKING:
    import torch

Attrs = Mapping[str, Attr]
ShapeRule = Callable[[Sequence[ValueType], Attrs], Sequence[ValueType]]
Meaning = Callable[..., Any]

# How a parameter is given. "value": an expression with rows; "weight": `$name`; "either": one of both;
# "scalar": a constant; "rope": a map of rope settings, flattened into attributes; "step": filled in by
# the compiler from the step's own inputs (positions, sequences).
ParamKind = Literal["value", "weight", "either", "scalar", "rope", "step"]
# What a scalar is: a finite number (given as a float), one above zero, a positive whole number, a word,
# the name of an activation, or whatever an op of a user's takes.
ScalarType = Literal["number", "positive", "size", "word", "activation", "any"]
REQUIRED: Final = object()


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
    """

    name: str
    params: tuple[Param, ...]
    infer: ShapeRule
    meaning: Meaning
    rowwise: bool = False
    internal: bool = False

    def tensor_params(self) -> tuple[Param, ...]:
        """The parameters that stand in a node's `inputs`, in order."""
        return tuple(p for p in self.params if p.kind not in ("scalar", "rope"))


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Adds an op to the table; a name can be taken once."""
    if op.name in OPS:
        raise ValueError(f"there is already an op named {op.name!r}")
    OPS[op.name] = op
    return op


def infer(name: str, types: Sequence[ValueType], attrs: Attrs) -> tuple[ValueType, ...]:
    """Result types of an op on operands of these types."""
    return tuple(OPS[name].infer(types, attrs))


def run(name: str, tensors: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Results of an op by its meaning."""
    result = OPS[name].meaning(*tensors, **attrs)
    return result if isinstance(result, tuple) else (result,)


# ---------------------------------------------------------------------------------- shape rules


def _tensor(t: ValueType, what: str) -> Type:
    if not isinstance(t, Type):
        raise ShapeError(f"{what} is a cache, not a tensor")
    return t


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ShapeError(message)


def _flat(t: Type) -> int:
    return math.prod(t.inner)


def _same(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x = _tensor(types[0], "x")
    return [Type(x.rows, x.inner, "f32")]


def _arithmetic_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
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


def _embed_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    ids, w = _tensor(types[0], "ids"), _tensor(types[1], "the table")
    _check(ids.dtype == "i32" and not ids.inner, f"ids must be whole numbers, one per row, not {ids}")
    _check(len(w.inner) == 2, f"an embedding table is [rows, width], not {w}")
    return [Type(ids.rows, (w.inner[1],), "f32")]


def _linear_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
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


def _norm_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x = _tensor(types[0], "x")
    _check(bool(x.inner), "a norm needs an inner axis")
    for what, t in zip(("weight", "bias"), types[1:], strict=False):
        _check(
            _tensor(t, what).inner == x.inner[-1:],
            f"the norm's {what} is {t}, the last axis of x has {x.inner[-1]} elements",
        )
    return [Type(x.rows, x.inner, "f32")]


def _heads_of_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x, d = _tensor(types[0], "x"), attrs["head_dim"]
    _check(isinstance(d, int) and d > 0, f"head_dim must be a positive whole number, not {d!r}")
    assert isinstance(d, int)
    _check(len(x.inner) == 1, f"heads_of takes flat rows, not {x}")
    _check(x.inner[0] % d == 0, f"{x.inner[0]} elements do not divide into heads of {d}")
    return [Type(x.rows, (x.inner[0] // d, d), x.dtype)]


def _rope_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
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


def _attention_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    q, k, v = (_tensor(t, n) for t, n in zip(types[:3], "qkv", strict=True))
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check(len(t.inner) == 2, f"attention's {name} must be [T, heads, head_dim], not {t}; use heads_of")
    _check(k.inner == v.inner, f"k is {k}, v is {v}")
    _check(q.inner[1] == k.inner[1], f"q has heads of {q.inner[1]}, k of {k.inner[1]}")
    _check(q.inner[0] % k.inner[0] == 0, f"{q.inner[0]} query heads do not divide by {k.inner[0]} KV heads")
    return [Type(q.rows, q.inner, "f32")]


def _take_rows_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x, rows = _tensor(types[0], "x"), _tensor(types[1], "rows")
    return [Type(rows.rows, x.inner, x.dtype)]


def _slice_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x = _tensor(types[0], "x")
    start, stop = attrs["start"], attrs["stop"]
    assert isinstance(start, int)
    assert isinstance(stop, int)
    _check(len(x.inner) == 2 and 0 <= start < stop <= x.inner[0], f"groups {start}:{stop} of {x}")
    one = attrs.get("drop_axis")
    return [Type(x.rows, x.inner[1:] if one else (stop - start, x.inner[1]), x.dtype)]


def _cast_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    x = _tensor(types[0], "x")
    dtype: DType = "bf16" if attrs["dtype"] == "bf16" else "f32"
    return [Type(x.rows, x.inner, dtype)]


def _argmax_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    x = _tensor(types[0], "x")
    return [Type(x.rows, (), "i32")]


def _kv_write_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[ValueType]:  # noqa: ARG001
    cache, k = types[0], _tensor(types[1], "k")
    assert isinstance(cache, CacheType)
    _check(k.inner == (cache.kv_heads, cache.head_dim), f"k is {k}, the {cache}")
    return [cache]


def _paged_attention_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    q, cache = _tensor(types[0], "q"), types[1]
    assert isinstance(cache, CacheType)
    _check(q.inner[1] == cache.head_dim and q.inner[0] % cache.kv_heads == 0, f"q is {q}, the {cache}")
    return [Type(q.rows, q.inner, "f32")]


# ------------------------------------------------------------------------------------- meanings


def _operand(y: Any, scalar: float | None) -> Any:
    return scalar if y is None else y


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, split: int | None = None) -> Any:
    y = x.flatten(1) @ w.T
    y = y if b is None else y + b
    return y if split is None else y.reshape(len(y), -1, split)


def _rmsnorm(x: torch.Tensor, w: torch.Tensor | None = None, *, eps: float, offset: float = 0.0) -> Any:
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps), times the weight."""
    import torch

    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * (w + offset)


def _layernorm(
    x: torch.Tensor, w: torch.Tensor | None = None, b: torch.Tensor | None = None, *, eps: float
) -> Any:
    import torch

    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)


def _rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Su et al. 2021. Pairs are (i, i + dims/2), or (2i, 2i + 1) if interleaved; the rest is unturned."""
    import torch

    config = RopeConfig.from_attrs(settings)
    cos_np, sin_np = cos_sin(config, int(positions.max()) + 1)
    cos, sin = (torch.from_numpy(t).to(q.device)[positions.long()][:, None] for t in (cos_np, sin_np))

    def turn(x: torch.Tensor) -> torch.Tensor:
        body, rest = x[..., : config.dims], x[..., config.dims :]
        if config.interleaved:
            a, b = body[..., 0::2], body[..., 1::2]
            body = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = body.chunk(2, -1)
            body = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((body, rest), -1)

    return turn(q), turn(k)


def _masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """q[T,h,d], k and v [K,g,d], seen[T,K]: softmax(scale q k) v over the keys that each row sees."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,khd->htk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v)


def _visible(row: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """seen[T,K]: keys at positions max(0, p - window + 1) .. p."""
    seen = key[None] <= row[:, None]
    return seen if window is None else seen & (key[None] > row[:, None] - window)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention among the rows of the step alone (every sequence starts in it)."""
    seen = _visible(positions, positions, window) & (sequences[:, None] == sequences[None])
    return _masked_attention(q, k, v, seen, scale, softcap)


def _kv_write(
    cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, sequences: torch.Tensor
) -> torch.Tensor:
    """cache[2,S,length,kv_heads,head_dim] with this step's keys and values put at their positions."""
    import torch

    cache = cache.clone()
    cache[:, sequences.long(), positions.long()] = torch.stack((k, v))
    return cache


def _paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    import torch

    out = torch.empty_like(q)
    for s in sorted(set(sequences.tolist())):
        rows = sequences == s
        p = positions[rows]
        k, v = cache[:, s, : int(p.max()) + 1]
        seen = _visible(p, torch.arange(len(k), device=q.device), window)
        out[rows] = _masked_attention(q[rows], k, v, seen, scale, softcap)
    return out


def _activation(x: torch.Tensor, *, name: str) -> torch.Tensor:
    import torch.nn.functional as F  # noqa: N812

    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "sigmoid":
            return x.sigmoid()
        case "tanh":
            return x.tanh()
    raise ValueError(f"no activation {name!r}")


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


def _activation_rule(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:
    known = sorted(set(ACTIVATIONS.values()))
    _check(attrs["name"] in known, f"no activation {attrs['name']!r}; known: {', '.join(known)}")
    return _same(types, attrs)


def _cast(x: torch.Tensor, *, dtype: str) -> torch.Tensor:
    return x.bfloat16().float() if dtype == "bf16" else x


def _slice(x: torch.Tensor, *, start: int, stop: int, drop_axis: bool = False) -> torch.Tensor:
    return x[:, start] if drop_axis else x[:, start:stop]


# ---------------------------------------------------------------------------------------- table

_X = Param("x", "value")
_STEP = (Param("positions", "step"), Param("sequences", "step"))
_MASK = (
    Param("scale", "scalar", type="number"),
    Param("window", "scalar", None, "size"),
    Param("softcap", "scalar", None, "positive"),
)


def _binary(name: str, meaning: Callable[[Any, Any], Any]) -> Op:
    """x op y, where y is a value or a weight, or x op scalar where there is no y."""
    return Op(
        name,
        (_X, Param("y", "either", None), Param("scalar", "scalar", None, "number")),
        _arithmetic_rule,
        lambda x, y=None, *, scalar=None: meaning(x, _operand(y, scalar)),
        rowwise=True,
    )


for _op in (
    Op("embed", (Param("ids", "value"), Param("w", "weight")), _embed_rule, lambda ids, w: w[ids.long()]),
    Op(
        "linear",
        (_X, Param("w", "weight"), Param("b", "weight", None), Param("split", "scalar", None, "size")),
        _linear_rule,
        _linear,
    ),
    Op(
        "rmsnorm",
        (
            _X,
            Param("w", "weight", None),
            Param("eps", "scalar", type="number"),
            Param("offset", "scalar", 0, "number"),
        ),
        _norm_rule,
        _rmsnorm,
        rowwise=True,
    ),
    Op(
        "layernorm",
        (_X, Param("w", "weight", None), Param("b", "weight", None), Param("eps", "scalar", type="number")),
        _norm_rule,
        _layernorm,
        rowwise=True,
    ),
    Op(
        "heads_of",
        (_X, Param("head_dim", "scalar", type="size")),
        _heads_of_rule,
        lambda x, *, head_dim: x.unflatten(1, (-1, head_dim)),
    ),
    Op(
        "rope",
        (Param("q", "value"), Param("k", "value"), Param("positions", "value"), Param("rope", "rope")),
        _rope_rule,
        _rope,
    ),
    Op(
        "attention",
        (Param("q", "value"), Param("k", "value"), Param("v", "value"), *_STEP, *_MASK),
        _attention_rule,
        _attention,
    ),
    Op(
        "activation",
        (_X, Param("name", "scalar", type="activation")),
        _activation_rule,
        _activation,
        rowwise=True,
    ),
    Op(
        "softcap",
        (_X, Param("cap", "scalar", type="positive")),
        _same,
        lambda x, *, cap: cap * (x / cap).tanh(),
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
        _cast_rule,
        _cast,
        rowwise=True,
        internal=True,
    ),
    Op(
        "take_rows",
        (_X, Param("rows", "value")),
        _take_rows_rule,
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
        _slice_rule,
        _slice,
        internal=True,
    ),
    Op(
        "kv_write",
        (Param("cache", "value"), Param("k", "value"), Param("v", "value"), *_STEP),
        _kv_write_rule,
        _kv_write,
        internal=True,
    ),
    Op(
        "paged_attention",
        (Param("q", "value"), Param("cache", "value"), *_STEP, *_MASK),
        _paged_attention_rule,
        _paged_attention,
        internal=True,
    ),
    Op("argmax", (_X,), _argmax_rule, lambda x: x.argmax(-1), internal=True),
):
    register(_op)
