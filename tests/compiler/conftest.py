"""A small spec whose every part is easy to change, and an interpreter that runs a graph by its meanings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagec.compiler import ops
from pagec.compiler.ir import Graph

RunGraph = Callable[[Graph, Callable[[str], np.ndarray], list[int]], torch.Tensor]

TINY = """\
required: [vocab, hidden, layers, max_len]
params:
  vocab: 32
  hidden: 8
  layers: 2
  max_len: 64
  norm_eps: 1.0e-5
weights:
  embed: {name: embed.weight, shape: [vocab, hidden]}
  norm: {name: "{i}.norm.weight", shape: [hidden]}
  up: {name: "{i}.up.weight", shape: [hidden, hidden]}
graph:
  first:
    - x = embed(tokens, $embed)
  layer:
    - h = rmsnorm(x, $norm, eps=norm_eps)
    - x = x + linear(h, $up)
  last:
    - logits = linear(x, $embed)
"""


@pytest.fixture
def tiny() -> str:
    """The text of a spec that loads and builds."""
    return TINY


@pytest.fixture
def run_graph() -> RunGraph:
    """Runs a graph on one sequence: `run_graph(graph, weight, tokens)` gives logits [T, vocab]."""

    def run(graph: Graph, weight: Callable[[str], np.ndarray], tokens: list[int]) -> torch.Tensor:
        values = {
            "tokens": torch.tensor(tokens, dtype=torch.int32),
            "positions": torch.arange(len(tokens), dtype=torch.int32),
            "sequences": torch.zeros(len(tokens), dtype=torch.int32),
        }
        for node in graph.nodes:
            inputs = [
                values[n[1:]] if n[0] == "%" else torch.from_numpy(np.array(weight(n[1:])))
                for n in node.inputs
            ]
            values.update(zip(node.outputs, ops.run(node.op, inputs, node.attrs), strict=True))
        return values["logits"]

    return run
