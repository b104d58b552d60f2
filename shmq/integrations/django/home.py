"""The broker of a project, as one process reaches it.

By default the project has an embedded broker with its files in `BASE_DIR/.shmq`. The first process
that needs it starts its supervisor and becomes its owner: it holds a record lock on `owner.lock`,
and starts the supervisor again if that dies. The others attach. When the owner ends, the supervisor
lives on as long as a process is attached; if it dies then, the next process that looks becomes
the owner. When nobody is attached it writes everything to disk and ends, and the next process
starts it from there.

A record lock belongs to one process, so a forked child never takes itself for the owner, and the
kernel drops it at the owner's death.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import shmq
from shmq.storage import own_files

T = TypeVar("T")

#: Seconds within which an embedded broker must answer, the flush of the last one included.
_PATIENCE: Final = 60.0
_PAUSE: Final = 0.02
#: Seconds to wait for a broker that somebody else is just starting.
_BRIEF: Final = 0.5
#: The directory in BASE_DIR.
FOLDER: Final = ".shmq"
#: Options of an embedded broker: a task may be deferred for as long as the format allows.
OPTIONS: Final[Mapping[str, Any]] = {"max_req_timeout": float(1 << 33)}


def instance_of(directory: Path) -> str:
    """The name of the instance with its files in a directory, which is that of the project for
    `BASE_DIR/.shmq`."""
    base = directory.parent if directory.name == FOLDER else directory
    return f"django-{hashlib.sha256(os.fsencode(base.resolve())).hexdigest()[:16]}"


@dataclass
class Home:
    """Where the broker is, and this process's attachment to it. Any thread may use it, and a forked
    child."""

    instance: str
    data_path: Path | None
    """The directory of an embedded broker; None: somebody else runs the instance."""
    owner: str | int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    _broker: shmq.Broker | None = None
    _embedded: shmq.Broker | None = None
    """The supervision of an owner, which stays until its process ends."""
    _lock: tuple[int, int] | None = None
    """The process that holds the lock of the owner, and its descriptor."""
    _made: tuple[shmq.Broker | None, dict[str, Any]] = (None, {})
    _owns: int = 0
    """The process that watches the supervisor."""
    _locks: dict[int, threading.Lock] = field(default_factory=dict)

    def broker(self) -> shmq.Broker:
        """The broker, attached or started. Raises NotRunning if nobody runs an instance that is
        not embedded, and ShmqError if an embedded one cannot be started within 60 s."""
        broker = self._broker
        if broker is not None and _serves(broker, self.data_path is None):
            return broker
        # A thread of the parent may have held its lock at the fork.
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            broker = self._broker
            if broker is None or not _serves(broker, self.data_path is None):
                broker = self._broker = self._open(broker)
            return broker

    def _open(self, last: shmq.Broker | None) -> shmq.Broker:
        if self.data_path is None:
            return shmq.attach(self.instance, _BRIEF, self.owner)
        deadline = time.monotonic() + _PATIENCE
        while True:
            late = time.monotonic() > deadline
            try:
                if last is None or _ended(last):
                    last = shmq.attach(self.instance, owner=self.owner)
                if last.supervisor_alive():
                    return last
            except (shmq.LayoutMismatch, shmq.TooManyClients):
                raise
            except shmq.ShmqError:  # there is none, or it is just being made
                if late:
                    raise
            if self._become_owner():
                with contextlib.suppress(*(() if late else (shmq.ShmqError,))):
                    # The last supervisor may still write its messages, and then hold the files.
                    return self._start()
            elif last is not None and not _ended(last):
                return last  # its owner starts the supervisor again; publishing goes on without
            time.sleep(_PAUSE)

    def _become_owner(self) -> bool:
        """Take the lock. Returns False if another process has it, or if this one is the owner
        already, and so watches its supervisor."""
        assert self.data_path is not None
        pid = os.getpid()
        if self._lock is not None and self._lock[0] == pid:
            return self._owns != pid
        try:
            self.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = own_files.open_beside(self.data_path / "owner.lock", os.O_RDWR | os.O_CREAT)
        except own_files.ForeignFile:
            raise
        except OSError as exc:
            raise OSError(
                exc.errno,
                "the broker's files cannot be made here (set OPTIONS['directory'] in TASKS to a "
                f"directory that this user may write, or OPTIONS['instance']): {exc.strerror}",
                str(self.data_path),
            ) from exc
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock = pid, fd
        return True

    def _start(self) -> shmq.Broker:
        assert self.data_path is not None
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            fd = own_files.open_beside(self.data_path / ".gitignore", flags, 0o644)
            with open(fd, "w") as file:
                file.write("*\n")
        options: dict[str, Any] = {**OPTIONS, **self.options}
        self._embedded = shmq.Broker(self.data_path / "data", self.instance, **options)
        self._owns = os.getpid()
        return self._embedded

    def kept(self, broker: shmq.Broker, key: str, make: Callable[[], T]) -> T:
        """The thing that was made for this broker under this key, by any thread. The objects of
        an earlier broker are dropped."""
        if self._made[0] is not broker:
            self._made = broker, {}
        made = self._made[1]
        if key not in made:
            made[key] = make()
        found: T = made[key]
        return found

    def drop(self) -> None:
        """Drop what was made: one of these was gone, because somebody deleted its topic or store,
        or stopped the broker."""
        self._made = None, {}

    def forget(self) -> None:
        """Leave the instance: what this process holds goes back. An owner's supervisor stays as
        long as others are attached."""
        broker, self._broker = self._broker, None
        if broker is not None and broker is not self._embedded:
            broker.close()


_homes: dict[tuple[str, str], Home] = {}
_making = threading.Lock()


def home(
    instance: str | None,
    directory: Path | None,
    owner: str | int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Home:
    """The home of an instance that somebody runs, or of the embedded broker with its files in a
    directory. All users in this process share it."""
    name = instance or instance_of(directory or Path(FOLDER).absolute())
    data_path = None if instance else directory
    with _making:
        return _homes.setdefault(
            (name, str(data_path)), Home(name, data_path, owner, dict(options or {}))
        )


def _serves(broker: shmq.Broker, any_will_do: bool) -> bool:
    """Whether the broker can be used as it is. any_will_do: also while its supervisor is dead."""
    try:
        return not broker.ended and (any_will_do or broker.supervisor_alive())
    except shmq.Gone:
        return False


def _ended(broker: shmq.Broker) -> bool:
    return not _serves(broker, True)
