"""A holder of leases on another host."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Self

from shmq import arguments
from shmq.errors import ShmqError
from shmq.leased import READ_BYTES, READ_ROWS, Lease, keep_alive
from shmq.remote.connections import Connections
from shmq.remote.reading import Reader

if TYPE_CHECKING:
    from shmq.remote.rows import RemoteBatch

_MOST_PARTS: Final = 32
#: Seconds for which a gateway waits at most in one request.
_WAIT: Final = 20.0


class RemoteLeaseHolder:
    """Holds leases of one channel under a name; returned by `RemoteBroker.lease_holder`. A context
    manager. Its methods are those of `LeaseHolder`.

    The holder is known by its name and its incarnation, not by a connection: when a connection
    breaks or a gateway process dies, the next call goes on over another connection, and fences
    nobody. The leases go back to the channel when the holder gave no sign of life for `ttl`
    seconds; and when it was closed, its last connection has ended, or the gateway process that it
    spoke to last has died, and the holder has not called since, after `grace` seconds. Both are at
    most the broker's max_lease_ttl; with `ttl=None` a thread gives the signs of life.

    Every method raises LeaseFenced if the name was opened again, MemoryLost if the broker was
    started with new memory since, Gone if the channel was deleted, and Unreachable if there is no
    answer within the timeout.
    """

    def __init__(
        self,
        connections: Connections,
        topic: str,
        channel: str,
        name: str,
        times: tuple[float | None, float | None],
        keepalive: bool,
        secret: str,
        resume: tuple[int, int] | None = None,
        free: bool = False,
    ) -> None:
        """free: of `RemoteBroker.lease_holder_if_free`."""
        self.topic = topic
        self.channel = channel
        self.name = name
        self._connections = connections
        self._lock = threading.Lock()
        self._closed = threading.Event()
        ttl, grace = times
        document: dict[str, Any] = {"name": name, "ttl": ttl, "grace": grace, "secret": secret}
        if resume is not None:
            document["holder"] = _words(_checked(resume))
        if free:
            document["free"] = True
        answer = connections.ask("LHOLD", (topic, channel), document)
        self.identity = str(answer["identity"])
        """The identity of the channel, see `RemoteBroker.channel_identity`."""
        entry, bits = answer["holder"]
        self.incarnation: tuple[int, int] = (int(entry), int(bits, 16))
        """The holder, for `RemoteBroker.lease_holder(resume=...)` in another process, which then is
        the same holder and fences nobody. A client that knows it is the holder: it is a secret."""
        most = float(answer.get("ttl") or 0)  # the broker's, if it is less than was wished
        keepalive = keepalive or ttl is None
        ttl = min(ttl or most, most or ttl or 0)
        self._newest = max((lease.id for lease in self.leases()), default=0)
        if keepalive and ttl:
            thread = threading.Thread(
                target=keep_alive,
                args=(weakref.WeakMethod(self.touch), self._closed, ttl / 4),
                name=f"shmq holder {name}",
                daemon=True,
            )
            thread.start()

    def _ask(self, command: str, more: float = 0.0, **document: Any) -> dict[str, Any]:
        document |= {"identity": self.identity, "holder": _words(self.incarnation)}
        return self._connections.ask(command, (self.topic, self.channel), document, more)

    def lease(
        self,
        n: int,
        max_bytes: int | None = None,
        parts: int = 1,
        parent: int = 0,
        timeout: float = 0,
    ) -> Lease | None:
        """Take up to n messages, in the order a consumer would get them, and return their lease;
        None if there is no message within `timeout` seconds. The arguments are those of
        `LeaseHolder.lease`.

        If the answer gets lost the request is repeated, and the lease that was taken the first time
        is returned. Raises as the class says, ShmqError if 64 leases of the channel are open, and
        ValueError for n or parts.
        """
        n = arguments.counted("n", n, arguments.MOST_NUMBER)
        parts = arguments.counted("parts", parts, _MOST_PARTS)
        parent = arguments.lease("parent", parent)
        if max_bytes is not None:
            max_bytes = arguments.counted("max_bytes", max_bytes, least=0)
        timeout = min(arguments.delay("timeout", timeout, True), arguments.LONGEST)
        wish: dict[str, Any] = {"n": n, "parts": parts, "parent": parent}
        if max_bytes is not None:
            wish["max_bytes"] = max_bytes
        end = time.monotonic() + timeout
        with self._lock:
            while True:
                left = min(max(end - time.monotonic(), 0.0), _WAIT)
                answer = self._ask("LEASE", left, **wish, after=self._newest, timeout=left)
                if answer.get("lease") is not None:
                    lease = _lease(answer["lease"])
                    self._newest = max(self._newest, lease.id)
                    return lease
                if time.monotonic() >= end:
                    return None

    def wait(self, timeout: float) -> bool:
        """Sleep until there may be something to lease, at most `timeout` seconds. Returns False if
        the time is over."""
        seconds = min(arguments.delay("timeout", timeout, True), arguments.LONGEST)
        end = time.monotonic() + seconds
        while True:
            left = min(max(end - time.monotonic(), 0.0), _WAIT)
            if self._ask("LWAIT", left, timeout=left)["ready"]:
                return True
            if time.monotonic() >= end:
                return False

    def read_lease(
        self,
        lease: int,
        part: int = 0,
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
        properties: bool = False,
    ) -> Iterator[RemoteBatch]:
        """Yield one part of the lease in batches, any number of times, with the same rows each
        time. Other processes of this client read it with `RemoteBroker.read_lease`. The arguments
        are those of `LeaseHolder.read_lease`. Raises LeaseLost if the lease has ended; the batches
        before were valid."""
        where, which = (self.topic, self.channel), (lease, part)
        mine = {"holder": _words(self.incarnation)}
        reader = Reader(
            self._connections, where, which, self.identity, mine, rows, max_bytes, properties
        )
        return reader.batches()

    def finish_lease(self, through: int) -> int:
        """Finish every open lease of this name up to the id `through`. Returns the number of their
        messages; 0 if they were finished before. Raises LeaseLost if that lease is neither open nor
        finished; the leases before it are finished all the same."""
        through = arguments.lease("through", through)
        return int(self._ask("LFIN", through=through)["messages"])

    def return_lease(self, lease: int) -> int:
        """Return a lease: its messages go to the head of the channel. Returns their number. Raises
        LeaseLost if there is no such lease: also if the answer of a first try got lost."""
        lease = arguments.lease("lease", lease)
        return int(self._ask("LRET", lease=lease)["messages"])

    def look(self, lease: int, replay: bool = False) -> Lease:
        """Return the open lease of this id. replay: add 1 to its `replays`; a repeated request may
        add more. Raises LeaseLost if there is no such lease."""
        id = arguments.lease("lease", lease)
        return _lease(self._ask("LLOOK", lease=id, replay=replay)["lease"])

    def leases(self) -> list[Lease]:
        """Return the open leases of this name, the oldest first."""
        return [_lease(row) for row in self._ask("LLIST")["leases"]]

    def touch(self) -> None:
        """Give a sign of life: `ttl` begins again."""
        self._ask("LKEEP")

    def close(self) -> None:
        """Release the name. Its leases stay open for `grace` seconds. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(ShmqError):  # fenced or gone: there is nothing to release
            self._ask("LCLOSE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"{self.topic}/{self.channel} on {self._connections.address}"
        return f"<shmq.RemoteLeaseHolder {self.name!r} of {where}>"


def _checked(resume: tuple[int, int]) -> tuple[int, int]:
    """The incarnation that a caller gives. Raises TypeError and ValueError."""
    entry, bits = resume
    whole = (arguments.whole("the first number of resume", entry), arguments.whole("resume", bits))
    if not (0 <= whole[0] <= arguments.MOST_NUMBER and 0 <= whole[1] < 1 << 64):
        raise ValueError(f"resume must be the incarnation of a holder, not {resume!r}")
    return whole


def _words(incarnation: tuple[int, int]) -> list[Any]:
    """An incarnation as the protocol has it: JSON's numbers need not hold 64 bits."""
    return [incarnation[0], f"{incarnation[1]:016x}"]


def _lease(row: list[int]) -> Lease:
    return Lease(*(int(number) for number in row))
