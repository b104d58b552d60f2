"""The files of queues that overflow: which are open, read to the end, or not yet synced."""

from __future__ import annotations

import time

import numpy as np

from shmq.layout import State
from shmq.storage.positions import unpack
from shmq.supervisor.overflow.state import States
from shmq.supervisor.registry import Queue

_READ_BACK = [State.RESTORED, State.REQUEUED, State.IN_FLIGHT, State.LEASED]
_OPEN_MOST = 256  # queues whose files stay open


class Files:
    """Keeps few files open, deletes those that were read, and syncs those that were written."""

    def __init__(self, states: States, spill_all: bool = False) -> None:
        """spill_all: no message is kept in memory alone (`mem_queue_size` is 0)."""
        self._states = states
        self._spill_all = spill_all
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
        kept, again = self.needed(queue, read)
        before = state.seen_kept if self._spill_all else state.seen_read
        if (before, state.seen_read) != (kept, read):
            if unpack(kept)[0] != unpack(before)[0]:
                queue.disk.drop_before(kept)
            queue.disk.note(1)
            state.seen_read, state.seen_kept = read, kept
        depth = queue.view.read("disk_depth") + again
        if queue.disk.maybe_sync(time.monotonic(), depth, kept, write) and kept == read:
            self.active.discard(queue)

    def needed(self, queue: Queue, read: int) -> tuple[int, int]:
        """The position before which nothing is needed, and how many messages between it and the
        read position are in memory. If none is to be in memory alone, those that were read back are
        on disk too until they are finished. Raises OSError."""
        if not self._spill_all:
            return read, 0
        state = self._states[queue]
        if state.seen_kept < 0:
            meta = queue.disk.load_meta()
            state.seen_kept = min(read, meta.read_position if meta else queue.first_read)
        slots = queue.view.slots
        held = slots["pos"][np.isin(slots["word"] & np.uint64(0xFF), _READ_BACK)]
        # a slot may still have the position of an earlier message
        held = held[(held >= np.uint64(state.seen_kept)) & (held < np.uint64(read))]
        return (int(held.min()), held.size) if held.size else (read, 0)
