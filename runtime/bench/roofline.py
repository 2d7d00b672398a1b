"""How long a step takes on a device that is not here: stated constants, the simplest roofline.

step = overhead + max(bytes / (share of bandwidth), FLOPs / (share of peak))
bytes = weights, once + keys and values that each sequence reads
FLOPs = linears of all tokens + attention of all (query, key) pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagec.runtime.scheduler import Entry


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes and FLOPs of a model: `weights_bytes` that a step reads, `token_flops` of a token's linears,
    `pair_flops` of a (query, key) pair over all layers, `kv_bytes` of a token's keys and values."""

    name: str
    weights_bytes: float
    token_flops: float
    pair_flops: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Data sheet values, and what of them a step is taken to reach."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    bandwidth_share: float = 0.8
    peak_share: float = 0.6
    overhead_s: float = 5e-4
    # What weights and keys and values may take.
    memory_share: float = 0.9

    def kv_tokens(self, model: ModelSize) -> int:
        """Tokens whose keys and values fit beside the weights."""
        return int((self.memory_bytes * self.memory_share - model.weights_bytes) / model.kv_bytes)

    def step_s(self, model: ModelSize, num_tokens: int, keys: int, pairs: int) -> float:
        """Seconds of a step of so many tokens that reads `keys` keys for `pairs` (query, key) pairs."""
        nbytes = model.weights_bytes + keys * model.kv_bytes
        flops = num_tokens * model.token_flops + pairs * model.pair_flops
        memory_s = nbytes / (self.bytes_per_s * self.bandwidth_share)
        return self.overhead_s + max(memory_s, flops / (self.flops_per_s * self.peak_share))


def work_of(entries: Sequence[Entry]) -> tuple[int, int, int]:
    """Tokens, keys read and (query, key) pairs of a step."""
    tokens = keys = pairs = 0
    for _, _, start, count, *_ in entries:
        tokens += count
        keys += start + count
        pairs += count * start + count * (count + 1) // 2
    return tokens, keys, pairs


# Llama 3.1 8B in bf16: 32 layers of 32 heads and 8 KV heads of 128 dims; 8.03e9 weights, 0.53e9 of them in
# the embedding, which is looked up.
LLAMA_8B: Final = ModelSize(
    "Llama 3.1 8B",
    weights_bytes=2 * 7.5e9,
    token_flops=2 * 7.5e9,
    pair_flops=4 * 32 * 128 * 32,
    kv_bytes=2 * 32 * 8 * 128 * 2,
)

ACCELERATORS: Final = {
    "a100": Accelerator("A100 SXM 80 GB", 2.039e12, 312e12, 80e9),
    "h100": Accelerator("H100 SXM 80 GB", 3.35e12, 989e12, 80e9),
}
