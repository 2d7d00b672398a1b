"""Sampling needs more than the greatest logit: a token drawn as the step's own numbers say."""

from __future__ import annotations

from typing import Final

from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.sampling import NUM_WORDS, mask_words

# What a step gives the op (compiler/sampling.py), and its results.
INPUTS: Final = ("sampling.settings", "sampling.edits", "sampling.masks")
TOKEN: Final = "sampling.token"
LOGPROB: Final = "sampling.logprob"


def add_sample(graph: Graph) -> Graph:
    """Adds a token drawn from each row's logits to the outputs, and its log probability.

    before:  output %logits          after:  %sampling.token: R i32, %sampling.logprob: R f32 =
                                                 sample(%logits, %sampling.settings, ...)
                                             output %logits, %sampling.token, %sampling.logprob
    """
    logits = graph.type("logits")
    inner = ((NUM_WORDS,), (2,), (mask_words(logits.inner[0]),))
    types = dict(graph.types)
    types |= {name: Type(logits.rows, size, "i32") for name, size in zip(INPUTS, inner, strict=True)}
    types |= {TOKEN: Type(logits.rows, (), "i32"), LOGPROB: Type(logits.rows, (), "f32")}
    node = Node("sample", ("%logits", *(f"%{name}" for name in INPUTS)), (TOKEN, LOGPROB))
    return graph.with_nodes(
        [*graph.nodes, node],
        types,
        inputs=(*graph.inputs, *INPUTS),
        outputs=(*graph.outputs, TOKEN, LOGPROB),
    )
