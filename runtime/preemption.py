"""What to do with the keys and values of a request that must make room: forget them, or move them away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagec.runtime.sequence import Request


class Swapper(Protocol):
    """Moves a request's blocks to memory beyond the pool and back, while steps run."""

    def swap_out(self, request: Request) -> bool:
        """Begins to copy what the sequences have computed; False if there is no room for it.

        The blocks stay the sequences' own until the copy has ended; then the scheduler releases them.
        """

    def swap_in(self, request: Request) -> bool:
        """Grows the tables to hold all tokens and begins to copy back; False, and nothing changed, if
        blocks lack. The copy outside the pool is forgotten."""

    def is_copying(self, request: Request) -> bool:
        """Whether a copy of the request is under way: its blocks must not be touched."""

    def drop(self, request: Request) -> None:
        """Forgets the copy outside the pool. Idempotent."""


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Rates by which computing again and swapping compare.

    `prefill_tokens_per_s`: at which a prompt is computed; `token_bytes`: keys and values of one token;
    `swap_bytes_per_s`: of the link to the memory beyond; `swap_latency_s`: of one transfer, however small.
    """

    prefill_tokens_per_s: float
    token_bytes: float
    swap_bytes_per_s: float
    swap_latency_s: float = 1e-4

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to compute the tokens again."""
        return num_tokens / self.prefill_tokens_per_s

    def swap_s(self, num_tokens: int) -> float:
        """Seconds to copy the tokens' keys and values away and back."""
        return 2 * (self.swap_latency_s + num_tokens * self.token_bytes / self.swap_bytes_per_s)

    def prefers_swap(self, num_tokens: int) -> bool:
        return self.swap_s(num_tokens) < self.recompute_s(num_tokens)
