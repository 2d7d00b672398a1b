"""Frequencies of rotary embeddings: radians per position for each pair of dims.

They are formed by the float32 steps of Hugging Face transformers, as torch takes them on x86: at position
100,000 the last bit of a frequency is a visible difference, and libraries differ in the last bit of a power.
In numpy, for compiling needs no torch; number / array is there what it is in torch, the number times the
array's reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.ops.power import power
from pagec.compiler.rope import RopeConfig

F32 = npt.NDArray[np.float32]
f32: Final = np.float32


def frequencies(config: RopeConfig) -> F32:
    """The dims/2 frequencies, float32."""
    exponents = np.arange(0, config.dims, 2).astype(f32) / f32(config.dims)
    return _KINDS[config.kind](power(config.base, exponents), config)


def _default(periods: F32, config: RopeConfig) -> F32:  # noqa: ARG001
    return f32(1) / periods


def _linear(periods: F32, config: RopeConfig) -> F32:
    return f32(1) / periods / f32(config.scaling["factor"])


def _factors(periods: F32, config: RopeConfig) -> F32:
    divisors: F32 = np.array(config.scaling["factors"], f32)
    return f32(1) / periods / divisors


def _longrope(periods: F32, config: RopeConfig) -> F32:
    """Ding et al. 2024: a divisor for each frequency."""
    return f32(1) / (np.array(config.scaling["factors"], f32) * periods)


def _llama3(periods: F32, config: RopeConfig) -> F32:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (config.scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    old_len = config.scaling["original_max_position_embeddings"]
    inverse = f32(1) / periods
    wavelength = f32(1) / inverse * f32(2 * math.pi)
    smooth = (f32(1) / wavelength * f32(old_len) - f32(low)) / f32(high - low)
    blended = (f32(1) - smooth) * inverse / f32(factor) + smooth * inverse
    result = np.where(wavelength > f32(old_len / low), inverse / f32(factor), inverse)
    between = ~(wavelength < f32(old_len / high)) & ~(wavelength > f32(old_len / low))
    return np.where(between, blended, result)


def _yarn(periods: F32, config: RopeConfig) -> F32:
    """Peng et al. 2023: a ramp between frequencies that are kept and those that are stretched."""
    scaling = config.scaling

    def dim_of(rotations: float) -> float:
        turns = math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi))
        return (config.dims * turns) / (2 * math.log(config.base))

    low, high = dim_of(scaling["beta_fast"]), dim_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    high = high + 0.001 if low == high else high
    ramp = (np.arange(config.dims // 2, dtype=f32) - f32(low)) / f32(high - low)
    kept = f32(1) - ramp.clip(f32(0), f32(1))
    stretched: F32 = f32(1) / (f32(scaling["factor"]) * periods)
    found: F32 = stretched * (f32(1) - kept) + f32(1) / periods * kept
    return found


_KINDS: Final[Mapping[str, Callable[[F32, RopeConfig], F32]]] = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "longrope": _longrope,
    "llama3": _llama3,
    "yarn": _yarn,
}
