"""Beam search: its rules against their definition; its sequences and blocks in the loop, on numpy models."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beams import Model, score, search_until_all_have_ended, total, transformers_search
from support.steps import VOCAB, FakeRunner, Output, Part

from pagec.compiler.errors import RequestError
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.loop import Loop
from pagec.runtime.sampling.beam import BeamSearch, BeamSearchParams, Hypothesis
from pagec.runtime.scheduler import Limits, Scheduler
from pagec.runtime.sequence import Changes, Request

# ------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("beam_width", 0, "0 is not a whole number of at least 1"),
        ("beam_width", None, "None is not a whole number"),
        ("beam_width", True, "True is not a whole number"),
        ("max_tokens", 0, "0 is not a whole number of at least 1"),
        ("max_tokens", 2.5, "2.5 is not a whole number"),
        ("n", 0, "0 is not a whole number of at least 1"),
        ("n", 5, "5 is not at most beam_width, 4"),
        ("temperature", 0.7, "0.7 is not 0: a beam search draws nothing"),
        ("length_penalty", float("nan"), "nan is not a number from -10 to 10"),
        ("length_penalty", 10.5, "10.5 is not a number from -10 to 10"),
        ("length_penalty", "1", "'1' is not a number"),
        ("early_stopping", "always", '\'always\' is not true, false, "never" or "all"'),
        ("early_stopping", 1, "1 is not true, false"),
        ("early_stopping", None, "None is not true, false"),
        ("ignore_eos", 1, "1 is not true or false"),
        ("include_stop_str_in_output", "no", "'no' is not true or false"),
    ],
)
def test_a_bad_value_is_refused_with_field_and_range(field: str, value: Any, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**({"beam_width": 4} | {field: value}))
    assert caught.value.place == field
    assert str(caught.value).startswith(f"{field}: {expected}")


def test_an_engine_of_few_rows_refuses_many_beams() -> None:
    params = BeamSearchParams(beam_width=4)
    params.check(max_choices=4)
    with pytest.raises(RequestError, match="beam_width: 4 is not at most 3, the sequences that run at once"):
        params.check(max_choices=3)


# ----------------------------------------------------------------------------------------- rules


def whole_numbers(seed: int, vocab: int, levels: int) -> Model:
    """Few different logits, so that many texts are equally likely."""

    @functools.cache
    def logits(tokens: tuple[int, ...]) -> Any:
        return np.random.default_rng([seed, *tokens]).integers(0, levels, vocab).astype(np.float32)

    return lambda tokens: logits(tuple(tokens))


def play(model: Model, params: BeamSearchParams, max_tokens: int, ends: Collection[int]) -> list[Hypothesis]:
    """What the hook finds where somebody does as it says with sequences that are lists."""
    hook = BeamSearch(params, max_tokens, ends)
    request = Request(0, [0], max_tokens, 1, width=params.beam_width)
    sequences: list[list[int]] = [[]]
    while sequences:
        logits = np.stack([model(tokens) for tokens in sequences])
        chosen = logits.argmax(1).tolist()
        changes = hook(request, chosen, logits)
        forks = [[*sequences[fork.parent], fork.token] for fork in changes.forks]
        kept = [
            [*tokens, token]
            for number, (tokens, token) in enumerate(zip(sequences, chosen, strict=True))
            if number not in changes.drops
        ]
        assert all(fork.token != chosen[fork.parent] for fork in changes.forks), "it could have stayed"
        sequences = kept + forks
        assert len(sequences) <= params.beam_width
    return list(request.hypotheses)


def a_search(seed: int) -> tuple[Model, BeamSearchParams, int, list[int]]:
    """Any: model, parameters, most tokens, ends. Drawn evenly, for most ties and late ends are rare."""
    rng = np.random.default_rng(seed)
    vocab, width = rng.integers(1, 10), rng.integers(1, 6)
    model = whole_numbers(seed, int(vocab), int(rng.integers(1, 7)))
    params = BeamSearchParams(
        beam_width=width,
        n=rng.choice([None, rng.integers(1, width + 1)]),
        length_penalty=rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        early_stopping=([True, False, "never", "all"])[rng.integers(4)],
    )
    ends = rng.permutation(vocab)[: rng.integers(6)].tolist()
    return model, params, int(rng.integers(1, 7)), ends


@given(st.integers(0, 2**62))
@settings(deadline=None, max_examples=300)
def test_texts_and_scores_are_those_of_the_definition(seed: int) -> None:
    model, params, max_tokens, ends = a_search(seed)
    if params.early_stopping == "all":
        texts = search_until_all_have_ended(model, params.beam_width, params.length_penalty, max_tokens, ends)
    else:
        texts = transformers_search(model, params, max_tokens, ends)
    hypotheses = play(model, params, max_tokens, ends)
    assert [list(hypothesis.tokens) for hypothesis in hypotheses] == texts[: params.n]
    for hypothesis in hypotheses:
        text = list(hypothesis.tokens)
        assert hypothesis.score == score(model, text, params.length_penalty)
        assert hypothesis.cumulative_logprob == total(model, text)
        assert functools.reduce(lambda a, b: a + b, hypothesis.logprobs, 0.0) == hypothesis.cumulative_logprob
        assert hypothesis.finish_reason == ("stop" if text[-1] in ends else "length")


def likely(*rows: dict[int, float]) -> Model:
    """Of three tokens these probabilities after so many tokens; 2 is the end of text."""
    with np.errstate(divide="ignore"):
        table = np.log([[row.get(token, 0.0) for token in range(3)] for row in rows]).astype(np.float32)
    return lambda tokens: table[len(tokens)]


def found(
    model: Model, rule: Any, width: int = 2, penalty: float = 1.0, max_tokens: int = 3
) -> list[tuple[int, ...]]:
    params = BeamSearchParams(beam_width=width, early_stopping=rule, length_penalty=penalty)
    return [hypothesis.tokens for hypothesis in play(model, params, max_tokens, [2])]


def test_rules_differ_in_what_they_wait_for() -> None:
    """Once two texts have ended, the best beam is (0, 0)."""
    likelier = likely({2: 0.5, 0: 0.4, 1: 0.1}, {0: 0.55, 2: 0.35, 1: 0.1}, {0: 0.9, 2: 0.1})
    assert found(likelier, True) == [(2,), (0, 2)]
    assert found(likelier, False) == [(0, 0, 0), (2,)]
    assert found(likelier, "never") == [(0, 0, 0), (2,)]
    less = likely({2: 0.5, 0: 0.4, 1: 0.1}, {2: 0.6, 0: 0.4}, {0: 1.0})
    assert found(less, False) == [(2,), (0, 2)]
    assert found(less, "never") == [(0, 0, 0), (2,)]
    assert found(less, "never", penalty=0.0) == [(2,), (0, 2)]
    short = likely({2: 0.5, 0: 0.4, 1: 0.1}, {0: 0.7, 2: 0.3}, {2: 1.0})
    assert found(short, "never", penalty=-1.0, max_tokens=4) == [(2,), (0, 0, 2)]
    equal = likely({2: 0.5, 0: 0.5}, {2: 0.5, 0: 0.5}, {0: 1.0})
    assert found(equal, False) == [(2,), (0, 2)]


def test_hypotheses_take_the_places_of_beams_if_all_shall_end() -> None:
    """After (2) and (0, 2) no beam is left, though (0, 0, 0) would be better."""
    model = likely({2: 0.5, 0: 0.4, 1: 0.1}, {2: 0.6, 0: 0.4}, {0: 1.0})
    assert found(model, "all") == [(2,), (0, 2)]
    assert found(model, "all", width=3) == [(0, 0, 0), (2,), (0, 2)]


@pytest.mark.parametrize("rule", [True, False, "never"])
def test_an_end_counts_only_among_the_first(rule: Any) -> None:
    model = likely({0: 0.5, 1: 0.3, 2: 0.2}, {0: 1.0}, {0: 1.0})
    assert found(model, rule) == [(0, 0, 0), (1, 0, 0)]
    assert (2,) in found(model, rule, width=3)


@pytest.mark.parametrize("rule", [True, False, "never", "all"])
def test_one_beam_is_a_greedy_search(rule: Any) -> None:
    model = likely({0: 0.6, 2: 0.4}, {2: 0.6, 0: 0.4}, {0: 1.0})
    assert found(model, rule, width=1, penalty=2.0) == [(0, 2)]


def test_impossible_tokens_are_no_candidates() -> None:
    model = likely({0: 1.0}, {0: 1.0}, {0: 0.7, 1: 0.3})
    assert found(model, True) == [(0, 0, 0), (0, 0, 1)]
    assert found(likely({0: 1.0}, {0: 1.0}, {0: 1.0}), False) == [(0, 0, 0)]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(RequestError, match="not numbers"):
        found(lambda _: np.full(3, np.nan, np.float32), True)


def test_a_text_may_be_long() -> None:
    """And ever less likely: the product of its probabilities is no float any more."""
    params = BeamSearchParams(beam_width=2, early_stopping="never")
    model = likely({0: 0.6, 1: 0.4})
    first, second = play(lambda _: model([]), params, 3_000, [2])
    assert first.tokens == (0,) * 3_000
    assert second.tokens.count(1) == 1
    assert first.score == pytest.approx(np.log(0.6))


# ------------------------------------------------------------------------------------ in the loop


def logits_of(tokens: list[int]) -> Any:
    """Another model than `says`: all that is read from the pool decides."""
    return np.random.default_rng(tokens).normal(size=VOCAB).astype(np.float32)


class Runner(FakeRunner):
    """Gives logits, from the tokens that the pool has."""

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__(blocks)
        self.rows: list[Any] = []
        self.copies: list[int] = []
        self.spoils = False

    def collect(self) -> Output:
        self.copies.append(len(self.steps[0].copies))
        self.rows = []
        output = super().collect()
        rows = np.array(self.rows, np.float32).reshape(-1, VOCAB)
        return output._replace(logits=np.full_like(rows, np.nan) if self.spoils else rows)

    def _read(self, part: Part, length: int) -> int:
        super()._read(part, length)
        size, table = self.blocks.block_size, part.tables[0]
        row = logits_of([self.pool[table[at // size], at % size] for at in range(length)])
        self.rows.append(row)
        return int(row.argmax())


class Engine:
    """A loop with what it needs."""

    def __init__(
        self,
        depth: int = 1,
        num_blocks: int = 200,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        **limits: Any,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, windows)
        self.runner = Runner(self.blocks)
        chosen = {"tokens": 24, "sequences": 8, "length": 64, "prefill_chunk": 6} | limits
        self.scheduler = Scheduler(self.blocks, Limits(**chosen), depth=depth)
        self.loop = Loop(self.scheduler, self.runner, self.runner.prepare, vocab=VOCAB, depth=depth)
        self.changes: list[Changes] = []
        self._num_requests = 0

    def add(self, prompt: list[int], max_tokens: int, params: BeamSearchParams | None = None) -> Request:
        """A beam search, or a greedy request if it is not told how."""
        options: dict[str, Any] = {}
        if params is not None:
            hook = BeamSearch(params, max_tokens, ENDS)

            def note(request: Request, tokens: list[int], logits: Any) -> Changes:
                self.changes.append(hook(request, tokens, logits))
                return self.changes[-1]

            options = {"width": params.beam_width, "on_commit": note, "hook_logits": True}
        request = Request(self._num_requests, prompt, max_tokens, len(self.blocks.windows), **options)
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    def finish(self) -> None:
        for _ in self.loop.stream():
            self.blocks.check()
        assert self.blocks.num_used == 0


ENDS = (3, 7)


def expected(prompt: list[int], max_tokens: int, params: BeamSearchParams) -> list[Hypothesis]:
    return play(lambda tokens: logits_of([*prompt, *tokens]), params, max_tokens, ENDS)


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("is_small", [False, True])
def test_beams_find_the_same_in_any_company(
    depth: int, is_small: bool, windows: Sequence[int | None]
) -> None:
    """In a small pool requests are preempted, and their beams computed again."""
    num_blocks = len(windows) * (19 if is_small else 100)
    engine, rng = Engine(depth, num_blocks, windows=windows), np.random.default_rng(0)
    asked = []
    for number in range(12):
        params = BeamSearchParams(
            beam_width=1 + number % 3, early_stopping=(True, False, "never", "all")[number % 4]
        )
        prompt = rng.integers(0, VOCAB, 1 + 2 * number % 11).tolist()
        asked.append((prompt, params, engine.add(prompt, 14, params)))
        engine.add(prompt, 20)
    engine.finish()
    for prompt, params, request in asked:
        assert request.error is None
        assert request.hypotheses == expected(prompt, 14, params)
        assert {hypothesis.finish_reason for hypothesis in request.hypotheses} <= {"stop", "length"}
    assert (engine.scheduler.num_preemptions > 0) == is_small


def test_beams_share_a_prompt(depth: int) -> None:
    engine = Engine(depth, 300, 16, tokens=256, length=1200, prefill_chunk=None)
    request = engine.add([5, 8] * 500, 10, BeamSearchParams(beam_width=4, early_stopping="never"))
    before = engine.blocks.blocks_for(1000)
    while len(request.sequences) < 4:
        engine.loop.step()
    assert engine.blocks.num_used == before
    engine.loop.step()
    assert before < engine.blocks.num_used <= 1.1 * before
    engine.finish()


def test_only_beams_that_part_copy_a_block() -> None:
    """As many as have a sibling that wrote before them; none at the beginning of a block."""
    engine = Engine(block_size=4)
    engine.add([9, 4, 1, 1, 6], 12, BeamSearchParams(beam_width=4, early_stopping="never"))
    engine.finish()
    partings = []
    beams = 1
    for changes in engine.changes[:-1]:
        staying = beams - len(changes.drops)
        parents = {fork.parent for fork in changes.forks} | (set(range(beams)) - set(changes.drops))
        beams = staying + len(changes.forks)
        partings.append(beams - len(parents))
    assert sum(partings) > 10
    prompt_steps = len(engine.runner.copies) - len(partings)
    lengths = range(5, 5 + len(partings))
    assert engine.runner.copies[prompt_steps:] == [
        count if length % 4 else 0 for count, length in zip(partings, lengths, strict=True)
    ]


def test_an_abort_frees_all_beams(depth: int) -> None:
    engine = Engine(depth)
    request = engine.add([9, 4, 1, 1, 6], 40, BeamSearchParams(beam_width=4, early_stopping="never"))
    while len(request.sequences) < 4:
        engine.loop.step()
    engine.loop.abort(request)
    engine.finish()
    assert (request.finish_reason, request.hypotheses) == ("abort", [])


def test_a_model_that_breaks_ends_a_search_with_an_error(depth: int) -> None:
    engine = Engine(depth)
    request = engine.add([9, 4, 1], 40, BeamSearchParams(beam_width=4))
    engine.loop.step()
    engine.runner.spoils = True
    engine.finish()
    assert request.finish_reason == "error"
    assert "not numbers" in str(request.error)
