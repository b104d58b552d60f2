"""The only place where a file of a data path is opened, and where its owner is looked at.

A data path may be a directory in which other users can create files: /tmp, a group's, or one that
was left open by mistake. So the name of a file proves nothing: the messages of another user's file
would be delivered as if somebody had published them. A file is used only if it is a regular one
with one name, belongs to this process's user or to root, and nobody else may write it. This is
checked on the descriptor, so nobody can put another file into its place between the check and its
use. The names in the data path are looked at before a start too, so that it is refused before
anything is used.

`share` takes these checks off a data path whose other writers are trusted (`--data-path-shared`).

The name of a data path can come to mean another directory while its broker runs: its file system is
unmounted, or somebody moves it. Files that seem to be missing there are not lost, and what is
written there is never found again. `hold` notes which directory is meant, and `check_place` refuses
another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Final

from shmq import ownership
from shmq.storage import StorageError

#: The most bytes of nsqd.dat and of shmq.dat. 16 384 topics and channels need two million.
MOST_METADATA = 64 << 20

#: The kinds of files that a broker reads or replaces in a data path, and what their names look
#: like. No other can be made there, so that each is looked at before a start. Those that were set
#: aside are for people, and no kind of their own.
KINDS: Final = {
    "topics": r"nsqd\.dat",
    "settings": r"shmq\.dat",
    "copy of the settings": r"shmq\.copy\.dat",
    "key": r"shmq\.key",
    "returned leases": r"shmq\.leases",
    "records": r".+\.diskqueue\.[0-9]{6,}\.dat",
    "positions": r".+\.diskqueue\.meta\.dat",
    "mark of a deletion": r".+\.diskqueue\.removed\.dat",
    "deferred messages": r".+\.deferred\.[0-9]{6,}(?:\.[0-9]+)?\.dat",
    "results": r"shmq\.results\..+\.dat",
}
_KIND = "|".join(KINDS.values())
#: The name of a file that shall replace one of a kind, or become one that is set aside.
TEMPORARY: Final = re.compile(rf"(?:{_KIND})(?:\.bad(?:\.[0-9]+)?)?\.[0-9]+\.tmp")
_OURS = re.compile(rf"{_KIND}|{TEMPORARY.pattern}")

_shared: set[str] = set()
_held: dict[str, int] = {}  # the descriptor of each data path that is locked


class ForeignFile(StorageError):
    """A file (`filename`) of the data path belongs to another user, or others may write it.
    Nothing in it was used."""


def share(data_path: Path | str) -> None:
    """From now on this process takes files of other users in this directory."""
    _shared.add(os.path.abspath(data_path))


def is_shared(data_path: Path | str) -> bool:
    """Whether `share` was called for the directory."""
    return bool(_shared) and os.path.abspath(data_path) in _shared


# ---- which directory ----


def hold(data_path: Path | str, fd: int) -> None:
    """From now on this name means the directory of the descriptor `fd`, which stays open, and no
    other."""
    _held[os.path.normpath(data_path)] = fd


def let_go(data_path: Path | str) -> None:
    """The name may mean any directory again."""
    _held.pop(os.path.normpath(data_path), None)


def check_place(data_path: Path | str) -> None:
    """Raises StorageError (ESTALE) if the name of a data path that is held means another directory
    now, or none: nothing in it may be read, written or removed. A directory that was removed cannot
    come back, so the name means whatever is made there."""
    fd = _held.get(os.path.normpath(data_path))
    if fd is None:
        return
    held = os.fstat(fd)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(data_path), held):
            return
    if held.st_nlink == 0:
        return
    sentence = (
        "it is not the directory that it was (moved, or its file system unmounted): bring that one "
        "back under this name (mount, mv)"
    )
    raise StorageError(errno.ESTALE, sentence, os.fspath(data_path))


# ---- opening ----


def open_file(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a file in a data path, as of `os.open`. Raises ForeignFile, without waiting,
    also for a link, a FIFO or anything else that is no regular file; StorageError as `check_place`;
    OSError; ValueError if the file shall be made and is of none of `KINDS`."""
    if flags & os.O_CREAT:
        _check_kind(path)
    return open_beside(path, flags, mode)


def open_beside(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """`open_file` for a file of any name, beside a data path."""
    directory = os.path.dirname(path) or "."
    check_place(directory)
    try:
        fd = ownership.open_regular(path, flags, mode)
    except (FileNotFoundError, FileExistsError):
        check_place(directory)  # it may have gone away since
        raise
    except OSError as exc:
        with contextlib.suppress(FileNotFoundError):
            _refuse(os.lstat(path), path)  # a reason that says more, if there is one
        if isinstance(exc, PermissionError) and os.path.lexists(path):
            raise PermissionError(exc.errno, not_permitted(path), os.fspath(path)) from exc
        raise
    try:
        _refuse(os.fstat(fd), path)
        if flags & os.O_CREAT:
            check_place(directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_file(path: Path | str, mode: int = 0o600) -> int:
    """A descriptor to write a new file in a data path with. mode: whatever the umask says. Raises
    FileExistsError if the name is taken, also by a dead link; StorageError as `check_place`;
    ValueError as `open_file`."""
    _check_kind(path)
    check_place(os.path.dirname(path) or ".")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, mode)
    os.fchmod(fd, mode)
    return fd


def read_file(path: Path | str, most: int) -> bytes:
    """All bytes of a file in a data path. Raises as `open_file`, and OSError (EFBIG) if it has more
    than `most`: nothing is read then."""
    with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            sentence = f"it has {size} bytes, and such a file has {most} at most: move it away"
            raise OSError(errno.EFBIG, sentence, os.fspath(path))
        return file.read()


def read_start(path: Path | str, most: int) -> bytes:
    """The first bytes, up to `most`, of a file in a data path. Raises as `open_file`."""
    with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read(most) or b""


def truncate(path: Path | str, size: int) -> None:
    """Cut a file in a data path. Raises as `open_file`."""
    fd = open_file(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def is_known(name: str) -> bool:
    """Whether a file of this name is of one of `KINDS`, or shall replace one."""
    return _OURS.fullmatch(name) is not None


def _check_kind(path: Path | str) -> None:
    name = os.path.basename(path)
    if not is_known(name):
        raise ValueError(f"{name} is no kind of file that a data path has")


# ---- checks ----


def check_all(data_path: Path | str, owner: int | None = None) -> None:
    """Look at the names in a data path, before anything in it is used. owner: the uid of the
    broker; None: this process's. Raises ForeignFile for the first file of a broker's that must not
    be used, with the remedy; OSError."""
    first: tuple[str, os.stat_result] | None = None
    count = 0
    with os.scandir(data_path) as entries:
        for entry in entries:
            if not is_known(entry.name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if _why_not(status, entry.path, owner):
                count += 1
                if first is None or entry.path < first[0]:
                    first = entry.path, status
    if first is not None:
        path, status = first
        more = f" ({count - 1} more files are not to be used either)" if count > 1 else ""
        raise ForeignFile(errno.EACCES, _why_not(status, path, owner) + more, path)


def _refuse(status: os.stat_result, path: Path | str) -> None:
    """Raises ForeignFile if a file must not be used."""
    path = os.fspath(path)
    if why := _why_not(status, path):
        raise ForeignFile(errno.EACCES, why, path)


def no_file(status: os.stat_result, path: str) -> str:
    """Why a directory, a link or another thing that is no regular file cannot have the name of one,
    with the remedy; "" for a regular file."""
    mode, quoted = status.st_mode, shlex.quote(path)
    if stat.S_ISREG(mode):
        return ""
    what = f"it is {ownership.kind(mode)}, and a broker takes only a regular file of this name"
    if stat.S_ISDIR(mode):
        return f"{what}: move it away (mv -T {quoted} {shlex.quote(path + '.away')})"
    if not stat.S_ISLNK(mode) or status.st_uid != os.geteuid():  # nobody moves what others name
        return f"{what}: remove it (rm {quoted})"
    to = os.path.realpath(path)
    if os.path.isfile(to):
        return (
            f"{what}: put the file itself here (mv -T {shlex.quote(to)} {quoted}); to have the "
            "files on another disk, give a data path that is there"
        )
    return f"{what}; {to}, to which it leads, is no file: bring that back, or rm {quoted}"


def not_permitted(path: Path | str) -> str:
    """Returns the remedy for a file that may be used, and that this user may not open."""
    quoted = shlex.quote(os.fspath(path))
    if os.lstat(path).st_uid == os.geteuid():
        return f"its mode does not let its owner use it: chmod u+rw {quoted}"
    mine = ownership.user(os.geteuid())
    return f"it belongs to root, and {mine} may not use it: chown {os.geteuid()} {quoted} as root"


def _why_not(status: os.stat_result, path: str, owner: int | None = None) -> str:
    """The reason not to use a file, with the remedy; "" if there is none. owner: as of
    `check_all`."""
    if is_shared(os.path.dirname(path) or "."):
        return no_file(status, path)
    mine = os.geteuid() if owner is None else owner
    mode, quoted = status.st_mode, shlex.quote(path)
    if status.st_uid not in (mine, 0):
        directory = shlex.quote(os.path.dirname(os.path.abspath(path)))
        return (
            f"it belongs to {ownership.user(status.st_uid)}, and a broker takes only files of its "
            f"own user, {ownership.user(mine)}, and of root: if you trust what is in it, "
            f"chown {mine} {quoted} (what nsqd left: chown -R {mine} {directory}), else have it "
            "removed. A directory of its own keeps files of others out; --data-path-shared takes "
            "them"
        )
    if odd := no_file(status, path):
        return odd
    if mode & stat.S_IWOTH:
        return f"every user of this host may write it: chmod o-w {quoted}"
    if mode & stat.S_IWGRP and not ownership.is_private_group(status.st_gid):
        members = ownership.group(status.st_gid)
        return f"members of group {members} may write it: chmod g-w {quoted}"
    if status.st_nlink > 1 and status.st_nlink > 1 + _set_aside_names(status, path):
        return (
            f"it has {status.st_nlink} names (hard links), so it may be another file's content: "
            f"cp -p {quoted} {quoted}.copy && mv {quoted}.copy {quoted}"
        )
    return ""


def _set_aside_names(status: os.stat_result, path: str) -> int:
    """How many of the other names of a file are those that this broker gave it (`.bad`). A death
    between setting a damaged file aside and replacing it leaves one."""
    directory, name = os.path.split(path)
    count = 0
    with os.scandir(directory or ".") as entries:
        for entry in entries:
            if entry.name.startswith(f"{name}.bad") and entry.inode() == status.st_ino:
                count += 1
    return count
