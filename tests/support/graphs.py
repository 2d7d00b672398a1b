"""A small llama as a graph, two layers, sizes free: what passes and kernels are tested on."""

from __future__ import annotations

from pagec.compiler.ir import Graph
from pagec.compiler.spec import build_graph, parse_spec

TEXT = """\
extends: llama
params:
  vocab: {vocab}
  hidden: {hidden}
  layers: {layers}
  heads: {heads}
  kv_heads: {kv_heads}
  head_dim: {head_dim}
  inter: {inter}
  max_len: {max_len}
  qkv_bias: {qkv_bias}
  window: {window}
  tied: {tied}
"""


def llama_text(
    *,
    vocab: int = 256,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inter: int = 128,
    max_len: int = 128,
    qkv_bias: bool = False,
    window: int | None = None,
    tied: bool = True,
) -> str:
    """The YAML of a small llama."""
    return TEXT.format(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inter=inter,
        max_len=max_len,
        qkv_bias=str(qkv_bias).lower(),
        window="null" if window is None else window,
        tied=str(tied).lower(),
    )


def llama_graph(**sizes: object) -> Graph:
    """Its graph before the passes."""
    return build_graph(parse_spec(llama_text(**sizes), "small.yaml"))  # type: ignore[arg-type]
