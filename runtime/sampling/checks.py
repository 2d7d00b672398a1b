"""Checks of single values: each gives what it found, or a RequestError that names field and range."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NoReturn

from pagec.compiler.errors import RequestError


def bad(field: str, value: object, expected: str) -> NoReturn:
    """Refuses a value."""
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    raise RequestError(f"{text} is not {expected}", place=field)


def number(field: str, value: object, low: float, high: float, expected: str) -> float:
    """A finite number in low..high."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        bad(field, value, expected)
    try:
        number = float(value)
    except OverflowError:
        bad(field, value, expected)
    if not math.isfinite(number) or not low <= number <= high:
        bad(field, value, expected)
    return number


def whole(field: str, value: object, low: int, high: int | None, expected: str) -> int:
    """A whole number in low..high."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        bad(field, value, expected)
    number = int(value)
    if number < low or (high is not None and number > high):
        bad(field, value, expected)
    return number


def flag(field: str, value: object) -> None:
    """True or False, and no number in place of it."""
    if not isinstance(value, bool):
        bad(field, value, "true or false")


def items(field: str, value: object, expected: str) -> tuple[Any, ...]:
    """The items of a list; None is an empty one."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | set | frozenset):
        bad(field, value, expected)
    return tuple(value)


def at_most(field: str, value: object, most: int) -> None:
    """No more than `most` tokens in a list or a map; looks at none of them."""
    if isinstance(value, Sized) and not isinstance(value, str | bytes) and len(value) > most:
        bad(field, f"{len(value)} tokens", f"at most {most}")


def texts(field: str, value: object, expected: str) -> tuple[str, ...]:
    """One text or several, none of them empty."""
    texts = (value,) if isinstance(value, str) else items(field, value, expected)
    for text in texts:
        if not isinstance(text, str) or not text:
            bad(field, text, expected)
    return texts


def token_ids(field: str, value: object, most: int) -> tuple[int, ...]:
    """A list of at most `most` token ids; their upper limit is the model's."""
    expected = "a list of token ids"
    at_most(field, value, most)
    ids = items(field, value, expected)
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:  # a long list is checked fast
        return ids
    return tuple(whole(f"{field}[{i}]", token, 0, None, "a token id") for i, token in enumerate(ids))
