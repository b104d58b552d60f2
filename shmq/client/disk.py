"""Messages that a lease holds on disk: found in the overflow files before the lease is taken, and
read from them any number of times until it ends.

Only the supervisor writes the files. The records between a queue's read and write position do not
change as long as the read position does not move, and a lease on some of them keeps it where it is.
So no lock is needed. The records that were found are leased only if the core, holding the queue's
deliver lock (D), still sees the read position at their start. The records that were read are valid
only if the lease is still held afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from shmq import _native, layout, peek
from shmq.storage.diskqueue import DamagedFile, DiskQueue
from shmq.views import QueueView

#: Bytes that are scanned at a time; a part of a lease begins where such a piece begins.
_PIECE: Final = 256 << 10

Run = tuple[int, int, int, int, bytes]
"""A run of records as the core takes it: from and to (positions), bytes of the bodies, number of
records, position of each part's first record."""


@dataclass(frozen=True)
class Files:
    """A queue's overflow files, read by a process that is not the supervisor."""

    view: QueueView
    directory: str
    """The data path; empty if it is not known."""
    max_msg_size: int

    def _disk(self) -> DiskQueue:
        base = layout.text(self.view.header["base"])
        return DiskQueue(self.directory, base, max_msg_size=self.max_msg_size)

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
        pieces: list[tuple[int, int]] = []  # records before it, position
        position, count, size = start, 0, 0
        with self._disk() as disk:
            while count < n and position != write:
                try:
                    chunk = disk.read(position, write, _PIECE, _at_most(n - count))
                except (DamagedFile, OSError):
                    break  # the supervisor reports damage; or it has removed the file since
                taken, bodies, used = _native.leasable_records(
                    chunk.data, max(0, max_bytes - size), not count
                )
                if not taken:
                    break
                pieces.append((count, position))
                whole = taken == chunk.count
                position = chunk.next_position if whole else chunk.position + used
                count, size = count + taken, size + bodies
                if taken < chunk.count:
                    break
        if not count:
            return None
        before = np.array([piece[0] for piece in pieces])
        firsts = np.searchsorted(before, np.arange(parts) * count / parts)
        chosen = np.unique(firsts[firsts < len(pieces)])
        at = np.array([pieces[index][1] for index in chosen.tolist()], np.uint64)
        return start, position, size, count, at.tobytes()

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


def _at_most(records: int) -> Callable[[bytes, int], tuple[int, int, bool]]:
    """A scanner that stops after this number of records."""
    most = min(records, layout.NONE)
    return lambda data, max_msg_size: _native.scan_records(data, max_msg_size, most)
