"""Bodies of requests, from bytes to values of the types that were asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

#: Levels of lists and objects inside each other.
_DEEPEST: Final = 16


def parsed(body: bytes) -> Any:
    """The value of a JSON document in UTF-8. Raises ValueError, with a sentence."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("the body is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"the body has more than {_DEEPEST} levels") from None
    except ValueError as exc:
        said = str(exc) if isinstance(exc, json.JSONDecodeError) else "a number is none"
        raise ValueError(f"the body is not JSON: {said[:100]}") from None
    _check_depth(value, _DEEPEST)
    return value


def typed(body: bytes, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The object of a body. fields: the type of each value that it may have; `null` counts as a
    field that is missing. Raises ValueError, with a sentence."""
    value = parsed(body)
    if not isinstance(value, dict):
        raise ValueError("the body is an object")
    found = {}
    for name, item in value.items():
        if item is None:
            continue
        wanted = fields.get(name)
        if wanted is None:
            raise ValueError(f"there is no field {name[:50]!r}; there are {', '.join(fields)}")
        types = wanted if isinstance(wanted, tuple) else (wanted,)
        if not isinstance(item, types) or (isinstance(item, bool) and bool not in types):
            raise ValueError(f"{name} is {_name(types)}, not {_name((type(item),))}")
        if isinstance(item, str) and any("\ud800" <= sign <= "\udfff" for sign in item):
            raise ValueError(f"{name} is no text: it has half a character")
        found[name] = item
    return found


_NAMES: Final = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def _name(types: tuple[type, ...]) -> str:
    return " or ".join(_NAMES[each] for each in types)


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number of the body is too large")
    items: Any = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    if not left and items:
        raise ValueError(f"the body has more than {_DEEPEST} levels")
    for item in items:
        _check_depth(item, left - 1)
