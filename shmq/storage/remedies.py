"""Remedies for calls on a data path that the system refused: the part of an error that helps.

The system's own words, such as `File too large`, name neither the limit nor who has set it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shlex
import stat

from shmq import ownership
from shmq.storage import StorageError
from shmq.storage.own_files import not_permitted

#: Refusals that end when somebody makes room.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def sentence(exc: OSError) -> str:
    """`exc` as one sentence: the file, what the system says, and what to do."""
    text = f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror or str(exc)
    if exc.filename is None or isinstance(exc, StorageError):  # which says it already
        return text
    more = remedy(exc.errno or 0, os.fsdecode(exc.filename))
    return f"{text}: {more}" if more and more not in text else text


def remedy(number: int, path: str) -> str:
    """Returns what helps against the refusal `number` (an errno) of a call on `path`, a data path
    or a file in one; "" if the system's words say all."""
    with contextlib.suppress(OSError):
        if number in (errno.EACCES, errno.EPERM):
            return _permission(path)
        if number == errno.EROFS:
            where = shlex.quote(_mount_point(path))
            return f"its file system is read-only: mount -o remount,rw {where} as root"
        if number == errno.ENOSPC:
            room = os.statvfs(_directory(path))
            no_names = room.f_files and not room.f_favail
            return "no inodes are left there: remove files" if no_names else "make room there"
        if number == errno.EDQUOT:
            return f"make room there, or raise the quota of {ownership.user(os.geteuid())}"
        if number == errno.EFBIG:
            return _too_large()
        if number == errno.EIO:
            return "the disk fails: see dmesg, and copy the data path to another one"
    return ""


def _too_large() -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "its file system takes no larger files: use another one"
    return (
        f"a file may have {limit} bytes (RLIMIT_FSIZE), in shared memory too: start the broker "
        "with ulimit -f unlimited (systemd: LimitFSIZE=infinity)"
    )


def _permission(path: str) -> str:
    directory = _directory(path)
    status, mine = os.stat(directory), os.geteuid()
    is_closed = not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
    quoted = shlex.quote(directory)
    if is_closed and status.st_uid == mine:
        return f"chmod u+rwx {quoted}"
    if is_closed:
        owner = ownership.user(status.st_uid)
        return f"the directory belongs to {owner}: chown {mine} {quoted} as root"
    is_file = stat.S_ISREG(os.lstat(path).st_mode)
    return not_permitted(path) if is_file else ""


def _directory(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))


def _mount_point(path: str) -> str:
    at = os.path.realpath(_directory(path))
    while not os.path.ismount(at):
        at = os.path.dirname(at)
    return at
