"""The report on one file: which file is meant, which format it has, and its damages."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shmq import shm
from shmq.diagnostics import disk_files, segment
from shmq.diagnostics.findings import Report
from shmq.errors import ShmqError

_HEAD = 4096  # bytes that tell formats apart


def find(text: str) -> Path:
    """The file that is meant by a path, the name of a shared memory object, or an instance. Raises
    FileNotFoundError."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        return path
    shared = Path(shm.SHM_DIRECTORY)
    for name in (text.removeprefix("/"), f"shmq.{text}"):
        if "/" not in name and (shared / name).is_file():
            return shared / name
    if path.is_dir():
        raise IsADirectoryError(21, "a directory; name one of the files in it", text)
    raise FileNotFoundError(2, "no such file, shared memory object or instance", text)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and close it after the block. Raises OSError, ShmqError."""
    # a FIFO must not block the open; in /dev/shm any user may have placed a link
    flags = os.O_NOFOLLOW if path.parent == Path(shm.SHM_DIRECTORY) else 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        raise ShmqError(f"inspect {path}: it is a symbolic link and no regular file") from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ShmqError(f"inspect {path}: it is no regular file")
        yield fd
    finally:
        os.close(fd)


def report_on(
    path: Path, fd: int, count: int, say: disk_files.Progress = lambda text: None
) -> Report:
    """Report on an open file. count: rows of each long table; say: takes progress texts. Raises
    ShmqError if shmq does not know its format."""
    head = os.pread(fd, _HEAD, 0)
    in_shared_memory = path.parent == Path(shm.SHM_DIRECTORY)
    if segment.looks_like(head) or (in_shared_memory and path.name.startswith("shmq.")):
        return segment.read(fd, count)
    reader = disk_files.reader_of(path.name, head)
    if reader is None:
        what = "is empty" if not head else "is nothing that shmq or nsqd writes"
        raise ShmqError(f"inspect {path}: it {what} (by its name and its first bytes)")
    return reader(path, fd, count, say)
