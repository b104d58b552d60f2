"""The files of queues that overflow: which are open, read to the end, or not yet synced."""

from __future__ import annotations

import time

from shmq.storage.positions import unpack
from shmq.supervisor.overflow.state import States
from shmq.supervisor.registry import Queue

_OPEN_MOST = 256  # queues whose files stay open


class Files:
    """Keeps few files open, deletes those that were read, and syncs those that were written."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._open: dict[Queue, None] = {}  # whose files may be open, the last used one last
        self.active: set[Queue] = set()
        """Queues with disk operations that are not synced yet."""

    def forget_gone(self) -> None:
        """Drop references to deleted queues."""
        for queue in [queue for queue in self._open if queue.gone]:
            del self._open[queue]
        self.active.difference_update([queue for queue in self.active if queue.gone])

    def keep_open(self, queue: Queue) -> None:
        """Note that the queue's files may be opened now. If many queues have open files, close
        those of the queue that was used longest ago."""
        self._open.pop(queue, None)
        self._open[queue] = None
        if len(self._open) > _OPEN_MOST:
            oldest = next(iter(self._open))
            del self._open[oldest]
            with oldest.lock:
                oldest.disk.close()

    def sync(self, queue: Queue) -> None:
        """Delete the queue's files that were read (or emptied) completely, and sync if it is due.
        Raises OSError."""
        state = self._states[queue]
        read, write = queue.positions
        if read != state.seen_read:
            if unpack(read)[0] != unpack(state.seen_read)[0]:
                queue.disk.drop_before(read)
            queue.disk.note(1)
            state.seen_read = read
        depth = queue.view.read("disk_depth")
        if queue.disk.maybe_sync(time.monotonic(), depth, read, write):
            self.active.discard(queue)
