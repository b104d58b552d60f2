"""Data paths of embedded brokers that were given none.

They are `$XDG_STATE_HOME/shmq/INSTANCE` (`~/.local/state/shmq/INSTANCE`). A named instance has the
same one every time, so it finds the messages it left. A directory without messages is removed when
its broker is closed or, if it never was, by the next embedded broker that the same user starts.
Where the home directory cannot be written, each has one in the directory of temporary files, and a
broker without a disk has one in /dev/shm: they have the number of the process that made them in
their names. The next broker of that kind that the same user starts removes those of processes that
were killed.

Two locks make the removal safe. Every supervisor holds an flock on its data path
(`storage.dirlock`). The parent directory is locked shared from the creation of a directory until a
supervisor has locked it, and exclusively for a removal, which thus never meets a directory that is
about to be used.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shmq import claims, shm
from shmq.names import valid_instance
from shmq.procfs import Process
from shmq.storage.data_path import existing_files, remove_temporary
from shmq.storage.dirlock import DirLock
from shmq.storage.own_files import read_start
from shmq.storage.positions import MOST_META, parse_meta, unpack

_log = logging.getLogger("shmq.broker")

#: Names of data paths in memory, and of those among temporary files.
MEMORY: Final = "shmq-memory-"
_IN_MEMORY: Final = re.compile(rf"{MEMORY}(?P<pid>[0-9]+)-\w{{8}}")
_TEMPORARY: Final = re.compile(r"shmq-(?P<instance>.+)-(?P<pid>[0-9]+)-\w{8}")

#: Files of a data path that hold no messages.
_NO_MESSAGES: Final = frozenset(
    {"nsqd.dat", "shmq.dat", "shmq.copy.dat", "shmq.key", "shmq.leases", claims.NAME}
)


def parent() -> Path | None:
    """The directory of the data paths, which survives a reboot; None if this user has no home."""
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(state) if state else Path.home() / ".local" / "state") / "shmq"
    except RuntimeError:  # neither HOME nor an entry in the password database
        return None


def is_own(path: str | os.PathLike[str], instance: str) -> bool:
    """Returns True if this is the directory that `opened` gives to the instance."""
    return Path(path) == (parent() or Path()) / instance


@contextlib.contextmanager
def opened(instance: str) -> Iterator[Path]:
    """The directory of an instance, created if it is missing. No other process removes it during
    the block, in which a supervisor must lock it. If the block raises, it is removed, unless it
    has messages. If the home directory cannot be written, it is a new temporary directory."""
    above = parent()
    with contextlib.ExitStack() as held:
        try:
            if above is None:
                raise FileNotFoundError
            above.mkdir(parents=True, exist_ok=True)
            sweep(above)
            held.enter_context(_locked(above, fcntl.LOCK_SH))
            path = above / instance
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            for left in temporary_left():
                _remove_if_empty(left)
            path = Path(tempfile.mkdtemp(prefix=f"shmq-{instance}-{os.getpid()}-"))
        try:
            yield path
        except BaseException:
            held.close()
            remove(path)
            raise


@contextlib.contextmanager
def made(path: Path) -> Iterator[None]:
    """A data path that the caller named. It is created if only its last component is missing, and
    removed again if the block raises and it is empty. If it cannot be created, the supervisor
    reports why."""
    new = False
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
        new = True
    try:
        yield
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def remove(path: Path) -> None:
    """Remove a directory unless it has messages, a supervisor uses it, or one is about to. Logs a
    warning if messages are left."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as held:
        try:
            if path.parent == parent():
                held.enter_context(_locked(path.parent, fcntl.LOCK_EX | fcntl.LOCK_NB))
            left = _remove_if_empty(path) is False
        except BlockingIOError:  # a broker is starting now; a later start removes the directory
            left = _holds_messages(path)
        if left:
            _log.warning("messages were left in %s: use it as data_path to get them", path)


def sweep(above: Path) -> list[str]:
    """Remove the directories of instances that are gone and left no message. Returns their
    names."""
    removed: list[str] = []
    with contextlib.suppress(OSError), _locked(above, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for path in above.iterdir():
            if _instance_of(path) and _remove_if_empty(path):
                removed.append(path.name)
    return removed


def _instance_of(path: Path) -> str | None:
    """The instance that the directory belongs to; None if it still has shared memory objects."""
    name = re.sub(r"\A(embedded-\d+-[0-9a-f]{8})-\w{8}\Z", r"\1", path.name)  # an older format
    usable = valid_instance(name) and not path.is_symlink() and path.is_dir()
    return name if usable and not shm.list_objects(name) else None


# ---- directories with the number of the process that made them ----


def temporary_left() -> list[Path]:
    """The directories of this user for temporary files whose process has died, and of whose
    instance nothing is in shared memory."""
    return [
        path
        for path, instance in _left(tempfile.gettempdir(), _TEMPORARY)
        if not shm.list_objects(instance)
    ]


def memory_left() -> list[Path]:
    """The data paths in memory of this user whose process and supervisor have died."""
    return [path for path, _ in _left(shm.SHM_DIRECTORY, _IN_MEMORY)]


def is_in_memory(path: Path) -> bool:
    """Whether this is the name of a data path in memory."""
    return str(path.parent) == shm.SHM_DIRECTORY and bool(_IN_MEMORY.fullmatch(path.name))


def remove_memory(path: Path) -> bool:
    """Remove a data path in memory with all that is in it, unless somebody uses it. Returns whether
    it is gone."""
    with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
        shutil.rmtree(path)
        return True
    return not os.path.lexists(path)


def holds_messages(path: Path) -> bool:
    """Whether a directory may hold messages, of which nobody else needs to know."""
    try:
        return _holds_messages(path)
    except OSError:
        return True


def _left(directory: str, pattern: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    """This user's directories whose process has died, and which no supervisor has; with the name of
    the instance, if the directory's has it."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            found = pattern.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                if found is None or not entry.is_dir(follow_symlinks=False):
                    continue
                is_own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                if not is_own or Process.look(int(found["pid"])) is not None:
                    continue
                with _locked(Path(entry.path), fcntl.LOCK_EX | fcntl.LOCK_NB):
                    pass
                yield Path(entry.path), found.groupdict().get("instance", "")


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold an flock on a directory. Raises OSError, BlockingIOError for LOCK_NB."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _remove_if_empty(path: Path) -> bool | None:
    """Returns True if the directory was removed, False if it has messages, None if it is in use or
    cannot be removed."""
    try:
        with DirLock(path):
            remove_temporary(path)
            if _holds_messages(path):
                return False
            shutil.rmtree(path)
    except OSError:
        return None
    return True


def _holds_messages(path: Path) -> bool:
    """Returns True unless every file is known to hold no message."""
    queues = existing_files(path)
    known = set(_NO_MESSAGES)
    for base, files in queues.items():
        meta = path / f"{base}.diskqueue.meta.dat"
        found = parse_meta(read_start(meta, MOST_META)) if files.meta else None
        known.add(meta.name)
        if found is None or found.depth or found.read_position != found.write_position:
            return True
        last, offset = unpack(found.write_position)
        for number in files.numbers:
            data = path / f"{base}.diskqueue.{number:06d}.dat"
            known.add(data.name)
            if number > last or (number == last and data.stat().st_size > offset):
                return True
    return any(file.name not in known for file in path.iterdir())
