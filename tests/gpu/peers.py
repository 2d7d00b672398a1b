"""What pagec's kernels are timed beside: torch's attention, cuBLAS with separate kernels, a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagec.compiler import ops
from pagec.compiler.ir import CacheType, Graph, Node
from pagec.compiler.ops.meanings import turned
from pagec.compiler.rope import RopeConfig

BACKENDS: Final[Mapping[str, SDPBackend]] = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}
COPY_BYTES: Final = 1 << 30
SCALE: Final = 0.02


def attention_peers(
    sequences: int, tokens: int, heads: int, kv_heads: int, head_dim: int, like: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Causal attention among the tokens of each sequence, over dense arrays [B, tokens, heads, D] as models
    make them; those that this torch has. `like`: of the same type and device."""
    q, k, v = (
        torch.randn(sequences, tokens, n, head_dim, dtype=like.dtype, device=like.device).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    found = {}
    for name, backend in BACKENDS.items():
        for grouped in (True, False):
            keys, values = (k, v) if grouped else (_spread(x, heads // kv_heads) for x in (k, v))
            run = _sdpa(backend, q, keys, values, grouped=grouped)
            if _runs(run):
                found[name] = run
                break
    return found


def _sdpa(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grouped: bool
) -> Callable[[], object]:
    def run() -> object:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=grouped
            )

    return run


def _spread(x: torch.Tensor, group: int) -> torch.Tensor:
    """Each KV head once for every query head that reads it; its copies are not timed."""
    return x.repeat_interleave(group, 1)


def _runs(run: Callable[[], object]) -> bool:
    try:
        run()
    except RuntimeError:  # "No available kernel"
        return False
    return True


def linear_peer(
    node: Node, graph: Graph, rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """A linear by cuBLAS and what follows it op by op, all in `dtype`. Values are random: only their sizes
    matter. Rounding is left out, as there is nothing to round."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device).normal_(0, SCALE, generator=generator)

    values: dict[str, Any] = {}
    for name in node.values():
        kind = graph.types[name]
        if isinstance(kind, CacheType):
            continue
        values[name] = (
            torch.arange(rows, device=device) if kind.dtype == "i32" else random((rows, *kind.inner))
        )
    weights = {name: random(graph.weights[name[1:]].inner) for name in node.inputs if name[0] == "$"}
    body = node.body or (node,)
    configs = {n.outputs[0]: RopeConfig.from_attrs(n.attrs) for n in body if n.op == "rope"}
    angles = {name: [random((rows, 1, one.dims // 2)) for _ in "cs"] for name, one in configs.items()}

    def run() -> object:
        found = dict(values)
        for inner in body:
            if inner.op in ("cast", "take_rows"):
                found[inner.outputs[0]] = found[inner.inputs[0][1:]]
                continue
            if inner.op == "kv_write":  # the bytes that it writes, in the order in which they come
                k, v = (found[name[1:]] for name in inner.inputs[1:3])
                found[inner.outputs[0]] = torch.stack((k, v))
                continue
            if inner.op == "rope":  # its meaning makes the angles on the host
                config, (cos, sin) = configs[inner.outputs[0]], angles[inner.outputs[0]]
                for name, out in zip(inner.inputs, inner.outputs, strict=False):
                    found[out] = turned(found[name[1:]], cos, sin, config)
                continue
            given = [weights[name] if name[0] == "$" else found[name[1:]] for name in inner.inputs]
            results = ops.run(inner.op, given, inner.attrs)
            found.update(zip(inner.outputs, results, strict=True))
        return found

    return run


def copy(device: torch.device, nbytes: int = COPY_BYTES) -> Callable[[], object]:
    """Reads and writes so many bytes each."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
