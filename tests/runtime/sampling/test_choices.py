"""Choices of a request in the engine: how many, how they end, what may be asked beside the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small import small_artifact

from pagec.compiler.errors import RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.sampling.params import SamplingParams, StructuredOutputsParams
from pagec.runtime.sampling.sampler import pack_mask
from pagec.runtime.sequence import Request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def artifact() -> Path:
    return small_artifact()


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def start(artifact: Path, **options: Any) -> Engine:
    return Engine(artifact, **{"num_blocks": 200, "eos_token_ids": (), **options})


def run(engine: Engine, *requests: Request) -> None:
    """To the end; the books are right after each step."""
    for _ in engine.stream():
        engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.num_used == 0
    assert all(request.error is None for request in requests)


def greedy(artifact: Path, count: int, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    engine = start(artifact, **options)
    request = engine.add_request(prompt, count)
    run(engine, request)
    return request.output


# ------------------------------------------------------------------------------------- several


def test_choices_are_what_their_seeds_say_alone_and_share_the_prompt(artifact: Path, depth: int) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=30)
    engine = start(artifact, depth=depth)
    request = engine.add_request(PROMPT * 3, params=params)
    seen: dict[int, list[int]] = {}
    for output in engine.stream():
        seen.setdefault(output.choice, []).extend(output.token_ids)
        engine.scheduler.blocks.check()
        # The prompt's three full blocks are there once.
        assert engine.scheduler.blocks.num_used <= 3 + 4 * 3
    assert seen == {i: s.output for i, s in enumerate(request.sequences)}
    assert len({tuple(output) for output in seen.values()}) == 4
    assert [s.finish_reason for s in request.sequences] == ["length"] * 4
    # Choice 0 of n is what a request for one gives.
    engine = start(artifact, depth=depth)
    alone = engine.add_request(PROMPT * 3, params=SamplingParams(seed=7, temperature=1.5, max_tokens=30))
    run(engine, alone)
    assert alone.output == seen[0]
    crowded = start(artifact, depth=depth, num_blocks=28, prefill_chunk=16, prefix_cache=False)
    again = crowded.add_request(PROMPT * 3, params=params)
    others = [crowded.add_request([n, *PROMPT], 60) for n in range(4)]
    run(crowded, again, *others)
    assert {i: s.output for i, s in enumerate(again.sequences)} == seen
    assert crowded.scheduler.num_preemptions > 0


def test_greedy_choices_are_all_the_same(artifact: Path, depth: int) -> None:
    engine = start(artifact, depth=depth)
    request = engine.add_request(PROMPT, params=SamplingParams(temperature=0.0, n=3, max_tokens=9))
    run(engine, request)
    assert [s.output for s in request.sequences] == [greedy(artifact, 9)] * 3


def test_one_token_of_several_choices(artifact: Path, depth: int) -> None:
    engine = start(artifact, depth=depth)
    request = engine.add_request(PROMPT, params=SamplingParams(n=5, seed=1, max_tokens=1))
    run(engine, request)
    assert [len(s.output) for s in request.sequences] == [1] * 5


def test_more_choices_than_run_at_once_are_refused(artifact: Path) -> None:
    engine = start(artifact, max_seqs=4)
    with pytest.raises(RequestError, match="n: 5 is not at most 4"):
        engine.add_request(PROMPT, params=SamplingParams(n=5))


def test_a_choice_is_ended_alone(artifact: Path, depth: int) -> None:
    engine = start(artifact, depth=depth)
    request = engine.add_request(PROMPT, params=SamplingParams(n=3, seed=7, max_tokens=20))
    tokens = 0
    for output in engine.stream():
        tokens += output.choice == 1
        if tokens == 5:
            engine.abort(request, 1, "stop")
            engine.abort(request, 1, "stop")
    assert [s.finish_reason for s in request.sequences] == ["length", "stop", "length"]
    assert len(request.sequences[1].output) == 5
    assert engine.scheduler.blocks.num_used == 0


# ---------------------------------------------------------------------------------------- ends


def test_stop_tokens_and_every_end_of_text(artifact: Path, depth: int) -> None:
    answer = greedy(artifact, 30)
    soon, late = answer[2], answer[9]
    first, second = answer.index(soon), answer.index(late)
    assert first < second
    engine = start(artifact, depth=depth, eos_token_ids=[late, soon])

    def ask(**fields: Any) -> Request:
        return engine.add_request(PROMPT, params=SamplingParams(temperature=0.0, max_tokens=30, **fields))

    plain, ignoring = ask(), ask(ignore_eos=True)
    by_token = ask(ignore_eos=True, stop_token_ids=[late])
    run(engine, plain, ignoring, by_token)
    assert plain.output == answer[: first + 1]
    assert (plain.finish_reason, plain.sequences[0].stop_reason) == ("stop", None)
    assert (ignoring.output, ignoring.finish_reason) == (answer, "length")
    assert by_token.output == answer[: second + 1]
    assert (by_token.finish_reason, by_token.sequences[0].stop_reason) == ("stop", late)


def test_nothing_ends_a_text_before_min_tokens(artifact: Path, depth: int) -> None:
    """All ends of text and all stop tokens are ruled out until then, not only the first."""
    ends, stops = {5, 77, 130}, [9, 200]
    engine = start(artifact, depth=depth, eos_token_ids=ends)
    bias = dict.fromkeys([*ends, *stops], 60.0)
    fields: dict[str, Any] = {"logit_bias": bias, "stop_token_ids": stops, "max_tokens": 40}
    requests = [
        engine.add_request(PROMPT, params=SamplingParams(seed=seed, min_tokens=12, **fields))
        for seed in range(8)
    ]
    run(engine, *requests)
    for request in requests:
        assert len(request.output) == 13
        assert not {*ends, *stops} & set(request.output[:12])
        assert request.finish_reason == "stop"


# ------------------------------------------------------------------------- log probabilities


def test_log_probabilities_of_output_and_prompt(artifact: Path, depth: int) -> None:
    """Against float64 log softmax of the logits themselves."""
    engine = start(artifact, depth=depth)
    seen = engine.add_request(PROMPT, 8, prompt_logits=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    asked = engine.add_request(PROMPT, params=params)
    own = engine.add_request(PROMPT, params=SamplingParams(temperature=0.0, max_tokens=8, logprobs=0))
    run(engine, seen, asked, own)
    exact = torch.tensor(np.concatenate(seen.logits)).double().log_softmax(-1)
    tokens = [*PROMPT, *seen.output]
    assert asked.prompt_logprobs[0] is None
    given = [*asked.prompt_logprobs[1:], *asked.logprobs]
    assert len(asked.prompt_logprobs) == len(PROMPT)
    for position, found in enumerate(given):
        row, token = exact[position], tokens[position + 1]
        count = 2 if position + 1 < len(PROMPT) else 3
        assert found is not None
        assert found.token == token
        assert found.own.logprob == pytest.approx(float(row[token]), abs=1e-12)
        assert found.own.rank == 1 + int((row > row[token]).sum())
        top = row.topk(count)
        assert list(found.top) == top.indices.tolist()
        assert [t.logprob for t in found.top.values()] == pytest.approx(top.values.tolist(), abs=1e-12)
        assert [t.rank for t in found.top.values()] == list(range(1, count + 1))
    # The sampling kernel's: float32, and its exponentials are good to 2 ulp of each of 256 terms.
    assert [t.own.logprob for t in own.logprobs] == pytest.approx(
        [t.own.logprob for t in asked.logprobs], abs=1e-5
    )
    assert not own.logprobs[0].top


def test_a_prompts_log_probabilities_take_no_more_rows_than_the_head_has(artifact: Path) -> None:
    engine = start(artifact)
    capacity = engine.program.capacity
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 256, 3 * capacity.R + 5).tolist()
    rows: list[int] = []
    collect = engine.runner.collect

    def count() -> Any:
        output = collect()
        rows.append(len(output.tokens))
        return output

    engine.runner.collect = count  # type: ignore[method-assign]
    other = engine.add_request(PROMPT, 12)
    request = engine.add_request(prompt, params=SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0))
    run(engine, request, other)
    assert max(rows) <= capacity.R
    assert len(request.prompt_logprobs) == len(prompt)
    assert other.output == greedy(artifact, 12)


# ---------------------------------------------------------------------- what else may be asked


def test_bad_words_do_not_come(artifact: Path, depth: int) -> None:
    answer = greedy(artifact, 12)
    words = [[answer[1]], answer[4:6]]
    engine = start(artifact, depth=depth)
    params = SamplingParams(temperature=0.0, max_tokens=40, bad_words=["one", "another"])
    request = engine.add_request(PROMPT, params=params, bad_words=words)
    run(engine, request)
    output = request.output
    assert output[0] == answer[0]
    assert answer[1] not in output
    assert answer[4:6] not in [output[i : i + 2] for i in range(len(output))]
    with pytest.raises(RequestError, match="bad_words: need their tokens"):
        engine.add_request(PROMPT, params=params)


def test_logits_processors_change_one_request_and_fail_alone(artifact: Path, depth: int) -> None:
    answer = greedy(artifact, 10)
    told: list[list[int]] = []

    def second_best(output: list[int], logits: Any) -> Any:
        told.append(output)
        logits[logits.argmax()] = -np.inf
        return logits

    def fail(output: list[int], logits: Any) -> Any:
        if len(output) == 4:
            raise ValueError("no idea")
        return logits

    def ask(engine: Engine, *functions: Any) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=10, logits_processors=functions, logprobs=1)
        return engine.add_request(PROMPT, params=params)

    engine = start(artifact, depth=depth)
    changed, plain = ask(engine, second_best), engine.add_request(PROMPT, 10)
    faulty, misshapen = ask(engine, fail), ask(engine, lambda _output, logits: logits[:-1])
    run(engine, changed, plain)
    assert plain.output == answer
    assert told == [changed.output[:i] for i in range(10)]
    # Log probabilities are the model's own: each token is its second choice.
    assert [found.own.rank for found in changed.logprobs] == [2] * 10
    assert (str(faulty.error), faulty.output) == ("no idea", answer[:4])
    assert "gave logits of shape (255,)" in str(misshapen.error)


class Ladder:
    """A grammar of ascending tokens, to 250 at most; `fails_at` this length it breaks."""

    def __init__(self, last: int = 0, length: int = 0, fails_at: int = -1) -> None:
        self.last, self.length, self.fails_at = last, length, fails_at

    def fork(self) -> Ladder:
        return Ladder(self.last, self.length, self.fails_at)

    @property
    def is_done(self) -> bool:
        return self.last >= 250

    def mask(self) -> Any:
        if self.length == self.fails_at:
            raise RequestError("a grammar of nonsense", place="structured_outputs")
        return pack_mask(range(self.last + 1, 251), 256) if self.last < 250 else None

    def accept(self, token: int) -> None:
        assert token > self.last
        self.last, self.length = token, self.length + 1


def test_a_grammar_guides_each_choice_and_fails_alone(artifact: Path, depth: int) -> None:
    engine = start(artifact, depth=depth)
    wanted = StructuredOutputsParams(regex="(stands for what the grammar says)")
    params = SamplingParams(n=3, seed=2, temperature=2.0, max_tokens=256, structured_outputs=wanted)
    guided = engine.add_request(PROMPT, params=params, grammar=Ladder())
    faulty = engine.add_request(PROMPT, params=params, grammar=Ladder(fails_at=2))
    plain = engine.add_request(PROMPT, 20)
    run(engine, guided, plain)
    assert plain.output == greedy(artifact, 20)
    assert str(faulty.error) == "structured_outputs: a grammar of nonsense"
    for sequence in guided.sequences:
        output = sequence.output
        assert output == sorted(set(output))
        assert output[-1] == 250
        assert sequence.finish_reason == "stop"
    assert len({tuple(s.output) for s in guided.sequences}) == 3
    with pytest.raises(RequestError, match="structured_outputs: needs a compiled grammar"):
        engine.add_request(PROMPT, params=params)


def test_a_drawn_seed_is_reported_and_gives_the_same_again(artifact: Path) -> None:
    engine = start(artifact)
    params = {"temperature": 2.0, "max_tokens": 12}
    first, second = (engine.add_request(PROMPT, params=SamplingParams(**params)) for _ in range(2))  # type: ignore[arg-type]
    run(engine, first, second)
    assert first.output != second.output
    again = engine.add_request(PROMPT, params=SamplingParams(seed=first.seed, **params))  # type: ignore[arg-type]
    run(engine, again)
    assert again.output == first.output
