"""Rotary position embedding (Su et al. 2021): its settings, and the table of cosines and sines.

Frequencies are made at compile time (ops/frequencies.py); angles are formed in float32, as in Hugging Face
transformers. The cosine of a float32 angle is taken in float64 and rounded once, which makes the table
independent of any library's float32 cosine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
_OLD_LENGTH: Final = "original_max_position_embeddings"
# What each kind needs beside base and dims.
SCALING: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _OLD_LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _OLD_LENGTH),
    "yarn": ("factor", _OLD_LENGTH),
    "longrope": ("short_factor", "long_factor", _OLD_LENGTH),
    "factors": ("factors",),  # one divisor for each frequency, as GGUF files carry them
}
# What it may be given beside.
OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
}
KINDS: Final = tuple(SCALING)


class RopeError(ValueError):
    """A setting of rope is missing, unknown to its kind, or of a wrong type; `key` names it."""

    def __init__(self, key: str, message: str, remedy: str = "mend the rope param") -> None:
        super().__init__(message)
        self.key = key
        self.remedy = remedy


def settings_of(kind: str) -> tuple[str, ...]:
    """All settings that a kind reads beside base, dims, kind and interleaved."""
    return (*SCALING.get(kind, ()), *OPTIONAL.get(kind, ()))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`dims` of each head are turned; cosines and sines are multiplied by `scale`; `scaling` holds what the
    kind needs (factor, ...)."""

    base: float
    dims: int
    kind: str = "default"
    interleaved: bool = False
    scale: float = 1.0
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_attrs(attrs: Mapping[str, Any]) -> RopeConfig:
        """From a rope node's attributes."""
        own = {"base", "dims", "kind", "interleaved", "scale"}
        return RopeConfig(
            base=float(attrs["base"]),
            dims=int(attrs["dims"]),
            kind=str(attrs.get("kind", "default")),
            interleaved=bool(attrs.get("interleaved", False)),
            scale=float(attrs.get("scale", 1.0)),
            scaling={key: value for key, value in attrs.items() if key not in own},
        )


def checked_attrs(settings: Mapping[str, Any], length: int, model_length: int) -> dict[str, Any]:
    """A map of rope settings as a rope node's attributes, in one order and without what is the default.

    `length` is the artifact's maximum length, `model_length` the model's own: what depends on a sequence's
    length is fixed here, or chunking a prompt would change results. Thus "dynamic" becomes another base, and
    "longrope" one of its two lists. RopeError names a setting that is missing, unknown to the kind, or of a
    wrong type.
    """
    kind = settings.get("kind", "default")
    if not isinstance(kind, str) or kind not in SCALING:
        raise RopeError("kind", f"there is no rope kind {kind!r}; known: {', '.join(KINDS)}")
    known = ("base", "dims", "kind", "interleaved", *settings_of(kind))
    unknown = [key for key in settings if key not in known]
    if unknown:
        remedy = f"its settings are {', '.join(known)}"
        raise RopeError(unknown[0], f"rope of kind {kind} takes no {', '.join(unknown)}", remedy)
    attrs: dict[str, Any] = {"base": _positive(settings, "base"), "dims": _dims(settings)}
    if kind not in ("default", "dynamic"):
        attrs["kind"] = kind
    if _flag(settings, "interleaved", False):
        attrs["interleaved"] = True
    try:
        return attrs | _scaling_attrs(kind, settings, attrs, length, model_length)
    except ArithmeticError as error:
        raise RopeError("kind", f"rope of kind {kind}: its numbers are too large or too small") from error


def _scaling_attrs(
    kind: str, settings: Mapping[str, Any], attrs: Mapping[str, Any], length: int, model_length: int
) -> dict[str, Any]:
    match kind:
        case "dynamic":
            return {"base": _dynamic_base(settings, attrs, length)}
        case "longrope":
            return _longrope(settings, attrs["dims"], length, model_length)
        case "factors":
            return {"factors": _factors(settings, "factors", attrs["dims"])}
    found: dict[str, Any] = {key: _positive(settings, key) for key in SCALING[kind]}
    if kind == "llama3" and found["high_freq_factor"] <= found["low_freq_factor"]:
        raise RopeError("high_freq_factor", "rope's high_freq_factor must be above its low_freq_factor")
    if kind == "yarn":
        found["beta_fast"] = _positive(settings, "beta_fast", 32.0)
        found["beta_slow"] = _positive(settings, "beta_slow", 1.0)
        found["truncate"] = _flag(settings, "truncate", True)
        found |= _scale(_yarn_scale(settings, found["factor"]))
    return found


def _dynamic_base(settings: Mapping[str, Any], attrs: Mapping[str, Any], length: int) -> float:
    """The "NTK" base (reddit, u/emozilla 2023) for sequences of the artifact's length."""
    factor, old_length = _positive(settings, "factor"), _positive(settings, _OLD_LENGTH)
    dims = attrs["dims"]
    if dims == 2:
        raise RopeError("dims", "rope of kind dynamic needs more than 2 dims")
    stretch = (factor * max(length, old_length) / old_length) - (factor - 1)
    return float(attrs["base"] * stretch ** (dims / (dims - 2)))


def _longrope(settings: Mapping[str, Any], dims: int, length: int, model_length: int) -> dict[str, Any]:
    short, long = (_factors(settings, key, dims) for key in ("short_factor", "long_factor"))
    old_length = _positive(settings, _OLD_LENGTH)
    if old_length <= 1:
        raise RopeError(_OLD_LENGTH, f"rope's {_OLD_LENGTH} must be above 1, not {old_length}")
    factor = _positive(settings, "factor", model_length / old_length)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old_length))
    scale = _positive(settings, "attention_factor", scale)
    return {"factors": long if length > old_length else short, **_scale(scale)}


def _yarn_scale(settings: Mapping[str, Any], factor: float) -> float:
    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    default = of(1.0)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        default = of(_positive(settings, "mscale")) / of(_positive(settings, "mscale_all_dim"))
    return _positive(settings, "attention_factor", default)


def _scale(value: float) -> dict[str, float]:
    return {} if value == 1.0 else {"scale": value}


def _positive(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = settings.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    problem = f"must be a number above zero, not {value!r}" if value is not None else "is missing"
    raise RopeError(key, f"rope's {key} {problem}")


def _flag(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RopeError(key, f"rope's {key} must be true or false, not {value!r}")
    return value


def _dims(settings: Mapping[str, Any]) -> int:
    """A share of a head, head_dim * 0.25, may come as a whole float."""
    dims = settings.get("dims")
    dims = int(dims) if isinstance(dims, float) and dims.is_integer() else dims
    if not isinstance(dims, int) or isinstance(dims, bool) or dims < 2:
        raise RopeError("dims", f"rope's dims must be a positive even number, not {dims!r}")
    return dims


def _factors(settings: Mapping[str, Any], key: str, dims: int) -> tuple[float, ...]:
    values = settings.get(key)
    if not isinstance(values, tuple) or len(values) != dims // 2:
        problem = f"rope's {key} must be a list of {dims // 2} numbers, one for each pair of dims"
        raise RopeError(key, problem)
    return tuple(_positive({key: value}, key) for value in values)


def cos_sin_of(inverse: F32, length: int, scale: float = 1.0) -> tuple[F32, F32]:
    """Tables [length, dims/2] of the cosine and sine of position x frequency; made at load."""
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse[None, :]
    wide = angles.astype(np.float64)
    cos, sin = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
    return (cos, sin) if scale == 1.0 else (cos * np.float32(scale), sin * np.float32(scale))
