"""The sampling template in Triton's interpreter, against the op's meaning (by sorting, float64)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.interpret import interpret

from pagec.compiler.backends.cuda.sample import sample
from pagec.compiler.dims import round_up, row_stride
from pagec.compiler.ops.sampling import outside
from pagec.compiler.ops.sampling import sample as meaning
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sampling.sampler import Row, Sampler, sampling_inputs

VOCAB, BLOCK = 300, 128

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 3.0},
    {"top_k": 7},
    {"top_k": 150},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.02},
    {"logit_bias": {3: 5.0, 299: 8.0, 100: -100.0}},
    {"allowed_token_ids": [0, 7, 31, 32, 63, 64, 150, 255, 256, 299]},
    {"repetition_penalty": 1.7, "presence_penalty": 1.5, "frequency_penalty": -0.4},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.005, "logit_bias": {5: 2.0, 6: -3.0}},
]


def run(logits: Any, rows: list[Row]) -> tuple[Any, Any, list[torch.Tensor]]:
    """(tokens, logprobs) of the kernel, and the arrays as the op takes them."""
    n, vocab = logits.shape
    inputs = sampling_inputs(rows, vocab)
    x = np.full((n, row_stride((vocab,))), np.inf, np.float32)
    x[:, :vocab] = logits
    token, logprob = np.full(n, -7, np.int32), np.full(n, np.nan, np.float32)
    arrays = {"x": x, "settings": inputs.settings}
    arrays |= {name: np.append(getattr(inputs, name), np.int32(0)) for name in ("edits", "masks")}
    arrays |= {
        "work": np.full((n, round_up(vocab, BLOCK)), np.nan, np.float32),
        "token": token,
        "logprob": logprob,
    }
    interpret(sample(vocab, BLOCK), arrays, {"R": n})
    tensors = [torch.from_numpy(np.array(a)) for a in (inputs.settings, inputs.edits, inputs.masks)]
    tensors[0] = tensors[0].reshape(n, -1)
    if tensors[2].numel():
        tensors[2] = tensors[2].reshape(-1, -(-vocab // 32))
    return token, logprob, tensors


@pytest.mark.parametrize("vocab", [VOCAB, 31])
def test_tokens_are_those_of_the_meaning(vocab: int) -> None:
    """Every kind of request in one step, each by its own random number; log probabilities are asked for."""
    rng, rows = np.random.default_rng(0), []
    prompt, output = list(range(5, 20)), [7, 7, 8, 25, 30]
    for seed, given in enumerate(PARAMS * 3):
        given = {**given, "logprobs": 0}
        if vocab < VOCAB:
            given = {k: v for k, v in given.items() if k not in ("logit_bias", "allowed_token_ids")}
        sampler = Sampler(SamplingParams(**given), prompt, vocab=vocab, seed=seed)
        rows.append(sampler.row([*prompt, *output]))
    logits = (2.5 * rng.standard_normal((len(rows), vocab))).astype(np.float32)
    tokens, logprobs, (settings, edits, masks) = run(logits, rows)
    assert (logprobs < 0).any()
    x = torch.from_numpy(logits)
    _, expected = meaning(x, settings, edits, masks)
    for i, token in enumerate(tokens):
        assert outside(int(token), x[i].double(), settings[i], edits, masks) < 1e-6, (i, token)
        if logprobs[i] or expected[i]:
            assert logprobs[i] == pytest.approx(float(x[i].double().log_softmax(-1)[token]), abs=1e-5)


def test_rows_without_an_allowed_token_give_none() -> None:
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[1, 17] = 3.0
    row = Sampler(SamplingParams(), [], vocab=VOCAB, seed=1).row([])
    tokens, logprobs, _ = run(logits, [row, row])
    assert tokens.tolist() == [-1, 17]
    assert logprobs.tolist() == [0.0, 0.0]


def test_equal_logits_are_kept_together() -> None:
    """Top-k of 2 where five are equal: any of the five is drawn, and nothing else."""
    logits = np.zeros((16, VOCAB), np.float32)
    logits[:, [3, 50, 130, 200, 299]] = 1.0
    rows = [
        Sampler(SamplingParams(top_k=2), [], vocab=VOCAB, seed=seed).row([]) for seed in range(len(logits))
    ]
    tokens, _, _ = run(logits, rows)
    assert set(tokens.tolist()) == {3, 50, 130, 200, 299}
