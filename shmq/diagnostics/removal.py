"""Removal of instances from shared memory, and the proof that nobody can use them any more.

An instance is stale if its creation or removal was interrupted, if its directory is gone, or if it
was made before the last boot. It is removed only if the kernel also grants a read lease on its
segments: the kernel does so only while no process, of any user or container, has them open for
writing. An instance that a supervisor could adopt is never removed as stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from shmq import claims, homes, layout, ownership, shm, sources
from shmq.diagnostics.instances import contents_of
from shmq.diagnostics.segment import head_of, is_other_boot
from shmq.errors import ShmqError
from shmq.layout import Ready
from shmq.ownership import NotTrusted
from shmq.shm import SharedObject


def why_dead(fd: int) -> str:
    """Why the directory segment rules out that a process uses the instance; "" if it does not."""
    head = head_of(fd)
    magic, state = int(head["magic"]), int(head["ready"])
    if magic == 0 and state == Ready.RAW:
        return "half-made: its creator died"
    if magic != layout.MAGIC or int(head["layout_version"]) != layout.LAYOUT_VERSION:
        return ""
    if state == Ready.RAW:
        return "half-made: its creator died"
    if state == Ready.CLOSED:
        return "its removal was interrupted"
    if is_other_boot(tuple(int(word) for word in head["boot_id"])):
        return "from before the last boot, or from another machine"
    return ""


def is_intact(item: SharedObject) -> bool:
    """Returns true for a queue segment of this boot that was completed and not removed."""
    if item.kind != "queue":
        return False
    try:
        fd = shm.open_segment(item.name, read_only=True)
    except (ShmqError, OSError):
        return False
    try:
        head = head_of(fd)
    finally:
        os.close(fd)
    words = tuple(int(word) for word in head["boot_id"])
    is_ready = int(head["magic"]) == layout.MAGIC and int(head["ready"]) == Ready.READY
    return is_ready and not is_other_boot(words)


def in_use(objects: Iterable[SharedObject]) -> bool | None:
    """Returns true if a process has one of the segments open for writing, as every attached process
    has; None if this user may not find out."""
    # the kernel sends SIGIO to a process whose file lease is broken
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        paths = [item.path for item in objects if item.kind != "semaphore"]
        # check all of them: a single one that this user may not check makes the answer None
        return sum(map(_is_open, paths)) > 0
    except PermissionError:
        return None
    finally:
        signal.signal(signal.SIGIO, before)


def _refuse(busy: bool | None) -> None:
    if busy is not False:
        raise ShmqError(
            "a process uses it"
            if busy
            else "whether a process uses it can only be told by its owner or root"
        )


def _is_open(path: str) -> bool:
    """Returns true if a process has the file open for writing. Raises PermissionError if this user
    may not find out."""
    try:
        fd = ownership.open_owned(path, os.O_RDONLY, ownership.trusted())
    except FileNotFoundError:
        return False
    except NotTrusted:  # not a regular file: no process uses it as shared memory
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except PermissionError:
        raise
    except OSError as exc:  # the file system has no leases
        raise PermissionError(exc.errno, "cannot tell whether it is in use", path) from exc
    finally:
        os.close(fd)
    return False


def remove_leftover(instance: str) -> int:
    """Remove an instance whose directory says that nobody can use it. Returns the number of
    objects. Raises ShmqError if that is no longer so."""
    fd = shm.open_directory(instance, read_only=True)
    with _locked(instance, fd) as objects:
        if not why_dead(fd):
            raise ShmqError("it has come to life")
        if int(head_of(fd)["ready"]) != Ready.CLOSED and any(map(is_intact, objects)):
            raise ShmqError("some of its queues are intact: `shmq serve` saves their messages")
        _refuse(in_use(objects))
        return _unlink(instance, objects)


def remove_dead(instance: str) -> int:
    """Remove an instance with all its messages. Returns the number of objects. Raises ShmqError if
    a supervisor or another process uses it."""
    fd = shm.open_segment(shm.directory_name(instance), read_only=True)
    with _locked(instance, fd) as objects:
        try:
            _refuse(in_use(objects))
        except ShmqError as exc:
            raise ShmqError(f"instance {instance!r} cannot be removed: {exc}") from None
        return _unlink(instance, objects)


def remove_orphans(instance: str) -> int:
    """Remove the objects of an instance that has no directory. Returns their number. Raises
    ShmqError if they are in use, or if an instance of this name has been started.

    An empty directory segment reserves the name meanwhile.
    """
    name = shm.directory_name(instance)
    try:
        fd = shm.create_directory(instance, 0o600)
    except FileExistsError:
        if _is_strangers(shm.path_of(name)):  # then no supervisor can start under the name
            return _unlink_orphans(instance)
        raise ShmqError("an instance of this name has come up") from None
    try:
        _lock(instance, fd)
        try:
            return _unlink_orphans(instance)
        finally:
            shm.unlink_segment(name)
    finally:
        os.close(fd)


def _is_strangers(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_uid not in ownership.trusted()
    return False


def _unlink_orphans(instance: str) -> int:
    orphans = [
        item
        for item in shm.list_objects(instance, everybodys=True)
        if item.kind != "directory" and item.uid in ownership.trusted()
    ]
    _refuse(in_use(orphans))
    return sum([item.unlink() for item in orphans])


def remove_embedded(name: str, path: str) -> str:
    """Remove an instance of an embedded broker. Raises ShmqError if it is in use or holds
    messages."""
    with sources.open_readonly(name) as source:
        if contents_of(source).messages:
            raise ShmqError("it holds messages")
    uid = os.stat(shm.directory_path(name)).st_uid
    text, own = removed(remove_dead(name)), own_directory(name, path, uid)
    is_removed = own is not None and remove_own_directory(own, uid)
    return f"{text} and {path}" if is_removed else text


@contextlib.contextmanager
def _locked(instance: str, fd: int) -> Iterator[list[SharedObject]]:
    """Hold the lock that a supervisor of the instance would need. Yields the objects of the owner
    of the directory segment, and closes `fd`, which unlocks."""
    try:
        _lock(instance, fd)
        uid = os.fstat(fd).st_uid
        found = shm.list_objects(instance, everybodys=True)
        yield [item for item in found if item.uid == uid]
    finally:
        os.close(fd)


def _unlink(instance: str, objects: list[SharedObject]) -> int:
    """Remove the objects, the directory last, so that a death of this process leaves an instance
    that can still be found. Returns their number."""
    count = sum([item.unlink() for item in objects if item.kind != "directory"])
    return count + shm.unlink_segment(shm.directory_name(instance))


def _lock(instance: str, fd: int) -> None:
    """Lock a directory segment as a supervisor does, until `fd` is closed. Raises ShmqError if a
    supervisor holds the lock or the segment has been replaced."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShmqError("a supervisor has it") from None
    with contextlib.suppress(FileNotFoundError):
        path = shm.path_of(shm.directory_name(instance))
        if os.lstat(path).st_ino == os.fstat(fd).st_ino:
            return
    raise ShmqError("an instance of this name has come up")


def removed(count: int) -> str:
    """The sentence that reports a removal."""
    return f"removed {count} object{'' if count == 1 else 's'}"


#: Names of the files that a broker creates in its data path.
_BROKERS_FILE = re.compile(
    r"(nsqd|shmq|shmq\.copy)\.dat|shmq\.(key|leases)|shmq\.results\..+\.dat|"
    r".+\.(diskqueue|deferred)\..+\.dat(\.bad(\.\d+)?)?|.+\.tmp"
)


def is_own_path(path: str, instance: str, uid: int) -> bool:
    """Returns true if `path` is where an embedded broker of this user and instance keeps its files
    when it was given no data path."""
    place, state = Path(path), os.environ.get("XDG_STATE_HOME")
    if homes.is_in_memory(place):
        return True
    if place.parent == Path(tempfile.gettempdir()):
        return place.name.startswith(f"shmq-{instance}-")
    parents = [Path(state) / "shmq"] if state else []
    with contextlib.suppress(KeyError):
        parents.append(Path(pwd.getpwuid(uid).pw_dir) / ".local/state/shmq")
    pattern = rf"{re.escape(instance)}(-\w{{8}})?"
    return place.parent in parents and re.fullmatch(pattern, place.name) is not None


def own_directory(instance: str, data_path: str | None, uid: int) -> str | None:
    """The data path, if it exists and an embedded broker of this user chose it itself; else
    None."""
    if not data_path or not is_own_path(data_path, instance, uid):
        return None
    with contextlib.suppress(OSError):
        status = os.lstat(data_path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == uid:
            return data_path
    return None


def remove_own_directory(path: str, uid: int) -> bool:
    """Remove such a directory with the broker's files in it. Returns false if it could not be
    removed, for instance because it holds other files too.

    The path comes from shared memory and may be forged. So a directory of another user is left
    alone, subdirectories but that of claims are not entered, and files are removed relative to the
    open directory. One in memory goes with all that is in it.
    """
    if homes.is_in_memory(Path(path)):
        return os.lstat(path).st_uid == uid and homes.remove_memory(Path(path))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != uid:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in os.listdir(fd):
            if _BROKERS_FILE.fullmatch(name):
                os.unlink(name, dir_fd=fd)
            elif name == claims.NAME:
                shutil.rmtree(name, dir_fd=fd)
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
