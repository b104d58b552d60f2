"""The numbered data files of one queue: names, descriptors, reading and writing of bytes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from shmq.storage import own_files
from shmq.storage.data_path import data_file_number, valid_base
from shmq.storage.positions import unpack

_log = logging.getLogger(__name__)


class DataFiles:
    """The files of one base name in a data path, with one descriptor to read and one to write.

    Descriptors are opened on demand and kept until `close`. `close` may be called at any time: the
    next call opens them again. For one thread at a time.
    """

    _open = staticmethod(own_files.open_file)

    def __init__(self, data_path: Path | str, base: str) -> None:
        """`base`: `<topic>` or `<topic>:<channel>`. No file is touched. Raises ValueError for an
        invalid base name."""
        if not valid_base(base):
            raise ValueError(f"{base!r} is not a topic or topic:channel")
        self.data_path = Path(data_path)
        self.base = base
        self.lowest: int | None = None
        """No file below this number exists. None: not known."""
        self.buffer: bytearray | None = None
        """Where `read_at` reads to, if given: what it returned is valid until its next call."""
        self._read_fd = self._write_fd = -1
        self._read_file = self._write_file = -1
        self._unsynced: set[int] = set()  # files written since their last fsync
        self._new_names = True  # files may have been made since the directory's last fsync

    # -- names

    def file_name(self, file: int) -> str:
        """The name of a data file in the data path."""
        return f"{self.base}.diskqueue.{file:06d}.dat"

    def file_path(self, file: int) -> Path:
        """The path of a data file."""
        return self.data_path / self.file_name(file)

    @property
    def meta_path(self) -> Path:
        """The path of the position file."""
        return self.data_path / f"{self.base}.diskqueue.meta.dat"

    @property
    def mark_path(self) -> Path:
        """The path of the file that says that the deletion of all these files has begun."""
        return self.data_path / f"{self.base}.diskqueue.removed.dat"

    def files(self) -> list[int]:
        """The numbers of the existing data files, rising. Lists the whole directory. Raises
        OSError."""
        own_files.check_place(self.data_path)
        prefix, numbers = f"{self.base}.", []
        for name in os.listdir(self.data_path):
            number = data_file_number(name, self.base) if name.startswith(prefix) else None
            if number is not None:
                numbers.append(number)
        return sorted(numbers)

    # -- bytes

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        """Write bytes into a file, which is created if it does not exist. Raises OSError."""
        with self.naming(file):
            fd = self.open_write(file)
            self._unsynced.add(file)
            while view:
                done = os.pwrite(fd, view, offset)
                view, offset = view[done:], offset + done

    def read_at(self, file: int, offset: int, size: int) -> bytes | memoryview:
        """Read up to `size` bytes: fewer at the file's end, or if the disk cannot read the rest."""
        fd = self.open_read(file)
        if self.buffer is not None and len(self.buffer) < size:
            self.buffer = bytearray(size)
        into = None if self.buffer is None else memoryview(self.buffer)
        parts: list[bytes] = []
        done = 0
        while done < size:
            try:
                if into is None:
                    parts.append(os.pread(fd, size - done, offset + done))
                    got = len(parts[-1])
                else:
                    got = os.preadv(fd, [into[done:size]], offset + done)
            except OSError as exc:
                if exc.errno != errno.EIO:
                    exc.filename = str(self.file_path(file))
                    raise
                where = offset + done
                _log.error("%s: cannot read at offset %d: %s", self.file_path(file), where, exc)
                break
            if not got:
                break
            done += got
        if into is not None:
            return into[:done]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextlib.contextmanager
    def naming(self, file: int) -> Iterator[None]:
        """Add the file's name to errors of calls on its descriptor."""
        try:
            yield
        except OSError as exc:
            exc.filename = str(self.file_path(file))
            raise

    def fsync(self, file: int) -> None:
        """fsync a file. Raises OSError."""
        if file == self._write_file:
            os.fsync(self._write_fd)
            return
        fd = self._open(self.file_path(file), os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- descriptors

    def open_write(self, file: int, *, create: bool = True) -> int:
        """The descriptor to write a file with."""
        if self._write_file != file:
            self._close_write()
            flags = os.O_RDWR | (os.O_CREAT if create else 0)
            if create and self.mark_path.exists():  # what is written now is not to be removed
                self.mark_path.unlink(missing_ok=True)
            self._new_names = self._new_names or create
            self._write_fd = self._open(self.file_path(file), flags)
            self._write_file = file
            if self.lowest is not None:
                self.lowest = min(self.lowest, file)
        return self._write_fd

    def open_read(self, file: int) -> int:
        """The descriptor to read a file with."""
        if self._read_file != file:
            self._close_read()
            self._read_fd = self._open(self.file_path(file), os.O_RDONLY)
            self._read_file = file
        return self._read_fd

    def close(self) -> None:
        """Close the descriptors. Nothing is synced, because that needs positions: see `sync`."""
        self._close_read()
        self._close_write()

    def close_file(self, file: int) -> None:
        """Close a file that is about to be removed or renamed."""
        self._unsynced.discard(file)
        if self._read_file == file:
            self._close_read()
        if self._write_file == file:
            self._close_write()

    def _close_read(self) -> None:
        fd, self._read_fd, self._read_file = self._read_fd, -1, -1
        if fd >= 0:
            os.close(fd)

    def _close_write(self) -> None:
        fd, self._write_fd, self._write_file = self._write_fd, -1, -1
        if fd >= 0:
            os.close(fd)

    # -- removal

    def unlink(self, numbers: Iterable[int]) -> int:
        """Close and delete these files. Returns how many existed. Raises OSError."""
        count = 0
        for number in numbers:
            self.close_file(number)
            with contextlib.suppress(FileNotFoundError):
                self.file_path(number).unlink()
                count += 1
        return count

    def cut(self, write_position: int) -> int:
        """Remove everything beyond the write position. Returns the number of bytes removed.

        A supervisor that adopts a queue calls this, because its predecessor may have died while
        writing; so does a caller that abandons a batch. Raises OSError.
        """
        file, offset = unpack(write_position)
        last = file
        while self.file_path(last + 1).exists():
            last += 1
        removed = 0
        # from the end, so that a death in the middle leaves no gap that hides the later files
        for later in range(last, file if offset else file - 1, -1):
            path = self.file_path(later)
            with contextlib.suppress(FileNotFoundError):
                removed += path.stat().st_size
                self.unlink([later])
        if offset:
            path = self.file_path(file)
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                if size > offset:
                    own_files.truncate(path, offset)
                    removed += size - offset
        return removed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
