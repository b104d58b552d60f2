"""Moves deferred messages between memory and disk, by their due times.

* Out: from a queue in which more than half of the slots that may be held are deferred, or whose
  publisher waits for room that deferred messages take. Messages due last are written first.
* In: from chunks whose next message is due soon, as far as there is room, the earliest due time
  first. Without room, messages that are due clearly later are written to make some. Some room is
  always left for publishers, so that they need not wait for consumers.

Example with room for four deferred messages, named by their due times in seconds from now:

    start                  memory [2 8 20 30 40 50]  chunk 1 []
    write the latest       memory [2 8 20 30]        chunk 1 [40 50]
    35 s later             memory []                 chunk 1 [5 15]
    read what is due soon  memory [5]                chunk 1 [15]

The spiller's loop calls this under the queue's lock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmq import _native
from shmq._native import Broker, Spill
from shmq.layout import Array
from shmq.storage.deferred import MAX_BYTES, MAX_MESSAGES
from shmq.supervisor import salvage
from shmq.supervisor.overflow.policy import (
    LEAD,
    SECOND,
    Policy,
    lacking,
    log_too_big,
    never_fits,
    room_for_deferred,
)
from shmq.supervisor.registry import Queue

_STEPS = (SECOND // 4, SECOND, LEAD)  # load all that is due within a step before the next step
_APART = SECOND  # do not write a message due this soon after LEAD: it would be read back at once
_WORTH = 16  # a file should hold at least this part (1/16) of `in_flight_slots`
_BITES = 8  # chunks a queue may write in one round
_FIRST = np.iinfo(np.int64).min


class DeferredMover:
    """Moves deferred messages, for the spiller."""

    def __init__(self, broker: Broker, policy: Policy) -> None:
        self._broker = broker
        self._policy = policy

    # -- out

    def write(self, queue: Queue, few: bool = False) -> bool:
        """Write the surplus of deferred messages, those due last. Returns whether any were written.
        Raises OSError; the messages are then still in memory.

        If a publisher needs room but only few of the held messages are deferred and more of them
        are requeued, nothing is written, so that the requeued ones go to disk first. few: that did
        not make enough room, so a file with few messages is better than a publisher that waits.
        """
        queue.deferred_store.settle()
        view, moved = queue.view, False
        for _ in range(_BITES):
            slots, dues = view.read("in_flight_slots"), _dues(queue)
            needed = lacking(queue)
            if needed > 0 and not few and len(dues) * _WORTH < slots and queue.waiting > len(dues):
                break
            surplus = len(dues) - slots // 4 if len(dues) > slots // 2 or moved else 0
            if view.read("in_use_bytes") > view.read("arena_max") * 5 // 8:
                surplus = max(surplus, len(dues) // 2)
            if needed > 0:
                surplus = max(surplus, needed + slots // 8, len(dues) - slots // 4)
            earliest = _FIRST if needed > 0 else _native.realtime() + LEAD + _APART
            if not self._write_latest(queue, dues, surplus, earliest):
                break
            moved = True
        return moved

    def write_all(self, queue: Queue) -> bool:
        """Write all deferred messages, for a flush. Returns whether any were. Raises OSError."""
        queue.deferred_store.settle()
        salvage.drop_emptied_chunks(self._broker, queue)
        moved = False
        while (dues := _dues(queue)).size:
            if not self._write_latest(queue, dues, len(dues), _FIRST):
                break
            moved = True
        return moved

    def _write_latest(self, queue: Queue, dues: Array, surplus: int, earliest: int) -> bool:
        """Write a chunk of the `surplus` messages that are due last, but none due before `earliest`
        (Unix ns). Returns whether there were any."""
        count = min(surplus, MAX_MESSAGES, len(dues))
        if count <= 0:
            return False
        place = len(dues) - count
        from_due = max(int(np.partition(dues, place)[place]), earliest)
        number = queue.deferred_store.highest + 1
        batch = self._broker.chunk_begin(queue.index, number, from_due, count, MAX_BYTES)
        return batch is not None and _store(queue, batch)

    def _write_later(self, queue: Queue, due: int) -> bool:
        """Make room for a message due at `due` by writing messages that are due clearly later.
        Returns whether any were written.

        Nothing is written while consumers have enough to take, because those messages come first
        anyway: it would only exchange a few messages for others, with a file for each exchange.
        """
        if queue.waiting >= queue.limits[2]:
            return False
        if queue.in_memory or self._policy.feeds_channels(queue):
            return False
        dues = _dues(queue)
        earliest = max(due, _native.realtime()) + _APART
        later = int(np.count_nonzero(dues >= earliest))
        return self._write_latest(queue, dues, later, earliest)

    # -- in

    def read(self, queue: Queue, everything: bool = False) -> bool:
        """Load messages that are due soon, as far as there is room. everything: then the others
        too. Returns whether any were loaded. Raises OSError."""
        store, now = queue.deferred_store, _native.realtime()
        store.settle()
        salvage.drop_emptied_chunks(self._broker, queue)
        moved = late = False
        steps = _STEPS[:1] if lacking(queue) > 0 else _STEPS
        for step in (*steps, 1 << 62) if everything else steps:
            while (due := store.due) is not None and due <= now + step:
                late |= due <= now
                if not self._read_some(queue, now + step):
                    break
                moved = True
            else:
                continue
            break
        if late and moved:
            self._broker.expire(queue.index, MAX_MESSAGES)
        return moved

    def _read_some(self, queue: Queue, until: int) -> bool:
        """Load messages of one chunk that are due at `until` or before. Returns whether all of them
        fitted."""
        store = queue.deferred_store
        chunk = min(store.chunks.values(), key=lambda chunk: chunk.due)
        room, nbytes = room_for_deferred(queue)
        if (room <= 0 or nbytes <= 0) and self._write_later(queue, chunk.due):
            room, nbytes = room_for_deferred(queue)
        if room <= 0 or nbytes <= 0:
            return False
        piece = store.read(chunk, until, min(room, MAX_MESSAGES), min(nbytes, MAX_BYTES))
        if piece is None:  # damaged: its intact messages are read next time
            self._broker.chunk_depth(queue.index, store.depth)
            return True
        taken = self._broker.chunk_load(queue.index, piece.data, piece.dues, piece.position)
        if taken is None:
            salvage.drop_emptied_chunks(self._broker, queue)
            return False
        if taken:
            store.took(piece, taken)
        elif never_fits(queue, piece.first):
            bad = store.keep_first(piece)
            self._broker.chunk_depth(queue.index, store.depth)
            log_too_big(queue, len(piece.first), bad)
            return True
        return taken == len(piece.dues)


def _store(queue: Queue, batch: Spill) -> bool:
    """Write a chunk to disk and end its batch. False if the queue was emptied meanwhile."""
    store = queue.deferred_store
    try:
        dues = np.frombuffer(batch.positions, np.int64).tolist()
        lengths = np.frombuffer(batch.lengths, np.uint32).tolist()
        chunk = store.write(dues, lengths, batch.encode())
    except BaseException:
        batch.end(0, False)
        raise
    if batch.end(0, True):
        store.add(chunk)
        return True
    store.discard(chunk)
    return False


def _dues(queue: Queue) -> NDArray[np.int64]:
    """Due times of all deferred messages in memory."""
    view = queue.view
    dues: NDArray[np.int64] = np.concatenate((view.deferred[0], view.slots["deadline"][view.defer]))
    return dues
