"""The errors of shmq, made by the extension from the status table of native/include/shmq.h.

`ShmqError` is the root. Each error says what was tried, on what, and what to do.

* `NotRunning`: no supervisor runs this instance (start `shmq serve`, or `attach(timeout=...)`)
* `Full`: no room in memory, or the shared memory file system is full; nothing was published
* `MessageTooBig`: the message or batch can never fit; also a ValueError
* `BadName`: a topic, channel or instance name breaks the rules of `shmq.names`; also a ValueError
* `NotInFlight`: finish, requeue or touch of a message this consumer does not hold (any more)
* `Gone`: the topic, channel or broker was deleted or closed
* `LayoutMismatch`: the shared memory was made by another version or build of shmq
* `LeaseLost`: the lease has ended: its time was over, or an administrator ended it
* `LeaseFenced`: somebody else leases under this name now
* `TooManyClients`: every one of the 1024 client entries is taken
"""

from shmq._native import (
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
