"""Who runs when, what is refused, and that everything admitted finishes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagec.compiler.errors import RequestError
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.policies import DeadlinePolicy, Policy, PriorityPolicy
from pagec.runtime.scheduler import Entry, Limits, Scheduler
from pagec.runtime.sequence import Request, Status

BLOCK = 4


def make(
    num_blocks: int = 100,
    tokens: int = 16,
    sequences: int = 4,
    chunk: int | None = None,
    groups: int = 1,
    policy: Policy | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **limits: float,
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK, [None] * groups)
    return Scheduler(blocks, Limits(tokens, sequences, 64, chunk, **limits), policy, clock=clock)


def request(number: int, prompt: int, output: int = 4, groups: int = 1) -> Request:
    return Request(number, [number + 1] * prompt, output, groups)


def commit(scheduler: Scheduler, entries: list[Entry]) -> None:
    """What the loop does, with a token of 0 from every finished chunk."""
    for entry in entries:
        request, sequence = entry.request, entry.sequence
        sequence.num_in_flight -= 1
        sequence.num_computed = end = entry.start + entry.num_tokens
        scheduler.blocks.commit(sequence)
        if sequence.tokens[end] < 0:
            sequence.tokens[end] = 0
            request.num_emitted += 1
            request.is_shielded = False
            if len(sequence) == request.max_len:
                scheduler.finish(request)
        if request.status is not Status.RUNNING:
            scheduler.settle(request, sequence)


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
    while scheduler.has_work:
        commit(scheduler, entries)
        entries = scheduler.schedule()
    assert victim.is_finished
    assert len(victim.output) == 4


def test_finish_in_any_state_frees_all_and_is_idempotent() -> None:
    scheduler = make(sequences=1)
    running, waiting = request(0, 8), request(1, 8)
    scheduler.add(running)
    scheduler.add(waiting)
    commit(scheduler, scheduler.schedule())
    for item in (waiting, running, running, waiting):
        scheduler.finish(item)
    assert not scheduler.has_work
    assert scheduler.blocks.num_used == 0


def test_blocks_of_a_step_in_flight_are_freed_when_it_is_done() -> None:
    scheduler = make()
    item = request(0, 8)
    scheduler.add(item)
    entries = scheduler.schedule()
    scheduler.finish(item)
    assert scheduler.blocks.num_used == 2
    assert scheduler.schedule() == []
    item.sequences[0].num_in_flight -= len(entries)
    scheduler.settle(item, item.sequences[0])
    assert scheduler.blocks.num_used == 0


def test_decodes_never_wait_and_prompts_get_their_least() -> None:
    """20 requests, 8 tokens a step of which prompts get 2 at least: 6 run at once."""
    scheduler = make(tokens=8, sequences=20, prefill_least=0.25)
    for number in range(20):
        scheduler.add(request(number, 9, 30))
    for _ in range(60):
        ready = [r.id for r in scheduler.running if r.sequences[0].num_pending == 1]
        prompts = any(r.sequences[0].num_pending > 1 for r in scheduler.running)
        entries = scheduler.schedule()
        assert [e.request.id for e in entries][: len(ready)] == ready
        assert len(ready) <= 6
        if prompts:
            assert sum(e.num_tokens for e in entries[len(ready) :]) >= 2
        commit(scheduler, entries)


def test_a_long_prompt_takes_its_share_while_others_decode() -> None:
    scheduler = make(tokens=16, prefill_most=0.5)
    scheduler.add(request(0, 4, 20))
    commit(scheduler, scheduler.schedule())
    scheduler.add(request(1, 40, 4))
    for start in (0, 8, 16, 24):
        entries = scheduler.schedule()
        assert parts(entries) == [(0, 4 + start // 8, 1, 1), (1, start, 8, 0)]
        commit(scheduler, entries)


def test_a_prompt_holds_no_blocks_ahead_but_nobody_takes_them() -> None:
    """Of 12 blocks 9 are promised to the first prompt: the second one finds too few, though most are free."""
    scheduler = make(num_blocks=13, chunk=4)
    for number in range(2):
        scheduler.add(request(number, 36))
    for done in range(1, 9):
        commit(scheduler, scheduler.schedule())
        assert scheduler.blocks.num_used == done
        assert [r.id for r in scheduler.waiting] == [1]


def test_a_prefix_in_the_making_is_awaited_and_others_go_on() -> None:
    scheduler = make()
    for number, prompt in ((0, [7] * 12 + [1]), (1, [7] * 12 + [2]), (2, [8])):
        scheduler.add(Request(number, prompt, 4, 1))
    entries = scheduler.schedule()
    assert parts(entries) == [(0, 0, 13, 1), (2, 0, 1, 1)]
    commit(scheduler, entries)
    entries = scheduler.schedule()
    assert parts(entries) == [(0, 13, 1, 1), (2, 1, 1, 1), (1, 12, 1, 1)]
    assert entries[2].request.num_cached_tokens == 12


def test_the_first_of_the_order_is_never_preempted() -> None:
    scheduler = make(num_blocks=13, policy=PriorityPolicy())
    items = [Request(n, [n + 1] * 12, 30, 1, priority=5 - n) for n in range(3)]
    for item in items:
        scheduler.add(item)
    while scheduler.has_work:
        first = scheduler.running[0] if scheduler.running else None
        before = first.num_preemptions if first else 0
        entries = scheduler.schedule()
        assert first is None or first.num_preemptions == before
        commit(scheduler, entries)
    assert [item.num_preemptions > 0 for item in items] == [True, True, False]


def test_one_that_was_preempted_is_not_again_before_it_has_emitted() -> None:
    scheduler = make(num_blocks=14, chunk=2)
    items = [request(n, 14, 34) for n in range(3)]
    for item in items:
        scheduler.add(item)
    seen: dict[int, int] = {}
    while scheduler.has_work:
        before = {item.id: (item.num_preemptions, item.num_emitted) for item in items}
        entries = scheduler.schedule()
        for item in items:
            preemptions, emitted = before[item.id]
            if item.num_preemptions > preemptions:
                assert emitted > seen.get(item.id, -1)
                seen[item.id] = emitted
        commit(scheduler, entries)
    assert len(seen) == 2
    assert all(len(item.output) == 34 for item in items)


def test_priorities_order_waiting_requests_and_age() -> None:
    now = [0.0]
    scheduler = make(sequences=1, policy=PriorityPolicy(ageing_s=10), clock=lambda: now[0])
    for number, priority in enumerate((0, 5, 2)):
        scheduler.add(Request(number, [1], 1, 1, priority=priority))
    now[0] = 45.0
    scheduler.add(Request(3, [1], 1, 1, priority=1))
    order = []
    while scheduler.has_work:
        entries = scheduler.schedule()
        order += [e.request.id for e in entries]
        commit(scheduler, entries)
    assert order == [0, 2, 1, 3]  # 5 + 0 / 10 comes before 1 + 45 / 10


def test_deadlines_order_requests_and_those_missed_stand_back() -> None:
    now = [0.0]
    scheduler = make(sequences=1, policy=DeadlinePolicy(late_s=100), clock=lambda: now[0])
    for number, ttft_s in enumerate((9.0, 3.0, 1.0, None)):
        scheduler.add(Request(number, [1], 1, 1, ttft_s=ttft_s))
    now[0] = 2.0  # number 2 is late
    order = []
    while scheduler.has_work:
        entries = scheduler.schedule()
        order += [e.request.id for e in entries]
        commit(scheduler, entries)
    assert order == [1, 0, 3, 2]


def test_more_sequences_than_run_at_once_are_refused() -> None:
    scheduler = make(sequences=2)
    with pytest.raises(RequestError, match="3 sequences; 2 run at once"):
        scheduler.add(Request(0, [1], 4, 1, width=3))


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
    scheduler = make(num_blocks, tokens, sequences, chunk, groups)
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
