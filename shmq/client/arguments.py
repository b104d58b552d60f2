"""Checks of arguments that several calls share."""

from __future__ import annotations

import operator


def number(name: str, value: float) -> float:
    """The value of an argument in seconds. Raises TypeError."""
    try:
        return float(value + 0)
    except TypeError:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None


def whole(name: str, value: int) -> int:
    """The value of an argument that is a count. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
