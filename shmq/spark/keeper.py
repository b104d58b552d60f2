"""Keeps the leases of a batch read alive while its Spark application runs.

The process that plans a read is one of Spark's, which ends a minute later or sooner; the JVM cannot
give signs of life. So the planner starts this program, one for each name with open leases, which
are on one instance or on many. It ends with the application, or when none of the leases is left.
Its end begins the leases' grace.

A lease that was only looked at (`show`, `limit`) it gives back, so that consumers have it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import shmq
from shmq import procfs
from shmq.errors import LeaseFenced, LeaseLost, MemoryLost, ShmqError, Unreachable
from shmq.spark.reads import Lookout, Reads, no_secret

#: Seconds between two signs of life, at most: an instance that stops is left soon.
_PERIOD: Final = 1.0
#: Seconds after which a lease that was only looked at goes back, at most. Spark keeps the plan of a
#: DataFrame, which cannot be read after that; and it tries a task that failed again before.
_LOOKED: Final = 60.0

#: A holder as it is written down: its entry, and the bits that tell it from every other.
Incarnation = tuple[int, int]

_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Kept:
    """The leases that are kept on one instance. instance: its name on this host; None: it is at
    `place`, whose fields these are. where: topic, channel, and the name of the leases. identity: of
    the channel. leases: the id and number of parts of each."""

    instance: str | None
    owner: str | None
    place: dict[str, Any] | None
    where: tuple[str, str, str]
    identity: str
    holder: Incarnation
    leases: list[tuple[int, int]]

    def attached(self) -> Any:
        """A broker of this process's own. Raises ShmqError."""
        if self.instance is not None:
            named: Any = {} if self.owner is None else {"owner": self.owner}
            return shmq.attach(self.instance, timeout=2.0, **named)
        from shmq.spark.hosts import Place, broker_at

        assert self.place is not None
        return broker_at(Place(**self.place))


def start(kept: Sequence[Kept], holders: Iterable[Any], ttl: float | None, process: str) -> str:
    """Have a process of its own keep leases alive while `process` lives. Both as `PID-START`;
    returns the new one. Until it does, this process gives the signs of life of the holders."""
    job = {"kept": [asdict(one) for one in kept], "ttl": ttl, "process": process}
    above = str(Path(shmq.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
    _children[:] = [one for one in _children if one.poll() is None]  # those that ended are reaped
    child = subprocess.Popen(
        [sys.executable, "-m", "shmq.spark.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    _children.append(child)
    with contextlib.suppress(OSError):  # its start must not slow down the query's
        os.setpriority(os.PRIO_PROCESS, child.pid, 5)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps(job).encode())
    waiter = (child, list(holders), ttl)
    threading.Thread(target=_until_it_keeps, args=waiter, name="shmq keeper", daemon=True).start()
    return f"{child.pid}-{procfs.start_time(child.pid)}"


def _until_it_keeps(child: subprocess.Popen[bytes], holders: list[Any], ttl: float | None) -> None:
    """Give the signs of life until the keeper says that it does. Its start may take long."""
    assert child.stdout is not None
    watch = select.poll()
    watch.register(child.stdout, select.POLLIN)
    with child.stdout:
        while not watch.poll(_period(ttl) * 1000):
            for holder in holders:
                with contextlib.suppress(ShmqError, OSError):
                    _sign(holder)


def _period(ttl: float | None) -> float:
    return min(_PERIOD, (ttl or _PERIOD) / 4)


def _sign(holder: Any) -> None:
    """A sign of life, which also has the holder live as long as this process. A request over a
    network does both."""
    if isinstance(holder, shmq.LeaseHolder):
        holder.adopt()
    else:
        holder.touch()


def holder_again(broker: Any, where: tuple[str, str, str], known: Sequence[int]) -> Any:
    """The holder that was opened as `known`, which fences nobody. Its calls, or this one, raise
    LeaseFenced if the name was opened since."""
    topic, channel, name = where
    incarnation = (known[0], known[1])
    if isinstance(broker, shmq.Broker):
        return broker.lease_holder_known(topic, channel, incarnation, 0)
    return broker.lease_holder(topic, channel, name, resume=incarnation)


# ---- the process ----


def keep(job: dict[str, Any]) -> None:
    """Give the signs of life until none is needed."""
    pid, _, start_time = job["process"].partition("-")
    try:
        fd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return
    try:
        if str(procfs.start_time(int(pid))) != start_time:
            return
        all_kept = [Kept(**{**one, "where": tuple(one["where"])}) for one in job["kept"]]
        # a host that does not answer must not cost another its leases
        threads = [
            threading.Thread(target=_keep_one, args=(one, job["ttl"], fd, told))
            for one, told in zip(all_kept, _tellers(len(all_kept)), strict=True)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        os.close(fd)


def _tellers(count: int) -> Iterator[Any]:
    """Functions, one for each of so many, that say on stdout when all of them were called."""
    left, lock = [count], threading.Lock()

    def teller() -> Any:
        mine = [True]

        def tell() -> None:
            with lock:
                if mine.pop() if mine else False:
                    left[0] -= 1
                    if not left[0]:
                        with contextlib.suppress(OSError):
                            os.write(1, b"kept\n")

        return tell

    return (teller() for _ in range(count))


def _keep_one(kept: Kept, ttl: float | None, application: int, tell: Any) -> None:
    """Until the application ends, or none of these leases is left. application: a pidfd."""
    watch = select.poll()
    watch.register(application, select.POLLIN)
    looks = [
        _Look(Lookout(kept.instance, kept.identity, lease, parts), kept, lease)
        for lease, parts in kept.leases
    ]
    with contextlib.ExitStack() as stack:
        for look in looks:
            stack.callback(look.end)
        holder = None
        while True:
            with contextlib.suppress(Unreachable, OSError):  # it may be back before the ttl is over
                try:
                    if holder is None:
                        broker = stack.enter_context(kept.attached())
                        holder = holder_again(broker, kept.where, kept.holder)
                        if kept.instance is not None:
                            stack.callback(_leave, holder)
                    _sign(holder)
                    tell()
                    open_ = {lease.id for lease in holder.leases()}
                except (LeaseFenced, MemoryLost):
                    tell()
                    return
                if not open_ & {lease for lease, _ in kept.leases}:
                    if not open_ and kept.instance is None:
                        holder.close()  # the sign of life has taken the name over again
                    return
                for look in looks:
                    if look.lease in open_:
                        look.give_back(holder, ttl)
            if watch.poll(_period(ttl) * 1000):
                return


def _leave(holder: Any) -> None:
    with contextlib.suppress(ShmqError):
        holder.leave()


class _Look:
    """A lease that may have been only looked at."""

    def __init__(self, lookout: Lookout, kept: Kept, lease: int) -> None:
        self.lookout, self.lease, self._kept = lookout, lease, kept
        self._since: float | None = None
        self._is_given_back = False

    def give_back(self, holder: Any, ttl: float | None) -> None:
        """Give the lease back if for some time it is one that was only looked at."""
        if not self.lookout.only_looked():
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < min(_LOOKED, ttl or _LOOKED):
            return
        topic, channel, name = self._kept.where
        reads = Reads(self._kept.instance, topic, channel, name, no_secret)
        with reads.locked() as found, self.lookout.alone() as is_alone:
            if is_alone:
                found.gave_back(self._kept.identity, self.lease)
                with contextlib.suppress(LeaseLost):
                    holder.return_lease(self.lease)
                    self.lookout.note_given_back()
                    self._is_given_back = True

    def end(self) -> None:
        """The lease has ended. Tasks that still read it are to know why."""
        if not self._is_given_back:
            self.lookout.forget()


if __name__ == "__main__":
    with contextlib.suppress(ShmqError):
        keep(json.load(sys.stdin))
