"""Topics and results stores of a broker in memory that go when no process has them any more.

The maker of such a queue or pool has an open file with a shared lock, and so has every process that
got a duplicate of its descriptor. The kernel knows when the last of them has gone, however they
ended. The file says what is to go. The supervisor tries the exclusive lock now and then.

A file gets its name when it has its lock and its contents, so the supervisor never finds one that
nobody has yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

#: The directory of the files, in the data path.
_NAME: Final = "claims"
_MOST: Final = 1 << 16

_left_to_parents: weakref.WeakSet[Claim] = weakref.WeakSet()


def begin(data_path: str | os.PathLike[str]) -> None:
    """Have claims in this data path. Only the supervisor calls it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.join(data_path, _NAME), 0o700)


def claimed(data_path: str, topics: Sequence[str], stores: Sequence[str] = ()) -> int | None:
    """A descriptor of a new claim on these topics and stores, which need not exist yet. None if the
    broker has no claims, or this process may not write there."""
    if not data_path:
        return None
    with contextlib.ExitStack() as held:
        try:
            where = os.open(os.path.join(data_path, _NAME), os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, where)
        except OSError:
            return None
        return _claimed(where, topics, stores)


def _claimed(where: int, topics: Sequence[str], stores: Sequence[str]) -> int | None:
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=where)
    except OSError:
        return None
    try:
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
    caller goes on."""
    where = os.path.join(data_path, _NAME)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(where):
            path = os.path.join(where, name)
            with contextlib.suppress(OSError, ValueError):  # held, gone, or no claim
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    topics, stores = json.loads(os.pread(fd, _MOST, 0))
                    yield topics, stores
                    os.unlink(path)
                finally:
                    os.close(fd)


def _in_child() -> None:
    for claim in list(_left_to_parents):
        claim.close()


os.register_at_fork(after_in_child=_in_child)
