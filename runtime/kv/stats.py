"""What the KV memory's parts report: the pool, and the tiers below it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TierStats:
    """A tier's bytes: of swapped-out requests (`used`), of cached blocks; and counts since the start: tokens
    found here and not above, blocks evicted, bytes that came and went, copies that failed."""

    limit_bytes: int = 0
    used_bytes: int = 0
    cached_bytes: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class KvStats:
    """The pool's blocks by state (shared: in several tables), and counts since the start: blocks handed out,
    evicted and copied; tokens that sequences began with, and how many of them the cache had, in the pool or
    in one of the `tiers` below."""

    free: int
    cached: int
    used: int
    shared: int
    allocations: int
    evictions: int
    copies: int
    asked_tokens: int
    hit_tokens: int
    tiers: dict[str, TierStats] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Of the tokens that sequences began with, the part found in the cache."""
        return self.hit_tokens / max(self.asked_tokens, 1)
