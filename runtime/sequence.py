"""Requests and their sequences: plain data that scheduler, block manager and engine work on."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from pagec.runtime.prefix_index import KvState

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
    of that step gives. `sampler` (sampler.py) chooses its tokens, or the greatest
    logit does. `num_in_flight`: steps in flight that use its blocks. Of `max_len` tokens the last one
    is never fed back: the sequence then counts as computed.
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
    logprobs: list[float] = field(default_factory=list)
    sampler: Any = None
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


# Sees a request and the token that each of its unfinished sequences has just got.
CommitHook = Callable[["Request", list[int]], Changes]


@dataclass(slots=True, eq=False)
class Request:
    """What a user asked for. Its sequences are scheduled, preempted and aborted together.

    `logits` collects float32 arrays [n, vocab] in order of position, if they are wanted: those of every
    prompt position (`prompt_logits`), and those that each generated token was chosen from.
    `want_logprobs`: each sequence collects the log probability of each token that it generated.

    `width`: the most sequences that it may have at once; `on_commit` decides after each step which of them
    fork and which end. Such a request is scheduled only when all its earlier steps are committed, and its
    sequences advance in step.

    Only requests of the same `salt` find each other's keys and values in the cache.
    `ttft_s` and `token_s`: seconds within which the first and each further token should come. Times are
    those of the engine's clock; `key` is the place in the policy's order, the lowest comes first.
    `is_plain`: one sequence, and nothing but its tokens is wanted. `is_shielded`: it was preempted, and must
    not be again before it has emitted a token.
    """

    id: int
    prompt: Items[int]
    max_tokens: int
    num_groups: int
    ignore_eos: bool = False
    want_logits: bool = False
    prompt_logits: bool = False
    want_logprobs: bool = False
    width: int = 1
    on_commit: CommitHook | None = None
    salt: str = ""
    priority: int = 0
    ttft_s: float | None = None
    token_s: float | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    arrival: float = 0.0
    first_token_at: float | None = None
    finished_at: float | None = None
    key: float = 0.0
    num_emitted: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    is_shielded: bool = False
    is_swapped: bool = False
    is_plain: bool = field(init=False)
    sequences: list[Sequence] = field(init=False)
    logits: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.want_logits = self.want_logits or self.prompt_logits
        self.is_plain = self.width == 1 and self.on_commit is None and not self.needs_logits
        first = 0 if self.prompt_logits else len(self.prompt) - 1
        tables = [array("i") for _ in range(self.num_groups)]
        self.sequences = [Sequence(list(self.prompt), len(self.prompt), first, tables, self.max_len)]

    @property
    def output(self) -> list[int]:
        """The generated tokens of the first choice."""
        return self.sequences[0].output

    @property
    def logprobs(self) -> list[float]:
        """The log probabilities of the first choice's tokens."""
        return self.sequences[0].logprobs

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight uses its blocks."""
        return any(sequence.num_in_flight for sequence in self.sequences)

    @property
    def needs_logits(self) -> bool:
        """Whether a step shall bring back the logits themselves."""
        return self.want_logits or self.want_logprobs

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
