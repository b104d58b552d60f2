"""The errors of shmq, made by the extension from the status table of native/include/shmq.h.

`ShmqError` is the root. Each error says what was tried, on what, and what to do.

* `NotRunning`: no supervisor runs this instance (start `shmq serve`, or `attach(timeout=...)`)
* `Full`: no room in memory, or the shared memory file system is full; nothing was published; also a
  `queue.Full`
* `MessageTooBig`: the message or batch can never fit; also a ValueError
* `BadName`: a topic, channel or instance name breaks the rules of `shmq.names`; also a ValueError
* `BadArgument`: an empty body, a delay that is longer than allowed; also a ValueError
* `NotInFlight`: finish, requeue or touch of a message this consumer does not hold (any more)
* `Gone`: the topic or channel was deleted, the broker stopped or closed: the text says which. For
  a name that `stats()` does not have, also a KeyError
* `LayoutMismatch`: the shared memory was made by another version or build of shmq
* `LeaseLost`: the lease has ended: its time was over, or an administrator ended it
* `LeaseFenced`: somebody else leases under this name now
* `TooManyClients`: every one of the 1024 client entries is taken

An option of `Broker` that is out of bounds is an `OptionError`, a ValueError and no ShmqError, and
one that does not exist a TypeError, as of any function.
"""

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
    ShmqError,
    TooManyClients,
)

__all__ = [
    "BadArgument",
    "BadName",
    "Full",
    "Gone",
    "LayoutMismatch",
    "LeaseFenced",
    "LeaseLost",
    "MessageTooBig",
    "NotInFlight",
    "NotRunning",
    "ShmqError",
    "TooManyClients",
]
