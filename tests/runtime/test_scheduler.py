"""Who runs when, what is refused, and that everything admitted finishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagec.compiler.errors import RequestError
from pagec.runtime.block_manager import BlockManager
from pagec.runtime.scheduler import Entry, Limits, Scheduler
from pagec.runtime.sequence import Request, Status

BLOCK = 4


def make(num_blocks: int = 100, tokens: int = 16, sequences: int = 4, chunk: int | None = None) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK), Limits(tokens, sequences, 64, chunk))


def request(number: int, prompt: int, output: int = 4, groups: int = 1) -> Request:
    return Request(number, [1] * prompt, output, groups)


def commit(scheduler: Scheduler, entries: list[Entry]) -> None:
    """What the engine does, with a token of 0 from every finished chunk."""
    for entry in entries:
        sequence = entry.sequence
        sequence.num_computed += entry.num_tokens
        if entry.num_logits:
            sequence.next_logit = sequence.num_computed
        if sequence.num_pending == 0:
            sequence.tokens.append(0)
            if len(sequence) == entry.request.max_len:
                scheduler.finish(entry.request)


def parts(entries: list[Entry]) -> list[tuple[int, int, int, int]]:
    return [(e.request.id, e.start, e.num_tokens, e.num_logits) for e in entries]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    scheduler = make()
    for number, prompt in enumerate((10, 10, 3)):
        scheduler.add(request(number, prompt))
    assert parts(scheduler.schedule()) == [(0, 0, 10, 1), (1, 0, 6, 0)]


def test_decodes_come_first_then_begun_prompts_then_new_ones() -> None:
    scheduler = make()
    for number, prompt in enumerate((10, 10, 3)):
        scheduler.add(request(number, prompt))
    commit(scheduler, scheduler.schedule())
    assert parts(scheduler.schedule()) == [(0, 10, 1, 1), (1, 6, 4, 1), (2, 0, 3, 1)]


def test_a_chunk_limit_leaves_budget_to_others() -> None:
    scheduler = make(chunk=3)
    scheduler.add(request(0, 10))
    scheduler.add(request(1, 10))
    assert parts(scheduler.schedule()) == [(0, 0, 3, 0), (1, 0, 3, 0)]


def test_no_more_sequences_than_the_limit() -> None:
    scheduler = make(sequences=2)
    for number in range(3):
        scheduler.add(request(number, 1))
    assert [e.request.id for e in scheduler.schedule()] == [0, 1]


def test_all_prompt_logits_on_request() -> None:
    scheduler = make(chunk=3)
    scheduler.add(Request(0, [1] * 5, 2, 1, prompt_logits=True))
    seen = []
    while scheduler.running or scheduler.waiting:
        entries = scheduler.schedule()
        seen += parts(entries)
        commit(scheduler, entries)
    assert seen == [(0, 0, 3, 3), (0, 3, 2, 2), (0, 5, 1, 1)]


@pytest.mark.parametrize(("prompt", "output", "fits"), [(60, 3, True), (60, 4, True), (60, 5, False)])
def test_the_length_limit_is_exact_and_named(prompt: int, output: int, fits: bool) -> None:
    scheduler = make()
    if fits:
        scheduler.add(request(0, prompt, output))
        return
    with pytest.raises(RequestError, match=r"65.* 64 at most"):
        scheduler.add(request(0, prompt, output))
    assert not scheduler.waiting


@pytest.mark.parametrize(("prompt", "fits"), [(8, True), (9, True), (10, False)])
def test_what_can_never_fit_the_pool_is_refused(prompt: int, fits: bool) -> None:
    scheduler = make(num_blocks=4)  # 12 slots; the last of 4 output tokens needs none
    if fits:
        scheduler.add(request(0, prompt))
        return
    with pytest.raises(RequestError, match=r"needs 4 KV blocks .* has 3"):
        scheduler.add(request(0, prompt))


def test_the_youngest_is_preempted_and_computed_again() -> None:
    scheduler = make(num_blocks=5)
    scheduler.add(request(0, 8, 4))
    scheduler.add(request(1, 8, 4))
    commit(scheduler, scheduler.schedule())
    entries = scheduler.schedule()
    assert parts(entries) == [(0, 8, 1, 1)]
    victim = scheduler.waiting[0]
    assert (victim.id, victim.status, victim.num_preemptions) == (1, Status.WAITING, 1)
    assert victim.sequences[0].num_computed == 0
    assert len(victim.sequences[0]) == 9
    while scheduler.running:
        commit(scheduler, entries)
        entries = scheduler.schedule()
    assert victim.is_finished
    assert len(victim.output) == 4


def test_finish_in_any_state_frees_all_and_is_idempotent() -> None:
    scheduler = make(sequences=1)
    running, waiting = request(0, 8), request(1, 8)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    for item in (waiting, running, running, waiting):
        scheduler.finish(item)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.blocks.num_used == 0


shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    shapes=shapes,
    groups=st.integers(1, 2),
    num_blocks=st.integers(18, 40),
    tokens=st.integers(1, 24),
    sequences=st.integers(1, 5),
    chunk=st.none() | st.integers(1, 9),
)
def test_all_admitted_requests_finish(
    shapes: list[tuple[int, int]],
    groups: int,
    num_blocks: int,
    tokens: int,
    sequences: int,
    chunk: int | None,
) -> None:
    scheduler = make(num_blocks, tokens, sequences, chunk)
    requests = [request(n, prompt, output, groups) for n, (prompt, output) in enumerate(shapes)]
    for item in requests:
        scheduler.add(item)
    for _ in range(5000):
        entries = scheduler.schedule()
        if not entries:
            break
        assert sum(e.num_tokens for e in entries) <= tokens
        assert len(entries) <= sequences
        assert len({id(e.sequence) for e in entries}) == len(entries)
        for e in entries:
            assert all(len(t) * BLOCK >= e.start + e.num_tokens for t in e.sequence.block_tables)
        scheduler.blocks.check()
        commit(scheduler, entries)
    assert all(r.is_finished and len(r.output) == r.max_tokens for r in requests)
    assert scheduler.blocks.num_used == 0
