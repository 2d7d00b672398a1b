"""Everything that may happen to requests, in any order, over a tiny pool: arrivals, aborts, shared prefixes,
salts, forks, drops, faults, preemption by recompute and by swap, one or two steps in flight.

Whatever ends well says what the model says alone; blocks are neither lost nor freed twice; nothing starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.steps import VOCAB, FakeRunner, Step, says

from pagec.compiler.errors import RequestError
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.loop import Loop
from pagec.runtime.policies import POLICIES
from pagec.runtime.preemption import PreemptionCost
from pagec.runtime.scheduler import Limits, Scheduler
from pagec.runtime.sequence import Changes, Fork, Request
from pagec.runtime.sequence import Sequence as TokenSequence

BLOCK = 4
LENGTH = 40
PREFIXES = [[(7 * i + n) % VOCAB for i in range(20)] for n in range(3)]
MAX_STEPS = 4000


class FakeSwapper:
    """Memory for a few requests. A copy takes `delay` steps, and reads and writes at their end only."""

    def __init__(self, runner: FakeRunner, room: int, delay: int) -> None:
        self.runner, self.room, self.delay = runner, room, delay
        self.stored: dict[Request, list[list[list[int | None]]]] = {}
        self.under_way: dict[Request, tuple[str, int]] = {}
        self.num_swaps = 0

    def swap_out(self, request: Request) -> bool:
        if len(self.stored) >= self.room:
            return False
        self.stored[request] = []
        return self._begin(request, "out")

    def swap_in(self, request: Request) -> bool:
        blocks = self.runner.blocks
        live = [s for s in request.sequences if s.finish_reason is None]
        if all(blocks.grow(s, len(s.tokens)) for s in live):
            return self._begin(request, "in")
        for sequence in live:
            computed = sequence.num_computed
            blocks.release(sequence)
            sequence.num_computed = computed
        return False

    def is_copying(self, request: Request) -> bool:
        return request in self.under_way

    def drop(self, request: Request) -> None:
        self.stored.pop(request, None)

    def tick(self) -> None:
        """A step has passed."""
        for request, (way, left) in list(self.under_way.items()):
            if left:
                self.under_way[request] = way, left - 1
            else:
                self._end(request, way)

    def _begin(self, request: Request, way: str) -> bool:
        self.num_swaps += 1
        self.under_way[request] = way, self.delay
        if not self.delay:
            self._end(request, way)
        return True

    def _end(self, request: Request, way: str) -> None:
        del self.under_way[request]
        live = [s for s in request.sequences if s.finish_reason is None]
        if request.is_finished:
            return
        if way == "out":
            self.stored[request] = [self._read(sequence) for sequence in live]
        else:
            for sequence, groups in zip(live, self.stored.pop(request), strict=True):
                self._write(sequence, groups)

    def _read(self, sequence: TokenSequence) -> list[list[int | None]]:
        pool = self.runner.pool
        return [
            [pool.get((table[p // BLOCK], p % BLOCK)) for p in range(sequence.num_computed)]
            for table in sequence.block_tables
        ]

    def _write(self, sequence: TokenSequence, groups: list[list[int | None]]) -> None:
        for table, tokens in zip(sequence.block_tables, groups, strict=True):
            for p, token in enumerate(tokens):
                if token is not None and table[p // BLOCK]:
                    self.runner.pool[table[p // BLOCK], p % BLOCK] = token


class Script:
    """Forks and drops of one request. `forced`: tokens up to and with one that the model did not choose."""

    def __init__(self, plan: Sequence[tuple[str, int]]) -> None:
        self.plan = list(plan)
        self.forced: set[tuple[int, ...]] = set()

    def __call__(self, request: Request, tokens: list[int], _logits: object) -> Changes:
        living = [i for i, s in enumerate(request.sequences) if s.finish_reason is None]
        assert len(tokens) >= len(living)
        action, number = self.plan.pop(0) if self.plan else ("", 0)
        if action == "fault":
            raise ValueError("the hook fails")
        chosen = living[number % len(living)]
        if action in ("fork", "both") and len(living) < request.width:
            token = number % VOCAB
            self.forced.add((*request.sequences[chosen].tokens[:-1], token))
            return Changes([Fork(chosen, token)], [chosen] if action == "both" else [])
        if action == "drop" and len(living) > 1:
            return Changes(drops=[chosen])
        return Changes()


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 2),
        windows=st.sampled_from([(None,), (None, 6), (None, None)]),
        num_blocks=st.integers(10, 36),
        limits=st.builds(
            Limits,
            st.integers(2, 24),
            st.integers(1, 6),
            st.just(LENGTH),
            st.none() | st.integers(1, 9),
            st.sampled_from([0.0, 0.25, 0.7]),
            st.sampled_from([0.3, 1.0]),
        ),
        policy=st.sampled_from(sorted(POLICIES)),
        swap=st.none() | st.tuples(st.integers(1, 3), st.integers(0, 3)),
        cache=st.booleans(),
    )
    def begin(
        self,
        depth: int,
        windows: tuple[int | None, ...],
        num_blocks: int,
        limits: Limits,
        policy: str,
        swap: tuple[int, int] | None,
        cache: bool,
    ) -> None:
        self.now = 0.0
        self.limits, self.depth = limits, depth
        self.blocks = BlockManager(num_blocks, BLOCK, windows, prefix_cache=cache)
        self.runner = FakeRunner(self.blocks)
        self.runner.on_step = self.look
        self.swapper = FakeSwapper(self.runner, *swap) if swap else None
        self.scheduler = Scheduler(
            self.blocks,
            limits,
            POLICIES[policy](),
            cost=PreemptionCost(1000.0, 1.0, 10000.0, 0.002),  # swaps more than 5 tokens
            swapper=self.swapper,
            clock=lambda: self.now,
            depth=depth,
        )
        self.loop = Loop(self.scheduler, self.runner, self.runner.prepare, vocab=VOCAB, depth=depth)
        self.requests: list[Request] = []
        self.scripts: dict[Request, Script] = {}
        self.aborted: dict[Request, int] = {}
        self.num_steps = 0
        self.emitted: dict[tuple[Request, int], list[int]] = {}
        self.ended: set[TokenSequence] = set()  # by abort, alone

    def look(self, step: Step) -> None:
        """No step is larger than it may be."""
        assert 0 < sum(len(part.tokens) for part in step.parts) <= self.limits.tokens
        assert len(step.parts) <= self.limits.max_rows

    @rule(
        prefix=st.integers(0, 2),
        shared=st.sampled_from([0, 0, 4, 9, 13, 20]),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        output=st.integers(1, 24),
        count=st.integers(1, 4),
        priority=st.integers(0, 3),
        salt=st.sampled_from(["", "", "b"]),
        ttft_s=st.none() | st.floats(0.01, 1),
        ignore_eos=st.booleans(),
        plan=st.none()
        | st.lists(
            st.tuples(st.sampled_from(["", "fork", "fork", "drop", "both", "fault"]), st.integers(0, 99)),
            max_size=8,
        ),
        width=st.integers(1, 3),
        choices=st.sampled_from([1, 1, 2, 3]),
        needs_host=st.booleans(),
    )
    def arrive(
        self,
        prefix: int,
        shared: int,
        own: list[int],
        output: int,
        count: int,
        priority: int,
        salt: str,
        ttft_s: float | None,
        ignore_eos: bool,
        plan: list[tuple[str, int]] | None,
        width: int,
        choices: int,
        needs_host: bool,
    ) -> None:
        for number in range(count):
            script = Script(plan) if plan is not None else None
            request = Request(
                len(self.requests),
                [*PREFIXES[prefix][:shared], *own, number],
                output,
                len(self.blocks.windows),
                eos_token_ids=frozenset() if ignore_eos else frozenset({3}),
                n=1 if script else choices,
                needs_host=needs_host,
                salt=salt,
                priority=priority,
                ttft_s=ttft_s,
                width=width if script else 1,
                on_commit=script,
            )
            try:
                self.scheduler.add(request)
            except RequestError:
                return
            self.requests.append(request)
            if script:
                self.scripts[request] = script

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule(number=st.integers(0, 99))
    def abort(self, number: int) -> None:
        if self.requests:
            request = self.requests[number % len(self.requests)]
            if not request.is_finished:
                self.aborted[request] = self.num_steps
            self.loop.abort(request)
            self.loop.abort(request)

    @rule(number=st.integers(0, 99), choice=st.integers(0, 2))
    def abort_a_choice(self, number: int, choice: int) -> None:
        requests = [r for r in self.requests if not r.is_finished and r.on_commit is None and r.is_forked]
        if requests:
            request = requests[number % len(requests)]
            choice %= len(request.sequences)
            ended = request.sequences[choice].finish_reason
            self.loop.abort(request, choice)
            self.loop.abort(request, choice)
            if ended is None:
                self.ended.add(request.sequences[choice])

    @rule(token=st.none() | st.integers(0, VOCAB - 1))
    def break_a_token(self, token: int | None) -> None:
        self.runner.broken = token

    @rule(where=st.sampled_from(["submit", "collect"]), chance=st.integers(0, 3))
    def fail(self, where: str, chance: int) -> None:
        if chance == 0:
            self.runner.fail_next = where

    @rule(seconds=st.floats(0.01, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> None:
        self.now += 0.01
        self.num_steps += 1
        if self.swapper:
            self.swapper.tick()
        for output in self.loop.step():
            self.emitted.setdefault((output.request, output.choice), []).extend(output.token_ids)
        self.blocks.check()

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "loop"):
            return
        blocks = self.blocks
        assert blocks.num_free + blocks.num_cached + blocks.num_used + 1 == blocks.num_blocks
        scheduler = self.scheduler
        assert sum(r.width for r in scheduler.running) <= scheduler.limits.max_rows
        keys = [(r.key, r.id) for r in scheduler.waiting]
        assert keys == sorted(keys)
        for request in self.requests:
            assert request.num_preemptions <= request.num_emitted + 1
            assert len(request.sequences) in (1, request.n) or request in self.scripts
        patience = 2 + (self.swapper.delay + 1 if self.swapper else 0)
        for request, since in self.aborted.items():
            if self.num_steps >= since + patience:
                assert not any(table for s in request.sequences for table in s.block_tables)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.runner.broken = self.runner.fail_next = None
        for _ in range(MAX_STEPS):
            if not self.loop.has_work:
                break
            self.step()
        assert all(request.is_finished for request in self.requests), "a request starves"
        assert self.blocks.num_used == 0
        for request in self.requests:
            self.check_answer(request)

    def check_answer(self, request: Request) -> None:
        if request.finish_reason not in ("stop", "length"):
            assert request.finish_reason == "abort" or request.error is not None
            return
        script = self.scripts.get(request)
        for sequence in request.sequences:
            assert len(sequence) <= request.max_len
            for position in range(len(request.prompt), len(sequence)):
                if script is None or tuple(sequence.tokens[: position + 1]) not in script.forced:
                    assert sequence.tokens[position] == says(sequence.tokens[:position])
        if script is None:
            for number, sequence in enumerate(request.sequences):
                self.check_choice(request, number, sequence)

    def check_choice(self, request: Request, number: int, sequence: TokenSequence) -> None:
        """What was emitted is what it is; it went on until its end."""
        output = sequence.output
        assert output == self.emitted[request, number]
        assert not request.ends.intersection(output[:-1])
        if sequence not in self.ended:
            ended = output[-1] in request.ends
            assert sequence.finish_reason == ("stop" if ended else "length")
            assert ended or len(output) == request.max_tokens


SchedulerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=100, deadline=None)
test_scheduler_machine = SchedulerMachine.TestCase


def test_choices_that_resume_on_a_cached_prefix_come_to_their_next_token() -> None:
    """They write behind whole blocks that they share, and copy none: what was promised to them is enough."""
    machine = SchedulerMachine()
    machine.begin(1, (None, 6), 16, Limits(24, 6, LENGTH, None, 0.0, 0.3), "deadline", None, cache=True)

    def arrive(count: int, prefix: int, shared: int, own: list[int], output: int, **changes: Any) -> None:
        usual = {"priority": 0, "salt": "", "ttft_s": None, "ignore_eos": False, "plan": None, "width": 1}
        usual |= {"choices": 1, "needs_host": True}
        machine.arrive(prefix, shared, own, output, count, **{**usual, **changes})

    arrive(1, 0, 4, [29, 32, 29, 20], 18, plan=[("", 43), ("", 84), ("", 21), ("", 31)])
    arrive(2, 0, 0, [12, 0, 22, 0], 2, needs_host=False)
    machine.wait(16.79373470256313)
    arrive(4, 2, 4, [13, 23], 5, priority=3, salt="b", choices=2)
    machine.wait(35.664218340695564)
    arrive(4, 2, 0, [16], 7, priority=2, ttft_s=0.2873285092292671, ignore_eos=True)
    machine.wait(2.0336224649877552)
    plan = [("drop", 29), ("fault", 76), ("fork", 0), ("both", 77), ("fault", 50), ("drop", 0), ("", 52)]
    arrive(2, 2, 4, [12, 39, 8, 26], 1, plan=[*plan, ("fork", 56)], needs_host=False, width=2)
    machine.abort(6)
    machine.teardown()
    assert machine.scheduler.num_preemptions > 0
