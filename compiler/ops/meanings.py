"""What ops mean, in torch float32. (torch is imported only where a meaning runs.)"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pagec.compiler.ops.frequencies import frequencies
from pagec.compiler.ops.shapes import expert_lists_width
from pagec.compiler.rope import RopeConfig, cos_sin_of

if TYPE_CHECKING:
    import torch


def operand(y: Any, scalar: float | None) -> Any:
    return scalar if y is None else y


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, split: int | None = None) -> Any:
    y = x.flatten(1) @ w.T
    y = y if b is None else y + b
    return y if split is None else y.reshape(len(y), -1, split)


def rmsnorm(x: torch.Tensor, w: torch.Tensor | None = None, *, eps: float, offset: float = 0.0) -> Any:
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps), times the weight."""
    import torch

    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * (w + offset)


def layernorm(
    x: torch.Tensor,
    w: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
) -> Any:
    import torch

    y = torch.nn.functional.layer_norm(x, x.shape[-1:], None, None, eps)
    y = y if w is None else y * (w + offset)
    return y if b is None else y + b


def top_k(x: torch.Tensor, *, k: int, normalize: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal elements the first counts as the greater."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    values, indices = values[:, :k], indices[:, :k]
    return values / values.sum(-1, keepdim=True) if normalize else values, indices


def expert_linear(
    x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor, b: torch.Tensor | None = None
) -> torch.Tensor:
    """x[T,K] or [T,k,K] -> [T,k,N]: each row by the experts that it has chosen."""
    rows = x[:, None].expand(-1, chosen.shape[1], -1) if x.ndim == 2 else x
    y = x.new_empty(*chosen.shape, w.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        here = chosen == expert
        y[here] = rows[here] @ w[expert].T + (0 if b is None else b[expert])
    return y


def weighted_sum(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = y[:, 0] * w[:, :1]
    for j in range(1, y.shape[1]):
        total = total + y[:, j] * w[:, j : j + 1]
    return total


def expert_lists(chosen: torch.Tensor, *, experts: int) -> torch.Tensor:
    """Number of chosen experts; (expert, start, count) of each; row * k + choice, expert by expert. Flat."""
    import torch

    rows, k = chosen.shape
    flat = torch.zeros(rows * expert_lists_width(experts, k), dtype=torch.int32, device=chosen.device)
    counts = torch.bincount(chosen.flatten().long(), minlength=experts)
    starts = counts.cumsum(0) - counts
    active = counts.nonzero()[:, 0]
    flat[0] = len(active)
    flat[1 : 1 + 3 * len(active)] = torch.stack((active, starts[active], counts[active]), 1).flatten().int()
    order = chosen.flatten().argsort(stable=True).int()
    flat[1 + 3 * experts : 1 + 3 * experts + rows * k] = order
    return flat.reshape(rows, -1)


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Su et al. 2021. Pairs are (i, i + dims/2), or (2i, 2i + 1) if interleaved; the rest is unturned."""
    import torch

    config = RopeConfig.from_attrs(settings)
    cos_np, sin_np = cos_sin_of(frequencies(config), int(positions.max()) + 1, config.scale)
    cos, sin = (torch.from_numpy(t).to(q.device)[positions.long()][:, None] for t in (cos_np, sin_np))
    return turned(q, cos, sin, config), turned(k, cos, sin, config)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """x[T, heads, dim] by angles whose cosines and sines [T, 1, pairs] are given."""
    import torch

    body, rest = x[..., : config.dims], x[..., config.dims :]
    if config.interleaved:
        a, b = body[..., 0::2], body[..., 1::2]
        body = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = body.chunk(2, -1)
        body = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((body, rest), -1)


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


def attention(
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


def kv_write(
    cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, sequences: torch.Tensor
) -> torch.Tensor:
    """cache[2,S,length,kv_heads,head_dim] with this step's keys and values put at their positions."""
    import torch

    cache = cache.clone()
    cache[:, sequences.long(), positions.long()] = torch.stack((k, v))
    return cache


def paged_attention(
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


def activation(x: torch.Tensor, *, name: str) -> torch.Tensor:
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


def cast(x: torch.Tensor, *, dtype: str) -> torch.Tensor:
    return x.bfloat16().float() if dtype == "bf16" else x


def slice_of(x: torch.Tensor, *, start: int, stop: int, drop_axis: bool = False) -> torch.Tensor:
    return x[:, start] if drop_axis else x[:, start:stop]
