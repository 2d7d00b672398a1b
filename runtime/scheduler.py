"""Continuous batching: which sequence computes how many tokens in the next step.

A step has a budget of tokens. Sequences that decode come first, a token each; prompts fill the rest in
chunks: first those that have begun, then waiting ones while there are rows and blocks for them.

    decodes    never wait: at most `max_rows` sequences run, and so many tokens fit beside the prompts' least
    prompts    get `prefill_least` of the budget at least, `prefill_most` at most while others decode

So however long a prompt is, it delays running decodes by no more than one step's budget.

Within each kind the policy's order counts. A request starts when there are blocks for all its tokens so far,
so only decodes can find the pool dry. Then the last running request of the order is preempted: its blocks
are freed and computed again later, or swapped out if that is cheaper. Everything admitted finishes, because

    - what could not fit alone is refused at once,
    - the first running request of the order is never preempted,
    - one that was is not again before it has emitted a token, so `num_preemptions` <= tokens + 1.

With several steps in flight, a step is scheduled as if those before it were done: `num_scheduled` runs ahead
of `num_computed`, and tokens not known yet have placeholders. Blocks of what ends or is preempted meanwhile
are freed when its last step is committed (`settle`).
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final, NamedTuple

from pagec.compiler.errors import RequestError
from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.policies import FcfsPolicy, Policy
from pagec.runtime.preemption import PreemptionCost, Swapper
from pagec.runtime.room import Room
from pagec.runtime.sequence import FinishReason, Fork, Request, Sequence, Status

Clock = Callable[[], float]
_RUNNING: Final = Status.RUNNING


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a sequence may hold. `prefill_chunk`: most prompt tokens of a sequence in a step;
    `prefill_least`, `prefill_most`: the prompts' share of a step's tokens, see above; `logits`: the logit
    rows of a step beyond which no request gets those of its prompt."""

    tokens: int
    sequences: int
    length: int
    prefill_chunk: int | None = None
    prefill_least: float = 0.25
    prefill_most: float = 1.0
    logits: int = 64

    @property
    def max_rows(self) -> int:
        """The most sequences that run at once."""
        return min(self.sequences, max(self.tokens - math.ceil(self.prefill_least * self.tokens), 1))


class Entry(NamedTuple):
    """A sequence's part of a step: `num_tokens` from position `start`, and `num_logits` logit rows: one for
    each of the last tokens, but `num_draws` for the very last one, each of which chooses a token."""

    request: Request
    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    num_draws: int = 1

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_tokens]


def _place(request: Request) -> tuple[float, int]:
    return request.key, request.id


class Scheduler:
    """Decides who computes what in each step. Owns the queues; `blocks` owns the memory. `depth`: the most
    steps in flight."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: Limits,
        policy: Policy | None = None,
        *,
        cost: PreemptionCost | None = None,
        swapper: Swapper | None = None,
        clock: Clock = time.monotonic,
        depth: int = 1,
    ) -> None:
        self.blocks = blocks
        self.room = Room(blocks, limits.tokens * depth)
        self.limits = limits
        self.policy = policy or FcfsPolicy()
        self.clock = clock
        # Both in the policy's order.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._cost = cost
        self._swapper = swapper
        self._max_rows = limits.max_rows
        self._prefill_most = max(int(limits.prefill_most * limits.tokens), 1)
        self._num_rows = 0
        self._num_logits = 0  # of the step being scheduled
        self._releasing: set[Request] = set()  # blocks to be freed when their steps are done
        self._copying: list[Request] = []  # being swapped out or in: in none of the queues' hands
        self._dry: tuple[Request, int] | None = None  # who found too few blocks, and how many there were

    @property
    def has_work(self) -> bool:
        """Whether a request waits, runs, or is being copied."""
        return bool(self.running or self.waiting or self._copying)

    def is_beyond_the_pool(self, request: Request) -> bool:
        """Whether a request's keys and values are in host memory, or on the way to or from there."""
        return request.is_swapped or request in self._copying

    # ------------------------------------------------------------------------------ requests

    def add(self, request: Request, arrival: float | None = None) -> None:
        """Queues a request that has arrived now, or some time ago; RequestError if it could never run."""
        self.check(request)
        request.arrival = self.clock() if arrival is None else arrival
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is; its blocks are freed as soon as no step in flight and no
        copy uses them. Idempotent."""
        if request.status is Status.FINISHED:
            return
        is_copying = request in self._copying
        if request.status is Status.RUNNING:
            self._num_rows -= request.width
        if not is_copying:
            (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        for sequence in request.sequences:
            sequence.forget_placeholders()
        if request.is_in_flight:
            self._releasing.add(request)
        elif not is_copying:
            self._free(request)

    def settle(self, request: Request, sequence: Sequence) -> None:
        """To be called when no step in flight uses a sequence any more that has ended, or whose request
        has ended or was preempted."""
        if request in self._releasing:
            if request.is_in_flight:
                return
            self._releasing.remove(request)
            if request.is_finished:
                self._free(request)
            else:
                self._vacate(request)
        elif sequence.finish_reason is not None:
            self.room.release([sequence])

    # -------------------------------------------------------------------------- its sequences

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """One choice of a request has ended while others go on."""
        sequence.finish_reason = reason
        sequence.forget_placeholders()
        sequence.num_scheduled = len(sequence.tokens)
        if not sequence.num_in_flight:
            self.room.release([sequence])

    def fork(self, request: Request, fork: Fork, num_leaving: int = 0) -> Sequence:
        """Adds a sequence to a request; they share all blocks until one writes. `num_leaving`: so many of its
        sequences are about to be dropped."""
        parent = request.sequences[fork.parent]
        if parent.finish_reason is not None:
            raise RequestError(f"sequence {fork.parent} has ended", place="fork")
        if sum(s.finish_reason is None for s in request.sequences) - num_leaving >= request.width:
            raise RequestError(f"more than {request.width} sequences at once", place="fork")
        child = Sequence(
            [*parent.tokens[:-1], fork.token],
            parent.num_prompt,
            parent.next_logit,
            [],
            parent.max_len,
            num_computed=parent.num_computed,
            num_scheduled=parent.num_scheduled,
            logprobs=list(parent.logprobs),
        )
        if request.samplers:
            child.sampler = request.samplers[len(request.sequences)]
        self.blocks.fork(parent, child)
        request.sequences.append(child)
        return child

    def drop(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Takes sequences out of a request that has no step in flight."""
        for sequence in sequences:
            request.sequences.remove(sequence)
            self.room.release([sequence])

    # ------------------------------------------------------------------------------- a step

    def schedule(self) -> list[Entry]:
        """The next step, decodes first; empty if nothing can run."""
        for request in list(self._copying):
            if self._swapper is not None and not self._swapper.is_copying(request):
                self._end_copy(request)
        if self.policy.is_dynamic:
            self._reorder()
        entries: list[Entry] = []
        self._num_logits = 0
        before, num_running = self.num_preemptions, len(self.running)
        prompts = self._schedule_decodes(entries)
        budget = self.limits.tokens - len(entries)
        if entries:
            budget = min(budget, self._prefill_most)
        for request in prompts:
            if budget and request.status is _RUNNING:
                budget -= self._schedule_prompt(entries, request, budget)
        # Who was just preempted shall not take back what it gave.
        is_calm = self.num_preemptions == before
        if self.waiting and budget and is_calm and self.policy.may_start(num_running):
            self._admit(entries, budget)
        return entries

    def _schedule_decodes(self, entries: list[Entry]) -> list[Request]:
        """A token of every sequence that has but one pending; the requests whose prompts have more."""
        prompts: list[Request] = []
        before, row = self.num_preemptions, 0
        new = tuple.__new__  # half the time of calling the class
        for request in self.running:
            if request.is_group:
                row = self._schedule_group(entries, prompts, request, row)
                continue
            sequence = request.sequences[0]
            start, tokens = sequence.num_scheduled, sequence.tokens
            if start + 1 != len(tokens):
                if start < len(tokens):
                    prompts.append(request)
                continue
            if request.status is not _RUNNING:
                continue  # preempted a moment ago
            if start >= sequence.num_slots and not self._make_room(request, (sequence,)):
                continue
            entries.append(new(Entry, (request, sequence, start, 1, 1, 1)))
            row += 1
            tokens.append(-row)
            start += 1
            sequence.next_logit = start
            sequence.num_scheduled = start if start + 1 < sequence.max_len else start + 1
            sequence.num_in_flight += 1
        self._num_logits = row
        if self.num_preemptions != before:
            self.running = [r for r in self.running if r.status is _RUNNING]
        return prompts

    def _schedule_group(
        self, entries: list[Entry], prompts: list[Request], request: Request, row: int
    ) -> int:
        """As above for a request of several sequences; those with a hook advance together or not at all."""
        pending = [s.num_pending for s in request.sequences]
        if any(count > 1 for count in pending):
            prompts.append(request)
            if request.on_commit is not None:
                return row
        if request.waits and request.is_in_flight:
            return row
        ready = [s for s, count in zip(request.sequences, pending, strict=True) if count == 1]
        if request.status is _RUNNING and self._make_room(request, ready):
            self._num_logits = row
            for sequence in ready:
                self._enter(entries, request, sequence, 1)
            row = self._num_logits
        return row

    def _schedule_prompt(self, entries: list[Entry], request: Request, budget: int, least: int = 2) -> int:
        """The next chunks of a request's sequences that have `least` tokens pending; the tokens used."""
        used = held = 0
        if request.on_commit is not None:
            if request.is_in_flight:
                return 0
            # All shall have one token pending before any decodes.
            held = int(len(request.sequences) > 1)
        for sequence in request.sequences:
            pending = sequence.num_pending
            count = min(pending - held, budget - used, self.limits.prefill_chunk or budget)
            if sequence.next_logit < sequence.num_prompt - 1:
                before = max(sequence.next_logit - sequence.num_scheduled, 0)
                count = min(count, before + max(self.limits.logits - self._num_logits, 1))
            if count > 0 and pending >= least and self.room.grow(sequence, sequence.num_scheduled + count):
                self._enter(entries, request, sequence, count)
                used += count
        return used

    def _enter(self, entries: list[Entry], request: Request, sequence: Sequence, count: int) -> None:
        """Adds a sequence's part to the step and moves its plan on."""
        start = sequence.num_scheduled
        end = start + count
        num_logits = min(max(end - sequence.next_logit, 0), count)
        num_draws = 1 if end < len(sequence.tokens) or request.is_forked else request.n
        entries.append(Entry(request, sequence, start, count, num_logits + num_draws - 1, num_draws))
        self._num_logits += num_logits
        sequence.num_scheduled = end
        sequence.num_in_flight += 1
        if num_logits:
            sequence.next_logit = end
        if end == len(sequence.tokens):
            sequence.tokens.append(-self._num_logits)
            if end + 1 == sequence.max_len:
                sequence.num_scheduled += 1
        self._num_logits += num_draws - 1

    # ------------------------------------------------------------------------------- waiting

    def check(self, request: Request) -> None:
        """RequestError for a request that could never run."""
        if request.max_len > self.limits.length:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens are "
                f"{request.max_len}; a sequence holds {self.limits.length} at most",
                place="max_tokens" if len(request.prompt) < self.limits.length else "prompt",
            )
        if request.width > self._max_rows:
            raise RequestError(f"{request.width} sequences; {self._max_rows} run at once", place="width")
        needed = self.room.needed(request)
        if needed > self.blocks.num_blocks - 1:
            raise RequestError(
                f"needs {needed} KV blocks at its full length; the pool has {self.blocks.num_blocks - 1}",
                place="max_tokens",
                remedy="ask for fewer tokens, or start the engine with a larger KV pool",
            )

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        request.key = self.policy.key(request, self.clock())
        insort(self.waiting, request, key=_place)

    def _reorder(self) -> None:
        """Keys have changed with time. Those who wait have later ones if any: look at the front only."""
        now, key = self.clock(), self.policy.key
        for request in self.running:
            request.key = key(request, now)
        self.running.sort(key=_place)
        waiting = self.waiting
        while waiting and (later := key(waiting[0], now)) > waiting[0].key:
            request = waiting.pop(0)
            request.key = later
            insort(waiting, request, key=_place)

    def _admit(self, entries: list[Entry], budget: int) -> None:
        """Starts waiting requests in order while budget, rows and blocks last."""
        index = 0
        # However many wait for a prefix, a step looks at no more of them than could run.
        while budget > 0 and index < min(len(self.waiting), self._max_rows):
            request = self.waiting[index]
            if self._num_rows + request.width > self._max_rows:
                if not request.is_swapped and request not in self._releasing:
                    self.room.is_awaited(request)  # what it needs from disk shall be here when a row is free
                return
            if request in self._releasing or (not request.is_swapped and self.room.is_awaited(request)):
                index += 1
            elif self._take_blocks(request):
                del self.waiting[index]
                budget -= self._start(entries, request, budget)
            else:
                return

    def _take_blocks(self, request: Request) -> bool:
        """Cached blocks of its tokens so far, and a promise of the others. False: none taken."""
        found = request, self.room.num_available
        if self._dry == found and self.running:
            return False
        if request.is_swapped:
            assert self._swapper is not None
            fits = self.room.whole(request) <= self.room.num_available
            done = fits and self._swapper.swap_in(request)
        else:
            done = self.room.start(request)
        self._dry = None if done else found
        return done

    def _start(self, entries: list[Entry], request: Request, budget: int) -> int:
        """Puts a request that has its blocks to work; the tokens used."""
        request.status = Status.RUNNING
        request.is_shielded = request.num_preemptions > 0
        if request.scheduled_at is None:
            request.scheduled_at = self.clock()
        self._num_rows += request.width
        if request.is_swapped:
            request.is_swapped = False
            self._copying.append(request)
            return 0
        insort(self.running, request, key=_place)
        return self._schedule_prompt(entries, request, budget, least=1)

    # ---------------------------------------------------------------------------- preemption

    def _make_room(self, request: Request, sequences: Items[Sequence]) -> bool:
        """Blocks for the sequences' next tokens, taken from the last running request if need be. False:
        the request cannot go on in this step."""
        for sequence in sequences:
            if sequence.num_scheduled < sequence.num_slots:
                continue
            while not self.room.grow(sequence, len(sequence.tokens)):
                if self._releasing or self._copying:
                    return False  # blocks are about to come
                victim = self._victim(request)
                if victim is None:
                    return False  # until those have emitted a token
                self._preempt(victim)
                if victim is request:
                    return False
        return True

    def _victim(self, request: Request) -> Request | None:
        """The last running request that may be preempted, none that comes before this one."""
        for candidate in reversed(self.running):
            may_go = candidate is not self.running[0] and not candidate.is_shielded
            if may_go and candidate.status is _RUNNING:
                return candidate
            if candidate is request:
                return None
        return None

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._num_rows -= request.width
        self._enqueue(request)
        if request.is_in_flight:
            self._releasing.add(request)
        else:
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Frees a preempted request's blocks, or begins to swap them out."""
        num_tokens = sum(s.num_computed for s in request.sequences if s.finish_reason is None)
        swapper, cost = self._swapper, self._cost
        is_cheaper = cost is not None and cost.prefers_swap(num_tokens)
        # What comes back shares nothing, and so might never fit again.
        can_return = self.room.whole(request) < self.blocks.num_blocks
        if swapper and is_cheaper and can_return and swapper.swap_out(request):
            request.is_swapped = True
            self.waiting.remove(request)
            self._copying.append(request)
            if not swapper.is_copying(request):
                self._end_copy(request)
        else:
            self.room.release(request.sequences)

    def _end_copy(self, request: Request) -> None:
        """Goes on with a request whose copy has ended."""
        self._copying.remove(request)
        if request.is_finished:
            self._free(request)
        elif request.status is _RUNNING:
            insort(self.running, request, key=_place)
        else:
            computed = [s.num_computed for s in request.sequences]
            self.room.release(request.sequences)
            for sequence, count in zip(request.sequences, computed, strict=True):
                sequence.num_computed = sequence.num_scheduled = count
            insort(self.waiting, request, key=_place)

    def _free(self, request: Request) -> None:
        if self._swapper is not None:
            self._swapper.drop(request)
        self.room.release(request.sequences)
