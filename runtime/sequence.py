"""Requests and their sequences: plain data that scheduler and engine work on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    """WAITING -> RUNNING -> FINISHED; a preempted request waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output tokens of one choice of a request.

    The first `num_computed` tokens have their keys and values in the pool. `next_logit` is the first
    position whose logits are still wanted: the last prompt token, or 0 if all prompt logits are.
    `block_tables` has one table of block ids for each KV group.
    """

    tokens: list[int]
    num_prompt: int
    next_logit: int
    block_tables: list[array[int]]
    num_computed: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens yet to be computed: the prompt's rest, or the one token that was generated last."""
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt :]


@dataclass(slots=True, eq=False)
class Request:
    """What a user asked for. Its sequences are scheduled, preempted and aborted together.

    `logits` collects float32 arrays [n, vocab] in order of position, if they are wanted: those of every
    prompt position (`prompt_logits`), and those that each generated token was chosen from.
    """

    id: int
    prompt: Items[int]
    max_tokens: int
    num_groups: int
    ignore_eos: bool = False
    want_logits: bool = False
    prompt_logits: bool = False
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    num_preemptions: int = 0
    sequences: list[Sequence] = field(init=False)
    logits: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.want_logits = self.want_logits or self.prompt_logits
        first = 0 if self.prompt_logits else len(self.prompt) - 1
        tables = [array("i") for _ in range(self.num_groups)]
        self.sequences = [Sequence(list(self.prompt), len(self.prompt), first, tables)]

    @property
    def output(self) -> list[int]:
        """The generated tokens of the first choice."""
        return self.sequences[0].output

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence of this request will have."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED
