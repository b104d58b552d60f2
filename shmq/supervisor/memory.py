"""Gives the memory of queues that have been emptied back to the system.

A queue grows as it fills and would stay as large as it ever was. When almost nothing has been in it
for a while, the pages behind its last message body go back; it grows again as it did at first. A
queue that is used does not pay: whoever publishes keeps it from that. When /dev/shm has no room for
somebody, it is done at once for all queues that are almost empty.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable

import numpy as np

from shmq._native import Broker, ShmqError
from shmq.layout import NONE
from shmq.supervisor.roster import Look, Queue

_WORTH = 1 << 20  # bytes of bodies that a queue may keep
_AFTER = 10.0  # seconds in which it was almost empty each time it was looked at
_FEW = 16  # almost empty: this part (1/16) of its slots are in use, or fewer
_AGAIN = 60.0  # seconds before the same queue is tried once more: its last body may be far behind
_AT_ONCE_EVERY = 0.5  # seconds between two times that all are looked at for somebody without room
_SCARCE = 4 << 20  # bytes in /dev/shm that are as good as none

_log = logging.getLogger(__name__)


class Thrift:
    """For the spiller's loop and the creator."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._at_once = -_AT_ONCE_EVERY

    def look(self, look: Look, now: float) -> None:
        """Give back what has been idle long enough. now: monotonic seconds."""
        large = look.hot["arena_committed"] > _WORTH
        for row in np.flatnonzero(large).tolist():
            queue, hot = look.queues[row], look.hot[row]
            published = int(hot["enqueued"])
            few = _used(hot) * _FEW <= int(hot["slots_committed"])
            quiet = published - queue.quiet_since[1] <= int(hot["slots_committed"]) // _FEW
            if not (few and quiet) or queue.quiet_since[0] == math.inf:
                queue.quiet_since = (now, published)
            elif now - queue.quiet_since[0] >= _AFTER:
                queue.quiet_since = (now + _AGAIN - _AFTER, published)
                self._give_back(queue)

    def at_once(self, queues: Iterable[Queue]) -> int:
        """For somebody who found no room: what all queues that are almost empty can give, in bytes;
        0 if this was done a moment ago."""
        now = time.monotonic()
        if now - self._at_once < _AT_ONCE_EVERY:
            return 0
        self._at_once = now
        look = Look.at([queue for queue in queues if not queue.gone])
        given = 0
        for row in np.flatnonzero(look.hot["arena_committed"] > _WORTH // 16).tolist():
            if _used(look.hot[row]) * _FEW <= int(look.hot[row]["slots_committed"]):
                given += self._give_back(look.queues[row])
        return given

    def _give_back(self, queue: Queue) -> int:
        try:
            given = self._broker.give_back(queue.index)
        except ShmqError:  # removed, held by a stopped process, cannot be repaired: not now
            return 0
        if given:
            _log.info("%s: gave %d KiB of memory back", queue, given >> 10)
        return given


def scarce(needed: int) -> bool:
    """Whether /dev/shm has no room for so many bytes."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < needed + _SCARCE


def _used(hot: np.void) -> int:
    """Slots that are not free."""
    free = (int(hot["free_tail"]) - int(hot["free_head"])) & NONE
    return int(hot["slots_committed"]) - free
