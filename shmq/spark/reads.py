"""The leases that batch reads on this host have read, so that these are ended and no others.

A name of leases says whose they are, but not which DataFrame has read which of them: a lease that
ran out is the next reader's. So who plans a read writes down, for its application, the leases that
the rows come from; `finish_lease` ends these and no others. The file is in a directory of this
user in /dev/shm, and lives as long as what it names. A lock of the name has one process at a time
plan under it, so both sides of a join read one lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Final, Self

import psutil

from shmq import procfs
from shmq.errors import LeaseFenced, LeaseLost, ShmqError
from shmq.private import Private
from shmq.staging_place import FORGOTTEN, READS, StagingPlace

_LOCKS: Final = 64
#: The application of processes that no JVM has started.
_NO_SPARK: Final = "0-0"


def this_process() -> str:
    """This process as `PID-START`."""
    return f"{os.getpid()}-{procfs.start_time(os.getpid())}"


def is_alive(process: str) -> bool:
    """Whether the process `PID-START` lives."""
    pid, _, start = process.partition("-")
    return str(procfs.start_time(int(pid))) == start


@dataclass(frozen=True)
class Application:
    """The application that a process works for. name: its JVM as `PID-START`. above: the JVM's
    ancestors, of which one is the user's program, unless the JVM is above that."""

    name: str
    above: tuple[str, ...]

    @classmethod
    def mine(cls) -> Self:
        """That of this process."""
        chain = [psutil.Process(), *psutil.Process().parents()]
        names = [f"{one.pid}-{procfs.start_time(one.pid)}" for one in chain]
        for place, one in enumerate(chain):
            with contextlib.suppress(psutil.Error):
                if one.name() == "java":
                    return cls(names[place], tuple(names[place + 1 :]))
        return cls(_NO_SPARK, tuple(names))


@dataclass
class Read:
    """The leases of one name that the DataFrames of one application have read.

    leases: from the identity of an instance's memory to that of the channel, and the ids. holders:
    from the same to the incarnation of their holder, a secret. looked: those leases that were only
    looked at, and went back. keepers: the processes that keep them alive."""

    application: str
    above: list[str]
    leases: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    holders: dict[str, tuple[int, int]] = field(default_factory=dict)
    looked: list[int] = field(default_factory=list)
    keepers: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the application has ended."""
        return self.application != _NO_SPARK and not is_alive(self.application)


class Reads:
    """The reads under one name; `locked` first."""

    def __init__(
        self,
        instance: str | None,
        topic: str,
        channel: str,
        name: str,
        secret: Callable[[], tuple[bytes, str]],
        many: Iterable[str] = (),
    ) -> None:
        """instance: None for the reads of many instances; many: how they are named, in any order.
        secret: of `StagingPlace`."""
        self._place = StagingPlace(f"{instance or ''}{READS}", secret)
        self.what = f"{topic}/{channel} under {name!r}"
        words = "\0".join((instance or " ".join(sorted(many)), topic, channel, name))
        self._key = hashlib.blake2b(words.encode(), digest_size=16).hexdigest()
        self._here: Private | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[Self]:
        """The block is the only one that plans or ends reads under this name."""
        while True:
            with self._place.open() as here, contextlib.ExitStack() as stack:
                try:
                    fd = here.append(f"lock.{int(self._key, 16) % _LOCKS}")
                except FileNotFoundError:
                    continue  # an instance ended, and took its empty directory with it
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:  # else it took the file
                    self._here = here
                    stack.callback(setattr, self, "_here", None)
                    yield self
                    return

    # ---- what was read ----

    def of(self, application: Application) -> Read | None:
        """The read of an application; None: it has none."""
        return self._load(f"{self._key}.{application.name}")

    def note(self, read: Read) -> None:
        """Write down what an application reads from now on."""
        self.store(read)
        self._sweep()

    def gave_back(self, identity: str, lease: int) -> None:
        """This lease, which was only looked at, goes back. identity: of its channel."""
        assert self._here is not None
        for name in self._here.names():
            read = self._load(name) if name.startswith(f"{self._key}.") else None
            ids = () if read is None else [*read.leases.values()]
            if read is not None and any(at == identity and lease in one for at, one in ids):
                read.looked.append(lease)
                self.store(read)

    def store(self, read: Read) -> None:
        """Write a read down again, which has changed."""
        assert self._here is not None
        name = f"{self._key}.{read.application}"
        self._here.unlink(name)
        with open(self._here.create(name), "w") as file:
            json.dump(asdict(read), file)

    def mine(self) -> Read | None:
        """The read of this program: of the application that it started or that started it, else
        of one that has ended. None: there is none. Raises LeaseFenced if only another program,
        which lives, has read under this name."""
        assert self._here is not None
        names = [name for name in self._here.names() if name.startswith(f"{self._key}.")]
        names.sort(key=self._here.age)
        found = [read for name in names if (read := self._load(name)) is not None]
        me, chain = this_process(), Application.mine()
        related = [
            read
            for read in found
            if me in read.above or read.application in (chain.name, *chain.above)
        ]
        if related:
            return related[0]
        over = [read for read in found if read.is_over or _is_remote()]
        if found and not over:
            pid = found[0].application.split("-")[0]
            raise LeaseFenced(
                f"{self.what}: what was read is held by process {pid}, another Spark application, "
                "which lives: only it ends what it reads. Give each application a consumer of its "
                "own"
            )
        return over[0] if over else None

    def _load(self, name: str) -> Read | None:
        assert self._here is not None
        try:
            found = json.loads(bytes(self._here.read(name)))
            found["leases"] = {key: (at, ids) for key, (at, ids) in found["leases"].items()}
            found["holders"] = {key: (at, bits) for key, (at, bits) in found["holders"].items()}
            return Read(**found)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _sweep(self) -> None:
        assert self._here is not None
        for name in self._here.names():
            with contextlib.suppress(FileNotFoundError):
                if name.startswith("lock.") or self._here.age(name) < FORGOTTEN:
                    continue
                if name.startswith("read.") or not is_alive(name.partition(".")[2]):
                    self._here.unlink(name)


class Lookout:
    """Which parts of a lease tasks have begun to read, and whether they read now.

    `show`, `limit` and `take` begin with the first part, and if it has enough rows for them they
    begin no other. Any other use reads all parts. So a lease of which only the first part was ever
    begun, and nothing is read now, was only looked at; one that has a single part, if that was not
    read to its end either. Spark says no more to a source.

    The file of a lease has a byte for each part. Readers have a shared lock of it."""

    _BEGUN, _READ = b"b", b"r"
    # places of bytes beyond all parts: there if the lease went back, and if somebody reads the
    # parts one after the other, as slowly as he likes
    _GIVEN_BACK, _IN_TURN = 64, 65

    def __init__(self, instance: str | None, identity: str, lease: int, parts: int = 1) -> None:
        """instance: None for a lease on one of many instances, of which nothing is known: who reads
        it may be on another host."""
        self._place = None if instance is None else _place(instance)
        self._name = f"read.{identity}.{lease}"
        self._parts = parts

    @contextlib.contextmanager
    def reading(self, part: int, in_turn: bool = False) -> Iterator[Callable[[], None]]:
        """The block is a task that reads. It calls what it is given when it has read all. in_turn:
        the parts are read one after the other, with any time between them, so this is a use."""
        fd = -1
        with contextlib.suppress(OSError, ShmqError), self._open() as here:
            fd = here.append(self._name)
            fcntl.flock(fd, fcntl.LOCK_SH)
        self._note(fd, part, self._BEGUN)
        if in_turn:
            self._note(fd, self._IN_TURN, self._BEGUN)
        try:
            yield lambda: self._note(fd, part, self._READ)
        except LeaseLost as exc:
            if fd < 0 or not os.pread(fd, 1, self._GIVEN_BACK).strip(b"\0"):
                raise
            raise LeaseLost(
                f"{exc}. It was only looked at (show, limit or take), and for a minute nobody read "
                "more of it, so its messages went back to the channel, for consumers: load() "
                'again. To look without taking: .option("peek", "true")'
            ) from None
        finally:
            if fd >= 0:
                os.close(fd)

    def _note(self, fd: int, part: int, what: bytes) -> None:
        with contextlib.suppress(OSError):  # no room: then it is kept
            if fd >= 0 and os.pread(fd, 1, part) != self._READ:
                os.pwrite(fd, what, part)

    def only_looked(self) -> bool:
        """Whether the lease was only looked at."""
        with self.alone() as found:
            return found

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """The same; if it is so, no task begins to read in the block."""
        fd, found = -1, False
        try:
            with contextlib.suppress(OSError, ShmqError), self._open() as here:
                if here.exists(self._name):
                    fd = here.append(self._name)
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    begun = os.pread(fd, self._parts, 0)
                    others = begun[1:].strip(b"\0")
                    found = bool(begun[:1].strip(b"\0")) and not others
                    found = found and not (self._parts == 1 and begun == self._READ)
                    found = found and not os.pread(fd, 1, self._IN_TURN)
            yield found
        finally:
            if fd >= 0:
                os.close(fd)

    def note_given_back(self) -> None:
        """Have who reads the lease after this know why it has ended."""
        with contextlib.suppress(OSError, ShmqError), self._open() as here:
            fd = here.append(self._name)
            try:
                os.pwrite(fd, b"g", self._GIVEN_BACK)
            finally:
                os.close(fd)

    def forget(self) -> None:
        """Remove what is known."""
        with contextlib.suppress(OSError, ShmqError), self._open() as here:
            here.unlink(self._name)

    def _open(self) -> Private:
        if self._place is None:
            raise FileNotFoundError
        return self._place.open()


def _place(instance: str) -> StagingPlace:
    return StagingPlace(f"{instance}{READS}", no_secret)


def no_secret() -> tuple[bytes, str]:
    """For a place that exists, because reads are planned there."""
    raise FileNotFoundError


def gone(what: str, lease: int) -> LeaseLost:
    """The error for a lease that was read and is not there any more."""
    return LeaseLost(
        f"lease {lease} of {what} has ended: it ran out, was ended by somebody else, or its "
        "instance was stopped. What the DataFrame read is in the channel again, so what the job "
        "wrote comes twice: take that back, or keep it and finish what the next run reads"
    )


def _is_remote() -> bool:
    """Whether this program is a client of Spark Connect, whose JVM may be anybody's child."""
    try:
        from pyspark.sql.utils import is_remote
    except ImportError:
        return False
    return bool(is_remote())
