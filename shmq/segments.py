"""Names of the shared memory objects of an instance, and opening, making and removing them.

    /shmq.<instance>            directory
    /shmq.<instance>.<serial>   one queue; a serial is never used twice
    /shmq.<instance>.<serial>.bad   a queue that something has overwritten, set aside
    /shmq.<instance>.attach     named semaphore: how many client entries are free

The core maps file descriptors and knows no names; this is the only place that makes them. Only the
supervisor creates and unlinks. Modes and group are set on the object itself, whatever the umask.
Descriptors that come from here are close-on-exec and belong to the caller.
"""

from __future__ import annotations

import contextlib
import grp
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import posix_ipc

from shmq.errors import NotRunning, ShmqError, TooManyClients
from shmq.names import check_instance, valid_instance

#: Where Linux keeps POSIX shared memory, and (as sem.NAME) named semaphores.
SHM_DIRECTORY = "/dev/shm"

#: What `group` means where no group is asked for.
NO_GROUP = -1

_YOUNG = 1.0  # seconds in which an object gets its group and mode, generously

_QUEUE = re.compile(r"\.([0-9]+)\Z")


def default_instance() -> str:
    """The instance when none is named: SHMQ_INSTANCE, else `default`."""
    return os.environ.get("SHMQ_INSTANCE") or "default"


def directory_name(instance: str) -> str:
    """Name of the directory segment. BadName if the instance cannot be called this."""
    return f"/shmq.{check_instance(instance)}"


def queue_name(instance: str, serial: int) -> str:
    """Name of a queue segment."""
    return f"{directory_name(instance)}.{serial:d}"


def attach_semaphore_name(instance: str) -> str:
    """Name of the semaphore that counts the free client entries."""
    return f"{directory_name(instance)}.attach"


def directory_path(instance: str) -> str:
    """File behind an instance's directory segment."""
    return path_of(directory_name(instance))


def path_of(name: str) -> str:
    """File behind a shared memory object's name."""
    return f"{SHM_DIRECTORY}{name}"


def semaphore_path_of(name: str) -> str:
    """File behind a named semaphore (glibc's and musl's place for it)."""
    return f"{SHM_DIRECTORY}/sem.{name.removeprefix('/')}"


# ---- open ----


def open_segment(name: str, *, read_only: bool = False) -> int:
    """A new descriptor of an existing object. FileNotFoundError, PermissionError."""
    try:
        fd = posix_ipc.SharedMemory(name, read_only=read_only).fd
    except posix_ipc.ExistentialError:
        raise FileNotFoundError(2, "no such shared memory object", path_of(name)) from None
    except posix_ipc.PermissionsError:
        raise PermissionError(13, "not allowed to open shared memory", path_of(name)) from None
    os.set_inheritable(fd, False)
    return int(fd)


def open_directory(instance: str, *, read_only: bool = False) -> int:
    """A new descriptor of the directory segment.

    NotRunning if there is none; ShmqError, naming owner and mode, if it is not ours to open.
    """
    name = directory_name(instance)
    try:
        return open_segment(name, read_only=read_only)
    except FileNotFoundError:
        raise not_running(instance) from None
    except PermissionError as exc:
        raise ShmqError(f"attach to instance {instance!r}: {_forbidden(path_of(name))}") from exc


def open_queue(instance: str, serial: int, *, read_only: bool = False) -> int:
    """A new descriptor of a queue segment. FileNotFoundError if it was deleted."""
    return open_segment(queue_name(instance, serial), read_only=read_only)


def not_running(instance: str) -> NotRunning:
    """The error for an instance that is not there."""
    path = path_of(directory_name(instance))
    return NotRunning(
        f"no shmq instance {instance!r} is running (there is no {path}): "
        f"start it with `shmq serve --instance {instance}`, or name another (SHMQ_INSTANCE)"
    )


def _forbidden(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return f"permission denied on {path}"
    remedy = "run as its owner, or start the supervisor with --group"
    if status.st_mode & 0o060 == 0o060:
        group = str(status.st_gid)
        with contextlib.suppress(KeyError):
            group = f"{grp.getgrgid(status.st_gid).gr_name} ({group})"
        remedy = f"run as a member of group {group}"
    return (
        f"permission denied on {path} (uid {status.st_uid}, gid {status.st_gid}, mode "
        f"{status.st_mode & 0o777:04o}; this process is uid {os.geteuid()}): {remedy}"
    )


def just_made(instance: str) -> bool:
    """Whether a permission that is missing may still come: objects are private until their group
    and mode are set."""
    for path in (directory_path(instance), semaphore_path_of(attach_semaphore_name(instance))):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_ctime < _YOUNG:
                return True
    return False


# ---- create, unlink: the supervisor only ----


def create_segment(name: str, mode: int, group: int = NO_GROUP) -> int:
    """A descriptor of a new, empty object. FileExistsError if the name is taken.

    mode: exact permission bits; group: gid that owns it, or NO_GROUP.
    """
    try:
        fd = int(posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd)
    except posix_ipc.ExistentialError:
        raise FileExistsError(17, "shared memory object exists", path_of(name)) from None
    try:
        os.set_inheritable(fd, False)
        if group != NO_GROUP:
            _give(fd, group, path_of(name))
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        unlink_segment(name)
        raise
    return fd


def _give(file: int | str, group: int, path: str) -> None:
    """To the group. PermissionError, with a sentence."""
    try:
        os.chown(file, -1, group)
    except PermissionError as exc:
        sentence = f"cannot give it to group {group}: this user (uid {os.geteuid()}) is no member"
        raise PermissionError(exc.errno, sentence, path) from exc


def create_directory(instance: str, mode: int, group: int = NO_GROUP) -> int:
    """A descriptor of a new, empty directory segment. FileExistsError."""
    return create_segment(directory_name(instance), mode, group)


def create_queue(instance: str, serial: int, mode: int, group: int = NO_GROUP) -> int:
    """A descriptor of a new, empty queue segment. FileExistsError."""
    return create_segment(queue_name(instance, serial), mode, group)


def unlink_segment(name: str) -> bool:
    """Remove a name; who has it mapped keeps it. False if it was not there."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True


def unlink_queue(instance: str, serial: int) -> bool:
    """Remove a queue's name. False if it was not there."""
    return unlink_segment(queue_name(instance, serial))


def set_aside_queue(instance: str, serial: int) -> str:
    """Give a queue's segment a name that nobody opens: for people. The file it is then."""
    path = path_of(queue_name(instance, serial))
    os.rename(path, f"{path}.bad")
    return f"{path}.bad"


def unlink_instance(instance: str) -> list[str]:
    """Remove every object of the instance, the directory first; what was removed."""
    removed = [item.name for item in list_objects(instance) if item.unlink()]
    return removed


# ---- what is there ----


@dataclass(frozen=True)
class SharedObject:
    """One object in /dev/shm. kind: "directory", "queue" (then `serial`) or "semaphore"."""

    name: str
    kind: str
    serial: int | None = None

    def unlink(self) -> bool:
        """Remove the name. False if it was not there."""
        if self.kind != "semaphore":
            return unlink_segment(self.name)
        try:
            posix_ipc.unlink_semaphore(self.name)
        except posix_ipc.ExistentialError:
            return False
        return True


def list_objects(instance: str) -> list[SharedObject]:
    """Every object of the instance, for the sweeper: directory, semaphore, queues by serial."""
    directory, attach = directory_name(instance), attach_semaphore_name(instance)
    found = []
    for file in _files():
        if file == directory[1:]:
            found.append(SharedObject(directory, "directory"))
        elif file == f"sem.{attach[1:]}":
            found.append(SharedObject(attach, "semaphore"))
        elif file.startswith(f"{directory[1:]}.") and file[len(directory) :].isdecimal():
            found.append(SharedObject(f"/{file}", "queue", int(file[len(directory) :])))
    order = {"directory": 0, "semaphore": 1, "queue": 2}
    return sorted(found, key=lambda item: (order[item.kind], item.serial or 0))


def list_set_aside(instance: str) -> list[str]:
    """Files of its queues that something had overwritten, which are kept for people."""
    wanted = re.compile(re.escape(directory_name(instance)[1:]) + r"\.[0-9]+\.bad")
    return sorted(path_of(f"/{file}") for file in _files() if wanted.fullmatch(file))


def list_instances() -> list[str]:
    """Names of the instances that have a directory segment, running or not."""
    names = (file.removeprefix("shmq.") for file in _files() if file.startswith("shmq."))
    return sorted(name for name in names if valid_instance(name))


def _files() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        yield from os.listdir(SHM_DIRECTORY)


# ---- the attach semaphore ----

#: Client entries that only the gateway and commands that administer may take, so that one program
#: that takes all others does not lock its administrator out.
RESERVE = 8

_administers = False


@contextlib.contextmanager
def administration() -> Iterator[None]:
    """Inside, this process may attach with an entry of the reserve."""
    global _administers
    before, _administers = _administers, True
    try:
        yield
    finally:
        _administers = before


def reserve() -> int:
    """Client entries that this process is to leave to others."""
    return 0 if _administers else RESERVE


class Permits:
    """The named semaphore that counts free client entries, so that a full table is a clear error.

    A client takes one before its native attach and gives it back after its detach; for a dead
    client the reaper gives it. The supervisor creates it and, at adoption, sets it right.
    """

    def __init__(self, instance: str) -> None:
        """Open it. NotRunning if it is not there, ShmqError if it is not ours to open."""
        self._instance = instance
        name = attach_semaphore_name(instance)
        try:
            self._semaphore = posix_ipc.Semaphore(name)
        except posix_ipc.ExistentialError:
            raise not_running(instance) from None
        except posix_ipc.PermissionsError as exc:
            path = semaphore_path_of(name)
            raise ShmqError(f"attach to instance {instance!r}: {_forbidden(path)}") from exc

    @classmethod
    def create(cls, instance: str, free: int, mode: int, group: int = NO_GROUP) -> Permits:
        """The supervisor's way: make it or take over the one that is there; `free` entries are."""
        name = attach_semaphore_name(instance)
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=free).close()
        # posix_ipc.Semaphore has no descriptor; the directory is sticky, so the path is ours
        path = semaphore_path_of(name)
        if group != NO_GROUP:
            _give(path, group, path)
        os.chmod(path, mode)
        permits = cls(instance)
        permits.set(free)
        return permits

    @property
    def free(self) -> int:
        """How many are there to take now."""
        return int(self._semaphore.value)

    def take(self, reserve: int = 0) -> None:
        """Take one without waiting, but none of the last `reserve`. TooManyClients."""
        with contextlib.suppress(posix_ipc.BusyError):
            if self.free > reserve:  # looked at before, so that many who fail never hold the last
                self._semaphore.acquire(0)
                if self.free >= reserve:
                    return
                self._semaphore.release()  # others came at the same time
        kept = f" but {reserve} for the gateway and `shmq topic`, `channel`, `lease`"
        raise TooManyClients(
            f"instance {self._instance!r}: all 1024 client entries{kept if reserve else ''} are "
            "taken: detach processes that are not needed, or use one Broker per process"
        )

    def give(self) -> None:
        """Give one back."""
        self._semaphore.release()

    def set(self, free: int) -> None:
        """Make `free` of them be there (the supervisor at adoption, from the client table)."""
        for _ in range(free - self.free):
            self._semaphore.release()
        with contextlib.suppress(posix_ipc.BusyError):
            for _ in range(self.free - free):
                self._semaphore.acquire(0)

    def close(self) -> None:
        """Let go of it; nothing is given back. Idempotent."""
        with contextlib.suppress(posix_ipc.ExistentialError):
            self._semaphore.close()
