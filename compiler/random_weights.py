"""Random weights for a program without a checkpoint: the same for a seed wherever they are made."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from pagec.compiler.packing import F32, Array, pack
from pagec.compiler.program import PackedWeight

SCALE: Final = 0.02


def random_weight(seed: int, name: str, shape: tuple[int, ...]) -> F32:
    """A model's weight: normal with deviation 0.02; ones for a vector (a norm)."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(SCALE)


def random_packed(seed: int, weight: PackedWeight) -> Array:
    """A packed tensor made of random weights."""
    parts = zip(weight.parts, weight.part_shapes, strict=True)
    return pack(weight, [random_weight(seed, name, shape) for name, shape in parts])
