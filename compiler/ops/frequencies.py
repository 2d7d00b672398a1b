"""Frequencies of rotary embeddings: radians per position for each pair of dims.

They are formed by the float32 steps of Hugging Face transformers, in torch, as it does: at position 100,000
the last bit of a frequency is a visible difference, and libraries differ in the last bit of a power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from pagec.compiler.rope import RopeConfig

if TYPE_CHECKING:
    import torch

F32 = npt.NDArray[np.float32]


def frequencies(config: RopeConfig) -> F32:
    """The dims/2 frequencies, float32."""
    import torch

    exponents = torch.arange(0, config.dims, 2, dtype=torch.int64).float() / config.dims
    found: F32 = _KINDS[config.kind](config.base**exponents, config).numpy()
    return found


def _default(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:  # noqa: ARG001
    return 1.0 / periods


def _linear(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    return (1.0 / periods) / float(config.scaling["factor"])


def _factors(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    import torch

    return (1.0 / periods) / torch.tensor(config.scaling["factors"], dtype=torch.float32)


def _longrope(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Ding et al. 2024: a divisor for each frequency."""
    import torch

    return 1.0 / (torch.tensor(config.scaling["factors"], dtype=torch.float32) * periods)


def _llama3(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    import torch

    factor, low, high = (config.scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    old_len = config.scaling["original_max_position_embeddings"]
    inverse = 1.0 / periods
    wavelength = 2 * math.pi / inverse
    smooth = (old_len / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    result = torch.where(wavelength > old_len / low, inverse / factor, inverse)
    between = ~(wavelength < old_len / high) & ~(wavelength > old_len / low)
    return torch.where(between, blended, result)


def _yarn(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Peng et al. 2023: a ramp between frequencies that are kept and those that are stretched."""
    import torch

    scaling = config.scaling

    def dim_of(rotations: float) -> float:
        turns = math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi))
        return (config.dims * turns) / (2 * math.log(config.base))

    low, high = dim_of(scaling["beta_fast"]), dim_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(config.dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    stretched = 1.0 / (float(scaling["factor"]) * periods)
    return stretched * (1 - kept) + 1.0 / periods * kept


_KINDS: Final[Mapping[str, Callable[[Any, RopeConfig], Any]]] = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "longrope": _longrope,
    "llama3": _llama3,
    "yarn": _yarn,
}
