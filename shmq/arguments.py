"""Checks of arguments that several calls share, with the errors and the words of the extension."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

#: Seconds above which a wait is one without a limit: the system's clocks end a little later.
LONGEST: Final = 1e9

_ADVICE: Final = {
    True: "encode it first: text.encode()",
    False: "make bytes of it first: pickle.dumps(object), or json.dumps(object).encode()",
}


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


def counted(name: str, value: int, most: int) -> int:
    """The value of an argument that counts from 1 to `most`. Raises TypeError and ValueError."""
    if not 1 <= whole(name, value) <= most:
        raise ValueError(f"{name} must be from 1 to {most}, not {value}")
    return operator.index(value)


def delay(name: str, value: float) -> float:
    """The value of an argument that is a delay in seconds. Raises TypeError and ValueError."""
    seconds = number(name, value)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} must be a number of seconds, 0 or more, not {value!r}")
    return seconds


def limit(name: str, value: float | None) -> float | None:
    """The value of an argument that is a time limit in seconds, at most LONGEST; None: no limit.
    Raises TypeError and ValueError."""
    if value is None:
        return None
    try:
        seconds = number(name, value)
    except TypeError:
        raise TypeError(f"{name} must be None or a number of seconds, not {value!r}") from None
    if not seconds >= 0:
        raise ValueError(f"{name} must be None or a number of seconds, 0 or more, not {value!r}")
    return min(seconds, LONGEST)


def body(tried: str, value: Any, index: int | None = None) -> bytes:
    """The bytes of a message's body. tried: what fails without it. index: of one of many. Raises
    TypeError for what is not bytes-like: `bytes` would make five zeros of the number 5."""
    if type(value) is bytes:
        return value
    try:
        with memoryview(value) as view:
            return view.tobytes()
    except TypeError:
        which = "a body" if index is None else f"body {index}"
        raise TypeError(
            f"{tried}: {which} must be bytes-like, not {type(value).__name__}; "
            f"{_ADVICE[isinstance(value, str)]}"
        ) from None


def bodies(call: str, values: Iterable[Any]) -> Iterable[Any]:
    """The argument of a call that takes many bodies. Raises TypeError for one, and for none."""
    if isinstance(values, str | bytes | bytearray | memoryview):
        raise TypeError(f"{call} takes many bodies; use publish for one")
    if not isinstance(values, Iterable):
        raise TypeError(f"{call} takes an iterable of bodies, not {type(values).__name__}")
    return values
