"""The engine over the toy model: every answer is what the toy says alone, whatever else happens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagec.compiler.artifact import Artifact
from pagec.compiler.errors import CapacityError, RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.runner import READY_BYTES
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.sequence import Changes, Fork, Request

# Greedy, with the log probabilities of the tokens.
TOP_1 = SamplingParams(temperature=0.0, logprobs=1, max_tokens=None)

Toy = Callable[..., Artifact]
Answer = Callable[[list[int], int], list[int]]


def make(artifact: Artifact, device: object, **options: object) -> Engine:
    return Engine(artifact, weights="random:0", device=device, **options)  # type: ignore[arg-type]


def finish(engine: Engine) -> None:
    for _ in engine.stream():
        engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 16, None])
@pytest.mark.parametrize("tight", [True, False])
def test_a_crowd_answers_as_each_one_alone(
    toy: Toy, device: object, toy_answer: Answer, chunk: int | None, tight: bool, num_groups: int, depth: int
) -> None:
    engine = make(
        toy(num_groups=num_groups),
        device,
        prefill_chunk=chunk,
        num_blocks=8 * num_groups + 1 if tight else 200,
        eos_token_ids=(),
        depth=depth,
    )
    engine.runner.fill_kv_with_nan()
    rng = random.Random(1)
    asked: list[tuple[Request, list[int], int]] = []
    for _ in range(12):
        prompt = [rng.randrange(50) for _ in range(rng.choice((1, 15, 16, 17, 70)))]
        count = rng.randrange(1, 40)
        asked.append((engine.add_request(prompt, count), prompt, count))
    finish(engine)
    for request, prompt, count in asked:
        assert request.output == toy_answer(prompt, count)
        assert request.finish_reason == "length"
    assert (sum(request.num_preemptions for request, _, _ in asked) > 0) == tight


@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_pool_is_made_ready_before_it_is_used(toy: Toy, device: Any, num_groups: int) -> None:
    """Each step finds what it writes announced, and READY_BYTES more."""
    engine = make(toy(num_groups=num_groups), device, num_blocks=200, eos_token_ids=())
    kv = engine.program.kv
    ahead = READY_BYTES // kv.spans
    assert device.touched == [ahead]
    for length in (70, 3, 40, 100):
        engine.add_request([5] * length, 20)
    for _ in engine.stream():
        tables = [t for r in engine.scheduler.running for s in r.sequences for t in s.block_tables]
        used = [block for table in tables for block in table]
        assert device.touched[-1] >= (max(used, default=0) + 1) * kv.span_bytes + ahead
    assert 2 < len(device.touched) == len(set(device.touched))
    assert device.touched == sorted(device.touched)


def test_an_end_token_stops_unless_ignored(toy: Toy, device: object, toy_answer: Answer) -> None:
    answer = toy_answer([1, 2, 3], 6)
    end = answer[3]
    engine = make(toy(), device, eos_token_ids=[end])
    stops, ignores = engine.add_request([1, 2, 3], 6), engine.add_request([1, 2, 3], 6, ignore_eos=True)
    finish(engine)
    assert stops.output == answer[: answer.index(end) + 1]
    assert stops.finish_reason == "stop"
    assert ignores.output == answer
    assert ignores.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [63, 64])
def test_up_to_the_length_limit(toy: Toy, device: object, toy_answer: Answer, max_tokens: int) -> None:
    engine = make(toy(), device, eos_token_ids=())
    request = engine.add_request([5] * 64, max_tokens)
    finish(engine)
    assert request.output == toy_answer([5] * 64, max_tokens)


def test_without_max_tokens_up_to_the_length_limit(toy: Toy, device: object) -> None:
    engine = make(toy(), device, eos_token_ids=())
    request = engine.add_request([5] * 127)
    finish(engine)
    assert len(request.output) == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "prompt: is empty"),
        ([1, 50], 4, "token 50 is not in 0..49"),
        ([1, -1], 4, "token -1"),
        ([1], 0, "max_tokens: 0 is less than 1"),
        ([1] * 64, 65, "129; a sequence holds 128"),
        ([1] * 128, None, "129; a sequence holds 128"),
    ],
)
def test_invalid_requests_are_refused(
    toy: Toy, device: object, prompt: list[int], max_tokens: int | None, message: str
) -> None:
    engine = make(toy(), device)
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, max_tokens)
    assert not engine.has_work


@pytest.mark.parametrize("chunk", [1, 5, None])
def test_logits_of_prompt_and_output(toy: Toy, device: object, toy_answer: Answer, chunk: int | None) -> None:
    engine = make(toy(), device, prefill_chunk=chunk, eos_token_ids=())
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    whole = engine.add_request(prompt, 4, prompt_logits=True)
    plain = engine.add_request(prompt, 4)
    last = engine.add_request(prompt, 4, want_logits=True)
    finish(engine)
    tokens = prompt + toy_answer(prompt, 4)
    says = [toy_answer(tokens[: n + 1], 1)[0] for n in range(len(tokens) - 1)]
    logits = np.concatenate(whole.logits)
    assert logits.shape == (len(tokens) - 1, 50)
    assert logits.argmax(axis=1).tolist() == says
    assert np.concatenate(last.logits).argmax(axis=1).tolist() == whole.output
    assert plain.logits == []


def test_logits_come_once_in_spite_of_preemption(toy: Toy, device: object) -> None:
    engine = make(toy(), device, num_blocks=12, eos_token_ids=(), prefill_chunk=9)
    requests = [engine.add_request([n] * 33, 40, prompt_logits=True) for n in range(4)]
    finish(engine)
    assert sum(r.num_preemptions for r in requests) > 0
    for request in requests:
        logits = np.concatenate(request.logits)
        assert len(logits) == 33 + 39
        assert logits[32:].argmax(axis=1).tolist() == request.output


def test_a_fault_ends_one_request_only(toy: Toy, device: object, toy_answer: Answer) -> None:
    good, bad = toy_answer([1], 8), toy_answer([2], 8)
    broken = next(t for t in bad if t not in good)
    device.break_token = broken  # type: ignore[attr-defined]
    engine = make(toy(), device, eos_token_ids=())
    fine, faulty = engine.add_request([1], 8), engine.add_request([2], 8)
    finish(engine)
    assert fine.output == good
    assert faulty.finish_reason == "error"
    assert isinstance(faulty.error, RequestError)


def test_abort_in_every_state_is_idempotent(toy: Toy, device: object) -> None:
    engine = make(toy(S=2), device, prefill_chunk=4, eos_token_ids=())
    decoding, prefilling, queued = (engine.add_request([1] * n, 20) for n in (2, 20, 2))
    engine.step()
    for request in (queued, prefilling, decoding, queued, decoding):
        engine.abort(request)
        assert request.finish_reason == "abort"
    assert not engine.has_work
    assert engine.step() == []
    assert engine.scheduler.blocks.num_used == 0


def test_outputs_tell_tokens_and_ends(toy: Toy, device: object, toy_answer: Answer) -> None:
    engine = make(toy(), device, prefill_chunk=2, eos_token_ids=())
    request = engine.add_request([1, 2, 3], 2)
    seen = [engine.step() for _ in range(3)]
    first, second = toy_answer([1, 2, 3], 2)
    assert seen[0] == []
    assert [(o.request, o.token_ids, o.finish_reason) for o in seen[1]] == [(request, (first,), None)]
    assert [(o.token_ids, o.finish_reason) for o in seen[2]] == [((second,), "length")]


def test_the_pool_is_sized_by_need_and_by_share(toy: Toy, device: object) -> None:
    engine = make(toy(), device)
    assert engine.ledger.kv_blocks == 4 * 8 + 1
    device.free = 10 * engine.program.kv.block_bytes  # type: ignore[attr-defined]
    assert make(toy(), device).ledger.kv_blocks == 5
    assert make(toy(), device, kv_bytes=9 * engine.program.kv.block_bytes).ledger.kv_blocks == 9


def test_a_pool_for_nothing_is_refused_with_the_number_needed(toy: Toy, device: object) -> None:
    with pytest.raises(CapacityError, match="2 blocks"):
        make(toy(), device, kv_bytes=100)


def test_a_pool_beyond_what_is_free_is_refused_with_both_numbers(toy: Toy, device: object) -> None:
    device.free = 100_000  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=r"1000000 bytes|100000 are free"):
        make(toy(), device, kv_bytes=1_000_000)


def test_the_ledger_adds_up(toy: Toy, device: object) -> None:
    ledger = make(toy(), device, num_blocks=10).ledger.to_json()
    parts = [value for key, value in ledger.items() if key.endswith("_bytes") and key != "total_bytes"]
    assert ledger["total_bytes"] == sum(parts)
    assert ledger["kv_tokens"] == 9 * 16
    assert any(line.startswith("KV pool") for line in make(toy(), device, num_blocks=10).ledger.lines())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fork_copies_its_last_block_when_it_writes(
    toy: Toy, device: object, toy_answer: Answer, depth: int
) -> None:
    """After 20 tokens of prompt and one generated, the second block is partly filled and shared."""
    engine = make(toy(), device, eos_token_ids=(), depth=depth)
    engine.runner.fill_kv_with_nan()
    prompt = list(range(20))

    def fork(request: Request, tokens: list[int], _logits: object) -> Changes:
        assert tokens == [sequence.tokens[-1] for sequence in request.sequences]
        return Changes([Fork(0, 7)] if len(request.sequences) == 1 else [])

    request = engine.add_request(prompt, 20, width=2, on_commit=fork, params=TOP_1)
    finish(engine)
    one, two = request.sequences
    assert one.output == toy_answer(prompt, 20)
    assert two.output == [7, *toy_answer([*prompt, 7], 19)]
    assert engine.scheduler.blocks.stats().copies == 1
    # The toy's logits are 1 for what it says and 0 else.
    said, other = 1 - math.log(math.e + 49), -math.log(math.e + 49)
    assert [t.own.logprob for t in one.logprobs] == pytest.approx([said] * 20)
    assert [t.own.logprob for t in two.logprobs] == pytest.approx([other] + [said] * 19)
    assert [t.token for t in two.logprobs] == two.output


def test_a_prefix_is_computed_once(toy: Toy, device: object, toy_answer: Answer) -> None:
    engine = make(toy(), device, num_blocks=100, eos_token_ids=())
    prompts = [[*range(40), n] for n in range(3)]
    requests = [engine.add_request(prompt, 4) for prompt in prompts]
    other = engine.add_request(prompts[0], 4, salt="another")
    finish(engine)
    assert [request.num_cached_tokens for request in (*requests, other)] == [0, 32, 32, 0]
    assert [request.output for request in requests] == [toy_answer(prompt, 4) for prompt in prompts]


def test_without_a_prefix_cache_everything_is_computed(toy: Toy, device: object) -> None:
    engine = make(toy(), device, num_blocks=100, eos_token_ids=(), prefix_cache=False)
    requests = [engine.add_request([*range(40), n], 4) for n in range(3)]
    finish(engine)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]
    assert engine.scheduler.blocks.num_cached == 0


def test_the_first_token_of_an_urgent_request_comes_first(toy: Toy, device: object) -> None:
    engine = make(toy(S=1), device, eos_token_ids=(), policy="deadline", clock=lambda: 0.0)
    slow, urgent = (engine.add_request([n], 4, ttft_s=seconds) for n, seconds in ((1, 9.0), (2, 1.0)))
    seen = [output.request for output in engine.stream()]
    assert seen == [urgent] * 4 + [slow] * 4


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_targets_are_numbers_of_seconds(toy: Toy, device: object, seconds: float) -> None:
    engine = make(toy(), device)
    for name in ("ttft_s", "token_s"):
        with pytest.raises(RequestError, match=f"{name}: .* is no number of seconds"):
            engine.add_request([1], 4, **{name: seconds})  # type: ignore[arg-type]
