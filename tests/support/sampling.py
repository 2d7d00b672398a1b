"""Sampling defined by sorting, in float64 numpy, from the parameters themselves; and tests of frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.ops.sampling import shape
from pagec.compiler.sampling import NUM_WORDS, mask_words
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Row, SamplingInputs, sampling_inputs, token_logprobs
from support.kernels import KernelRun

F64 = npt.NDArray[np.float64]


def processed(
    logits: Any,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> F64:
    """One row of logits after masks, bans, biases and penalties."""
    y = np.asarray(logits, np.float64).copy()
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(y), bool)
        allowed[list(params.allowed_token_ids)] = True
        y[~allowed] = -np.inf
    y[list(banned)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        y[token] += bias
    for token in set(prompt) | set(output):
        y[token] = (
            y[token] / params.repetition_penalty if y[token] > 0 else y[token] * params.repetition_penalty
        )
    for token in set(output):
        y[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return y


def probabilities(y: F64, params: SamplingParams) -> F64:
    """The exact probability of each token, from a row of processed logits."""
    if params.is_greedy:
        return np.asarray(np.arange(len(y)) == y.argmax(), np.float64)
    p = np.exp((y - y.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < len(y):
        p[y < np.sort(y)[-params.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    greater = np.array([p[order][p[order] > value].sum() for value in np.unique(p)])
    kept = np.unique(p)[greater < params.top_p]
    p[p < kept.min()] = 0
    result: F64 = p / p.sum()
    return result


def is_plausible(counts: Any, exact: F64) -> bool:
    """Pearson's chi-square test at about 3e-5: whether these counts come from the exact probabilities.

    Tokens that are expected less than five times are counted together. The quantile is Wilson's and
    Hilferty's (1931).
    """
    assert (counts[exact == 0] == 0).all(), "a token of probability 0 was drawn"
    expected = exact * counts.sum()
    often = expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    mean = np.append(expected[often], expected[~often].sum())
    if mean[-1] < 5:  # too few even together: they join the last
        seen, mean = np.append(seen[:-2], seen[-2:].sum()), np.append(mean[:-2], mean[-2:].sum())
    k = len(mean) - 1
    if k == 0:
        return True
    limit = k * (1 - 2 / (9 * k) + 4 * np.sqrt(2 / (9 * k))) ** 3
    return bool(((seen - mean) ** 2 / mean).sum() < limit)


def sample_graph(vocab: int) -> Graph:
    """A graph of the op `sample` alone."""
    inputs = {
        "x": Type("R", (vocab,), "f32"),
        "settings": Type("R", (NUM_WORDS,), "i32"),
        "edits": Type("R", (2,), "i32"),
        "masks": Type("R", (mask_words(vocab),), "i32"),
    }
    outputs = dict(zip(("token", "logprob"), shape(list(inputs.values()), {}), strict=True))
    node = Node("sample", tuple(f"%{name}" for name in inputs), tuple(outputs))
    return Graph(tuple(inputs), tuple(outputs), (node,), {**inputs, **outputs}, {})


def log_probability(logits: Any, token: int) -> float:
    """A token's log probability by the host's own code, from a row of logits."""
    return token_logprobs(logits[None], [token], 0)[0].own.logprob


def run_sample(kernels: KernelRun, logits: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
    """(tokens, logprobs) of the sampling kernel; one row of logits serves all rows if there is but one."""
    vocab = kernels.graph.type("x").inner[0]
    logits = np.broadcast_to(np.asarray(logits, np.float32), (len(rows), vocab))
    return run_inputs(kernels, logits, sampling_inputs(rows, vocab))


def run_inputs(kernels: KernelRun, logits: Any, inputs: SamplingInputs) -> tuple[Any, Any]:
    """The same from the step's arrays."""
    arrays = {"settings": inputs.settings, "edits": inputs.edits, "masks": inputs.masks}
    # Dense, and never empty: kernels take no address of nothing.
    step = {f"value:{name}": np.append(array, np.int32(0)) for name, array in arrays.items()}
    results = kernels.run({"x": logits}, step)
    return results["token"], results["logprob"]
