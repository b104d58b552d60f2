"""Leases: sets of messages that can be read any number of times until they are finished."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from shmq import _native, arguments, leased
from shmq.client.handle import Reduction, Shown, home_of, reduction
from shmq.client.properties import unpack
from shmq.errors import ShmqError
from shmq.leased import READ_BYTES, READ_ROWS, Lease, keep_alive
from shmq.option_types import to_ns

if TYPE_CHECKING:
    from shmq.client.disk import Files

#: Largest number of parts that a lease can be split into.
MOST_PARTS: Final = _native.CONSTANTS["LEASE_PARTS"]

#: Attempts at leasing from disk while the supervisor may be moving the same records to memory.
_TRIES: Final = 3


class LeasedBatch(leased.LeasedBatch):
    """Messages read from a lease. They are copies, which stay valid after the lease has ended.
    `len(batch)` is their number; the arrays below have one element per message, `offsets` one
    more."""

    __slots__ = ()

    @staticmethod
    def _unpacked(block: bytes) -> Mapping[str, bytes]:
        return unpack(block)


def read_lease(
    native: _native.Broker,
    queue: int,
    serial: int,
    lease: int,
    part: int,
    files: Callable[[], Files],
    rows: int = READ_ROWS,
    max_bytes: int = READ_BYTES,
    properties: bool = False,
) -> Iterator[LeasedBatch]:
    """Yield one part of a lease in batches. Raises LeaseLost as soon as the lease has ended; the
    batches before were valid."""
    lease = arguments.lease("lease", lease)
    part, rows, max_bytes = arguments.reading(part, rows, max_bytes)

    def look() -> tuple[int, ...]:
        return native.lease_open(queue, serial, lease, part)

    cursor = look()
    start, end = cursor[-3:-1]
    while cursor[-1]:
        before = cursor
        cursor, count, ids, times, attempts, offsets, data = native.lease_read(
            cursor, rows, max_bytes
        )
        blocks = native.lease_properties(before, count) if properties else None
        yield LeasedBatch(count, ids, times, attempts, offsets, data, blocks)
    if start != end:
        for count, found, blocks in files().read(start, end, rows, max_bytes, look, properties):
            yield LeasedBatch(count, *found, blocks)


def _deadline(timeout: float) -> int:
    """When a wait of so many seconds ends (CLOCK_MONOTONIC ns). Raises TypeError and ValueError."""
    return _native.now() + to_ns(min(arguments.delay("timeout", timeout, True), arguments.LONGEST))


@dataclass(frozen=True)
class Elsewhere:
    """Whose a holder is for which this process speaks, because it is on the network."""

    whose: int
    """A hash of its client, 64 bits and not 0."""
    known: bool
    """The client has proven who it is, so it may open its own names without their secret."""
    names: int
    """The most names of a channel that one client may have, and its most open leases there."""
    leases: int


class LeaseHolder(metaclass=Shown):
    """Holds leases of one channel under a name; returned by `Broker.lease_holder`. A context
    manager.

    The name outlives processes: the next process that opens it continues with the open leases, and
    every earlier holder of that name raises LeaseFenced. The leases go back to the head of the
    channel, with one more attempt, when the holder gave no sign of life for `ttl` seconds, or when
    it was closed or its process ended and nobody opened the name again within `grace` seconds.
    Every call is a sign of life; with `keepalive=True` a thread gives them. A forked child must
    open the name again.

    It can be pickled: the copy in another process is the same holder of the same leases and fences
    nobody, but the end of the process that opened the name counts as the holder's end.

    Every method raises LeaseFenced if the name was opened again, and Gone if the channel was
    deleted or the broker closed or stopped.
    """

    _internal = frozenset({"adopt", "leave", "place", "reopened"})

    def __init__(
        self,
        native: _native.Broker,
        queue: int,
        serial: int,
        topic: str,
        channel: str,
        name: str,
        ttl_ns: int,
        grace_ns: int,
        keepalive: bool,
        files: Callable[[], Files],
        proof: tuple[int, int] = (0, 0),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.topic = topic
        self.channel = channel
        self.name = name
        self._native = native
        self._queue, self._serial = queue, serial
        far = elsewhere
        more = () if far is None else (far.whose, far.known, far.names)
        self._holder = native.lease_holder_open(
            queue, serial, name, ttl_ns, grace_ns, *proof, *more
        )
        self._most = 0 if far is None else far.leases
        self._files = files
        self._home = home_of(files)
        self._closed = threading.Event()
        if keepalive and ttl_ns:
            thread = threading.Thread(
                target=keep_alive,
                args=(weakref.WeakMethod(self.touch), self._closed, ttl_ns / 4e9),
                name=f"shmq holder {name}",
                daemon=True,
            )
            thread.start()

    def __reduce__(self) -> Reduction:
        names = (self.topic, self.channel, self.name)
        return reduction(self._home, "holder", *names, self._holder)

    @classmethod
    def reopened(
        cls,
        native: _native.Broker,
        topic: str,
        channel: str,
        name: str,
        holder: tuple[int, int, int, int],
        files: Callable[[], Files],
        most: int = 0,
    ) -> Self:
        """Another handle of the holder that was opened as `holder`. most: the open leases of the
        channel that its client may have; 0: no limit."""
        self = object.__new__(cls)
        self.topic, self.channel, self.name = topic, channel, name
        self._native, self._holder, self._files = native, holder, files
        self._queue, self._serial = holder[:2]
        self._most = most
        self._home = home_of(files)
        self._closed = threading.Event()
        return self

    @property
    def incarnation(self) -> tuple[int, int]:
        """The entry of the name, and 64 random bits that were made when it was opened. They tell
        this holder from every other of the channel, and whoever knows them is this holder: they
        are a secret."""
        return self._holder[2], self._holder[3]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(queue, serial, index, incarnation), for `lease_holder_again` in another process of the
        rest of the package; as much a secret as `incarnation`."""
        return self._holder

    def adopt(self) -> None:
        """Have the holder live as long as this process, for the rest of the package. A sign of
        life."""
        self._native.lease_holder_adopt(self._holder)

    def leave(self) -> None:
        """Have `grace` begin, if the holder lives as long as this process."""
        self._native.lease_holder_leave(self._holder)

    def lease(
        self,
        n: int,
        max_bytes: int | None = None,
        parts: int = 1,
        parent: int = 0,
        timeout: float = 0,
    ) -> Lease | None:
        """Take up to n messages, in the order a consumer would get them, and return their lease.

        n: 1 to 2^32 - 1. max_bytes: bytes of their bodies in all, of which a first message may take
        more; None: no limit. parts: the number of parts (1 to 32) to split them into, at most.
        parent: the id of the lease before, for the holder's own use; 0: none. timeout: seconds to
        wait for a message.

        Returns None if there is no message within `timeout` seconds, or if consumers and leases
        hold as much as the limits in_flight_slots and arena_size allow.

        Messages on disk that follow those in memory are leased where they are, in any number, and
        are read from the files. Until such a lease ends nothing else is read back from disk: other
        consumers and leases of the channel get only the messages in memory. Only one lease of a
        channel at a time is on disk; for the others the supervisor reads back as many messages as
        there is room for. The same holds if this process may not read the files, because they
        belong to another user, and for messages with a time to live. When messages that were leased
        on disk return, their attempts are not raised. Emptying the channel ends a lease on disk.

        Raises ShmqError if 64 leases of the channel are open, ValueError for n or parts.
        """
        n = arguments.counted("n", n, arguments.MOST_NUMBER)
        parts = arguments.counted("parts", parts, MOST_PARTS)
        parent = arguments.lease("parent", parent)
        limit = arguments.MOST
        if max_bytes is not None:
            limit = arguments.counted("max_bytes", max_bytes, least=0)
        deadline = _deadline(timeout) if timeout != 0 else 0
        while True:
            found = self._take(n, limit, parts, parent)
            if found is not None:
                return Lease(*found)
            if not deadline or not self._native.lease_wait(self._holder, deadline):
                return None

    def _take(
        self, n: int, limit: int, parts: int, parent: int
    ) -> tuple[int, int, int, int, int, int, int] | None:
        for _ in range(_TRIES):
            run = self._files().find(n, limit, parts)
            found = self._native.lease_take(self._holder, parent, n, limit, parts, run, self._most)
            if found is not None or run is None:
                return found
        return self._native.lease_take(self._holder, parent, n, limit, parts, None, self._most)

    def wait(self, timeout: float) -> bool:
        """Sleep until there may be something to lease, at most `timeout` seconds. Returns False if
        the time is over."""
        return self._native.lease_wait(self._holder, _deadline(timeout))

    def read_lease(
        self,
        lease: int,
        part: int = 0,
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
        properties: bool = False,
    ) -> Iterator[LeasedBatch]:
        """Yield one part of the lease in batches, any number of times, with the same rows each
        time. Other processes read it with `Broker.read_lease`.

        part: from 0 to `parts` - 1. rows: messages in a batch, at most. max_bytes: bytes of bodies
        in a batch, at most; a single message may have more. properties: read them too. Raises
        LeaseLost if the lease has ended; the batches before were valid.
        """
        return read_lease(
            self._native,
            self._queue,
            self._serial,
            lease,
            part,
            self._files,
            rows,
            max_bytes,
            properties,
        )

    def finish_lease(self, through: int) -> int:
        """Finish every open lease of this name up to the id `through`. Returns the number of their
        messages; 0 if they were finished before.

        Raises LeaseLost if that lease is neither open nor finished: its messages went back to the
        channel, or the name was forgotten. The leases before it are finished all the same.
        """
        return self._native.lease_finish(self._holder, arguments.lease("through", through))

    def return_lease(self, lease: int) -> int:
        """Return a lease: its messages go to the head of the channel. Returns their number. Raises
        LeaseLost if there is no such lease."""
        return self._native.lease_return(self._holder, arguments.lease("lease", lease))

    def look(self, lease: int, replay: bool = False) -> Lease:
        """Return the open lease of this id. replay: add 1 to its `replays`. Raises LeaseLost if
        there is no such lease."""
        id = arguments.lease("lease", lease)
        return Lease(*self._native.lease_look(self._holder, id, replay))

    def leases(self) -> list[Lease]:
        """Return the open leases of this name, the oldest first."""
        return [Lease(*item) for item in self._native.lease_list(self._holder)]

    def touch(self) -> None:
        """Give a sign of life: `ttl` begins again."""
        self._native.lease_holder_touch(self._holder)

    def close(self) -> None:
        """Release the name. Its leases stay open for `grace` seconds. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(ShmqError):  # fenced or gone: there is nothing to release
            self._native.lease_holder_close(self._holder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<shmq.LeaseHolder {self.name!r} of {self.topic}/{self.channel}>"
