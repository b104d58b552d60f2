"""Checks of arguments that several calls share, with the errors and the words of the extension."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Final

#: Seconds above which a wait is one without a limit: the system's clocks end a little later.
LONGEST: Final = 1e9
#: The largest id of a lease and number of bytes, and the largest count of messages.
MOST: Final = (1 << 63) - 1
MOST_NUMBER: Final = (1 << 32) - 1

_ADVICE: Final = {
    True: "encode it first: text.encode()",
    False: "make bytes of it first: pickle.dumps(object), or json.dumps(object).encode()",
}


def number(name: str, value: float) -> float:
    """The value of an argument in seconds; a whole number that no float holds is infinite. Raises
    TypeError."""
    try:
        return float(value + 0)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except TypeError:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}") from None


def whole(name: str, value: int) -> int:
    """The value of an argument that is a count. Raises TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None


def counted(name: str, value: int, most: int = MOST, least: int = 1) -> int:
    """The value of an argument that counts from `least` to `most`. Raises TypeError and
    ValueError."""
    if not least <= whole(name, value) <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")
    return operator.index(value)


def lease(name: str, value: int) -> int:
    """The value of an argument that is the id of a lease; 0: of none. Raises TypeError and
    ValueError."""
    return counted(name, value, least=0)


def reading(part: int, rows: int, max_bytes: int) -> tuple[int, int, int]:
    """The arguments of a call that reads a part of a lease. rows, max_bytes: lowered to what any
    batch has. Raises TypeError and ValueError."""
    return (
        counted("part", part, least=0, most=MOST_NUMBER),
        min(counted("rows", rows), MOST_NUMBER),
        counted("max_bytes", max_bytes),
    )


def delay(name: str, value: float, endless: bool = False) -> float:
    """The value of an argument that is a delay in seconds. endless: it may be infinite. Raises
    TypeError and ValueError."""
    seconds = number(name, value)
    if not 0 <= seconds < math.inf and not (endless and seconds == math.inf):
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
