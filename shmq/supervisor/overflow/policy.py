"""Chooses the queues whose messages move between memory and disk, and how many of them.

Every choice is made from a snapshot of header lines. Its words may be from slightly different
moments, so the mover decides under the queue's lock.
"""

from __future__ import annotations

import logging
import shlex
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmq import _native, layout, peek
from shmq.storage.records import ENVELOPE, RECORD_MORE, RECORD_OVERHEAD
from shmq.supervisor.overflow.state import States
from shmq.supervisor.registry import Queue, Registry, Snapshot

BATCH_BYTES = 4 << 20  # bytes of records written or read at once
FAST_WINDOW = 0.010  # seconds over which the rate of a queue's consumers is measured
SECOND = 1_000_000_000  # ns
LEAD = 5 * SECOND  # load a deferred message this long before it is due

_FAST_SHARE = 8  # a fast consumer takes this part (1/8) of the capacity in FAST_WINDOW
_BLOCK = layout.constant("ARENA_UNIT")
_log = logging.getLogger(__name__)
_ASKING = 0.1  # seconds within which a publisher that found no room may try again

Rows = NDArray[np.bool_]
"""One truth value for each row of a snapshot."""


class Policy:
    """Chooses queues. Each method gets a snapshot, and returns rows of it or queues."""

    def __init__(self, registry: Registry, states: States, spill_all: bool) -> None:
        """spill_all: no message stays ready in memory (`mem_queue_size` is 0)."""
        self._registry = registry
        self._states = states
        self._spill_all = spill_all
        self.pressed: set[Queue] = set()
        """Channels without room that a backlog waits for."""

    # -- publishers

    def wanted(self, snapshot: Snapshot) -> Rows:
        """True where a publisher waits for room, or tried a moment ago and may try again, as a
        gateway does. (The header may still have the need of a publisher that gave up.)"""
        needs = (snapshot.hot["need_bytes"] != 0) | (snapshot.hot["need_slots"] != 0)
        recently = time.monotonic() - _ASKING
        for row in np.flatnonzero(needs).tolist():
            queue = snapshot.queues[row]
            waits = queue.view.header["space"]["summary"] != 0
            needs[row] = self._states[queue].asked_at > recently or waits
        wanted: Rows = needs
        return wanted

    def small(self, snapshot: Snapshot) -> Rows:
        """True where a publisher waits and the queue's memory has not grown to its maximum."""
        committed = snapshot.hot["arena_committed"].astype(np.int64)
        rows: Rows = self.wanted(snapshot) & (committed < snapshot.arena_max)
        return rows

    def _is_pressed(self, snapshot: Snapshot) -> Rows:
        return np.array([queue in self.pressed for queue in snapshot.queues], np.bool_)

    # -- spill

    def overflowing(self, snapshot: Snapshot, on_disk: Rows) -> Rows:
        """True where the ready ring must be spilled, if its consumers do not empty it fast."""
        hot, ready = snapshot.hot, snapshot.ready
        full = ready > 0 if self._spill_all else ready * 4 >= snapshot.capacity * 3
        full = full | self.wanted(snapshot)
        # with messages on disk all later ones go there too, so make room earlier
        full |= on_disk & (ready * 2 >= snapshot.capacity)
        committed = hot["arena_committed"].astype(np.int64) >= snapshot.arena_max
        for row in np.flatnonzero(committed & ~full).tolist():
            free = int(snapshot.queues[row].view.header["arena"]["free_bytes"])
            full[row] = free * 8 < snapshot.arena_max[row]
        if self.pressed:
            full |= self._is_pressed(snapshot)
        usable = (ready > 0) & ~snapshot.in_memory & (hot["base_pending"] == 0)
        chosen: Rows = full & usable
        return chosen

    def is_fast(self, queue: Queue, delivered: int, now: float) -> bool:
        """True if its consumers empty it so fast that the disk would only slow them down."""
        state = self._states[queue]
        since, before = state.delivered
        elapsed = now - since
        if elapsed > 10 * FAST_WINDOW:  # too old to measure a rate: look again in a moment
            state.delivered = (now, delivered)
            return True
        if elapsed < FAST_WINDOW:
            return True
        state.delivered = (now, delivered)
        return (delivered - before) * _FAST_SHARE * FAST_WINDOW >= queue.capacity * elapsed

    def crowded(self, snapshot: Snapshot) -> list[Queue]:
        """Queues in which requeued messages leave a publisher of deferred messages no room."""
        hot = snapshot.hot
        held = hot["in_use"] + snapshot.deferring + hot["need_slots"]
        full = (held > snapshot.in_flight_slots) | (hot["need_bytes"] > 0)
        usable = (snapshot.waiting > 0) & ~snapshot.in_memory & (hot["base_pending"] == 0)
        return snapshot.at(self.wanted(snapshot) & full & usable)

    # -- restore

    def running_low(self, snapshot: Snapshot, on_disk: Rows) -> list[Queue]:
        """Queues with messages on disk and few in the requeue ring."""
        low = on_disk & (snapshot.waiting < snapshot.low_water)
        chosen = snapshot.at(low & (snapshot.hot["base_pending"] == 0))
        # a lease may cover records on disk: they stay until it ends, and its end rings
        return [queue for queue in chosen if not peek.run_length(queue.view.header)]

    # -- deferred messages

    def defers_too_many(self, snapshot: Snapshot) -> list[Queue]:
        """Queues with too many deferred messages."""
        hot, slots = snapshot.hot, snapshot.in_flight_slots
        deferred = hot["deferred_len"] + snapshot.deferring
        if not deferred.any():
            return []
        many = deferred > slots // 2
        many |= hot["in_use_bytes"].astype(np.int64) > snapshot.arena_max * 5 // 8
        waits = self.wanted(snapshot)
        if self.pressed:
            waits |= self._is_pressed(snapshot)
        usable = (deferred > 0) & ~snapshot.in_memory & (hot["base_pending"] == 0)
        chosen = snapshot.at((many | waits) & usable)
        return [queue for queue in chosen if not self.feeds_channels(queue)]

    def has_deferred_due(self, snapshot: Snapshot) -> list[Queue]:
        """Queues with chunks whose messages are due soon, or that were emptied."""
        hot, soon = snapshot.hot, _native.realtime() + LEAD
        queues = [snapshot.queues[row] for row in np.flatnonzero(hot["deferred_depth"]).tolist()]
        chosen = [queue for queue in queues if (queue.deferred_store.due or soon) < soon]
        for row in np.flatnonzero(hot["deferred_gone"]).tolist():
            queue, gone = snapshot.queues[row], int(hot["deferred_gone"][row])
            if gone >= queue.deferred_store.lowest and queue not in chosen:
                chosen.append(queue)
        return chosen

    # -- backlogs

    def feeds_channels(self, queue: Queue) -> bool:
        """True if this is the backlog of an unpaused topic that has channels."""
        topic = queue.topic
        if queue.channel is not None or len(topic.queues) == 1:
            return False
        return not int(self._registry.directory.topics[topic.index]["paused"])


# -- how much


def holds(queue: Queue) -> bool:
    """True if the queue has messages to deliver, now or later."""
    read, write = queue.positions
    deferred = queue.view.ring_length("defer") + queue.view.read("deferred_len")
    return read != write or queue.ready + queue.waiting + deferred + queue.deferred_store.depth > 0


def has_room(queue: Queue) -> bool:
    """True if the queue has room for messages from disk."""
    _, slots, _, arena_max = queue.limits
    in_use, in_use_bytes = queue.view.read("in_use"), queue.view.read("in_use_bytes")
    return in_use < slots - slots // 8 and in_use_bytes < arena_max * 5 // 8


def oldest_quarter(queue: Queue) -> int:
    """How many messages stay in memory at the first overflow: a quarter of the ready ones, but at
    most a quarter of the bytes, so that something is left to spill."""
    oldest = queue.view.ready[: min(queue.ready, queue.capacity) // 4]
    nbytes = np.cumsum(queue.view.slots["capacity"][oldest], dtype=np.int64)
    return int(np.searchsorted(nbytes, queue.view.read("arena_max") // 4, "right"))


def bytes_that_fit(queue: Queue, record_bytes: int, *, everything: bool) -> int:
    """How many bytes to read: about twice the low-water mark of messages, and no more than fit,
    because the rest would have to be read again. record_bytes: the expected size of a record.
    everything: as many as fit."""
    view, (_, slots, low_water, arena_max) = queue.view, queue.limits
    room = arena_max * 3 // 4 - view.read("in_use_bytes")
    messages = slots - slots // 8 - view.read("in_use")
    if not everything:
        messages = min(2 * low_water, messages)
    return max(4096, min(BATCH_BYTES, room, messages * record_bytes))


def never_fits(queue: Queue, record: bytes | memoryview) -> bool:
    """True if the queue's memory could not hold this message even if it held nothing else."""
    in_memory = len(record) - RECORD_OVERHEAD
    if bytes(record[RECORD_OVERHEAD:][: len(ENVELOPE)]) == ENVELOPE:
        in_memory -= RECORD_MORE  # its envelope, and the entries that the slot has
    return in_memory + layout.constant("ARENA_HEAD") > queue.view.read("arena_max") // 4 * 3


def log_too_big(queue: Queue, size: int, bad: Path) -> None:
    """Log that a message which never fits was set aside, and how it is delivered all the same."""
    name, arena = bad.name.partition(".bad")[0], queue.view.read("arena_max")
    _log.error(
        "%s: a message of %d bytes can never fit into the %d bytes of this queue's memory; set "
        "aside as %s. To have it delivered: stop the broker, mv -n %s %s (or to another number, if "
        "there is such a file), and start with --arena-size=%d or more",
        queue,
        size,
        arena,
        bad,
        shlex.quote(str(bad)),
        shlex.quote(str(bad.with_name(name))),
        size * 3 // 2 + _BLOCK,
    )


def lacking(queue: Queue) -> int:
    """How many messages a queue must give up so that a waiting publisher's deferred messages fit.
    0 if none waits."""
    view = queue.view
    slots, nbytes = view.read("need_slots"), view.read("need_bytes")
    if not slots:
        return 0
    needed = held(queue) + slots - view.read("in_flight_slots")
    over = view.read("in_use_bytes") + nbytes - view.read("arena_max") * 3 // 4
    if over > 0:
        needed = max(needed, held(queue) * over // max(view.read("in_use_bytes"), 1) + 1)
    return max(needed, 0)


def held(queue: Queue) -> int:
    """How many messages of the queue are in use or being deferred."""
    return queue.view.read("in_use") + queue.view.ring_length("defer")


def room_for_deferred(queue: Queue) -> tuple[int, int]:
    """How many deferred messages, and how many bytes of them, may be loaded."""
    view = queue.view
    slots = view.read("in_flight_slots")
    deferred = view.read("deferred_len") + view.ring_length("defer")
    messages = min(max(slots // 2, 1) - deferred, max(slots * 7 // 8, 1) - held(queue))
    nbytes = view.read("arena_max") * 5 // 8 - view.read("in_use_bytes")
    return messages, nbytes
