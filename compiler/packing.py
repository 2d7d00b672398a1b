"""How a model's weights become the tensors that kernels read, step by step, and back.

Each step is (name, arguments) on one float32 array; each has an exact inverse (`unpack`), which verify
uses to read a packed file again. Steps, in the order in which they occur:

    groups(axis, count, size, padded)   an axis of count x size elements, each group padded with zeros
    pairs(axis, size, turned)           an axis of groups of `size`: of the first `turned` elements of each
                                        the two halves take turns
    pad(axis, length)                   zeros at the end of an axis
    interleave(axis, parts, chunk)      an axis of equal parts, a chunk of each in turn
    round()                             to bf16, nearest even; kept as uint16 bit patterns
    tile(nt, unit)                      [N, K] -> [N/nt, K/unit, nt, unit]: a register tile's weights
                                        lie together, in the order in which the tile reads them
                                        (of [E, N, K], a stack of experts, each matrix by itself)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pagec.compiler.dims import ITEM_BYTES, WORD_ELEMENTS, DType, padded_last, row_stride
from pagec.compiler.program import KvLayout, PackedWeight

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Step = tuple[str, tuple[int, ...]]

STORAGE: dict[DType, type] = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32}


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Bit patterns of x rounded to bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    out = rounded.astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FC0
    return out


def from_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    """The float32 values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _groups(x: Array, args: tuple[int, ...]) -> Array:
    axis, count, size, padded = args
    shape = x.shape
    x = x.reshape(*shape[:axis], count, size, *shape[axis + 1 :])
    widths = [(0, 0)] * x.ndim
    widths[axis + 1] = (0, padded - size)
    return np.pad(x, widths).reshape(*shape[:axis], count * padded, *shape[axis + 1 :])


def _groups_inverse(x: Array, args: tuple[int, ...], before: tuple[int, ...]) -> Array:
    axis, count, size, padded = args
    x = x.reshape(*before[:axis], count, padded, *x.shape[axis + 1 :])
    return x[(slice(None),) * (axis + 1) + (slice(0, size),)].reshape(before)


def _pairs(x: Array, args: tuple[int, ...]) -> Array:
    axis, size, turned = args
    return _within_groups(x, axis, _paired(size, turned))


def _pairs_inverse(x: Array, args: tuple[int, ...], before: tuple[int, ...]) -> Array:  # noqa: ARG001
    axis, size, turned = args
    return _within_groups(x, axis, np.argsort(_paired(size, turned)))


def _paired(size: int, turned: int) -> Array:
    """0, turned/2, 1, turned/2 + 1, ..., then the rest as it is."""
    halves = np.arange(turned).reshape(2, turned // 2)
    return np.concatenate([halves.T.reshape(-1), np.arange(turned, size)])


def _within_groups(x: Array, axis: int, order: Array) -> Array:
    groups = x.reshape(*x.shape[:axis], -1, len(order), *x.shape[axis + 1 :])
    return np.take(groups, order, axis + 1).reshape(x.shape)


def _pad(x: Array, args: tuple[int, ...]) -> Array:
    axis, length = args
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return np.pad(x, widths)


def _pad_inverse(x: Array, args: tuple[int, ...], before: tuple[int, ...]) -> Array:
    return x[(slice(None),) * args[0] + (slice(0, before[args[0]]),)]


def _interleave(x: Array, args: tuple[int, ...]) -> Array:
    axis, parts, chunk = args
    split = (*x.shape[:axis], parts, x.shape[axis] // parts // chunk, chunk, *x.shape[axis + 1 :])
    return x.reshape(split).swapaxes(axis, axis + 1).reshape(x.shape)


def _interleave_inverse(x: Array, args: tuple[int, ...], before: tuple[int, ...]) -> Array:
    axis, parts, chunk = args
    split = (*before[:axis], before[axis] // parts // chunk, parts, chunk, *before[axis + 1 :])
    return x.reshape(split).swapaxes(axis, axis + 1).reshape(before)


def _tile(x: Array, args: tuple[int, ...]) -> Array:
    nt, unit = args
    *stack, n, k = x.shape
    return np.ascontiguousarray(x.reshape(*stack, n // nt, nt, k // unit, unit).swapaxes(-3, -2))


def _tile_inverse(x: Array, args: tuple[int, ...], before: tuple[int, ...]) -> Array:  # noqa: ARG001
    return x.swapaxes(-3, -2).reshape(before)


_FORWARD: Mapping[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "groups": _groups,
    "pairs": _pairs,
    "pad": _pad,
    "interleave": _interleave,
    "round": lambda x, args: to_bf16(x),  # noqa: ARG005
    "tile": _tile,
}
_INVERSE: Mapping[str, Callable[[Array, tuple[int, ...], tuple[int, ...]], Array]] = {
    "groups": _groups_inverse,
    "pairs": _pairs_inverse,
    "pad": _pad_inverse,
    "interleave": _interleave_inverse,
    "round": lambda x, args, before: from_bf16(x),  # noqa: ARG005
    "tile": _tile_inverse,
}


def shape_after(shape: tuple[int, ...], step: Step) -> tuple[int, ...]:
    """The shape that a step gives."""
    name, args = step
    out = list(shape)
    match name:
        case "groups":
            out[args[0]] = args[1] * args[3]
        case "pad":
            out[args[0]] = args[1]
        case "tile":
            return (*shape[:-2], shape[-2] // args[0], shape[-1] // args[1], args[0], args[1])
    return tuple(out)


def joined_shape(part_shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the parts, one below the other."""
    return (sum(s[0] for s in part_shapes), *part_shapes[0][1:])


def pack(weight: PackedWeight, parts: Sequence[F32]) -> Array:
    """The packed tensor, as float32 or bf16 bit patterns (uint16)."""
    x: Array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    for name, args in weight.steps:
        x = _FORWARD[name](x, args)
    assert x.shape == weight.shape, (weight.name, x.shape, weight.shape)
    return np.ascontiguousarray(x, dtype=STORAGE[weight.dtype])


def unpack(weight: PackedWeight, packed: Array) -> dict[str, F32]:
    """The model's own weights out of a packed tensor (bf16 values as float32)."""
    shapes = [joined_shape(weight.part_shapes)]
    for step in weight.steps:
        shapes.append(shape_after(shapes[-1], step))
    x = packed.reshape(weight.shape)
    for (name, args), before in zip(reversed(weight.steps), reversed(shapes[:-1]), strict=True):
        x = _INVERSE[name](x, args, before)
    ends = np.cumsum([s[0] for s in weight.part_shapes])[:-1]
    return dict(zip(weight.parts, np.split(x, ends), strict=True))


def rows_to_buffer(x: F32, dtype: DType) -> Array:
    """Rows [n, *inner] as they lie in a workspace buffer: [n, row_stride(inner)], padding zero."""
    n, inner = len(x), x.shape[1:]
    if not inner:
        return np.ascontiguousarray(x, dtype=STORAGE[dtype])
    wide = _groups(x.reshape(n, -1), (1, prod(inner[:-1]), inner[-1], padded_last(inner)))
    wide = _pad(wide, (1, row_stride(inner)))
    return to_bf16(wide) if dtype == "bf16" else np.ascontiguousarray(wide, dtype=STORAGE[dtype])


def buffer_to_rows(raw: Array, inner: tuple[int, ...], dtype: DType) -> Array:
    """The inverse of rows_to_buffer, without the padding."""
    if not inner:
        return raw
    x = from_bf16(raw) if dtype == "bf16" else raw
    x = x[:, : prod(inner[:-1]) * padded_last(inner)].reshape(len(raw), *inner[:-1], padded_last(inner))
    return np.ascontiguousarray(x[..., : inner[-1]])


def nbytes(shape: tuple[int, ...], dtype: DType) -> int:
    """Bytes of a tensor."""
    return prod(shape) * ITEM_BYTES[dtype]


def kv_elements(layout: KvLayout, slots: npt.NDArray[np.int32]) -> tuple[Array, Array]:
    """Where tokens lie in one layer's slice of the pool: element indices [n, kv_heads, head_dim] of K and V.

    `slots` are block * block_size + offset. See KvLayout for the layout.
    """
    unit = WORD_ELEMENTS[layout.dtype]
    padded = padded_last((layout.head_dim,))
    block, offset = np.divmod(slots.astype(np.int64), layout.block_size)
    head = np.arange(layout.kv_heads)
    span = block * (layout.span_bytes // ITEM_BYTES[layout.dtype])
    if layout.kind == "rows":
        row = span[:, None] + (head * layout.block_size + offset[:, None]) * padded
        keys = row[..., None] + np.arange(layout.head_dim)
        return keys, keys + layout.kv_heads * layout.block_size * padded
    sub, lane = np.divmod(offset, 16)
    base = (span[:, None] + (sub[:, None] * layout.kv_heads + head) * 32 * padded)[..., None]
    lane = lane[:, None, None]
    c = np.arange(layout.head_dim)
    keys = base + (c // unit * 16 + lane) * unit + c % unit
    values = base + 16 * padded + (lane // unit * padded + c) * unit + lane % unit
    return keys, values
