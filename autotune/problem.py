"""What is to be tuned: a kernel's shape and the sizes at which its time counts. bf16 throughout.

A key names a problem in the tables: a shape, never the sizes that it was weighed at, for those are the
tuner's own choice and stand beside the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Kind = Literal["attention_prefill", "attention_decode", "linear"]
ITEM_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class _Attention:
    """What both kinds of attention have."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def key(self) -> str:
        return f"d{self.head_dim}_g{self.group}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prefill(_Attention):
    """Dense causal attention of `sequences` prompts of `tokens` tokens each, from an empty cache."""

    tokens: int = 4096
    sequences: int = 1

    @property
    def kind(self) -> Kind:
        return "attention_prefill"

    @property
    def flops(self) -> int:
        """Of the two products, over the keys that each query sees."""
        seen = self.tokens * (self.tokens + 1) // 2
        return 4 * self.sequences * self.heads * self.head_dim * seen

    @property
    def nbytes(self) -> int:
        """Queries and results, keys and values, each once."""
        per_token = 2 * (self.heads + self.kv_heads) * self.head_dim * ITEM_BYTES
        return self.sequences * self.tokens * per_token


@dataclass(frozen=True, slots=True)
class Decode(_Attention):
    """Attention of a new token of each of `sequences` sequences over `context` tokens in the paged cache."""

    sequences: int
    context: int

    @property
    def kind(self) -> Kind:
        return "attention_decode"

    @property
    def flops(self) -> int:
        return 4 * self.sequences * self.context * self.heads * self.head_dim

    @property
    def nbytes(self) -> int:
        """Keys and values once; a token's queries and results."""
        cache = self.context * 2 * self.kv_heads
        return self.sequences * (cache + 2 * self.heads) * self.head_dim * ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Linear:
    """y[M, N] = x[M, K] w[N, K]^T."""

    M: int
    N: int
    K: int

    @property
    def kind(self) -> Kind:
        return "linear"

    @property
    def key(self) -> str:
        return f"n{self.N}_k{self.K}"

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def nbytes(self) -> int:
        """Weights, inputs and results, each once."""
        return (self.N * self.K + self.M * self.K + self.M * self.N) * ITEM_BYTES

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Problem = Prefill | Decode | Linear


def problem_from(kind: Kind, sizes: Mapping[str, int]) -> Problem:
    """The problem that `to_json` gave these sizes of."""
    match kind:
        case "attention_prefill":
            return Prefill(**sizes)
        case "attention_decode":
            return Decode(**sizes)
        case "linear":
            return Linear(**sizes)
