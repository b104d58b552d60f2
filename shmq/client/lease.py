"""Leases: sets of messages that can be read again and again until they are finished."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from shmq import _native
from shmq.client.disk import Files
from shmq.client.handle import Reduction, home_of, reduction
from shmq.errors import ShmqError

#: Rows and bytes of bodies of one batch that is read, unless asked for otherwise.
READ_ROWS: Final = 16_384
READ_BYTES: Final = 4 << 20
#: Parts a lease can be read in.
MOST_PARTS: Final = _native.CONSTANTS["LEASE_PARTS"]

_NO_LIMIT: Final = (1 << 63) - 1
_MOST_MESSAGES: Final = (1 << 32) - 1
_LONG_NS: Final = 3600 * 10**9
#: Looks at what is on disk, if it is read back in the middle of one.
_TRIES: Final = 3


@dataclass(frozen=True)
class Lease:
    """Messages that are held under a name."""

    id: int
    """Rises within a channel."""
    parent: int
    """What its taker said came before it; 0: nothing."""
    count: int
    """Messages in it."""
    bytes: int
    """Of their bodies."""
    parts: int
    """In which it can be read, the same at every reading: of each of them what is in memory, a
    contiguous stretch, comes before what is on disk, another one."""
    replays: int
    """How often it was looked at with `replay`."""
    on_disk: int
    """Of `count`: leased where they lie."""


class LeasedBatch:
    """Messages read from a lease: copies, which stay what they are. `len`, and the arrays below."""

    __slots__ = ("_attempts", "_count", "_data", "_ids", "_offsets", "_timestamps")

    def __init__(
        self,
        count: int,
        ids: bytes,
        timestamps: bytes,
        attempts: bytes,
        offsets: bytes,
        data: bytes,
    ) -> None:
        self._count = count
        self._ids, self._timestamps, self._attempts = ids, timestamps, attempts
        self._offsets, self._data = offsets, data

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> npt.NDArray[np.uint64]:
        """Ids as numbers: `f"{id:016x}"` is what `Message.id` shows."""
        return np.frombuffer(self._ids, np.uint64)

    @property
    def timestamps(self) -> npt.NDArray[np.int64]:
        """Publish times, ns since 1970."""
        return np.frombuffer(self._timestamps, np.int64)

    @property
    def attempts(self) -> npt.NDArray[np.int32]:
        """Deliveries so far; a lease counts as one, however often it is read."""
        return np.frombuffer(self._attempts, np.int32)

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """Body i is data[offsets[i]:offsets[i + 1]]."""
        return np.frombuffer(self._offsets, np.int32)

    @property
    def data(self) -> bytes:
        """All bodies, one after the other."""
        return self._data

    def bodies(self) -> list[bytes]:
        """The bodies, each as bytes."""
        ends = self.offsets.tolist()
        return [self._data[ends[i] : ends[i + 1]] for i in range(self._count)]


def read_lease(
    native: _native.Broker,
    queue: int,
    serial: int,
    lease: int,
    part: int,
    files: Callable[[], Files],
    rows: int = READ_ROWS,
    max_bytes: int = READ_BYTES,
) -> Iterator[LeasedBatch]:
    """One part of a lease, in batches. LeaseLost as soon as it has ended; what was handed out
    before was its."""

    def look() -> tuple[int, ...]:
        return native.lease_open(queue, serial, lease, part)

    cursor = look()
    start, end = cursor[-3:-1]
    while cursor[-1]:
        cursor, count, *columns = native.lease_read(cursor, rows, max_bytes)
        yield LeasedBatch(count, *columns)
    if start != end:
        for count, found in files().read(start, end, rows, max_bytes, look):
            yield LeasedBatch(count, *found)


class Lessee:
    """Holds leases of one channel under a name; made by `Broker.lessee`. A context manager.

    The name outlives processes: whoever opens it next goes on with the leases that are open, and
    every earlier handle of that name raises LeaseFenced. Its leases go back to the head of the
    channel, with one more attempt, when nothing was heard of it for `ttl` seconds, or when its
    process ended or it was closed and nobody opened it again within `grace`. Every call is a sign
    of life; `keepalive=True` has a thread give one. A forked child must open it anew.

    It can be pickled: the copy in another process is the same holder of the same leases and fences
    nobody, but the end of the process that opened the name counts as its end.
    """

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
    ) -> None:
        self.topic = topic
        self.channel = channel
        self.name = name
        self._native = native
        self._queue, self._serial = queue, serial
        self._lessee = native.lessee_open(queue, serial, name, ttl_ns, grace_ns)
        self._files = files
        self._home = home_of(files)
        self._closed = threading.Event()
        if keepalive and ttl_ns:
            thread = threading.Thread(
                target=_keep_alive,
                args=(weakref.WeakMethod(self.touch), self._closed, ttl_ns / 4e9),
                name=f"shmq lessee {name}",
                daemon=True,
            )
            thread.start()

    def __reduce__(self) -> Reduction:
        names = (self.topic, self.channel, self.name)
        return reduction(self._home, "lessee", *names, self._lessee)

    @classmethod
    def _same(
        cls,
        native: _native.Broker,
        topic: str,
        channel: str,
        name: str,
        lessee: tuple[int, int, int, int],
        files: Callable[[], Files],
    ) -> Self:
        """The holder that was opened as `lessee`."""
        self = object.__new__(cls)
        self.topic, self.channel, self.name = topic, channel, name
        self._native, self._lessee, self._files = native, lessee, files
        self._queue, self._serial = lessee[:2]
        self._home = home_of(files)
        self._closed = threading.Event()
        return self

    def lease(
        self,
        n: int,
        max_bytes: int | None = None,
        parts: int = 1,
        parent: int = 0,
        timeout: float = 0,
    ) -> Lease | None:
        """Take up to n messages of together at most max_bytes (but at least one), in the order a
        consumer would get them, to be read in up to `parts` (1 to 32) parts. None if there is none
        within `timeout` seconds, or as much is held by consumers and leases as may be
        (inflight_slots, arena_size).

        What is on disk behind what waits in memory is leased where it lies, however much that is,
        and read from the files. Until such a lease ends nothing else is read back from disk: other
        consumers of the channel, and other leases, get what is in memory. One lease of a channel at
        a time has that; for the others the supervisor reads back what there is room for. Where the
        files may not be read (another user's) there is only that. Attempts of what was leased on
        disk and came back are not raised. Emptying the channel ends the lease of what is on disk.

        ShmqError if 64 leases of the channel are open.
        """
        if not 1 <= n <= _MOST_MESSAGES:
            raise ValueError(f"n must be from 1 to {_MOST_MESSAGES}, not {n}")
        if not 1 <= parts <= MOST_PARTS:
            raise ValueError(f"parts must be from 1 to {MOST_PARTS}, not {parts}")
        limit = _NO_LIMIT if max_bytes is None else max_bytes
        deadline = _native.now() + min(int(timeout * 1e9), _LONG_NS) if timeout > 0 else 0
        while True:
            found = self._take(n, limit, parts, parent)
            if found is not None:
                return Lease(*found)
            if not deadline or not self._native.lease_wait(self._lessee, deadline):
                return None

    def _take(
        self, n: int, limit: int, parts: int, parent: int
    ) -> tuple[int, int, int, int, int, int, int] | None:
        for _ in range(_TRIES):
            run = self._files().find(n, limit, parts)
            found = self._native.lease_take(self._lessee, parent, n, limit, parts, run)
            if found is not None or run is None:
                return found
        return self._native.lease_take(self._lessee, parent, n, limit, parts)

    def wait(self, timeout: float) -> bool:
        """Sleep until there may be something to lease, at most `timeout` seconds."""
        deadline = _native.now() + min(int(timeout * 1e9), _LONG_NS)
        return self._native.lease_wait(self._lessee, deadline)

    def read_lease(
        self, lease: int, part: int = 0, rows: int = READ_ROWS, max_bytes: int = READ_BYTES
    ) -> Iterator[LeasedBatch]:
        """One part of the lease, in batches of at most `rows` messages and (but for a single one)
        max_bytes; as often as wanted, each time the same. Other processes read it with
        `Broker.read_lease`. LeaseLost."""
        return read_lease(
            self._native, self._queue, self._serial, lease, part, self._files, rows, max_bytes
        )

    def finish_lease(self, through: int) -> int:
        """Finish every open lease up to this one; how many messages that were. Again: 0.

        LeaseLost if that lease was neither open nor finished before: its messages went back to the
        channel, or the name was forgotten. Those before it are finished all the same.
        """
        return self._native.lease_finish(self._lessee, through)

    def return_lease(self, lease: int) -> int:
        """Give its messages back to the head of the channel; how many. LeaseLost."""
        return self._native.lease_return(self._lessee, lease)

    def look(self, lease: int, replay: bool = False) -> Lease:
        """The open lease of this id; replay: count it as read once more. LeaseLost."""
        return Lease(*self._native.lease_look(self._lessee, lease, replay))

    def leases(self) -> list[Lease]:
        """The open leases of this name, the oldest first."""
        return [Lease(*item) for item in self._native.lease_list(self._lessee)]

    def touch(self) -> None:
        """A sign of life."""
        self._native.lessee_touch(self._lessee)

    def close(self) -> None:
        """Let go of the name; its leases wait for `grace`. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(ShmqError):  # fenced, gone: there is nothing to let go of
            self._native.lessee_close(self._lessee)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<shmq.Lessee {self.name!r} of {self.topic}/{self.channel}>"


def _keep_alive(
    touch: weakref.WeakMethod[Callable[[], None]], closed: threading.Event, period: float
) -> None:
    while not closed.wait(period):
        call = touch()
        if call is None:
            return
        try:
            call()
        except ShmqError:  # fenced or gone: its own next call says so
            return
        del call
