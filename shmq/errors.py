"""The errors of shmq, which the extension creates from the status table of native/include/shmq.h.

`ShmqError` is their base. The text of each says what was tried, on what, and what to do.

* `NotRunning`: no supervisor runs this instance (start `shmq serve`, or `attach(timeout=...)`)
* `Full`: there is no room in memory, or the shared memory file system is full; nothing was
  published; also a `queue.Full`
* `Rejected`: a channel has reached its limit, and its settings say `overflow=reject`; nothing was
  published in any channel; a `Full` that was not waited for
* `MessageTooBig`: the message or batch can never fit; also a ValueError
* `BadName`: a topic, channel or instance name breaks the rules of `shmq.names`; also a ValueError
* `BadArgument`: the body is empty, or a delay is longer than allowed; also a ValueError
* `BadObject`: the bytes are not an object that shmq packed; a `BadArgument`
* `NotInFlight`: finish, requeue or touch of a message that is not in flight to this consumer (any
  more)
* `Gone`: the topic or channel was deleted, or the broker stopped or closed; the text says which.
  For a name that the result of `stats()` does not have, also a KeyError
* `LayoutMismatch`: another version or build of shmq created the shared memory
* `LeaseLost`: the lease has ended: its time was over, or an administrator ended it
* `LeaseFenced`: another holder has opened the name since
* `TooManyClients`: all 1024 client entries are taken
* `MemoryLost`: the broker on another host was started with fresh memory, or the channel created
  again, so its leases and the marks of its writers are gone; a `LeaseLost`
* `Unreachable`: a broker on another host did not answer within the timeout of `connect`; a
  `NotRunning`
* `Unauthorized`: a broker on another host refused the secret, or does not permit this with it
* `Unconfirmed`: the connection broke after a publish was sent and before it was answered: the
  messages may or may not have been published
* `NotSealed`: the topic belongs to a pool or a queue, which unpickles what is in it, so nothing
  else may publish to it; nothing was published; also a message that may not be unpickled
* `OtherNamespace`: the broker is in another PID namespace (another container): share it
* `ShutDown`: a queue was shut down; `queue.ShutDown` itself from Python 3.13 on, and no ShmqError

An option of `Broker` that is out of bounds raises `OptionError`, a ValueError that is no ShmqError.
An option that does not exist raises TypeError, as for any function.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "shmq._native" in sys.modules:  # `shmq` loads it where there is one
    from shmq._native import (
        BadArgument,
        BadName,
        Full,
        Gone,
        LayoutMismatch,
        LeaseFenced,
        LeaseLost,
        MessageTooBig,
        NotInFlight,
        NotRunning,
        NotSealed,
        OtherNamespace,
        Rejected,
        ShmqError,
        TooManyClients,
    )
else:  # a host without the extension, which can only `connect`
    from shmq.plain_errors import (
        BadArgument,
        BadName,
        Full,
        Gone,
        LayoutMismatch,
        LeaseFenced,
        LeaseLost,
        MessageTooBig,
        NotInFlight,
        NotRunning,
        NotSealed,
        OtherNamespace,
        Rejected,
        ShmqError,
        TooManyClients,
    )


class BadObject(BadArgument):
    """The bytes are not an object that shmq packed."""


class MemoryLost(LeaseLost):
    """The broker was started with fresh memory, or the channel was created again."""


class Unreachable(NotRunning):
    """A broker on another host did not answer in time."""


class Unauthorized(ShmqError):
    """A broker on another host refused the secret, or what it permits."""


class Unconfirmed(ShmqError):
    """The connection broke before a publish was answered."""


if sys.version_info >= (3, 13):
    from queue import ShutDown
else:

    class ShutDown(Exception):
        """The queue was shut down: nothing can be put, and nothing is left to get."""


__all__ = [
    "BadArgument",
    "BadName",
    "BadObject",
    "Full",
    "Gone",
    "LayoutMismatch",
    "LeaseFenced",
    "LeaseLost",
    "MemoryLost",
    "MessageTooBig",
    "NotInFlight",
    "NotRunning",
    "NotSealed",
    "OtherNamespace",
    "Rejected",
    "ShmqError",
    "ShutDown",
    "TooManyClients",
    "Unauthorized",
    "Unconfirmed",
    "Unreachable",
]
