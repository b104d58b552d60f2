"""The documents with which a gateway answers, checked before anything of them is used.

A gateway may be another program than it should be, and its answers are JSON of any shape. Each key
that the client reads has its type here; a document that is not so ends in a ShmqError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from shmq.leased import Lease
from shmq.peers.documents import BadAnswer, flag, inner, number, text
from shmq.remote.counts import ChannelCounts

_Check = Callable[[dict[str, Any], str], object]

#: Characters of a name, or of an identity.
_LONGEST: Final = 400
_MOST_LIST: Final = 4096
_NUMBERS_OF_A_LEASE: Final = len(fields(Lease))


def _word(item: dict[str, Any], key: str) -> None:
    if not text(item, key, most=_LONGEST).isprintable():
        raise BadAnswer(f"{key} has characters that cannot be printed")


def _lease_in(value: Any, key: str) -> None:
    if not isinstance(value, list) or len(value) != _NUMBERS_OF_A_LEASE:
        raise BadAnswer(f"{key} is no lease")
    for each in value:
        if not isinstance(each, int) or not 0 <= each < 2**64:
            raise BadAnswer(f"{key} has something that is no count")


def _lease(item: dict[str, Any], key: str) -> None:
    _lease_in(item.get(key), key)


def _perhaps_lease(item: dict[str, Any], key: str) -> None:
    if item.get(key) is not None:
        _lease(item, key)


def _leases(item: dict[str, Any], key: str) -> None:
    found = item.get(key)
    if not isinstance(found, list) or len(found) > _MOST_LIST:
        raise BadAnswer(f"{key} is no list of leases")
    for each in found:
        _lease_in(each, key)


def _holder(item: dict[str, Any], key: str) -> None:
    found = item.get(key)
    if not isinstance(found, list) or len(found) != 2:
        raise BadAnswer(f"{key} is no holder")
    entry, bits = found
    if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < 2**32:
        raise BadAnswer(f"{key} has something that is no count")
    if not isinstance(bits, str) or not re.fullmatch("[0-9a-f]{16}", bits):
        raise BadAnswer(f"{key} has something that is no proof")


def _seconds(item: dict[str, Any], key: str) -> None:
    found = item.get(key, 0)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < 2**40:
        raise BadAnswer(f"{key} is no number of seconds")


def _limits(item: dict[str, Any], key: str) -> None:
    found = inner(item, key)
    if len(found) > _MOST_LIST:
        raise BadAnswer(f"{key} are {len(found)}, of at most {_MOST_LIST}")
    for name in found:
        if not name.isprintable() or len(name) > _LONGEST:
            raise BadAnswer(f"{key} has a name that cannot be printed")
        value = found[name]
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
            raise BadAnswer(f"{key}.{name} is no number")


def _counts(item: dict[str, Any], key: str) -> None:
    if key not in item:
        return
    found = inner(item, key)
    for field in fields(ChannelCounts):
        if field.name not in found:
            continue
        if field.name == "paused":
            flag(found, "paused", f"{key}.")
        elif field.name == "oldest_age":
            age = found["oldest_age"]
            if age is not None and (
                isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age < 1e12
            ):
                raise BadAnswer(f"{key}.oldest_age is no age")
        else:
            number(found, field.name, f"{key}.")


_ASKED_TWICE: Final = {"identity": _word}

#: Command, with the number of its names where that matters -> the keys that its answer must have.
_SHAPES: Final[dict[str, dict[str, _Check]]] = {
    "LINFO": {"memory": _word, "instance": _word, "limits": _limits},
    "LINFO/2": {"memory": _word, "identity": _word, "depth": number, "stats": _counts},
    "LMAKE": {},
    "LHOLD": {**_ASKED_TWICE, "holder": _holder, "ttl": _seconds},
    "LEASE": {**_ASKED_TWICE, "lease": _perhaps_lease},
    "LWAIT": {"ready": flag},
    "LLOOK": {"lease": _lease},
    "LLIST": {"leases": _leases},
    "LFIN": {"messages": number},
    "LRET": {"messages": number},
    "LKEEP": {},
    "LCLOSE": {},
    "STAGE": {"memory": _word, "size": number},
    "COMMIT": {"published": number, "done": flag},
    "ABANDON": {},
}


def check(command: str, names: int, document: dict[str, Any]) -> None:
    """Check the document that answers a command with so many names. Raises BadAnswer."""
    shape = _SHAPES.get(f"{command}/{names}", _SHAPES.get(command))
    assert shape is not None, f"{command} has no shape of its answer"
    for key, checked in shape.items():
        checked(document, key)


def check_identity(document: dict[str, Any]) -> None:
    """Check the answer to IDENTIFY, as far as it is used. Raises BadAnswer."""
    for key in ("leases", "auth_required"):
        if key in document:
            flag(document, key)
    if "max_rdy_count" in document:
        number(document, "max_rdy_count", most=2**31 - 1)
