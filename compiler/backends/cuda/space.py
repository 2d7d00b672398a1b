"""Tuning spaces: the knobs of a template, from the YAML beside it, and which points a target can hold.

What is dropped here could not run whatever the compiler does; what becomes of the rest, the compiler says
(see resources.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import resources
from typing import Any, Final, TypeVar

import yaml

from pagec import templates
from pagec.compiler.backends.cuda.attention import AttentionShape, DecodeKnobs, PrefillKnobs
from pagec.compiler.backends.cuda.kv_write import KvWriteKnobs
from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape
from pagec.compiler.backends.cuda.rowwise import RowwiseKnobs
from pagec.compiler.target import CudaTarget

BYTES: Final = {"bf16": 2, "f16": 2, "f32": 4}
# Rows of a tile that one warp's matrix instructions take at least.
WARP_ROWS: Final = 16

Knobs = TypeVar("Knobs", PrefillKnobs, DecodeKnobs, LinearKnobs, RowwiseKnobs, KvWriteKnobs)
TEMPLATES: Final[dict[type, str]] = {
    PrefillKnobs: "attention_prefill",
    DecodeKnobs: "attention_decode",
    LinearKnobs: "linear",
    RowwiseKnobs: "rowwise",
    KvWriteKnobs: "kv_write",
}


def points(kind: type[Knobs]) -> Iterator[Knobs]:
    """All points of a space, legal or not, in the order of the file."""
    knobs = _read(TEMPLATES[kind])["knobs"]
    for values in itertools.product(*knobs.values()):
        yield kind(**dict(zip(knobs, values, strict=True)))


def numeric(kind: type[Knobs]) -> frozenset[str]:
    """The knobs that can change a bit of the result."""
    return frozenset(_read(TEMPLATES[kind])["numeric"])


def _read(template: str) -> dict[str, Any]:
    text = resources.files(templates).joinpath("cuda", f"{template}.yaml").read_text()
    data = yaml.safe_load(text)
    assert isinstance(data, dict)
    return data


def holds_prefill(shape: AttentionShape, knobs: PrefillKnobs, target: CudaTarget) -> bool:
    """Every warp has rows, the tiles of K and V fit, and the sums of a row block fit in registers."""
    sums = knobs.BM * (shape.padded * (2 if knobs.split else 1) + knobs.BN)
    return (
        WARP_ROWS * knobs.warps <= knobs.BM
        and _cache_bytes(shape, knobs.BN, knobs.stages) <= target.shared_bytes_per_block
        and sums <= _registers(knobs.warps)
    )


def holds_decode(shape: AttentionShape, knobs: DecodeKnobs, target: CudaTarget) -> bool:
    """The tiles of K and V of all programs of a multiprocessor fit, and a split has more than one."""
    return (
        knobs.split > knobs.BN
        and knobs.per_sm * _cache_bytes(shape, knobs.BN, knobs.stages) <= target.shared_bytes_per_sm
        and knobs.per_sm * knobs.warps <= target.warps_per_sm
    )


def holds_linear(shape: LinearShape, knobs: LinearKnobs, target: CudaTarget) -> bool:
    """Steps divide K, tiles do not exceed N, operands fit, and the sums fit in registers."""
    step = (knobs.BM + knobs.BN) * knobs.BK * BYTES[shape.dtype]
    return (
        shape.k % (knobs.BK * knobs.splits) == 0
        and shape.n >= knobs.BN
        and max(1, knobs.stages - 1) * step <= target.shared_bytes_per_block
        and _registers(knobs.warps) >= knobs.BM * knobs.BN
        and (target.sm >= 90 or not knobs.tma)
    )


def _cache_bytes(shape: AttentionShape, bn: int, stages: int) -> int:
    """Shared memory for the tiles of K and V that are on their way."""
    return max(1, stages - 1) * 2 * bn * shape.padded * BYTES[shape.dtype]


def _registers(warps: int) -> int:
    """Registers for sums: of a thread's 255 some are addresses and operands."""
    return warps * 32 * 192
