"""A directory that only this user may read, and its files.

Where other users may create names, as in /dev/shm, a name may exist already: another user's
directory, or a link. So a directory is created, opened without following links, and its owner and
mode are checked on the descriptor. From then on every file is opened relative to that descriptor,
by a name without slashes: no path is looked up twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import time
from pathlib import Path
from typing import Final, Self

from shmq.errors import ShmqError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_WRITERS: Final = stat.S_IWGRP | stat.S_IWOTH


class NotOwn(ShmqError):
    """A name is another user's, or may be read or written by others. Nothing was put there."""


class Private:
    """The open directory. A context manager. path: for the texts of errors only."""

    def __init__(self, base: str, *names: str, kept: int = 0) -> None:
        """Open the directories `names` below `base`, creating those that are missing. Each of
        `names`, and each missing part of `base`, must be this user's and closed to others. kept:
        how many of the first names `remove` leaves. Raises NotOwn, and FileNotFoundError if one of
        them is removed meanwhile."""
        self.path, self._fd, self._depth = Path(base), -1, len(names) - kept
        self._enter(_open_named(self.path))
        try:
            for name in names:
                self._enter(_make(self._fd, name, self.path / name))
                self.path /= name
        except BaseException:
            self.close()
            raise

    def _enter(self, fd: int) -> None:
        self.close()
        self._fd = fd

    def remove(self) -> None:
        """Remove the directory and those of `names` above it, as far as they are empty. In a
        process that has one of them open, `create` then raises FileNotFoundError."""
        for path in [self.path, *self.path.parents][: self._depth]:
            try:
                path.rmdir()
            except OSError:
                return

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def again(self) -> int:
        """A new descriptor of the directory, which can have an flock of its own."""
        return os.open(".", _DIRECTORY, dir_fd=self._fd)

    def names(self) -> list[str]:
        """The names in the directory."""
        return os.listdir(self._fd)

    def exists(self, name: str) -> bool:
        """Returns True if the name exists, also as a dead link."""
        try:
            os.stat(_plain(name), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def create(self, name: str) -> int:
        """A descriptor of a new file, for writing. Raises FileExistsError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(_plain(name), flags, 0o600, dir_fd=self._fd)

    def append(self, name: str) -> int:
        """A descriptor of a file, for reading and writing; the file is created if it is missing.
        Raises ShmqError if it is no regular file of this user."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(_plain(name), flags, 0o600, dir_fd=self._fd)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ShmqError(f"{self.path / name} is no regular file: remove it")
            _check(found, self.path / name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def age(self, name: str) -> float:
        """Seconds since a file was last written. Raises FileNotFoundError."""
        return time.time() - os.stat(_plain(name), dir_fd=self._fd, follow_symlinks=False).st_mtime

    def touch(self, name: str) -> None:
        """Make a file as young as one that was just written."""
        os.utime(_plain(name), dir_fd=self._fd, follow_symlinks=False)

    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""
        return os.stat(_plain(name), dir_fd=self._fd, follow_symlinks=False).st_size

    def free(self, kept: float = 0.0) -> int:
        """Bytes that its file system has room for while this part of it stays free; negative if
        less is free."""
        found = os.fstatvfs(self._fd)
        return int((found.f_bavail - kept * found.f_blocks) * found.f_frsize)

    def read(self, name: str) -> mmap.mmap | bytes:
        """A file's bytes, mapped. Raises FileNotFoundError, and ShmqError if it is no regular file
        of this user."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(_plain(name), flags, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise ShmqError(f"cannot read {self.path / name}: {exc.strerror}") from exc
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ShmqError(f"{self.path / name} is no regular file: remove it")
            _check(found, self.path / name)
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ) if found.st_size else b""
        finally:
            os.close(fd)

    def link(self, name: str, other: str) -> None:
        """Give a file another name. Raises FileExistsError if that exists."""
        os.link(
            _plain(name),
            _plain(other),
            src_dir_fd=self._fd,
            dst_dir_fd=self._fd,
            follow_symlinks=False,
        )

    def unlink(self, name: str) -> None:
        """Remove a name, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_plain(name), dir_fd=self._fd)


def _plain(name: str) -> str:
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise ShmqError(f"{name!r} is no name of a file in one directory")
    return name


def _open_named(path: Path) -> int:
    """A descriptor of the directory that the caller named, following links. Missing parts are
    created."""
    try:
        return os.open(path, _DIRECTORY)
    except FileNotFoundError:
        parent = _open_named(path.parent)
    try:
        return _make(parent, path.name, path)
    finally:
        os.close(parent)


def _make(parent: int, name: str, path: Path) -> int:
    """A descriptor of this user's directory `name` below `parent`, created if it is missing. Raises
    NotOwn if the name refers to anything else."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(_plain(name), 0o700, dir_fd=parent)
    try:
        fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise NotOwn(f"cannot open the directory {path}: {exc.strerror}") from exc
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and not found.st_mode & _WRITERS:
            os.fchmod(fd, 0o700)  # it was created readable for others, but only this user wrote it
            found = os.fstat(fd)
        _check(found, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(found: os.stat_result, path: Path) -> None:
    """Raises NotOwn unless only this user has access."""
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise NotOwn(
            f"{path} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, "
            f"and must be of uid {os.geteuid()} and closed to others (0700): else somebody could "
            f"read or replace rows before they are published. Have it removed: rm -r {path}"
        )
