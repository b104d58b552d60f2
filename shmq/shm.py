"""Names and permissions of an instance's shared memory objects; opening, creating and removing
them.

    /shmq.<instance>            directory
    /shmq.<instance>.<serial>   one queue or results store; a serial is never used twice
    /shmq.<instance>.<serial>.bad   a queue whose segment was overwritten, set aside
    /shmq.<instance>.attach     named semaphore: how many client entries are free
    /shmq.<instance>:history    history and log of deaths (no instance's name has a colon)

The core maps file descriptors and knows no names; only this module builds them. Only the supervisor
creates and unlinks. Mode and group are set on the object itself, independent of the umask. The
descriptors returned here are close-on-exec and belong to the caller. Any user may have created
anything under these names, so every open goes through `ownership`.

The low 32 bits of a serial count up; the 21 bits above are random, so that nobody can create the
names of later queues first. With all its bits a serial is below 2^53: every reader of JSON has it
exactly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import grp
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from shmq import ownership
from shmq.errors import NotRunning, ShmqError, TooManyClients
from shmq.names import check_instance, valid_instance
from shmq.ownership import NotTrusted, Own
from shmq.semaphore import create_semaphore, open_semaphore

#: Where Linux keeps POSIX shared memory and named semaphores.
SHM_DIRECTORY = "/dev/shm"


def _is_glibc() -> bool:
    """Whether the C library of this Python is glibc."""
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        return False


#: The start of the file name of a semaphore. glibc puts it before the semaphore's name. musl, where
#: a semaphore could meet a segment of the same name, puts nothing, so there the name has it.
_BEFORE = "sem."
_GLIBC = _is_glibc()

#: The value of a `group` argument that means: no group.
NO_GROUP = -1

#: Bytes of the smallest history that is kept: the totals and the deaths.
LEAST_HISTORY = 1 << 20

_SEMAPHORE = 16  # every C library's semaphore has at least this number of bytes

_YOUNG = 1.0  # seconds after which an object certainly has its group and mode

_QUEUE = re.compile(r"\.([0-9]+)\Z")

#: Bits of a serial that count, and how many random ones are above.
_COUNTING, _RANDOM = 32, 21

#: Seconds between a client's tries to show that it attaches or detaches. The supervisor has the
#: lock for microseconds, unless it was stopped just then; and another user may hold it for ever.
_LOCK_PAUSES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.01)

_TAKEN = 1000  # names in a row that are taken, after which creation gives up


def default_instance() -> str:
    """The instance that is used if none is named: SHMQ_INSTANCE, or `default`."""
    return os.environ.get("SHMQ_INSTANCE") or "default"


def directory_name(instance: str) -> str:
    """Name of the directory segment. Raises BadName if the instance's name is not valid."""
    return f"/shmq.{check_instance(instance)}"


def queue_name(instance: str, serial: int) -> str:
    """Name of a queue segment."""
    return f"{directory_name(instance)}.{serial:d}"


def attach_semaphore_name(instance: str) -> str:
    """Name of the semaphore that counts the free client entries, as the C library takes it."""
    name = f"{directory_name(instance)[1:]}.attach"
    return f"/{name}" if _GLIBC else f"/{_BEFORE}{name}"


def history_name(instance: str) -> str:
    """Name of the segment with the history and the log of deaths."""
    return f"{directory_name(instance)}:history"


def directory_path(instance: str) -> str:
    """The file of an instance's directory segment."""
    return path_of(directory_name(instance))


def path_of(name: str) -> str:
    """The file of a shared memory object."""
    return f"{SHM_DIRECTORY}{name}"


def semaphore_path_of(name: str) -> str:
    """The file of a named semaphore, where the C library puts it."""
    return f"{SHM_DIRECTORY}/{_BEFORE if _GLIBC else ''}{name.removeprefix('/')}"


# ---- open ----


def own() -> Own:
    """The owner whose segments a supervisor takes up: its own user."""
    return Own({os.geteuid()})


def open_segment(
    name: str, *, read_only: bool = False, owners: Collection[int] | None = None
) -> int:
    """A new descriptor of an existing object. Raises FileNotFoundError, PermissionError, and
    NotTrusted if its owner is none of `owners` (uids; None: this user, root and SHMQ_OWNER).

    A directory with a second name (a hard link) is refused. A queue's segment may have one: it
    states its own serial, which the core checks, and otherwise anyone who may write it could lock
    all others out by linking it.
    """
    flags = os.O_RDONLY if read_only else os.O_RDWR
    if owners is None:
        owners = ownership.trusted()
    links = _QUEUE.search(name) is not None
    return ownership.open_owned(path_of(name), flags, owners, links=links)


def open_directory(
    instance: str, *, read_only: bool = False, owner: str | int | None = None
) -> int:
    """A new descriptor of the directory segment.

    owner: a further user (name or uid) who may have created it, besides this user and root; None:
    SHMQ_OWNER. Raises NotRunning if there is none, ShmqError (naming owner and mode) if this user
    has no permission, and NotTrusted if another user created it.
    """
    name = directory_name(instance)
    try:
        return open_segment(name, read_only=read_only, owners=ownership.trusted(owner))
    except FileNotFoundError:
        raise not_running(instance) from None
    except PermissionError as exc:
        raise ShmqError(f"attach to instance {instance!r}: {_forbidden(path_of(name))}") from exc


def open_queue(
    instance: str, serial: int, *, read_only: bool = False, owners: Collection[int] | None = None
) -> int:
    """A new descriptor of a queue segment. Raises FileNotFoundError if it was deleted, and
    NotTrusted. owners: the directory's owner, if the caller has it; None: as `open_segment`."""
    return open_segment(queue_name(instance, serial), read_only=read_only, owners=owners)


def open_history(instance: str, owner: str | int | None = None) -> int:
    """A new descriptor of the history, for reading. owner: as of `open_directory`. Raises
    FileNotFoundError, NotTrusted, and ShmqError if this user has no permission."""
    name = history_name(instance)
    try:
        return open_segment(name, read_only=True, owners=ownership.trusted(owner))
    except PermissionError as exc:
        raise ShmqError(
            f"read the history of instance {instance!r}: {_forbidden(path_of(name))}"
        ) from exc


def to_start(instance: str, data_path: str = "") -> str:
    """The command that starts a broker of this name; data_path: where the files of the last one
    are, if that is known."""
    where = f" --data-path {shlex.quote(data_path)}" if data_path else ""
    return f"shmq serve --instance {instance}{where}"


def not_running(instance: str) -> NotRunning:
    """The error for an instance that does not exist."""
    path = path_of(directory_name(instance))
    return NotRunning(
        f"no shmq instance {instance!r} is running (there is no {path}): "
        f"start it with `{to_start(instance)}`, or name another (SHMQ_INSTANCE)"
    )


def _forbidden(path: str) -> str:
    try:
        status = os.lstat(path)
    except OSError:
        return f"permission denied on {path}"
    remedy = "run as its owner, or start the supervisor with --group"
    if os.path.basename(path).startswith("shmq.tree-"):
        remedy = (
            "drop rights before the first queue or executor is made, or give them a broker that "
            "both users may use (instance=, `shmq serve --group`)"
        )
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
    """Returns True if a missing permission may still be granted: an object is private until its
    group and mode are set, right after its creation."""
    for path in (directory_path(instance), semaphore_path_of(attach_semaphore_name(instance))):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(path).st_ctime < _YOUNG:
                return True
    return False


# ---- create, unlink: the supervisor only ----


def create_segment(name: str, mode: int, group: int = NO_GROUP) -> int:
    """A descriptor of a new, empty object. mode: its exact permission bits. group: the gid that
    owns it, or NO_GROUP. Raises FileExistsError if the name is taken."""
    path = path_of(name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "shared memory object exists", path) from None
    try:
        set_permissions(fd, path, mode, group)
    except BaseException:
        os.close(fd)
        unlink_segment(name)
        raise
    return fd


def set_permissions(fd: int, path: str, mode: int, group: int = NO_GROUP) -> None:
    """Give an object of this user a mode and a group, by its descriptor. Raises PermissionError,
    whose text names `path`."""
    status = os.fstat(fd)
    if group not in (NO_GROUP, status.st_gid):
        _give(fd, group, path)
    if stat.S_IMODE(status.st_mode) != mode or group not in (NO_GROUP, status.st_gid):
        os.fchmod(fd, mode)


def _give(fd: int, group: int, path: str) -> None:
    """Give the object to the group. Raises PermissionError."""
    try:
        os.fchown(fd, -1, group)
    except PermissionError as exc:
        sentence = f"cannot give it to group {group}: this user (uid {os.geteuid()}) is no member"
        raise PermissionError(exc.errno, sentence, path) from exc


def create_directory(instance: str, mode: int, group: int = NO_GROUP) -> int:
    """A descriptor of a new, empty directory segment. Raises FileExistsError."""
    return create_segment(directory_name(instance), mode, group)


def create_queue(instance: str, serial: int, mode: int, group: int = NO_GROUP) -> int:
    """A descriptor of a new, empty queue segment. Raises FileExistsError."""
    return create_segment(queue_name(instance, serial), mode, group)


def make_queue(
    instance: str, reserve: Callable[[], tuple[int, int]], mode: int, group: int = NO_GROUP
) -> tuple[int, int, int]:
    """Make the segment of a new queue or results store: (its place in the directory, its serial, a
    descriptor). reserve: reserves a place and the next number. Raises FileExistsError if each name
    that was tried is taken."""
    for _ in range(_TAKEN):
        place, number = reserve()
        above = int.from_bytes(os.urandom(4), "little") >> (32 - _RANDOM)
        serial = above << _COUNTING | serial_number(number)
        with contextlib.suppress(FileExistsError):  # any user may create a file of this name
            return place, serial, create_queue(instance, serial, mode, group)
    raise FileExistsError(
        errno.EEXIST,
        f"this name and {_TAKEN - 1} others that were drawn at random are taken; have them removed",
        path_of(queue_name(instance, serial)),
    )


def serial_number(serial: int) -> int:
    """The part of a serial that counts the queues and stores that an instance has had."""
    return serial & ((1 << _COUNTING) - 1)


def unlink_segment(name: str) -> bool:
    """Remove a name; processes that have the object mapped keep it. Returns False if there was no
    such name. Raises PermissionError if the object is another user's."""
    return _unlink(path_of(name))


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def unlink_queue(instance: str, serial: int) -> bool:
    """Remove a queue's name. Returns False if there was no such name, or the object is another
    user's."""
    with contextlib.suppress(PermissionError):
        return unlink_segment(queue_name(instance, serial))
    return False


def is_short(instance: str, serial: int, size: int) -> bool:
    """Returns True if a queue's segment has fewer than the `size` bytes that are mapped. Touching
    the rest raises SIGBUS. Any process that may write a segment can truncate it."""
    return _size(path_of(queue_name(instance, serial)), size) < size


def is_directory_short(instance: str, size: int) -> bool:
    """Like `is_short`, for the directory."""
    return _size(directory_path(instance), size) < size


def _size(path: str, unknown: int) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return unknown


def set_aside_queue(instance: str, serial: int) -> str:
    """Rename a queue's segment to a name that no process opens, for a person to examine. Returns
    its file."""
    path = path_of(queue_name(instance, serial))
    try:
        os.rename(path, bad := f"{path}.bad")
    except OSError:  # another user has created a file or a directory of this name
        above = int.from_bytes(os.urandom(8), "little") >> 1
        os.rename(path, bad := f"{path_of(queue_name(instance, above))}.bad")
    return bad


def unlink_instance(instance: str) -> list[str]:
    """Remove every object of the instance that is this user's, the directory first. Returns the
    names that were removed."""
    removed = [item.name for item in list_objects(instance) if item.unlink()]
    return removed


# ---- what is there ----


class SharedObject(NamedTuple):
    """One object in /dev/shm. kind: "directory", "queue" (with a `serial`), "semaphore" or
    "history". uid: the owner of the file. nbytes: what it takes in memory."""

    name: str
    kind: str
    serial: int | None = None
    uid: int = 0
    nbytes: int = 0

    @property
    def path(self) -> str:
        """Its file."""
        return semaphore_path_of(self.name) if self.kind == "semaphore" else path_of(self.name)

    def unlink(self) -> bool:
        """Remove the name. Returns False if there was no such name. Raises PermissionError if the
        object is another user's."""
        return _unlink(self.path)


def list_objects(instance: str, *, everybodys: bool = False) -> list[SharedObject]:
    """Every object of the instance: directory, semaphore, history, queues by the number in their
    serials.

    Lists only objects of this user, unless `everybodys`: an object that another user created under
    such a name is not part of this user's instance. Those of users who are not trusted come last
    of their kind.
    """
    known = directory_name(instance)[1:]
    found = [
        item
        for name, item in _objects((known, f"{_BEFORE}{known}"))
        if name == instance and (everybodys or item.uid == os.geteuid())
    ]
    return _in_order(found)


def objects_by_instance() -> dict[str, list[SharedObject]]:
    """Everybody's objects of all instances, by the instance's name, each list as of `list_objects`.
    One pass over /dev/shm, in which anybody may have created any number of files."""
    found: dict[str, list[SharedObject]] = {}
    for name, item in _objects(("shmq.", f"{_BEFORE}shmq.")):
        found.setdefault(name, []).append(item)
    return {name: _in_order(found[name]) for name in sorted(found)}


def _objects(prefixes: tuple[str, ...]) -> Iterator[tuple[str, SharedObject]]:
    """(instance, object) of each file whose name begins so and is one of an instance."""
    for file in _files():
        parsed = _parse(file.name) if file.name.startswith(prefixes) else None
        if parsed is None:
            continue
        instance, name, kind, serial = parsed
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = file.stat(follow_symlinks=False)
            used = status.st_blocks * 512
            yield instance, SharedObject(name, kind, serial, status.st_uid, used)


def _parse(file: str) -> tuple[str, str, str, int | None] | None:
    """(instance, name of the object, kind, serial) of a file in /dev/shm; None for another one."""
    if file.startswith(_BEFORE):
        instance = file.removeprefix(f"{_BEFORE}shmq.").removesuffix(".attach")
        is_one = file == f"{_BEFORE}shmq.{instance}.attach" and _is_instance(instance)
        return (instance, attach_semaphore_name(instance), "semaphore", None) if is_one else None
    rest, name = file.removeprefix("shmq."), f"/{file}"
    instance, _, serial = rest.rpartition(".")
    if serial.isdecimal():  # a name of an instance does not end so
        is_one = serial.isascii() and len(serial) < 21 and _is_instance(instance)
        return (instance, name, "queue", int(serial)) if is_one else None
    instance = rest.removesuffix(":history")
    if instance != rest:
        return (instance, name, "history", None) if _is_instance(instance) else None
    return (rest, name, "directory", None) if _is_instance(rest) else None


_is_instance = functools.lru_cache(100)(valid_instance)


def _in_order(found: list[SharedObject]) -> list[SharedObject]:
    order = {"directory": 0, "semaphore": 1, "history": 2, "queue": 3}
    trusted = ownership.trusted()
    return sorted(
        found,
        key=lambda item: (
            order[item.kind],
            item.uid not in trusted,
            serial_number(item.serial or 0),
            item.serial or 0,
        ),
    )


def list_set_aside(instance: str) -> list[str]:
    """Files of the instance's overwritten queues, which are kept for a person to examine."""
    wanted = re.compile(re.escape(directory_name(instance)[1:]) + r"\.[0-9]+\.bad")
    found, trusted = [], ownership.trusted()
    for file in _files():
        if file.name.endswith(".bad") and wanted.fullmatch(file.name):
            with contextlib.suppress(FileNotFoundError):
                if file.stat(follow_symlinks=False).st_uid in trusted:
                    found.append(path_of(f"/{file.name}"))
    return sorted(found)


def set_aside_instances() -> list[str]:
    """Names of the instances of trusted users that have set-aside segments."""
    found, trusted = set(), ownership.trusted()
    for file in _files():
        parsed = _parse(file.name.removesuffix(".bad")) if file.name.endswith(".bad") else None
        if parsed is not None and parsed[2] == "queue":
            with contextlib.suppress(FileNotFoundError):
                if file.stat(follow_symlinks=False).st_uid in trusted:
                    found.add(parsed[0])
    return sorted(found)


def list_instances() -> list[str]:
    """Names of the instances that have a directory segment, running or not, of users who are
    trusted."""
    names, trusted = [], ownership.trusted()
    for instance, item in _objects(("shmq.",)):
        if item.kind == "directory" and item.uid in trusted:
            names.append(instance)
    return sorted(names)


def _files() -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(SHM_DIRECTORY) as entries:
        yield from entries


# ---- the attach semaphore ----

#: Client entries that only the gateway and administrative commands may take, so that a program that
#: takes all others does not lock out its administrator.
RESERVE = 8

_administers = False


@contextlib.contextmanager
def administration() -> Iterator[None]:
    """Inside the block this process may attach with a reserved entry."""
    global _administers
    before, _administers = _administers, True
    try:
        yield
    finally:
        _administers = before


def reserve() -> int:
    """The number of client entries that this process must leave free."""
    return 0 if _administers else RESERVE


def _open_semaphore(path: str, owners: Collection[int]) -> int:
    """A descriptor of a semaphore's file. Raises FileNotFoundError, PermissionError, NotTrusted."""
    fd = ownership.open_owned(path, os.O_RDWR, owners)
    size = os.fstat(fd).st_size
    if size < _SEMAPHORE:
        os.close(fd)
        raise NotTrusted(f"{path} has {size} bytes and is no semaphore: remove it")
    return fd


class Permits:
    """The named semaphore that counts free client entries, so that a full table is a clear error.

    A client takes a permit before its native attach and gives it back after its detach; for a dead
    client the reaper gives it back. The table of clients is the truth: while no client is between
    the two steps, which each shows by a shared lock of the semaphore's file, a permit is free for
    each free entry. The supervisor looks at that now and then, and so gives back those of clients
    that died between the two.
    """

    def __init__(self, instance: str, owners: Collection[int] | None = None) -> None:
        """Open the semaphore. Raises NotRunning if it does not exist, ShmqError if this user has no
        permission, and NotTrusted if its owner is none of `owners` (as `open_segment`)."""
        self._instance = instance
        self._owners = owners = ownership.trusted() if owners is None else owners
        name = attach_semaphore_name(instance)
        self._path = path = semaphore_path_of(name)
        try:
            fd = _open_semaphore(path, owners)
            try:
                self._semaphore = open_semaphore(name)
                self._compare(fd, path)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise not_running(instance) from None
        except PermissionError as exc:
            raise ShmqError(f"attach to instance {instance!r}: {_forbidden(path)}") from exc

    def _compare(self, fd: int, path: str) -> None:
        """Check that the opened semaphore is the file that `fd` refers to. It was opened by its
        name and has no descriptor. /dev/shm is sticky, so if the name refers to the same file
        before and after the open, that file had the name all the time."""
        before = os.fstat(fd)
        try:
            after = os.lstat(path)
        except FileNotFoundError:
            self.close()
            raise
        if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
            self.close()
            raise not_running(self._instance)

    @classmethod
    def create(cls, instance: str, free: int, mode: int, group: int = NO_GROUP) -> Permits:
        """Create the semaphore or take over the existing one, with `free` permits. Only the
        supervisor calls it. One of this user that cannot be used is created again. Raises
        NotTrusted if an object of another user has its name."""
        name = attach_semaphore_name(instance)
        path = semaphore_path_of(name)
        fd = cls._own_file(name, path, free)
        try:
            set_permissions(fd, path, mode, group)
        finally:
            os.close(fd)
        permits = cls(instance, own())
        permits.set(free)
        return permits

    @staticmethod
    def _own_file(name: str, path: str, free: int) -> int:
        """A descriptor of the semaphore's file, which is created if it is missing. Links are not
        followed, and an existing file is used only if it is this user's."""
        while True:
            with contextlib.suppress(FileExistsError):
                create_semaphore(name, free)
            try:
                return _open_semaphore(path, own())
            except FileNotFoundError:
                continue
            except NotTrusted:
                if os.lstat(path).st_uid != os.geteuid():
                    raise
                _unlink(path)

    @classmethod
    def check_name(cls, instance: str) -> None:
        """Raises NotTrusted if an object of another user has the semaphore's name."""
        path = semaphore_path_of(attach_semaphore_name(instance))
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_uid != os.geteuid():
                os.close(ownership.open_owned(path, os.O_RDWR, own()))

    @property
    def free(self) -> int:
        """The number of permits that can be taken now."""
        return self._semaphore.value

    def take(self, reserve: int = 0) -> None:
        """Take a permit without waiting, but none of the last `reserve`. Raises TooManyClients."""
        # checked first: failing clients must not hold the last ones
        if self.free > reserve and self._semaphore.decrement():
            if self.free >= reserve:
                return
            self._semaphore.increment()  # others took permits at the same time
        kept = f" but {reserve} for the gateway and `shmq topic`, `channel`, `lease`"
        raise TooManyClients(
            f"instance {self._instance!r}: all 1024 client entries{kept if reserve else ''} are "
            "taken: detach processes that are not needed, or use one Broker per process"
        )

    def give(self) -> None:
        """Give a permit back."""
        self._semaphore.increment()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """The block takes a permit and an entry, or gives both back. If it is left by a death, the
        kernel releases the lock, and the supervisor sees what is missing.

        Without a descriptor, or with a lock that somebody else does not release, the block runs all
        the same: the supervisor then may give a permit too many, and takes it back."""
        try:
            fd = ownership.open_owned(self._path, os.O_RDWR, self._owners)
        except (OSError, ShmqError):  # no descriptor is left; or the instance was removed
            yield
            return
        try:
            for pause in _LOCK_PAUSES:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                time.sleep(pause)
            try:
                yield
            finally:
                # by itself: a child that another thread forks meanwhile has the descriptor too
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def mend(self, free: Callable[[], int]) -> bool:
        """Make the number of permits that of the free entries, which `free` returns. Returns False
        if clients are between their two steps: then it is not known. Only the supervisor calls it,
        in the thread that frees the entries of dead clients."""
        if self.free == free():
            return True
        try:
            fd = ownership.open_owned(self._path, os.O_RDWR, self._owners)
        except (OSError, ShmqError):  # no descriptor is left; or it was removed: `doctor` says so
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.set(free())
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def set(self, free: int) -> None:
        """Set the number of permits, from the client table."""
        for _ in range(free - self.free):
            self._semaphore.increment()
        for _ in range(self.free - free):
            if not self._semaphore.decrement():
                return

    def close(self) -> None:
        """Close the semaphore; no permit is given back. Idempotent."""
        self._semaphore.close()
