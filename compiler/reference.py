"""The reference interpreter: runs any graph, before or after passes, by its ops' meanings in torch float32.

It is the oracle: slow, plain, and knows nothing of kernels. Graphs need the standard library; running them
needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pagec.compiler import ops
from pagec.compiler.ir import CacheType, Graph, Node

if TYPE_CHECKING:
    import torch

# A merged weight's name lists the weights it is made of, one below the other.
MERGE_MARK = "+"
WeightReader = Callable[[str], "torch.Tensor"]


def run(graph: Graph, inputs: Mapping[str, torch.Tensor], weight: WeightReader) -> dict[str, torch.Tensor]:
    """All values of a graph, by name.

    `inputs` holds the graph's inputs (int32 rows; caches as `empty_cache` makes them), `weight` gives a
    weight by name.
    """
    values = dict(inputs)
    for node in graph.nodes:
        values.update(run_node(node, values, weight))
    return values


def run_node(node: Node, values: Mapping[str, torch.Tensor], weight: WeightReader) -> dict[str, torch.Tensor]:
    """The results of one node, by name; of a fused node those that live on."""
    if node.body:
        inside = dict(values)
        for inner in node.body:
            inside.update(run_node(inner, inside, weight))
        return {name: inside[name] for name in node.outputs}
    tensors = [values[n[1:]] if n[0] == "%" else read(n[1:], weight) for n in node.inputs]
    results = ops.run(node.op, tensors, node.attrs)
    return dict(zip(node.outputs, results, strict=True))


def read(name: str, weight: WeightReader) -> torch.Tensor:
    """A weight, merged if its name says so."""
    import torch

    parts = [weight(part) for part in name.split(MERGE_MARK)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def empty_cache(cache: CacheType, num_sequences: int, length: int) -> torch.Tensor:
    """[2, S, length, kv_heads, head_dim], filled with NaN: what was not written must not be read."""
    import torch

    shape = (2, num_sequences, length, cache.kv_heads, cache.head_dim)
    return torch.full(shape, math.nan)


def step_inputs(
    graph: Graph, chunks: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """Inputs for a step that takes these tokens of each sequence, from position `starts` on (0); what it
    samples is greedy."""
    import torch

    starts = starts or [0] * len(chunks)
    tokens = [t for chunk in chunks for t in chunk]
    positions = [p + n for chunk, p in zip(chunks, starts, strict=True) for n in range(len(chunk))]
    sequences = [s for s, chunk in enumerate(chunks) for _ in chunk]
    rows = {"tokens": tokens, "positions": positions, "sequences": sequences}
    inputs = {name: torch.tensor(rows[name], dtype=torch.int32) for name in graph.inputs if name in rows}
    for name in graph.inputs:
        if name.startswith("sampling."):
            inputs[name] = torch.zeros(len(tokens), *graph.type(name).inner, dtype=torch.int32)
    return inputs
