"""The requests of the lease protocol: from the bytes of a body to checked values. Nothing here has
state. docs/fleet.md has the protocol.

A request is a line, `COMMAND topic channel`, and a body: a JSON object after its size. Keys that a
command does not know are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from shmq.gateway.protocol import ProtocolError
from shmq.remote.rows import MOST_BYTES, MOST_CREDIT, MOST_ROWS

#: The most bytes of a body; of COMMIT, which names the attempts of many tasks.
_BODY: Final = 16 << 10
_LONG_BODY: Final = 1 << 20
#: The longest time that a request waits for messages, in seconds.
MOST_WAIT: Final = 30.0
#: Attempts that one commit may name.
_ATTEMPTS: Final = 16_384

_U32: Final = (1 << 32) - 1
_U64: Final = (1 << 64) - 1
_I62: Final = (1 << 62) - 1

Values = dict[str, Any]


@dataclass(frozen=True)
class _Key:
    """A key of a body."""

    check: Callable[[Any], bool]
    words: str
    """How its values are described."""
    default: Any = None
    needed: bool = False


@dataclass(frozen=True)
class Command:
    """A command: how many names its line has, and the keys of its body."""

    names: tuple[int, ...]
    """0: none, 1: a topic, 2: a topic and a channel."""
    keys: dict[str, _Key] = field(default_factory=dict)
    most: int = _BODY
    rows: bool = False
    """The body has rows: a size, the JSON object, and the rows."""


def _whole(least: int, most: int, **how: Any) -> _Key:
    def check(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return _Key(check, f"a whole number from {least} to {most}", **how)


def _seconds(most: float, least: float = 0.0, **how: Any) -> _Key:
    def check(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most

    return _Key(check, f"seconds from {least:g} to {most:g}", **how)


def _text(most: int, **how: Any) -> _Key:
    def check(value: Any) -> bool:
        return (
            type(value) is str
            and 1 <= len(value) <= most
            and "\0" not in value
            and 1 <= len(value.encode("utf-8", "replace")) <= most
            and value.isprintable()
        )

    return _Key(check, f"1 to {most} bytes of printable text", **how)


def _switch(**how: Any) -> _Key:
    return _Key(lambda value: type(value) is bool, "true or false", default=False, **how)


def _is_hex(value: Any, digits: int) -> bool:
    return type(value) is str and len(value) == digits and set(value) <= set("0123456789abcdef")


def _is_holder(value: Any) -> bool:
    """A number of 64 bits is a text, because many a JSON parser makes it a float."""
    return (
        type(value) is list
        and len(value) == 2
        and type(value[0]) is int
        and 0 <= value[0] <= _U32
        and _is_hex(value[1], 16)
    )


def _is_secret(value: Any) -> bool:
    return type(value) is str and 16 <= len(value) <= 200 and value.isprintable()


def _is_attempt(value: Any) -> bool:
    return _is_hex(value, 32)


def _are_attempts(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= _ATTEMPTS
        and all(
            type(item) is dict
            and _is_attempt(item.get("attempt"))
            and all(type(item.get(key)) is int for key in ("rows", "size"))
            and 1 <= item["rows"] <= item["size"] <= _I62
            for item in value
        )
    )


_IDENTITY: Final = {"identity": _text(64)}
_HOLDER: Final = _Key(_is_holder, "[entry, 16 hexadecimal digits], as LHOLD gives it", needed=True)
_SECRET: Final = _Key(_is_secret, "16 to 200 printable characters")
_OWN: Final = _Key(_is_secret, f"{_SECRET.words}, as STAGE had or gave it", needed=True)
_OF_HOLDER: Final = {**_IDENTITY, "holder": _HOLDER}
_LEASE: Final = _whole(1, _U64, needed=True)
_TIME: Final = _seconds(1e9, 0.001)
_WRITER: Final = {"writer": _text(800, needed=True), "epoch": _whole(0, _I62, needed=True)}

COMMANDS: Final[dict[bytes, Command]] = {
    b"LINFO": Command((0, 2), {"stats": _switch()}),
    b"LMAKE": Command((1, 2), {}),
    b"LHOLD": Command(
        (2,),
        {
            "name": _text(79, needed=True),
            "ttl": _TIME,
            "grace": _TIME,
            "holder": _Key(_is_holder, _HOLDER.words),
            "secret": _SECRET,
            "free": _switch(),
            **_IDENTITY,
        },
    ),
    b"LKEEP": Command((2,), _OF_HOLDER),
    b"LCLOSE": Command((2,), _OF_HOLDER),
    b"LLIST": Command((2,), _OF_HOLDER),
    b"LLOOK": Command((2,), {**_OF_HOLDER, "lease": _LEASE, "replay": _switch()}),
    b"LFIN": Command((2,), {**_OF_HOLDER, "through": _whole(0, _U64, needed=True)}),
    b"LRET": Command((2,), {**_OF_HOLDER, "lease": _LEASE}),
    b"LWAIT": Command((2,), {**_OF_HOLDER, "timeout": _seconds(MOST_WAIT, default=0)}),
    b"LEASE": Command(
        (2,),
        {
            **_OF_HOLDER,
            "n": _whole(1, _U32, needed=True),
            "max_bytes": _whole(0, (1 << 63) - 1),
            "parts": _whole(1, 32, default=1),
            "parent": _whole(0, _U64, default=0),
            "after": _whole(0, _U64),
            "timeout": _seconds(MOST_WAIT, default=0),
        },
    ),
    b"LREAD": Command(
        (2,),
        {
            **_IDENTITY,
            "holder": _Key(_is_holder, _HOLDER.words),
            "secret": _SECRET,
            "lease": _LEASE,
            "part": _whole(0, 31, default=0),
            "from": _whole(0, _U64, default=0),
            "rows": _whole(1, MOST_ROWS, default=16_384),
            "bytes": _whole(1, MOST_BYTES, default=512 << 10),
            "credit": _whole(1, MOST_CREDIT, default=8 << 20),
            "properties": _switch(),
        },
    ),
    b"STAGE": Command(
        (1,),
        {
            **_WRITER,
            "secret": _SECRET,
            "attempt": _Key(_is_attempt, "32 hexadecimal digits", needed=True),
            "at": _whole(0, _I62, needed=True),
            "rows": _whole(1, _U32, needed=True),
        },
        0,
        True,
    ),
    b"COMMIT": Command(
        (1,),
        {
            **_WRITER,
            "secret": _OWN,
            "attempts": _Key(_are_attempts, "the attempts", needed=True),
            "memory": _text(64),
            "skip": _switch(),
        },
        _LONG_BODY,
    ),
    b"ABANDON": Command((1,), {**_WRITER, "secret": _OWN}),
}


def parse(name: bytes, body: bytes) -> Values:
    """The values of a body, with defaults for those that are missing or null. Raises
    ProtocolError."""
    what = name.decode()
    try:
        found = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ProtocolError("E_BAD_BODY", f"{what} failed to decode JSON body") from None
    if type(found) is not dict:
        raise ProtocolError("E_BAD_BODY", f"{what} body is no JSON object")
    values: Values = {}
    for key, rule in COMMANDS[name].keys.items():
        value = found.get(key)
        if value is None:
            if rule.needed:
                raise ProtocolError("E_BAD_BODY", f"{what} needs {key}: {rule.words}")
            values[key] = rule.default
        elif rule.check(value):
            values[key] = value
        else:
            raise ProtocolError("E_BAD_BODY", f"{what} {key} must be {rule.words}")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(name)
