"""Powers in float32, to the bit as torch has them on x86 with AVX2.

It takes 16 elements at a time by the steps of Sleef's powf of 1.0 ULP (Shibata and Petrogalli 2020): exp(y
log x) in pairs of float32, whose sum stands for a number of twice the digits. What is left, fewer than 16,
goes through the C library's powf, in whose place stands a power in float64, rounded: they differ once in some
thousand times.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
f32: Final = np.float32
# atanh's series, as Sleef fits it: of the square of (m - 1) / (m + 1), the highest power first.
LOG: Final = (0.240320354700088500976562, 0.285112679004669189453125, 0.400007992982864379882812)
# exp's series less its first terms, the highest power first.
EXP: Final = (
    0.00136324646882712841033936,
    0.00836596917361021041870117,
    0.0416710823774337768554688,
    0.166665524244308471679688,
    0.499999850988388061523438,
)
# log 2 less its last digits, and these.
LN2_HIGH, LN2_LOW = f32(0.693145751953125), f32(1.428606765330187045e-06)
LOG2_E: Final = f32(1.442695040888963407359924681)
# Elements that torch takes at a time.
BLOCK: Final = 16


class Pair(NamedTuple):
    """high + low, of which low is at most half a unit in high's last place: arrays, or single numbers."""

    high: Any
    low: Any


TWO_THIRDS: Final = Pair(*map(f32, (0.66666662693023681640625, 3.69183861259614332084311e-09)))
LN2: Final = Pair(*map(f32, (0.69314718246459960938, -1.904654323148236017e-09)))


def power(base: float, exponents: F32) -> F32:
    """base ** exponents, for a base above zero; neither the base nor a result may be beyond float32."""
    whole = len(exponents) // BLOCK * BLOCK
    rest = np.float64(f32(base)) ** exponents[whole:].astype(np.float64)
    return np.concatenate([by_pairs(base, exponents[:whole]), rest.astype(f32)])


def by_pairs(base: float, exponents: F32) -> F32:
    """The same by Sleef's steps alone."""
    return _exp(_times(_log(np.full_like(exponents, base)), exponents))


def _log(x: F32) -> Pair:
    exponent = (np.frexp(x * f32(1 / 0.75))[1] - 1).astype(f32)
    m = np.ldexp(x, -exponent.astype(np.int32))  # in [0.75, 1.5)
    ratio = _quotient(_sum_of(f32(-1), m), _sum_of(f32(1), m))
    square = _product(ratio, ratio)
    series = _sum2(_times(square, _horner(LOG, square.high)), TWO_THIRDS)
    log = _sum(_times(LN2, exponent), Pair(ratio.high * f32(2), ratio.low * f32(2)))
    return _sum(log, _product(_product(square, ratio), series))


def _exp(x: Pair) -> F32:
    twos = np.rint((x.high + x.low) * LOG2_E)
    rest = _sum2(x, twos * -LN2_HIGH)
    rest = _sum2(rest, twos * -LN2_LOW)
    high = rest.high + rest.low
    rest = Pair(high, (rest.high - high) + rest.low)
    more = _sum(rest, _times(_product(rest, rest), _horner(EXP, rest.high)))
    one = _sum(Pair(f32(1), f32(0)), more)
    found: F32 = np.ldexp(one.high + one.low, twos.astype(np.int32))
    return found


def _horner(factors: tuple[float, ...], x: F32) -> F32:
    total = np.full_like(x, factors[0])
    for factor in factors[1:]:
        total = _fma(total, x, f32(factor))
    return total


# ---------------------------------------------------------------------------------------- pairs


def _fma(x: Any, y: Any, z: Any) -> F32:
    """x y + z, rounded once: the sum in float64 is rounded to odd, so that rounding it again does no harm
    (Boldo and Melquiond 2008)."""
    product, z = np.multiply(x, y, dtype=np.float64), np.float64(z)
    total = np.asarray(product + z)
    part = total - product
    error = (product - (total - part)) + (z - part)
    even = total.view(np.int64) % 2 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(even & (error != 0), odd, total).astype(f32)


def _sum_of(x: Any, y: F32) -> Pair:
    """Exactly x + y."""
    total = x + y
    part = total - x
    return Pair(total, (x - (total - part)) + (y - part))


def _sum2(x: Pair, y: Any) -> Pair:
    """x + y, a pair or a number, whichever is larger."""
    high, low = y if isinstance(y, Pair) else (y, None)
    total, error = _sum_of(x.high, high)
    return Pair(total, error + (x.low if low is None else x.low + low))


def _sum(x: Pair, y: Pair) -> Pair:
    """x + y where |x| is the larger one."""
    total = x.high + y.high
    return Pair(total, (((x.high - total) + y.high) + x.low) + y.low)


def _times(x: Pair, y: F32) -> Pair:
    product = x.high * y
    return Pair(product, _fma(x.low, y, _fma(x.high, y, -product)))


def _product(x: Pair, y: Pair) -> Pair:
    product = x.high * y.high
    low = _fma(x.high, y.high, -product)
    if x is y:
        return Pair(product, _fma(x.high + x.high, x.low, low))
    return Pair(product, _fma(x.high, y.low, _fma(x.low, y.high, low)))


def _quotient(x: Pair, y: Pair) -> Pair:
    inverse = f32(1) / y.high
    quotient = x.high * inverse
    low = _fma(x.low, inverse, _fma(inverse, x.high, -quotient))
    error = _fma(-y.low, inverse, _fma(-y.high, inverse, f32(1)))
    return Pair(quotient, _fma(quotient, error, low))
