"""Checks of a file's owner and type, made on a descriptor and never on a path.

Every user may create files in /dev/shm, and the names of shared memory objects can be guessed. So a
name proves nothing: another user may have created a file of that name, a FIFO that blocks its
reader, or a link to a third user's file. The functions here open without following links and
without waiting, and then check the descriptor, so nobody can replace the file between the check and
its use.

A process trusts its own user and root, who can do everything anyway. Other owners must be named: in
the call, or by SHMQ_OWNER.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator

from shmq.errors import ShmqError

#: Environment variable with the user (name or uid) whose brokers are trusted besides one's own.
OWNER_VARIABLE = "SHMQ_OWNER"
#: The largest uid, and how many digits of a text are looked at: more than any uid has.
_LAST_UID = (1 << 32) - 2
_UID_DIGITS = 100

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

#: Seconds that an open waits for a file lease (`shmq doctor` takes one to learn which processes use
#: a file): the time that the kernel gives the lease's holder, /proc/sys/fs/lease-break-time, and a
#: little more.
_LEASE_SECONDS = 50.0

_KINDS: list[tuple[Callable[[int], bool], str]] = [
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]


class Own(frozenset[int]):
    """The owners (uids) whose files a supervisor takes up: only its own user, even if SHMQ_OWNER
    names another."""


class NotTrusted(ShmqError):
    """A file is of an unexpected type, or belongs to a user who is not trusted. Nothing in it was
    read or changed."""


# ---- users ----


def uid_of(owner: str | int) -> int:
    """The uid of a user, by name or number. Raises ValueError if there is no such user."""
    if isinstance(owner, str) and owner.isascii() and owner.isdecimal():
        owner = int(owner[:_UID_DIGITS])
    if isinstance(owner, int) and not isinstance(owner, bool):
        if not 0 <= owner <= _LAST_UID:
            raise ValueError(f"owner must be a user's name, or a uid from 0 to {_LAST_UID}")
        return owner
    if not isinstance(owner, str) or not owner or "\0" in owner:
        raise ValueError(f"owner must be a user's name or uid, not {owner!r}")
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise ValueError(f"owner {owner!r} is no user of this host") from None


def trusted(owner: str | int | None = None) -> frozenset[int]:
    """The uids whose segments a client uses: its own, root's, and that of `owner` (None: of
    SHMQ_OWNER, if that is set). Raises ValueError if there is no such user."""
    named = os.environ.get(OWNER_VARIABLE) if owner is None else owner
    return frozenset({os.geteuid(), 0, *([] if named in (None, "") else [uid_of(named)])})


def user(uid: int) -> str:
    """A user as errors name it: `alice (uid 1000)`."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


# ---- directories ----


def who_else_may_write(status: os.stat_result, path: str) -> tuple[str, str]:
    """Whether other users may add or replace files in a directory that this process reads. Returns
    (a reason not to use it, a reason to warn), as sentences with the remedy; each is empty if there
    is none."""
    mode = status.st_mode
    is_sticky = bool(mode & stat.S_ISVTX)
    if mode & stat.S_IWOTH and not is_sticky:
        return f"every user of this host may replace the files in it: chmod o-w {path}", ""
    warned = []
    if status.st_uid not in (os.geteuid(), 0):
        warned.append(f"it belongs to {user(status.st_uid)}, who may replace the files in it")
    if mode & stat.S_IWOTH:
        warned.append("every user of this host may put files into it: use a directory of its own")
    elif mode & stat.S_IWGRP and not is_sticky and not is_private_group(status.st_gid):
        warned.append(
            f"members of group {group(status.st_gid)} may replace the files in it: chmod g-w {path}"
        )
    return "", "; ".join(warned)


def is_private_group(gid: int) -> bool:
    """Returns True for the group that a distribution creates for this user alone."""
    try:
        group, mine = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return mine.pw_gid == gid and group.gr_name == mine.pw_name and not group.gr_mem


def group(gid: int) -> str:
    """A group as errors name it: `brokers (gid 990)`."""
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


# ---- secrets ----

#: The most bytes of a file that holds a secret.
LONGEST_SECRET = 1 << 20

_OTHERS_READ = stat.S_IROTH | stat.S_IXOTH


def read_secret(path: str | os.PathLike[str], what: str) -> bytes:
    """All bytes of a file whose content lets somebody in: tokens, passwords, keys, rules of access.

    what: the file as the error names it, such as `--http-token-file` or `the login`. The file must
    belong to this process's user or to root, nobody else may write it, and only its owner and its
    group may read it (0600, 0640, 0440). A link is followed if this user or root made it, and what
    it leads to is checked on the descriptor: secrets of Kubernetes are links.

    Raises OSError: PermissionError with the remedy if the file is not to be trusted, else what the
    system says.
    """
    fd = open_secret(path, what)
    with open(fd, "rb", buffering=0) as file:
        found = file.read(LONGEST_SECRET + 1) or b""
    if len(found) > LONGEST_SECRET:
        sentence = f"{what} is longer than {LONGEST_SECRET} bytes, so it is another file"
        raise OSError(errno.EFBIG, sentence, os.fspath(path))
    return found


@contextlib.contextmanager
def secret_path(path: str | os.PathLike[str], what: str) -> Iterator[str]:
    """A path of the file that was checked as by `read_secret`, for libraries that open files by
    themselves. It leads to that file even if `path` is replaced meanwhile; it ends with the block.
    Raises as `read_secret`."""
    fd = open_secret(path, what)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def open_secret(path: str | os.PathLike[str], what: str, *, readable: bool = False) -> int:
    """A descriptor to read a file with that was checked as by `read_secret`. Raises as it.
    readable: everybody may read the file."""
    path = os.fspath(path)
    at = os.lstat(path)
    if stat.S_ISLNK(at.st_mode) and at.st_uid not in (os.geteuid(), 0):
        sentence = f"{what} is a link that {user(at.st_uid)} made: name the file itself"
        raise PermissionError(errno.EACCES, sentence, path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_secret(os.fstat(fd), path, what, readable)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_trusted(path: str | os.PathLike[str], what: str) -> None:
    """Check a file that everybody may read but nobody may forge, such as certificates of
    authorities. Raises as `read_secret`."""
    os.close(open_secret(path, what, readable=True))


def check_trusted_directory(path: str | os.PathLike[str], what: str) -> None:
    """Check a directory of such files: nobody may add one. Raises as `read_secret`."""
    status, path = os.stat(path), os.fspath(path)
    _check_writers(status, path, what, safe="o-w")


def _check_secret(status: os.stat_result, path: str, what: str, readable: bool) -> None:
    """Raises OSError unless the file is as `read_secret` says. readable: by everybody."""
    mode = status.st_mode
    quoted = _quoted(path)
    if not stat.S_ISREG(mode):
        sentence = f"{what} is {kind(mode)} and no regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, sentence, path)
    _check_writers(status, path, what, "o-w" if readable else "600")
    if mode & _OTHERS_READ and not readable:
        sentence = f"every user of this host may read {what}: chmod o-rwx {quoted}"
        raise PermissionError(errno.EACCES, sentence, path)


def _check_writers(status: os.stat_result, path: str, what: str, safe: str) -> None:
    """Raise PermissionError if another user but root may change it. safe: what chmod is told."""
    mode, quoted, sentence = status.st_mode, _quoted(path), ""
    if status.st_uid not in (os.geteuid(), 0):
        mended = "go-w" if safe == "o-w" else safe
        sentence = (
            f"{what} belongs to {user(status.st_uid)}, who may change it at any time: "
            f"chown {os.geteuid()} {quoted} && chmod {mended} {quoted}"
        )
    elif mode & stat.S_IWOTH:
        sentence = f"every user of this host may change {what}: chmod {safe} {quoted}"
    elif mode & stat.S_IWGRP:
        sentence = f"members of group {group(status.st_gid)} may change {what}: chmod g-w {quoted}"
    if sentence:
        raise PermissionError(errno.EACCES, sentence, path)


def check_log(status: os.stat_result, path: str, what: str) -> None:
    """Check an open file to which lines are appended that nobody is to forge. Raises
    PermissionError, with the remedy, if it belongs to neither this user nor root, others may write
    it, or it has a second name."""
    mode, quoted = status.st_mode, _quoted(path)
    mine = os.geteuid()
    sentence = ""
    if status.st_uid not in (mine, 0):
        sentence = (
            f"{what} belongs to {user(status.st_uid)}, who may change it at any time: move it "
            f"away, or chown {mine} {quoted}"
        )
    elif mode & stat.S_IWOTH:
        sentence = f"every user of this host may change {what}: chmod o-w {quoted}"
    elif mode & stat.S_IWGRP and status.st_uid == mine:  # in root's, a group lets this user write
        sentence = f"members of group {group(status.st_gid)} may change {what}: chmod g-w {quoted}"
    elif status.st_nlink > 1:
        sentence = f"{what} has a second name (a hard link): find the other, and remove it"
    if sentence:
        raise PermissionError(errno.EACCES, sentence, path)


def _quoted(path: str) -> str:
    """A path as a shell takes it."""
    import shlex  # for a mistake only

    return shlex.quote(path)


# ---- locks ----


def flock_holder(fd: int) -> int | None:
    """The pid of the process that holds an flock on the file of `fd`, as far as the kernel shows
    it. It is 0 or less for a process in another PID namespace; None if no holder is shown."""
    status = os.fstat(fd)
    return flocks().get((os.major(status.st_dev), os.minor(status.st_dev), status.st_ino))


def flocks() -> dict[tuple[int, int, int], int]:
    """The flocks that the kernel shows: (major, minor, inode) of the file -> pid of the holder."""
    found = {}
    with contextlib.suppress(OSError), open("/proc/locks") as file:
        for line in file:
            match = re.match(r"\d+: FLOCK\s+\S+\s+\S+ (-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", line)
            if match is not None:
                place = int(match[2], 16), int(match[3], 16), int(match[4])
                found[place] = int(match[1])
    return found


def process(pid: int) -> str:
    """A process as errors name it: `pid 12 (python3, of alice (uid 1000))`."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = "".join(letter if letter.isprintable() else "?" for letter in file.read()[:-1])
    except OSError:
        return f"pid {pid} (which has ended; a child of it may have inherited the lock)"
    return f"pid {pid} ({name}, of {user(uid)})"


# ---- opening ----


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """`os.open` of a regular file. Raises OSError for a link, a FIFO or anything else, without
    waiting. The descriptor is close-on-exec."""
    path = os.fspath(path)
    try:
        fd = _open(path, flags, mode)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(exc.errno, f"it is {_kind_at(path)} and no regular file", path) from exc
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"it is {kind(mode)} and no regular file", path)
    return fd


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file. Raises OSError, as `open_regular`."""
    with open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read()


def open_owned(path: str, flags: int, owners: Collection[int], *, links: bool = False) -> int:
    """A descriptor of a regular file that belongs to one of `owners` (uids) and has only one name.
    links: accept more names, for a file whose contents state its name.

    Raises FileNotFoundError, PermissionError, or NotTrusted with a remedy.
    """
    for pause in _pauses():
        try:
            fd = _open(path, flags)
            break
        except FileNotFoundError:
            raise
        except PermissionError:
            _check(os.stat(path, follow_symlinks=False), path, owners)
            raise
        except BlockingIOError:  # a process has a file lease on it
            _check(os.stat(path, follow_symlinks=False), path, owners)
            if not pause:
                raise
            time.sleep(pause)
        except OSError as exc:
            status = os.stat(path, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                raise
            raise _odd(status, path) from exc
    try:
        status = os.fstat(fd)
        if not status.st_nlink:  # removed between the open and this check
            raise FileNotFoundError(errno.ENOENT, "no such shared memory object", path)
        _check(status, path, owners, links=links)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(path: str, flags: int, mode: int = 0o600) -> int:
    return os.open(path, flags | _SAFE, mode)


def _pauses() -> Iterator[float]:
    """Seconds to sleep between two attempts while a process has a file lease; finally 0."""
    until = time.monotonic() + _LEASE_SECONDS
    while time.monotonic() < until:
        yield 0.002
    yield 0.0


def _check(
    status: os.stat_result,
    path: str,
    owners: Collection[int],
    *,
    links: bool = False,
) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _odd(status, path)
    if status.st_uid not in owners:
        raise NotTrusted(_foreign(status, path, owners))
    if not links and status.st_nlink > 1:
        raise NotTrusted(
            f"{path} has {status.st_nlink} names (hard links), so it may be there under a wrong "
            f"one: find the others (find {os.path.dirname(path)} -inum {status.st_ino}) and remove "
            "them"
        )


def _foreign(status: os.stat_result, path: str, owners: Collection[int]) -> str:
    owner, mine = user(status.st_uid), user(os.geteuid())
    if isinstance(owners, Own):
        return (
            f"{path} belongs to {owner}, and a supervisor takes up only what its own user made, "
            f"{mine}: run it as that user, use another --instance, or have {owner} or root remove "
            f"the file: rm -r {_quoted(path)}"
        )
    name = owner.partition(" (")[0].removeprefix("uid ")
    return (
        f"{path} belongs to {owner}, who is neither this process's user, {mine}, nor root nor a "
        f"named owner: nothing in it was used. If you trust that user, say so: "
        f"SHMQ_OWNER={name}, shmq.attach(owner={name!r}) or --owner {name}"
    )


def _odd(status: os.stat_result, path: str) -> NotTrusted:
    return NotTrusted(
        f"{path} is {kind(status.st_mode)} of {user(status.st_uid)} and no shared memory: have "
        f"that user or root remove it (rm -r {_quoted(path)}), or use another instance's name"
    )


def kind(mode: int) -> str:
    """Returns the kind of a file from its mode, as errors name it: `a directory`."""
    return next((text for is_it, text in _KINDS if is_it(mode)), "no regular file")


def _kind_at(path: str) -> str:
    """The kind of file at a path, for the text of an error."""
    try:
        return kind(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return "something else"
