"""JSON of other programs, and the values in it, of which nothing is believed.

A value that is not of the type, or not within the bounds, that its reader needs is a BadAnswer with
the place of the value in its text.
"""

from __future__ import annotations

import json
from typing import Any, Final, Never

from shmq.printing import LONGEST, printable

#: One more than any number of nsqd or shmq.
_MOST_NUMBER: Final = 2**64


class BadAnswer(ValueError):
    """An answer cannot be used; the text says why, and can be printed."""


def parsed(data: bytes | bytearray | memoryview | str) -> Any:
    """The value in a JSON text. Raises BadAnswer, also for what Python alone takes for JSON."""
    try:
        text = data if isinstance(data, str) else bytes(data)
        return json.loads(text, parse_constant=_constant)
    except RecursionError:
        raise BadAnswer("it is nested too deeply") from None
    except BadAnswer:
        raise
    except ValueError as exc:
        raise BadAnswer(f"it is not JSON: {printable(str(exc), LONGEST)}") from None


def _constant(text: str) -> Never:
    raise BadAnswer(f"it is not JSON: {text}")


def table(value: Any, what: str = "it") -> dict[str, Any]:
    """An object. what: its place, for the text of the error."""
    if not isinstance(value, dict):
        raise BadAnswer(f"{what} is not an object")
    return value


def tables(value: Any, key: str, place: str = "") -> list[dict[str, Any]]:
    """A list of objects, under a key."""
    found = listed(value, key, place)
    return [table(item, f"{place}{key}[{index}]") for index, item in enumerate(found)]


def inner(item: dict[str, Any], key: str, place: str = "") -> dict[str, Any]:
    """An object under a key."""
    return table(item.get(key), f"{place}{key}")


def listed(item: dict[str, Any], key: str, place: str = "") -> list[Any]:
    """A list under a key, for which Go may write null."""
    value = item.get(key, "")
    if value is not None and not isinstance(value, list):
        raise BadAnswer(f"{place}{key} is not a list")
    return value or []


def text(item: dict[str, Any], key: str, place: str = "", most: int | None = None) -> str:
    """A text under a key, of at most `most` characters."""
    value = item.get(key)
    if not isinstance(value, str):
        raise BadAnswer(f"{place}{key} is not a string")
    if most is not None and len(value) > most:
        raise BadAnswer(f"{place}{key} has {len(value)} characters, of at most {most}")
    return value


def number(item: dict[str, Any], key: str, place: str = "", most: int = _MOST_NUMBER - 1) -> int:
    """A whole number from 0 to `most` under a key."""
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise BadAnswer(f"{place}{key} is not a count")
    return value


def flag(item: dict[str, Any], key: str, place: str = "") -> bool:
    """True or false under a key."""
    value = item.get(key)
    if not isinstance(value, bool):
        raise BadAnswer(f"{place}{key} is not true or false")
    return value
