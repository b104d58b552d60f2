"""The error frames of the protocol, and the exceptions that they stand for.

A frame is `CODE text`. After one of `KEPT` the connection stays open; after any other the server
closes it.
"""

from __future__ import annotations

import re
from typing import Final

from shmq.errors import (
    BadArgument,
    BadName,
    Full,
    Gone,
    LeaseFenced,
    LeaseLost,
    MemoryLost,
    MessageTooBig,
    NotInFlight,
    NotRunning,
    NotSealed,
    Rejected,
    ShmqError,
    Unauthorized,
)
from shmq.printing import said

#: Code -> exception. The first class that fits an error of the broker names its code.
KEPT: Final[dict[str, type[ShmqError]]] = {
    "E_MEMORY_LOST": MemoryLost,
    "E_LEASE_LOST": LeaseLost,
    "E_LEASE_FENCED": LeaseFenced,
    "E_NOT_SEALED": NotSealed,
    "E_REJECTED": Rejected,
    "E_FULL": Full,
    "E_MESSAGE_TOO_BIG": MessageTooBig,
    "E_BAD_NAME": BadName,
    "E_BAD_ARGUMENT": BadArgument,
    "E_NOT_IN_FLIGHT": NotInFlight,
    "E_GONE": Gone,
    "E_NOT_RUNNING": NotRunning,
    "E_FAILED": ShmqError,
}

#: Characters of an error's text.
_LONGEST: Final = 2000

#: nsqd's codes that are more than a ShmqError.
_CLOSED: Final[dict[str, type[ShmqError]]] = {
    "E_UNAUTHORIZED": Unauthorized,
    "E_AUTH_FIRST": Unauthorized,
    "E_AUTH_FAILED": Unauthorized,
    "E_AUTH_DISABLED": Unauthorized,
    "E_BAD_TOPIC": BadName,
    "E_BAD_CHANNEL": BadName,
    "E_BAD_MESSAGE": BadArgument,
}

_TOO_BIG: Final = re.compile(r"\b(?:(message|body) too big [0-9]+ >|message too big for (memory))")
_ADVICE: Final = {
    "message": "make it smaller, or raise the broker's --max-msg-size",
    "memory": "make it smaller, or raise the broker's --arena-size",
    "body": "publish fewer at a time, or raise the broker's --max-body-size",
}


def code_of(error: ShmqError) -> str:
    """The code of an error of the broker."""
    return next(code for code, kind in KEPT.items() if isinstance(error, kind))


def error_of(frame: bytes, tried: str) -> ShmqError:
    """The exception of an error frame. tried: what was asked, for its text."""
    code, _, text = said(frame, _LONGEST).partition(" ")
    kind = KEPT.get(code) or _CLOSED.get(code)
    if (found := _TOO_BIG.search(text)) is not None:  # nsqd has one code for this and for others
        return MessageTooBig(f"{tried}: {text}; {_ADVICE[found[1] or found[2]]}")
    if kind is None:
        return ShmqError(f"{tried}: {code} {text}")
    return kind(f"{tried}: {text}" if text else f"{tried}: {code}")


def is_kept(frame: bytes) -> bool:
    """Returns True if the connection stays open after this error."""
    return frame.partition(b" ")[0].decode("utf-8", "replace") in KEPT
