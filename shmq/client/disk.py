"""What a lease may hold on disk: looked for in the overflow files before it is taken, read from
them as often as wanted until it ends.

The supervisor alone writes the files. What lies between a queue's read and write position does not
change as long as the read position does not move, and a lease that holds some of it keeps it where
it is. So this needs no lock: what was found counts if the core, under the queue's lock, still sees
the read position there; what was read counts if the lease is still held afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from shmq import _native, layout
from shmq.layout import QueueView
from shmq.storage.diskqueue import RECORD_OVERHEAD, Chunk, DamagedFile, DiskQueue

#: Bytes looked at at once: parts begin where such a piece does.
_PIECE: Final = 256 << 10

Run = tuple[int, int, int, int, bytes]
"""As the core takes it: from, to, bytes of bodies, records, position of each part's first one."""


@dataclass(frozen=True)
class Files:
    """A queue's overflow files, as another process than the supervisor sees them."""

    view: QueueView
    directory: str
    """Empty if it is not known."""
    max_msg_size: int

    def _disk(self) -> DiskQueue:
        base = layout.text(self.view.header["base"])
        return DiskQueue(self.directory, base, max_msg_size=self.max_msg_size)

    def find(self, n: int, max_bytes: int, parts: int) -> Run | None:
        """Up to n messages of together at most max_bytes (but at least one), what waits in memory
        in front of them counted with them. None if there are none, or none to be had: leased, in
        files that this process may not read, damaged."""
        header = self.view.header
        start, write = int(header["disk_read"]), int(header["disk_write"])
        n -= self.view.ring_length("requeue")
        if start == write or n <= 0 or layout.run_length(header) or not self.directory:
            return None
        pieces: list[tuple[int, int]] = []  # records before it, position
        position, count, size = start, 0, 0
        with self._disk() as disk:
            while count < n and position != write:
                try:
                    chunk = disk.read(position, write, _PIECE, _at_most(n - count))
                except (DamagedFile, OSError):
                    break  # the supervisor will say what is wrong, or has moved on
                taken, bodies, end = _within(chunk, max_bytes - size, at_least=not count)
                if not taken:
                    break
                pieces.append((count, position))
                count, size, position = count + taken, size + bodies, end
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
        self, start: int, end: int, rows: int, max_bytes: int, held: Callable[[], object]
    ) -> Iterator[tuple[int, tuple[bytes, bytes, bytes, bytes, bytes]]]:
        """The messages between two positions, up to `rows` at a time: how many, and their columns.
        `held` raises if what was read may be something else by now."""
        position, window = start, min(max_bytes, _PIECE)
        with self._disk() as disk:
            while position < end:
                try:
                    chunk = disk.read(position, end, window, _at_most(rows))
                except (DamagedFile, OSError):
                    held()
                    raise
                columns = _native.decode_records(chunk.data, chunk.count)
                held()
                if chunk.count:
                    yield chunk.count, columns
                    each = len(chunk.data) // chunk.count + 1
                    window = min(max_bytes, rows * each * 9 // 8)  # what is not used is read again
                position = chunk.next_position


def _at_most(records: int) -> Callable[[bytes, int], tuple[int, int, bool]]:
    """A scanner that stops after so many."""
    most = min(records, layout.NONE)
    return lambda data, max_msg_size: _native.scan_records(data, max_msg_size, most)


def _within(chunk: Chunk, max_bytes: int, at_least: bool) -> tuple[int, int, int]:
    """How many of its records have together at most so many bytes of bodies (at least one, if
    that), these bytes, and where they end."""
    bodies = len(chunk.data) - RECORD_OVERHEAD * chunk.count
    if bodies <= max_bytes or not chunk.count:
        return chunk.count, bodies, chunk.next_position
    sums = np.cumsum(chunk.lengths - RECORD_OVERHEAD)
    taken = max(int(np.searchsorted(sums, max_bytes, side="right")), int(at_least))
    if not taken:
        return 0, 0, chunk.position
    if taken == chunk.count:
        return taken, bodies, chunk.next_position
    return taken, int(sums[taken - 1]), chunk.position + int(chunk.offsets[taken])
