"""The directory in /dev/shm with the rows that a user's processes have staged for an instance.

Every user of the host may make names in /dev/shm, so a name that can be foretold can be taken
first, and then nothing could be staged. This one follows from the key of the instance's seals and
from its memory, so only who may attach knows it before it is there. Once it is there only its owner
can remove it, and it stays as long as the memory: a name that was seen is not used again.

Processes that know no key, or come after the memory has ended, find the directory by its owner.
Where several processes make it at one time they make the same one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable
from typing import Final

from shmq import procfs
from shmq.private import NotOwn, Private

#: The end of the name under which notes of what batch reads have read are kept, after that of their
#: instance. No instance can have a name that ends so.
READS: Final = "+reads"

#: The name of a file of staged rows: of a writer and topic, an epoch, and the application.
STAGED: Final = re.compile(
    r"(?P<what>[0-9a-f]+\.[0-9]+)\.(?P<pid>[0-9]+)-(?P<start>[0-9]+)\.[0-9a-f]+\.arrow"
)

_BASE: Final = "/dev/shm"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Where the gateway stages, and the name below which there is one for each memory.
_GATEWAY: Final = "gateway"
#: Seconds after which what a dead application has read is forgotten, where nobody knows whether its
#: leases live.
FORGOTTEN: Final = 86_400.0
#: Names that are tried. Somebody who may not attach knows none of them before it is used.
_TRIED: Final = 64


class StagingPlace:
    """The directory of one instance, for this process's user. Any thread may use it."""

    def __init__(self, instance: str, secret: Callable[[], tuple[bytes, str]]) -> None:
        """secret: the key of the instance's seals and the identity of its memory. It is asked for
        when there is no directory yet."""
        self._instance = instance
        self._secret = secret
        self._known = ""

    def open(self, *names: str) -> Private:
        """Directories in it, which are made if they are missing. Raises NotOwn,
        FileNotFoundError if somebody removes them meanwhile, and what `secret` raises."""
        for left in reversed(range(_TRIED)):
            name = self._existing() or self._new()
            try:
                return Private(_BASE, name, *names, kept=1)
            except NotOwn:
                if not left or _owner(name) == os.geteuid():
                    raise  # else another user took a name in the moment in which it was free
        raise AssertionError

    def path(self, *names: str) -> str | None:
        """The path of directories in it, for looking; None if there is no directory yet."""
        found = self._existing()
        return None if found is None else os.path.join(_BASE, found, *names)

    def _existing(self) -> str | None:
        if not self._known or _owner(self._known) != os.geteuid():
            self._known = next(iter(_names(self._instance, os.geteuid())), "")
        return self._known or None

    def _new(self) -> str:
        import hashlib  # slow to import, and a supervisor makes no names

        key, memory = self._secret()
        before = _before(self._instance, os.geteuid())
        name = ""
        for number in range(_TRIED):
            text = f"{memory}\0{os.geteuid()}\0{number}".encode()
            made = hashlib.blake2b(text, key=key, digest_size=12, person=b"shmq-staged")
            name = before + made.hexdigest()
            if _owner(name) in (None, os.geteuid()):
                break
        return name


def _before(instance: str, uid: int) -> str:
    return f"shmq-staged-{instance}-{uid}-"


def _owner(name: str) -> int | None:
    """Whose a name in /dev/shm is; None if there is none."""
    try:
        return os.lstat(os.path.join(_BASE, name)).st_uid
    except FileNotFoundError:
        return None


def _all_names(uid: int, instance: str = "") -> dict[str, list[str]]:
    """The directories of this user by the names of their instances, which READS may follow: one for
    each, but for a change of its key. instance: only those of this one. One pass over /dev/shm,
    where anybody may have made any number of names."""
    before = _before(instance, uid) if instance else "shmq-staged-"
    pattern = re.compile(rf"shmq-staged-(.+)-{uid}-[0-9a-f]{{24}}")
    found: dict[str, list[str]] = {}
    with os.scandir(_BASE) as entries:
        for entry in entries:
            if entry.name.startswith(before) and (match := pattern.fullmatch(entry.name)):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == uid and stat.S_ISDIR(status.st_mode):
                        found.setdefault(match[1], []).append(entry.name)
    return {name: sorted(names) for name, names in sorted(found.items())}


def _names(instance: str, uid: int) -> list[str]:
    return _all_names(uid, instance).get(instance, [])


def staged_paths(instance: str, uid: int) -> list[str]:
    """The directories of a user for an instance, for who looks at them."""
    return [os.path.join(_BASE, name) for name in _names(instance, uid)]


def staged_by_instance(uid: int) -> dict[str, list[str]]:
    """The directories of a user, by the names of their instances, which READS may follow."""
    return {
        name: [os.path.join(_BASE, each) for each in names]
        for name, names in _all_names(uid).items()
    }


def forget_staged(instance: str, uid: int) -> int:
    """Remove the rows that the gateway of an instance keeps for commits, if nothing is left of its
    memory, because no commit is for other memory. Remove also, of each instance of which nothing is
    left, what applications staged that have died, the notes of what they have read, and directories
    with nothing else in them. Returns the number of files of the instance's rows. Only what is in
    the user's own directory is removed, wherever a link in it may lead."""
    count = 0
    with contextlib.suppress(OSError):
        for name, paths in _all_names(uid).items():
            for path in paths:
                with contextlib.suppress(OSError):
                    found = _forget(os.path.join(_BASE, path), name, instance, uid)
                    count += found if name == instance else 0
    return count


def _forget(path: str, name: str, instance: str, uid: int) -> int:
    """Remove what is staged in one directory for memory that has ended. Returns the number of files
    of rows. Raises OSError if it cannot be looked at."""
    count, other = 0, name.removesuffix(READS)  # "" where those of many have one directory
    fd = os.open(path, _DIRECTORY)
    try:
        if os.fstat(fd).st_uid != uid:
            return 0
        memories = _memories(fd) if name == instance else []
        if other and os.path.lexists(f"{_BASE}/shmq.{other}"):
            return 0
        # An instance that is started from now on has other memory than those, and looks itself.
        for memory in memories:
            count += _forget_memory(fd, memory)
        with contextlib.suppress(OSError):
            os.rmdir(_GATEWAY, dir_fd=fd)
        if name != other:
            _forget_reads(fd, 0.0 if other else FORGOTTEN)
        else:
            count += _forget_dead(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(path)  # it may hold what others have staged
    return count


def _memories(directory: int) -> list[str]:
    """The names of the memories for which the gateway has staged something."""
    try:
        fd = os.open(_GATEWAY, _DIRECTORY, dir_fd=directory)
    except OSError:
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _forget_memory(directory: int, memory: str) -> int:
    """Remove the gateway's rows for one memory. Returns the number of files."""
    place = os.path.join(_GATEWAY, memory)
    count = 0
    with contextlib.suppress(OSError):
        count = sum(len(names) for _, _, names, _ in os.fwalk(place, dir_fd=directory))
        import shutil  # slow to import, and seldom anything is left here

        shutil.rmtree(place, dir_fd=directory)
    return count


def is_staged_by_the_living(name: re.Match[str]) -> bool:
    """Whether the application that staged a file lives. name: a match of STAGED."""
    return procfs.start_time(int(name["pid"])) == int(name["start"])


def _forget_dead(directory: int) -> int:
    """Remove what applications staged that have died. A file that a manifest may name stays:
    somebody may finish that commit. Returns the number."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no commit is running
        names = os.listdir(directory)
        begun = {name.removesuffix(".manifest") for name in names if ".manifest" in name}
        for name in names:
            found = STAGED.fullmatch(name)
            if found and found["what"] not in begun and not is_staged_by_the_living(found):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=directory)
                    count += 1
    return count


def _forget_reads(directory: int, age: float) -> None:
    """Remove the notes of reads whose applications have ended, and the locks that nobody has. A
    note of an application that lives says that its leases are lost. age: seconds since the last
    change of a note that is removed; the leases of a younger one may live."""
    for name in os.listdir(directory):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            if name.startswith("lock.") or _age(directory, name) >= age:
                _forget_read(directory, name)


def _age(directory: int, name: str) -> float:
    return time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime


def _forget_read(directory: int, name: str) -> None:
    """Remove a file that nobody uses any more: who uses one has it locked, or is in its name or at
    the head of its processes. Raises OSError, ValueError, TypeError or LookupError if that is not
    known."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if name.startswith(("lock.", "read.")):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            application = name.partition(".")[2]
            if application == "0-0":
                application = str(json.loads(os.read(fd, 1 << 20))["above"][0])
            pid, _, start = application.partition("-")
            if str(procfs.start_time(int(pid))) == start:
                return
        os.unlink(name, dir_fd=directory)
    finally:
        os.close(fd)
