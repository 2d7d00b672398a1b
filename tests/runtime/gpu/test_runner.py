"""Whole engines on the fake GPU, kernels executed by Triton's interpreter: against the model's meaning, and
in all the ways that must not make a difference. The program is strict, so that none may make any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import in_interpreter
from support.gpu_artifacts import gpu_artifact, random_weights
from support.gpu_engine import NUM_BLOCKS, Answer, Ask, Told, answer, open_artifact, run_steps
from support.graphs import llama_text

from pagec.compiler import reference
from pagec.compiler.ir import CacheType, Graph
from pagec.runtime.batch import Batch

T, S, R = 32, 6, 4
BLOCK = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = llama_text(vocab=160, hidden=32, heads=4, kv_heads=2, head_dim=16, inter=64, max_len=80)
    return gpu_artifact(text, tmp_path_factory.mktemp("gpu") / "artifact", T=T, S=S, R=R, strict=True).path


# A prompt in two chunks beside single new tokens, one that shares a beginning, one of a single token.
PROMPTS = [[5, 9, 77], [100], list(range(40, 80)), [5, 9, 77, 12], list(range(18))]
ASKS = [Ask(prompt, 3 + number % 2, at_step=number // 2) for number, prompt in enumerate(PROMPTS)]


def told(path: Path, asks: list[Ask], **options: Any) -> Told:
    found = in_interpreter(answer, path, asks, options)
    assert isinstance(found, Told)
    assert found.blocks_used == 0, "blocks are lost"
    return found


@pytest.fixture(scope="module")
def plain(path: Path) -> Told:
    """Launch by launch, two steps in flight."""
    return told(path, ASKS, graph_rows=0)


def meant(graph: Graph, prompt: list[int], count: int) -> tuple[list[int], list[Any]]:
    """The model's greedy tokens by the graph's meaning, and the logits that chose them."""
    weights = {name: torch.from_numpy(x) for name, x in random_weights(graph, 0).items()}
    tokens, logits = list(prompt), []
    for _ in range(count):
        inputs = reference.step_inputs(graph, [tokens])
        for name in graph.inputs:
            if isinstance(t := graph.types[name], CacheType):
                inputs[name] = reference.empty_cache(t, 1, len(tokens))
        logits.append(reference.run(graph, inputs, weights.__getitem__)["logits"][-1].numpy())
        tokens.append(int(np.argmax(logits[-1])))
    return tokens[len(prompt) :], logits


def test_tokens_and_logits_are_what_the_model_means(path: Path, plain: Told) -> None:
    """Sums in float32 in another order: logits of order 10 differ by some 1e-5."""
    graph = open_artifact(path).graph()
    for ask, found in zip(ASKS, plain.answers, strict=True):
        tokens, logits = meant(graph, ask.prompt, ask.max_tokens)
        assert found.tokens == [tokens]
        assert_close(found, [row.tobytes() for row in logits])


def assert_close(found: Answer, logits: list[bytes]) -> None:
    """The interpreter's matrix products sum in an order that depends on how many rows there are."""
    for row, expected in zip(found.logits, logits, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(row, np.float32), np.frombuffer(expected, np.float32), rtol=0, atol=2e-4
        )


def test_graphs_change_no_bit(path: Path, plain: Told) -> None:
    found = told(path, ASKS)
    assert found.answers == plain.answers
    assert plain.num_replays == 0 < found.num_replays
    assert found.num_launches < plain.num_launches
    assert found.calls == {"cuLaunchKernelEx"}, "something is loaded while serving"


@pytest.mark.parametrize(("depth", "graph_rows"), [(1, 2), (3, None)])
def test_steps_in_flight_change_no_token(path: Path, plain: Told, depth: int, graph_rows: int | None) -> None:
    """They change which rows go together."""
    for found, expected in zip(
        told(path, ASKS, depth=depth, graph_rows=graph_rows).answers, plain.answers, strict=True
    ):
        assert found.tokens == expected.tokens
        assert_close(found, expected.logits)


def test_what_graphs_take_stands_in_the_ledger_and_is_not_given_to_the_pool(path: Path, plain: Told) -> None:
    with_graphs = told(path, ASKS[:1]).ledger
    assert with_graphs["graphs_bytes"] > 0
    assert plain.ledger["graphs_bytes"] == 0
    assert with_graphs["total_bytes"] - plain.ledger["total_bytes"] == with_graphs["graphs_bytes"]


def test_sampling_gives_the_same_tokens_in_any_company(path: Path) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3, "logprobs": 0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4},
        {"temperature": 0.0},
        {"temperature": 1.3, "repetition_penalty": 1.2, "logit_bias": {7: 5.0}, "seed": 5, "n": 2},
    ]
    asks = [Ask(PROMPTS[n % 2], 3, one) for n, one in enumerate(params)]
    together = told(path, asks, depth=1).answers
    in_turn = told(path, [replace(ask, at_step=3 * n) for n, ask in enumerate(asks)]).answers
    assert [one.tokens for one in together] == [one.tokens for one in in_turn]
    assert len(together[3].tokens) == 2
    assert len(together[0].logprobs) == 3
    assert all(x <= 0 for x in together[0].logprobs)


def test_the_host_may_change_logits_between_head_and_draw(path: Path, plain: Told) -> None:
    """Its row alone; with more rows than a head takes at once, in two chunks."""
    asks = [replace(ask, at_step=0, processor="three" if n == 4 else "") for n, ask in enumerate(ASKS)]
    answers = told(path, asks).answers
    for number, found in enumerate(answers):
        if number != 4:
            assert found.tokens == plain.answers[number].tokens
    for row, token in zip(answers[4].logits, answers[4].tokens[0], strict=True):
        assert token == int(np.argsort(np.frombuffer(row, np.float32))[-4])


def test_aborts_and_preemption_disturb_nobody(path: Path, plain: Told) -> None:
    """In a pool that cannot hold all at once."""
    asks = [replace(ask, at_step=0, abort_after=3 if n == 2 else 0) for n, ask in enumerate(ASKS)]
    answers = told(path, asks, num_blocks=6).answers
    assert answers[2].reason == "abort"
    for number, found in enumerate(answers):
        if number != 2:
            assert found.tokens == plain.answers[number].tokens


# ------------------------------------------------------------------------------- single steps


def decode_batch(lengths: list[int], blocks: list[list[int]], tokens: list[int], **more: Any) -> Batch:
    """One new token of each sequence, at the end of `lengths`."""
    seq_lens = np.array(lengths, np.int32)
    count = len(lengths)
    width = max(map(len, blocks))
    table = np.array([row + [0] * (width - len(row)) for row in blocks], np.int32)
    positions = seq_lens - 1
    slots = table[np.arange(count), positions // BLOCK] * BLOCK + positions % BLOCK
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=seq_lens,
        slot_mapping=(slots,),
        block_tables=(table,),
        tiles=np.stack([np.arange(count), np.zeros(count)], axis=1).astype(np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
        **more,
    )


def test_padding_reads_and_writes_nothing(path: Path) -> None:
    """Three sequences in the graph for four: not a byte of the pool changes but in the three slots, though
    all of it is NaN but for what was written, and a step of four was there before."""
    before = decode_batch([1, 1, 1, 1], [[1], [2], [3], [NUM_BLOCKS - 1]], [5, 6, 7, 8])
    step = decode_batch([2, 2, 2], [[1], [2], [3]], [9, 10, 11], want_logits=True)
    outputs, (first, second) = in_interpreter(run_steps, path, [before, step], {})
    (alone, *_), _ = in_interpreter(run_steps, path, [before, step], {"graph_rows": 0})
    np.testing.assert_array_equal(outputs[0].tokens, alone.tokens)
    assert np.isfinite(outputs[1].logits).all()
    spans, heads, width = 2, 2, 16
    pools = [
        np.frombuffer(raw, np.uint32).reshape(spans, NUM_BLOCKS, 2 * heads, BLOCK, width)
        for raw in (first, second)
    ]
    changed = (pools[0] != pools[1]).any(axis=(0, 2, 4))
    assert {tuple(place) for place in np.argwhere(changed).tolist()} == {(1, 1), (2, 1), (3, 1)}


@pytest.mark.parametrize("copies", [[(1, 4), (2, 5)], [(1, 4), (4, 5)], [(1, 4), (2, 4)], [(1, 2), (2, 1)]])
def test_blocks_are_copied_before_the_step_in_order(path: Path, copies: list[tuple[int, int]]) -> None:
    """By the kernel, or where a copy needs another's result one after the other."""
    before = decode_batch([1, 1], [[1], [2]], [5, 6])
    step = decode_batch([1], [[7]], [9], copies=np.array(copies, np.int32))
    _, (first, second) = in_interpreter(run_steps, path, [before, step], {})
    pools = [np.frombuffer(raw, np.uint32).reshape(2, NUM_BLOCKS, -1).copy() for raw in (first, second)]
    for source, target in copies:
        pools[0][:, target] = pools[0][:, source]
    others = [block for block in range(NUM_BLOCKS) if block != 7]
    np.testing.assert_array_equal(pools[0][:, others], pools[1][:, others])


def test_tokens_come_from_the_step_before_without_the_host(path: Path) -> None:
    """Row 1's choice is fed to sequence 0, and row 0's to sequence 1."""
    before = decode_batch([1, 1], [[1], [2]], [5, 6])
    crossed = decode_batch([2, 2], [[1], [2]], [-2, -1])
    outputs, _ = in_interpreter(run_steps, path, [before, crossed], {})
    chosen = outputs[0].tokens.tolist()
    known = decode_batch([2, 2], [[1], [2]], [chosen[1], chosen[0]])
    expected, _ = in_interpreter(run_steps, path, [before, known], {})
    np.testing.assert_array_equal(outputs[1].tokens, expected[1].tokens)
