"""Rotary position embedding (Su et al. 2021): settings, frequencies, and the table of cosines and sines.

Frequencies and angles are formed in float32, in the steps of Hugging Face transformers, since at position
100,000 another rounding of an angle is a visible difference. The cosine of a float32 angle is taken in
float64 and rounded once, which makes the table independent of any library's float32 cosine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
# What each kind needs beside base and dims.
SCALING: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),  # one divisor for each frequency, as GGUF files carry them
}
KINDS: Final = tuple(SCALING)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`dims` of each head are turned; `scaling` holds what the kind needs (factor, ...)."""

    base: float
    dims: int
    kind: str = "default"
    interleaved: bool = False
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_attrs(attrs: Mapping[str, Any]) -> RopeConfig:
        """From a rope node's attributes."""
        own = {"base", "dims", "kind", "interleaved"}
        return RopeConfig(
            base=float(attrs["base"]),
            dims=int(attrs["dims"]),
            kind=str(attrs.get("kind", "default")),
            interleaved=bool(attrs.get("interleaved", False)),
            scaling={key: value for key, value in attrs.items() if key not in own},
        )


def checked_attrs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A map of rope settings as a rope node's attributes, in one order and without what is the default.

    ValueError names a setting that is missing, unknown to the kind, or of a wrong type.
    """
    kind = settings.get("kind", "default")
    if not isinstance(kind, str) or kind not in SCALING:
        raise ValueError(f"there is no rope kind {kind!r}; known: {', '.join(KINDS)}")
    unknown = [key for key in settings if key not in ("base", "dims", "kind", "interleaved", *SCALING[kind])]
    if unknown:
        raise ValueError(f"rope of kind {kind} takes no {', '.join(unknown)}")
    attrs: dict[str, Any] = {"base": _positive(settings, "base"), "dims": settings.get("dims")}
    if not isinstance(attrs["dims"], int) or isinstance(attrs["dims"], bool) or attrs["dims"] < 2:
        raise ValueError(f"rope's dims must be a positive even number, not {attrs['dims']!r}")
    if kind != "default":
        attrs["kind"] = kind
    interleaved = settings.get("interleaved", False)
    if not isinstance(interleaved, bool):
        raise ValueError(f"rope's interleaved must be true or false, not {interleaved!r}")
    if interleaved:
        attrs["interleaved"] = True
    for key in SCALING[kind]:
        attrs[key] = _factors(settings, attrs["dims"]) if key == "factors" else _positive(settings, key)
    if kind == "llama3" and attrs["high_freq_factor"] <= attrs["low_freq_factor"]:
        raise ValueError("rope's high_freq_factor must be above its low_freq_factor")
    return attrs


def _positive(settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise ValueError(f"rope's {key} must be a number above zero, not {value!r}")


def _factors(settings: Mapping[str, Any], dims: int) -> tuple[float, ...]:
    values = settings.get("factors")
    if not isinstance(values, tuple) or len(values) != dims // 2:
        raise ValueError(f"rope's factors must be a list of {dims // 2} numbers, one for each pair of dims")
    return tuple(_positive({"factors": value}, "factors") for value in values)


def frequencies(config: RopeConfig) -> F32:
    """Radians per position for each of the dims/2 pairs."""
    exponents = np.arange(0, config.dims, 2, dtype=np.float32) / np.float32(config.dims)
    inverse: F32 = np.divide(1, np.power(np.float32(config.base), exponents), dtype=np.float32)
    match config.kind:
        case "default":
            return inverse
        case "linear":
            linear: F32 = np.divide(inverse, np.float32(config.scaling["factor"]), dtype=np.float32)
            return linear
        case "llama3":
            return _llama3(inverse, config.scaling)
        case "factors":
            divided: F32 = np.divide(inverse, np.float32(config.scaling["factors"]), dtype=np.float32)
            return divided
    raise ValueError(f"no rope kind {config.kind!r}; known: {', '.join(KINDS)}")


def _llama3(inverse: F32, scaling: Mapping[str, Any]) -> F32:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    old_len = float(scaling["original_max_position_embeddings"])
    wavelength = np.float32(2 * np.pi) / inverse
    smooth = (np.float32(old_len) / wavelength - np.float32(low)) / np.float32(high - low)
    stretched = inverse / np.float32(factor)
    blended = (np.float32(1) - smooth) * stretched + smooth * inverse
    long, short = wavelength > old_len / low, wavelength < old_len / high
    return np.where(long, stretched, np.where(short, inverse, blended)).astype(np.float32)


def cos_sin(config: RopeConfig, length: int) -> tuple[F32, F32]:
    """Tables [length, dims/2] of the cosine and sine of position x frequency."""
    return cos_sin_of(frequencies(config), length)


def cos_sin_of(inverse: F32, length: int) -> tuple[F32, F32]:
    """The same from given frequencies; what the runtime computes at load."""
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse[None, :]
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
