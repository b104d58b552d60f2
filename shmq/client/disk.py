"""Messages that a lease holds on disk: found in the overflow files before the lease is taken, and
read from them any number of times until it ends.

Only the supervisor writes the files. The records between a queue's read and write position do not
change as long as the read position does not move, and a lease on some of them keeps it where it is.
So no lock is needed. The records that were found are leased only if the core, holding the queue's
deliver lock (D), still sees the read position at their start. The records that were read are valid
only if the lease is still held afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from shmq import _native, layout, peek
from shmq.ownership import open_regular
from shmq.storage.diskqueue import DamagedFile, DiskQueue
from shmq.storage.positions import pack, unpack
from shmq.storage.records import Scanner
from shmq.views import QueueView

#: Bytes that are scanned at a time; a part of a lease begins where such a piece begins.
_PIECE: Final = 256 << 10
#: Files that are counted at a time, at most.
_AT_ONCE: Final = 4

Run = tuple[int, int, int, int, bytes]
"""A run of records as the core takes it: from and to (positions), bytes of the bodies, number of
records, position of each part's first record."""


@dataclass
class _Counted:
    """Records that follow each other and that one lease can have."""

    end: int
    """Position after the last one."""
    count: int = 0
    size: int = 0
    """Bytes of their bodies."""
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """Of each piece that was scanned: the records before it, and its position."""
    whole: bool = False
    """All that were asked for; False: a limit, damage or one that cannot be leased follows."""

    def add(self, more: _Counted) -> None:
        """Append the records that follow."""
        self.pieces += [(self.count + before, position) for before, position in more.pieces]
        self.end, self.whole = more.end, more.whole
        self.count, self.size = self.count + more.count, self.size + more.size


class _BrokersFiles(DiskQueue):
    """The files of a queue in a client. They belong to the broker's user, and the broker, which
    says which of them count, has looked at their owner."""

    _open = staticmethod(open_regular)


@dataclass(frozen=True)
class Files:
    """A queue's overflow files, read by a process that is not the supervisor."""

    view: QueueView
    directory: str
    """The data path; empty if it is not known."""
    max_msg_size: int

    def _disk(self) -> DiskQueue:
        """The files, which are read into one buffer: what is read is counted or copied at once."""
        base = layout.text(self.view.header["base"])
        disk = _BrokersFiles(self.directory, base, max_msg_size=self.max_msg_size)
        disk.buffer = bytearray(_PIECE)
        return disk

    def find(self, n: int, max_bytes: int, parts: int) -> Run | None:
        """Find the run of the next records on disk: with the messages that wait in memory before
        them at most n, and with bodies of at most max_bytes in all, but at least one record.
        It ends before a message with a time to live of its own, which is looked at when it is read
        back to memory. Returns None if there are none, or none that can be leased: they are leased
        already, damaged or in files that this process may not read."""
        header = self.view.header
        start, write = int(header["disk_read"]), int(header["disk_write"])
        n -= self.view.ring_length("requeue")
        if start == write or n <= 0 or peek.run_length(header) or not self.directory:
            return None
        found = self._count(start, write, n, max_bytes)
        if not found.count:
            return None
        before = np.array([piece[0] for piece in found.pieces])
        firsts = np.searchsorted(before, np.arange(parts) * found.count / parts)
        chosen = np.unique(firsts[firsts < len(before)])
        at = np.array([found.pieces[index][1] for index in chosen.tolist()], np.uint64)
        return start, found.end, found.size, found.count, at.tobytes()

    def _count(self, start: int, write: int, n: int, max_bytes: int) -> _Counted:
        """Count the records from `start` on. Each file begins with a record, so a thread for each
        core counts a file of its own."""
        first, last = unpack(start)[0], unpack(write)[0]
        ends = (start, *(pack(file, 0) for file in range(first + 1, last + 1)), write)
        files = [span for span in pairwise(ends) if span[0] < span[1]]
        at_once = min(_AT_ONCE, len(os.sched_getaffinity(0)), len(files))
        counted = _Counted(start, whole=True)
        with ThreadPoolExecutor(at_once) as pool:
            for i in range(0, len(files), at_once):
                group = files[i : i + at_once]
                rows, size = n - counted.count, max_bytes - counted.size
                count = partial(
                    self._count_file,
                    write=write,
                    n=rows,
                    max_bytes=size,
                    at_least=not counted.count,
                )
                each = map(count, group) if len(group) == 1 else pool.map(count, group)
                for file, found in zip(group, each, strict=True):
                    rows, size = n - counted.count, max_bytes - counted.size
                    if found.count > rows or found.size > size:  # the files before it left less
                        found = self._count_file(file, write, rows, size, not counted.count)
                    counted.add(found)
                    if not counted.whole or counted.count == n:
                        return counted
        return counted

    def _count_file(
        self, file: tuple[int, int], write: int, n: int, max_bytes: int, at_least: bool
    ) -> _Counted:
        """Count the records of one file, between two positions. at_least: one may be larger."""
        found, end = _Counted(file[0]), file[1]
        with self._disk() as disk:
            while found.end < end:
                try:
                    chunk = disk.read(found.end, write, _PIECE, _at_most(n - found.count))
                except (DamagedFile, OSError):
                    return found  # the supervisor reports damage; or it has removed the file since
                if chunk.position >= end:
                    found.end = end
                    break
                taken, bodies, used = _native.leasable_records(
                    chunk.data, max(0, max_bytes - found.size), at_least and not found.count
                )
                if not taken:
                    return found
                found.pieces.append((found.count, chunk.position))
                whole = taken == chunk.count
                found.end = chunk.next_position if whole else chunk.position + used
                found.count, found.size = found.count + taken, found.size + bodies
                if not whole or found.count == n:
                    return found
        found.whole = True
        return found

    def read(
        self,
        start: int,
        end: int,
        rows: int,
        max_bytes: int,
        held: Callable[[], object],
        properties: bool = False,
    ) -> Iterator[tuple[int, tuple[bytes, bytes, bytes, bytes, bytes], tuple[bytes, bytes] | None]]:
        """Yield the messages between two positions, at most `rows` at a time: (their number, the
        columns of `decode_records`, what `record_properties` gives or None). `held` raises if the
        lease has ended, because the files may have changed then. Raises DamagedFile and
        OSError."""
        position, window = start, min(max_bytes, _PIECE)
        with self._disk() as disk:
            while position < end:
                try:
                    chunk = disk.read(position, end, window, _at_most(rows))
                except (DamagedFile, OSError):
                    held()
                    raise
                columns = _native.decode_records(chunk.data, chunk.count)
                blocks = None
                if properties:
                    blocks = _native.record_properties(chunk.data, chunk.count)
                held()
                if chunk.count:
                    yield chunk.count, columns, blocks
                    each = len(chunk.data) // chunk.count + 1
                    window = min(max_bytes, rows * each * 9 // 8)  # a surplus would be read again
                position = chunk.next_position


def _at_most(records: int) -> Scanner:
    """A scanner that stops after this number of records."""
    most = min(records, layout.NONE)
    return lambda data, max_msg_size: _native.scan_records(data, max_msg_size, most)
