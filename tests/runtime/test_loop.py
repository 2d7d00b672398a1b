"""One step or two in flight: the same tokens; aborts, faults and forks, over a model of plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.sampling import log_probability
from support.steps import VOCAB, FakeRunner, generate

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.loop import Loop
from pagec.runtime.scheduler import Limits, Scheduler
from pagec.runtime.sequence import Changes, CommitHook, Fork, Request


class Engine:
    """A loop with what it needs."""

    def __init__(self, depth: int, num_blocks: int = 100, eos: Sequence[int] = ()) -> None:
        self.blocks = BlockManager(num_blocks, 4)
        self.runner = FakeRunner(self.blocks)
        self.scheduler = Scheduler(self.blocks, Limits(16, 4, 64, 6), depth=depth)
        self.loop = Loop(self.scheduler, self.runner, self.runner.prepare, vocab=VOCAB, depth=depth)
        self.eos = frozenset(eos)
        self.num_requests = 0

    def add(self, prompt: list[int], output: int, **options: Any) -> Request:
        request = Request(self.num_requests, prompt, output, 1, **{"eos_token_ids": self.eos, **options})
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def finish(self) -> None:
        for _ in self.loop.stream():
            self.blocks.check()
        assert self.blocks.num_used == 0


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("num_blocks", [17, 100])
def test_everyone_gets_the_models_answer(depth: int, num_blocks: int) -> None:
    engine, rng = Engine(depth, num_blocks), random.Random(1)
    asked = []
    for _ in range(20):
        prompt, count = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 30)
        asked.append((engine.add(prompt, count), generate(prompt, count)))
    engine.finish()
    assert all(request.output == answer for request, answer in asked)
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 17)


def test_a_step_is_submitted_before_the_one_before_is_known() -> None:
    engine = Engine(2)
    request = engine.add([1, 2, 3], 5)
    engine.loop.step()
    assert request.output == generate([1, 2, 3], 1)
    assert len(engine.runner.steps) == 1
    assert engine.runner.steps[0].parts[0].tokens == [-1]
    engine.finish()
    assert request.output == generate([1, 2, 3], 5)


def test_no_step_is_submitted_for_what_cannot_come() -> None:
    """The last token of a request is known to be its last before it is there."""
    engine = Engine(2)
    engine.add([1, 2, 3], 4)
    engine.finish()
    assert engine.runner.num_steps == 4


def test_an_end_found_late_discards_the_row_in_flight(depth: int) -> None:
    answer = generate([1, 2, 3], 8)
    end = answer[3]
    engine = Engine(depth, eos=[end])
    request, other = engine.add([1, 2, 3], 8), engine.add([4], 8, eos_token_ids=frozenset())
    engine.finish()
    assert request.output == answer[: answer.index(end) + 1]
    assert request.finish_reason == "stop"
    assert other.output == generate([4], 8)


@pytest.mark.parametrize("state", ["queued", "awaiting", "chunks", "decoding", "preempted"])
def test_an_abort_frees_all_within_two_steps(depth: int, state: str) -> None:
    engine = Engine(depth, num_blocks=17 if state == "preempted" else 100)
    if state == "awaiting":
        engine.add([7] * 30, 1)
        victim = engine.add([7] * 30, 9)
        engine.loop.step()
    elif state == "queued":
        for _ in range(4):
            engine.add([1], 40)
        victim = engine.add([1] * 9, 9)
        engine.loop.step()
    elif state == "chunks":
        victim = engine.add([7] * 40, 9)
        engine.loop.step()
        assert victim.output == []
    elif state == "decoding":
        victim = engine.add([7], 9)
        engine.loop.step()
        assert victim.output
    else:
        engine.add([1] * 17, 40)
        victim = engine.add([2] * 17, 40)
        while not victim.num_preemptions:
            engine.loop.step()
    for _ in range(2):
        engine.loop.abort(victim)
    assert victim.finish_reason == "abort"
    for _ in range(2):
        engine.loop.step()
    assert not any(victim.sequences[0].block_tables)
    engine.finish()
    engine.loop.abort(victim)
    assert all(token >= 0 for token in victim.output)


def test_a_token_that_is_no_number_ends_one_request_only(depth: int) -> None:
    good, bad = generate([1], 8), generate([2], 8)
    engine = Engine(depth)
    engine.runner.broken = next(token for token in bad if token not in good)
    fine, faulty = engine.add([1], 8), engine.add([2], 8)
    engine.finish()
    assert fine.output == good
    assert faulty.finish_reason == "error"
    assert "not numbers" in str(faulty.error)


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_failing_step_ends_its_requests_and_no_others(depth: int, where: str) -> None:
    engine = Engine(depth)
    victims = [engine.add([n], 20) for n in range(4)]
    waiting = engine.add([9], 20)
    for _ in range(3):
        engine.loop.step()
    engine.runner.fail_next = where
    engine.finish()
    assert all(request.finish_reason == "error" for request in victims)
    assert waiting.output == generate([9], 20)


def scripted(actions: dict[int, Changes]) -> CommitHook:
    """Changes by the number of tokens that the first sequence has generated."""
    return lambda request, *_: actions.get(len(request.sequences[0].output), Changes())


def test_forks_share_blocks_until_they_write(depth: int) -> None:
    engine = Engine(depth)
    prompt = [1, 2, 3, 4, 5, 6]
    hook = scripted({1: Changes([Fork(0, 11), Fork(0, 12)])})
    request = engine.add(prompt, 6, width=3, on_commit=hook)
    engine.loop.step()
    assert engine.blocks.num_used == 2
    engine.finish()
    first = generate(prompt, 6)
    others = [[token, *generate([*prompt, token], 5)] for token in (11, 12)]
    assert [s.output for s in request.sequences] == [first, *others]
    assert engine.blocks.stats().copies == 2


def test_drops_free_blocks_at_once(depth: int) -> None:
    engine = Engine(depth)
    hook = scripted({2: Changes([Fork(0, 11)]), 4: Changes(drops=[0])})
    request = engine.add([1, 2, 3], 8, width=2, on_commit=hook)
    engine.finish()
    begun = generate([1, 2, 3], 1)
    assert [s.output for s in request.sequences] == [[*begun, 11, *generate([1, 2, 3, *begun, 11], 6)]]


def test_a_preempted_family_goes_on_together() -> None:
    engine = Engine(1, num_blocks=18)
    hook = scripted({1: Changes([Fork(0, 11)])})
    first = engine.add([5] * 4, 40)
    family = engine.add([1, 2, 3], 24, width=2, on_commit=hook)
    while engine.loop.has_work:
        engine.loop.step()
        if not family.is_finished:
            lengths = {len(s) for s in family.sequences}
            assert len(lengths) == 1
    assert family.num_preemptions > 0
    assert first.output == generate([5] * 4, 40)
    assert family.sequences[1].output == [11, *generate([1, 2, 3, 11], 23)]


@pytest.mark.parametrize("num_blocks", range(15, 19))
def test_sequences_may_change_in_the_step_in_which_their_request_was_preempted(num_blocks: int) -> None:
    """Here in every step: a sequence gives way to its fork, which goes on with the same token."""
    engine = Engine(2, num_blocks)

    def renew(_request: Request, tokens: list[int], _logits: object) -> Changes:
        return Changes([Fork(0, tokens[0])], [0])

    prompt = [1, 2, 3, 4, 5, 6]
    first = engine.add([5] * 4, 50)
    others = [engine.add(prompt, 20, width=2, on_commit=renew) for _ in range(3)]
    for _ in range(3000):
        if not engine.loop.has_work:
            break
        engine.loop.step()
        engine.blocks.check()
    assert first.output == generate([5] * 4, 50)
    assert [request.output for request in others] == [generate(prompt, 20)] * 3
    assert engine.scheduler.num_preemptions > 0


def test_a_hook_that_fails_ends_its_request_only(depth: int) -> None:
    def fail(_request: Request, _tokens: list[int], _logits: object) -> Changes:
        raise ValueError("a grammar of nonsense")

    engine = Engine(depth)
    faulty, fine = engine.add([1], 8, on_commit=fail), engine.add([2], 8)
    engine.finish()
    assert str(faulty.error) == "a grammar of nonsense"
    assert fine.output == generate([2], 8)


def test_a_hook_forks_no_more_than_the_request_said(depth: int) -> None:
    engine = Engine(depth)
    request = engine.add([1], 8, width=1, on_commit=scripted({2: Changes([Fork(0, 1)])}))
    engine.finish()
    assert "more than 1 sequences" in str(request.error)


def test_choices_end_one_by_one(depth: int) -> None:
    answer = generate([1, 2, 3], 12)
    engine = Engine(depth, eos=[answer[3]])
    other = next(t for t in range(VOCAB) if answer[3] not in [t, *generate([1, 2, 3, t], 11)])
    hook = scripted({1: Changes([Fork(0, other)])})
    request = engine.add([1, 2, 3], 12, width=2, on_commit=hook)
    engine.finish()
    assert [s.finish_reason for s in request.sequences] == ["stop", "length"]
    assert [len(s.output) for s in request.sequences] == [answer.index(answer[3]) + 1, 12]


def test_log_probabilities_add_up_to_one() -> None:
    row = np.array([1e4, 9999.0, -1e30, 0.5], np.float32)
    found = [log_probability(row, token) for token in range(4)]
    assert sum(np.exp(found)) == pytest.approx(1, abs=1e-12)
    assert found[0] - found[1] == pytest.approx(1, abs=1e-12)
