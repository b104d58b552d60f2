"""The errors of shmq. The text of each says what was tried, on what, and what to do.

The extension raises those that the status table of native/include/shmq.h names; it takes them from
here when it is loaded. An option of `Broker` that is out of bounds raises `OptionError`, a
ValueError that is no ShmqError. An option that does not exist raises TypeError, as for any
function.
"""

from __future__ import annotations

import queue
import sys


class ShmqError(Exception):
    """The base class of the errors of shmq."""


class NotRunning(ShmqError):
    """No supervisor runs this instance: start `shmq serve`, or wait with `attach(timeout=...)`."""


class Full(ShmqError, queue.Full):
    """There is no room in memory, and none came in time, or the shared memory file system is full.
    Nothing was published."""


class Rejected(Full):
    """A channel has reached its limit, and its settings say `overflow=reject`. Nothing was
    published in any channel, and the call did not wait."""


class MessageTooBig(ShmqError, ValueError):
    """The message or batch can never fit."""


class BadName(ShmqError, ValueError):
    """The name of a topic, channel or instance breaks the rules of `shmq.names`."""


class BadArgument(ShmqError, ValueError):
    """An argument is out of range, for example an empty body or a delay that is too long."""


class BadObject(BadArgument):
    """The bytes are not an object that shmq packed."""


class NotInFlight(ShmqError):
    """The message is not, or no longer, in flight to this consumer."""


class Gone(ShmqError):
    """The topic or channel was deleted, or the broker was stopped or closed; the text says which.
    For a name that the result of `stats()` does not have, it is also a KeyError."""


class LayoutMismatch(ShmqError):
    """Another version or build of shmq made the shared memory, or its contents cannot be right."""


class TooManyClients(ShmqError):
    """All 1024 client entries are taken."""


class OtherNamespace(ShmqError):
    """The broker is in another PID namespace (another container), so its pids mean other processes
    here."""


class NotSealed(ShmqError):
    """The topic belongs to a pool or a queue, which unpickles what is in it, so nothing else may
    publish there. Nothing was published. Also a message that may not be unpickled."""


class LeaseLost(ShmqError):
    """The lease has ended: its time was over, or an administrator ended it."""


class LeaseFenced(ShmqError):
    """Another holder has opened the name since."""


class MemoryLost(LeaseLost):
    """The broker on another host was started with fresh memory, or the channel was created again,
    so its leases and the marks of its writers are gone."""


class Unreachable(NotRunning):
    """A broker on another host did not answer within the timeout of `connect`."""


class Unauthorized(ShmqError):
    """A broker on another host refused the secret, or does not permit this with it."""


class Unconfirmed(ShmqError):
    """The connection broke after a publish was sent and before it was answered: the messages may or
    may not have been published."""


if sys.version_info >= (3, 13):
    from queue import ShutDown
else:

    class ShutDown(Exception):
        """The queue was shut down: nothing can be put, and nothing is left to get. From Python 3.13
        on it is `queue.ShutDown`."""


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
for _name in __all__:
    if _name != "ShutDown":
        globals()[_name].__module__ = "shmq"  # where its users find it


# ---- inside shmq ----


class Busy(ShmqError):
    """A stopped process holds a lock: the supervisor's loops serve other queues first."""


class Forked(ShmqError):
    """The handle is the parent's: the public classes attach again and try again."""


class NeedBacklog(ShmqError):
    """The topic has no queue to publish to yet: `on_backlog` of Producer is called."""


class NotReady(LayoutMismatch):
    """The segment is being made, or its creator died: `attach` waits for it."""
