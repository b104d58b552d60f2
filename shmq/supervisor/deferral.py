"""Moves deferred messages between memory and disk, by their due times.

* out: a queue in which more than half of what may be held is deferred, or whose publisher waits for
  room that deferred messages take. Those due last go first.
* in: chunks whose next message is due soon, as far as there is room; what is due now before what is
  due later. Where there is none, what is due later in memory makes room. Some is left for
  publishers, so that they need not wait for consumers.

For the spiller's loop, which calls it under the queue's lock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmq import _native
from shmq._native import Broker, Spill
from shmq.layout import Array
from shmq.storage.deferred import MAX_BYTES, MAX_MESSAGES
from shmq.supervisor import damage
from shmq.supervisor.roster import Look, Queue, Roster

_SECOND = 1_000_000_000  # ns
LEAD = 5 * _SECOND  # a message is read so long before it is due
_STEPS = (_SECOND // 4, _SECOND, LEAD)  # what is due in so long is read before the rest
_APART = _SECOND  # what is due that soon after `LEAD` is not written, to be read again at once
_WORTH = 16  # a file is worth its while with this part (1/16) of `inflight_slots` in it
_BITES = 8  # chunks a queue may write in one round
_FIRST = np.iinfo(np.int64).min


class Deferral:
    """What the spiller does for deferred messages."""

    def __init__(self, broker: Broker, roster: Roster) -> None:
        self._broker = broker
        self._roster = roster

    # -- choosing

    def to_write(self, look: Look, pressed: set[Queue]) -> list[Queue]:
        """Queues that hold too many. pressed: channels that a backlog waits for."""
        hot, slots = look.hot, look.inflight_slots
        deferred = hot["deferred_len"] + look.deferring
        if not deferred.any():
            return []
        many = deferred > slots // 2
        many |= hot["held_bytes"].astype(np.int64) > look.arena_max * 5 // 8
        waits = look.wanted
        if pressed:
            waits |= np.array([queue in pressed for queue in look.queues])
        chosen = (many | waits) & (deferred > 0) & ~look.ephemeral & (hot["base_pending"] == 0)
        return [look.queues[row] for row in np.flatnonzero(chosen).tolist()
                if not self._being_pumped(look.queues[row])]  # fmt: skip

    def to_read(self, look: Look) -> list[Queue]:
        """Queues with messages on disk that are due soon, or were emptied."""
        hot, soon = look.hot, _native.realtime() + LEAD
        queues = [look.queues[row] for row in np.flatnonzero(hot["deferred_depth"]).tolist()]
        chosen = [queue for queue in queues if (queue.sidecar.due or soon) < soon]
        for row in np.flatnonzero(hot["deferred_gone"]).tolist():
            queue = look.queues[row]
            if int(hot["deferred_gone"][row]) >= queue.sidecar.lowest and queue not in chosen:
                chosen.append(queue)
        return chosen

    def _being_pumped(self, queue: Queue) -> bool:
        topic = queue.topic
        if queue.channel is not None or len(topic.queues) == 1:
            return False
        return not int(self._roster.directory.topics[topic.index]["paused"])

    # -- out

    def write(self, queue: Queue, few: bool = False) -> bool:
        """Write what is too much, those due last. Raises OSError; it is then still in memory.

        A file has at least as many as make it worth its while. Where a publisher needs room and so
        few are deferred that most of what is held came back already, that is to go first; few: it
        could not, so a file of a few messages is better than a publisher that waits.
        """
        queue.sidecar.settle()
        view, moved = queue.view, False
        for _ in range(_BITES):
            slots, dues = view.read("inflight_slots"), _dues(queue)
            needed = lacking(queue)
            if needed > 0 and not few and len(dues) * _WORTH < slots and queue.waiting > len(dues):
                break
            surplus = len(dues) - slots // 4 if len(dues) > slots // 2 or moved else 0
            if view.read("held_bytes") > view.read("arena_max") * 5 // 8:
                surplus = max(surplus, len(dues) // 2)
            if needed > 0:
                surplus = max(surplus, needed + slots // 8, len(dues) - slots // 4)
            earliest = _FIRST if needed > 0 else _native.realtime() + LEAD + _APART
            if not self._write_latest(queue, dues, surplus, earliest):
                break
            moved = True
        return moved

    def write_all(self, queue: Queue) -> bool:
        """For a flush: everything deferred; whether there was any. Raises OSError."""
        queue.sidecar.settle()
        damage.drop_emptied(self._broker, queue)
        moved = False
        while (dues := _dues(queue)).size:
            if not self._write_latest(queue, dues, len(dues), _FIRST):
                break
            moved = True
        return moved

    def _write_latest(self, queue: Queue, dues: Array, surplus: int, earliest: int) -> bool:
        """One chunk of the `surplus` messages due last, but none due before `earliest`."""
        count = min(surplus, MAX_MESSAGES, len(dues))
        if count <= 0:
            return False
        place = len(dues) - count
        from_due = max(int(np.partition(dues, place)[place]), earliest)
        number = queue.sidecar.highest + 1
        batch = self._broker.chunk_begin(queue.index, number, from_due, count, MAX_BYTES)
        return batch is not None and _store(queue, batch)

    def _write_later(self, queue: Queue, due: int) -> bool:
        """Make room for what is due at `due` by writing what is due clearly later. Not while there
        is enough for consumers to take, which would come before it: that would only swap a few
        messages for a few others, with a file for each time."""
        if queue.waiting >= queue.limits[2]:
            return False
        if queue.ephemeral or self._being_pumped(queue):
            return False
        dues = _dues(queue)
        earliest = max(due, _native.realtime()) + _APART
        later = int(np.count_nonzero(dues >= earliest))
        return self._write_latest(queue, dues, later, earliest)

    # -- in

    def read(self, queue: Queue, everything: bool = False) -> bool:
        """Read what is due soon, as far as there is room; everything: also what is not. Raises
        OSError."""
        sidecar, now = queue.sidecar, _native.realtime()
        sidecar.settle()
        damage.drop_emptied(self._broker, queue)
        moved = late = False
        steps = _STEPS[:1] if lacking(queue) > 0 else _STEPS
        for step in (*steps, 1 << 62) if everything else steps:
            while (due := sidecar.due) is not None and due <= now + step:
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
        """Whether all that was asked for fitted."""
        sidecar = queue.sidecar
        chunk = min(sidecar.chunks.values(), key=lambda chunk: chunk.due)
        room, nbytes = _room(queue)
        if (room <= 0 or nbytes <= 0) and self._write_later(queue, chunk.due):
            room, nbytes = _room(queue)
        if room <= 0 or nbytes <= 0:
            return False
        piece = sidecar.read(chunk, until, min(room, MAX_MESSAGES), min(nbytes, MAX_BYTES))
        if piece is None:  # damaged: what is intact of it comes next time
            self._broker.chunk_depth(queue.index, sidecar.depth)
            return True
        taken = self._broker.chunk_load(queue.index, piece.data, piece.dues, piece.position)
        if taken is None:
            damage.drop_emptied(self._broker, queue)
            return False
        if taken:
            sidecar.took(piece, taken)
        return taken == len(piece.dues)


def lacking(queue: Queue) -> int:
    """How many messages less a queue must hold for the deferred ones that a publisher waits with,
    or 0."""
    view = queue.view
    slots, nbytes = view.read("need_slots"), view.read("need_bytes")
    if not slots:
        return 0
    needed = _held(queue) + slots - view.read("inflight_slots")
    over = view.read("held_bytes") + nbytes - view.read("arena_max") * 3 // 4
    if over > 0:
        needed = max(needed, _held(queue) * over // max(view.read("held_bytes"), 1) + 1)
    return max(needed, 0)


def _store(queue: Queue, batch: Spill) -> bool:
    """Put a chunk on disk and end it. False: the queue was emptied meanwhile."""
    sidecar = queue.sidecar
    try:
        dues = np.frombuffer(batch.positions, np.int64).tolist()
        lengths = np.frombuffer(batch.lengths, np.uint32).tolist()
        chunk = sidecar.write(dues, lengths, batch.encode())
    except BaseException:
        batch.end(0, False)
        raise
    if batch.end(0, True):
        sidecar.add(chunk)
        return True
    sidecar.discard(chunk)
    return False


def _dues(queue: Queue) -> NDArray[np.int64]:
    """Due times of all that is deferred in memory."""
    view = queue.view
    dues: NDArray[np.int64] = np.concatenate((view.deferred[0], view.slots["deadline"][view.defer]))
    return dues


def _held(queue: Queue) -> int:
    return queue.view.read("held") + queue.view.ring_length("defer")


def _room(queue: Queue) -> tuple[int, int]:
    """How many messages, and bytes, may be read."""
    view = queue.view
    slots = view.read("inflight_slots")
    deferred = view.read("deferred_len") + view.ring_length("defer")
    messages = min(max(slots // 2, 1) - deferred, max(slots * 7 // 8, 1) - _held(queue))
    nbytes = view.read("arena_max") * 5 // 8 - view.read("held_bytes")
    return messages, nbytes
