"""Requests and their sequences: plain data that scheduler, block manager and engine work on."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pagec.runtime.kv.prefix_index import KvState

if TYPE_CHECKING:
    from pagec.runtime.sampling.sampler import Sampler, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    """WAITING -> RUNNING -> FINISHED; a preempted request waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output tokens of one choice of a request.

    The first `num_computed` tokens have their keys and values in the pool; `num_scheduled` is the same once
    the steps in flight are done. `next_logit` is the first position whose logits no step gives yet: the
    last prompt token, or 0 if all prompt logits are wanted. `block_tables` has one table of block ids for
    each KV group. Positions below `num_slots` may be written without asking the block manager; `kv` is its
    own.

    While a step in flight computes the next token, `tokens` ends in a placeholder, -1 - r: what logit row r
    of that step gives. `sampler` chooses its tokens, or the greatest logit does. `num_in_flight`: steps in
    flight that use its blocks. Of `max_len` tokens the last one is never fed back: the sequence then counts
    as computed. `ends_as`: why it shall end with its next token, whichever that is; `stop_reason`: which of
    the request's stop tokens has ended it, if one has.
    """

    tokens: list[int]
    num_prompt: int
    next_logit: int
    block_tables: list[array[int]]
    max_len: int = sys.maxsize
    num_computed: int = 0
    num_scheduled: int = 0
    num_slots: int = 0
    num_in_flight: int = 0
    finish_reason: FinishReason | None = None
    ends_as: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampler: Sampler | None = None
    kv: KvState = field(default_factory=KvState)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens that no step computes yet: the prompt's rest, or the one token that was generated last."""
        return len(self.tokens) - self.num_scheduled

    @property
    def output(self) -> list[int]:
        """The generated tokens, as far as they are known."""
        return [token for token in self.tokens[self.num_prompt :] if token >= 0]

    def forget_placeholders(self) -> None:
        """Of a sequence that has ended: what steps in flight will give is not wanted any more."""
        while self.tokens[-1] < 0:
            self.tokens.pop()


class Fork(NamedTuple):
    """A new sequence: that of number `parent`, but with `token` in place of its last one."""

    parent: int
    token: int


class Changes(NamedTuple):
    """What becomes of a request's sequences after a step: forks first, then drops, both by number."""

    forks: Items[Fork] = ()
    drops: Items[int] = ()


# Sees a request, the token that each of its unfinished sequences has just got and, if the request has
# `hook_logits`, the logits float32 [sequences, vocab] that these were chosen from.
CommitHook = Callable[["Request", list[int], Any], Changes]


@dataclass(slots=True, eq=False)
class Request:
    """What a user asked for. Its sequences are scheduled, preempted and aborted together.

    A sequence ends at `max_tokens`, or with a token of `eos_token_ids` or `stop_token_ids`.
    `n` choices fork when the prompt is computed; `samplers` has one for each choice, or is empty: greedy.
    `needs_host`: the host must know a token before the next can be chosen; `logits_processors` then change
    what it is chosen from.

    `width`: the most sequences that it may have at once; `on_commit` decides after each step which of them
    fork and which end. Such a request is scheduled only when all its earlier steps are committed, and its
    sequences advance in step.

    `logits` collects float32 arrays [n, vocab] in order of position, if they are wanted: those of every
    prompt position (`prompt_logits`), and those that each generated token was chosen from.
    `num_logprobs`: each sequence collects the log probability of each of its tokens, and so many likeliest
    ones; `num_prompt_logprobs`: likewise `prompt_logprobs` for the prompt's, of which the first has none.
    `hypotheses`: what a beam search has found, the best first.

    Only requests of the same `salt` find each other's keys and values in the cache.
    `ttft_s` and `token_s`: seconds within which the first and each further token should come. Times are
    those of the engine's clock; `key` is the place in the policy's order, the lowest comes first.
    `is_plain`: one sequence, and nothing but its tokens is wanted; `is_group`: its sequences cannot be
    scheduled each by itself. `is_shielded`: it was preempted, and must not be again before it has emitted a
    token.
    """

    id: int
    prompt: Items[int]
    max_tokens: int
    num_groups: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    seed: int | None = None
    needs_host: bool = False
    logits_processors: Items[Callable[[list[int], Any], Any]] = ()
    width: int = 1
    on_commit: CommitHook | None = None
    hook_logits: bool = False
    want_logits: bool = False
    prompt_logits: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    ttft_s: float | None = None
    token_s: float | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    arrival: float = 0.0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    key: float = 0.0
    num_emitted: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    is_shielded: bool = False
    is_swapped: bool = False
    samplers: Items[Sampler] = field(init=False, default=())
    ends: frozenset[int] = field(init=False)
    is_group: bool = field(init=False)
    is_plain: bool = field(init=False)
    sequences: list[Sequence] = field(init=False)
    logits: list[Any] = field(init=False, default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False, default_factory=list)
    hypotheses: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.ends = self.eos_token_ids | self.stop_token_ids
        self.want_logits = self.want_logits or self.prompt_logits
        self.width = max(self.width, self.n)
        self.is_group = self.width > 1 or self.on_commit is not None or self.needs_host
        self.is_plain = not self.is_group and not self.needs_logits and self.num_logprobs is None
        tables = [array("i") for _ in range(self.num_groups)]
        first = 0 if self.wants_prompt else len(self.prompt) - 1
        self.sequences = [Sequence(list(self.prompt), len(self.prompt), first, tables, self.max_len)]

    def use_samplers(self, samplers: Items[Sampler]) -> None:
        """Says how tokens are chosen, before the first step."""
        self.samplers = samplers
        self.sequences[0].sampler = samplers[0] if samplers else None

    @property
    def output(self) -> list[int]:
        """The generated tokens of the first choice."""
        return self.sequences[0].output

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log probabilities of the first choice's tokens."""
        return self.sequences[0].logprobs

    @property
    def wants_prompt(self) -> bool:
        """Whether the logits of all prompt positions are wanted."""
        return self.prompt_logits or self.num_prompt_logprobs is not None

    @property
    def is_forked(self) -> bool:
        """Whether all its choices exist."""
        return len(self.sequences) >= self.n

    @property
    def waits(self) -> bool:
        """Whether its next tokens can be scheduled only when those before are known."""
        return self.on_commit is not None or self.needs_host or not self.is_forked

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight uses its blocks."""
        return any(sequence.num_in_flight for sequence in self.sequences)

    @property
    def needs_logits(self) -> bool:
        """Whether a step shall bring back the logits themselves. A token's own log probability alone comes
        from the sampling kernel."""
        return self.want_logits or self.wants_prompt or self.hook_logits or bool(self.num_logprobs)

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence of this request will have."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def met_targets(self) -> bool:
        """Whether it ended well, its first token came in time, and the others did on average."""
        if self.finish_reason not in ("stop", "length"):
            return False
        if self.first_token_at is None or self.finished_at is None:
            return False
        first = self.first_token_at - self.arrival
        each = (self.finished_at - self.first_token_at) / max(self.num_emitted - 1, 1)
        in_time = self.ttft_s is None or first <= self.ttft_s
        return in_time and (self.token_s is None or each <= self.token_s)
