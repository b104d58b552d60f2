"""The errors that the extension makes, for hosts that do not have it. tests/unit/test_remote.py
holds the two lists together."""

from __future__ import annotations

import queue


class ShmqError(Exception):
    """The base of shmq's errors."""


class NotRunning(ShmqError):
    """No supervisor runs this instance."""


class Full(ShmqError, queue.Full):
    """There is no room in memory; nothing was published."""


class Rejected(Full):
    """A channel has reached its limit; nothing was published."""


class MessageTooBig(ShmqError, ValueError):
    """The message or batch can never fit."""


class BadName(ShmqError, ValueError):
    """A name breaks the rules of `shmq.names`."""


class BadArgument(ShmqError, ValueError):
    """The body is empty, or a delay is longer than allowed."""


class NotInFlight(ShmqError):
    """The message is not in flight to this consumer (any more)."""


class Gone(ShmqError):
    """The topic or channel was deleted, or the broker stopped or closed."""


class LayoutMismatch(ShmqError):
    """Another version or build of shmq created the shared memory."""


class TooManyClients(ShmqError):
    """All client entries are taken."""


class OtherNamespace(ShmqError):
    """The broker is in another PID namespace."""


class NotSealed(ShmqError):
    """The topic belongs to a pool or a queue, which alone publishes there."""


class LeaseLost(ShmqError):
    """The lease is no longer held: its time was over, or it was ended."""


class LeaseFenced(ShmqError):
    """Another holder has opened the name since."""


def _as_public() -> None:
    for each in ShmqError, *_below(ShmqError):
        each.__module__ = "shmq"


def _below(kind: type[ShmqError]) -> list[type[ShmqError]]:
    found = kind.__subclasses__()
    return [*found, *(below for each in found for below in _below(each))]


_as_public()
