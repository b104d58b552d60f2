"""Gives memory of emptied queues back to the system.

A queue grows as it fills, and its segment would stay that large. When a queue has been almost empty
for a while, the pages after its last message body are given back; later it grows again as it did
at first. A queue in use is left alone, so its publishers do not pay for growing again. When
somebody finds no room in /dev/shm, all queues are trimmed at once that are almost empty, or whose
bodies all lie in the first half of their memory.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import numpy as np

from shmq._native import Broker
from shmq.errors import ShmqError
from shmq.layout import NONE, State, state
from shmq.supervisor.registry import Queue, Snapshot

_WORTH = 1 << 20  # bytes of bodies that a queue may keep
_AFTER = 10.0  # seconds in which every look found it almost empty
_FEW = 16  # a queue is almost empty if at most this part (1/16) of its slots is in use
_AGAIN = 60.0  # seconds until the next try: its last body may lie near the end of the arena
_AT_ONCE_EVERY = 0.5  # seconds between two passes over all queues for somebody without room
_SCARCE = 4 << 20  # bytes: /dev/shm counts as full with less than this left

_log = logging.getLogger(__name__)


class Trimmer:
    """Trims queues, for the spiller and the topic manager."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._at_once = -_AT_ONCE_EVERY
        self._quiet: WeakKeyDictionary[Queue, tuple[float, int]] = WeakKeyDictionary()
        """Since when a queue has been almost empty, and the number published by then."""

    def trim_idle(self, snapshot: Snapshot, now: float) -> None:
        """Trim the queues that have been idle long enough. now: monotonic seconds."""
        large = snapshot.hot["arena_committed"] > _WORTH
        for row in np.flatnonzero(large).tolist():
            queue, hot = snapshot.queues[row], snapshot.hot[row]
            published = int(hot["enqueued"])
            few = _used(hot) * _FEW <= int(hot["slots_committed"])
            since, before = self._quiet.get(queue, (math.inf, 0))
            quiet = published - before <= int(hot["slots_committed"]) // _FEW
            if not (few and quiet) or since == math.inf:
                self._quiet[queue] = (now, published)
            elif now - since >= _AFTER:
                self._quiet[queue] = (now + _AGAIN - _AFTER, published)
                self._trim(queue)

    def trim_now(self, queues: Iterable[Queue]) -> int:
        """Trim all queues that are almost empty, and those that can give half of their memory back:
        a process may keep views of few large bodies. It is for somebody who found no room. Returns
        the bytes given back, 0 if the last call was a moment ago."""
        now = time.monotonic()
        if now - self._at_once < _AT_ONCE_EVERY:
            return 0
        self._at_once = now
        snapshot = Snapshot.of([queue for queue in queues if not queue.gone])
        given = 0
        for row in np.flatnonzero(snapshot.hot["arena_committed"] > _WORTH // 16).tolist():
            queue, hot = snapshot.queues[row], snapshot.hot[row]
            few = _used(hot) * _FEW <= int(hot["slots_committed"])
            if few or _end_of_bodies(queue) * 2 <= int(hot["arena_committed"]):
                given += self._trim(queue)
        return given

    def _trim(self, queue: Queue) -> int:
        try:
            given = self._broker.trim(queue.index)
        except ShmqError:  # removed, locked by a stopped process, or not repairable
            return 0
        if given:
            _log.info("%s: gave %d KiB of memory back", queue, given >> 10)
        return given


def scarce(needed: int) -> bool:
    """True if /dev/shm has no room for `needed` bytes."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < needed + _SCARCE


def _end_of_bodies(queue: Queue) -> int:
    """Where the last body of a message ends."""
    slots = queue.view.slots
    used = slots[state(slots["word"]) != State.FREE]
    return int((used["body"] + used["capacity"]).max(initial=0))


def _used(hot: np.void) -> int:
    """The number of slots that are not free."""
    free = (int(hot["free_tail"]) - int(hot["free_head"])) & NONE
    return int(hot["slots_committed"]) - free
