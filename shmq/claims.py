"""Topics and results stores that go when no process has them any more.

The maker of such a queue or pool has an open file with a shared lock, and so has every process that
got a duplicate of its descriptor. The kernel knows when the last of them has gone, however they
ended. The file says what is to go. The supervisor tries the exclusive lock now and then, and before
it writes anything to disk at its end.

The files are in a directory in the data path, so they last as long as the topics do that are on
disk: those of a host that lost its power are found by the next start. The data path's owner and
root make claims; a queue of another user is deleted by the process that made it.

A file gets its name when it has its lock and its contents, so the supervisor never finds one that
nobody has yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

#: The directory of the files, in the data path.
NAME: Final = "shmq.claims"
#: The file that each data path of a running broker has.
_ALWAYS: Final = "shmq.key"
_MOST: Final = 1 << 16
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_left_to_parents: weakref.WeakSet[Claim] = weakref.WeakSet()


def claimed(data_path: str, topics: Sequence[str], stores: Sequence[str] = ()) -> int | None:
    """A descriptor of a new claim on these topics and stores, which need not exist yet. None if
    this process may not make one in that data path."""
    if not data_path:
        return None
    place = os.path.join(data_path, NAME)
    try:
        # in a container another directory may have this path
        owner = os.stat(os.path.join(data_path, _ALWAYS)).st_uid
        if owner == os.geteuid():
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)
        where = _opened(place, owner)
    except OSError:
        return None
    try:
        return _claimed(where, topics, stores)
    finally:
        os.close(where)


def _opened(place: str, owner: int) -> int:
    """A descriptor of the directory. Raises OSError, PermissionError if it is not `owner`'s or
    others may write there: such files are not believed."""
    fd = os.open(place, _DIRECTORY)
    found = os.fstat(fd)
    if found.st_uid != owner or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise PermissionError
    return fd


def _claimed(where: int, topics: Sequence[str], stores: Sequence[str]) -> int | None:
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=where)
    except OSError:
        return None
    try:
        os.fchmod(fd, 0o644)  # the directory is closed; a supervisor reads what root has made
        os.write(fd, json.dumps([list(topics), list(stores)]).encode())
        fcntl.flock(fd, fcntl.LOCK_SH)
        # With a directory's descriptor this is linkat, which follows the link, as link does not.
        os.link(f"/proc/self/fd/{fd}", topics[0], dst_dir_fd=where, follow_symlinks=True)
    except OSError:
        os.close(fd)
        return None
    return fd


class Claim:
    """A claim of this process alone: forked children leave it to their parent."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        """fd: of `claimed`, which is taken over."""
        self._fd = fd
        _left_to_parents.add(self)

    def close(self) -> None:
        """End the claim. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def released(data_path: str | os.PathLike[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The topics and stores of each claim that no process has any more. It is forgotten when the
    caller goes on. Only the supervisor calls it."""
    with contextlib.ExitStack() as held:
        try:
            where = _opened(os.path.join(data_path, NAME), os.geteuid())
            held.callback(os.close, where)
            names = os.listdir(where)
        except OSError:
            return
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # held, gone, or no claim
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(name, flags, dir_fd=where)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    topics, stores = json.loads(os.pread(fd, _MOST, 0))
                    yield topics, stores
                    os.unlink(name, dir_fd=where)
                finally:
                    os.close(fd)


def forget_empty(data_path: str | os.PathLike[str]) -> None:
    """Remove the directory if there are no claims. Only the supervisor calls it, at its end."""
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(data_path, NAME))


def _in_child() -> None:
    for claim in list(_left_to_parents):
        claim.close()


os.register_at_fork(after_in_child=_in_child)
