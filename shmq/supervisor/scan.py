"""Finds timed-out and due messages: nsqd's queueScanLoop, plus a look at every queue's deadline.

Every `queue_scan_interval` some queues are chosen at random from a list that is refreshed every
`queue_scan_refresh_interval`, and scanned by a pool of workers; while more than
`queue_scan_dirty_percent` of them had something, at once again. Random choice alone would notice a
timeout in one of 10 000 channels after 50 s, so each round also compares the directory's columns
`next_deadline[]` and `next_due[]` with the clocks and adds the queues that are overdue. While none
will be before long it sleeps longer than that interval; who makes something earlier rings.

With each refresh every queue is audited too: whoever maps a segment can overwrite it, and a ring
index that is wrong hides messages that are all there.

Source: nsqd, `nsqd/nsqd.go` (queueScanLoop, resizePool, queueScanWorker).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shmq import _native
from shmq._native import Broker, Busy, Gone, LayoutMismatch, ShmqError
from shmq.options import Options
from shmq.supervisor.arbiter import Bell
from shmq.supervisor.roster import Roster

_BITE = 256  # messages a worker moves under one lock
_LONGEST_NS = 1_000_000_000  # without a look: a step of the system clock rings nobody

_log = logging.getLogger(__name__)


class Scanner:
    """One loop and its pool of workers."""

    def __init__(
        self,
        broker: Broker,
        roster: Roster,
        options: Options,
        broken: Callable[[int], None] = lambda index: None,
    ) -> None:
        """broken: called with the index of each queue that cannot be repaired, again and again."""
        self._broken = broken
        self._broker = broker
        self._roster = roster
        self._options = options
        self._queues: list[int] = []
        self._workers = 1
        self._pool: ThreadPoolExecutor | None = None
        self._corrupt: set[int] = set()  # that were told of
        self.timed_out = 0
        self.due = 0

    def run(self, bell: Bell) -> None:
        """The loop."""
        options, refresh_at = self._options, 0
        dirty_share = options.queue_scan_dirty_percent / 100
        try:
            while not bell.stopped:
                began = time.monotonic()
                if _native.now() >= refresh_at:
                    refresh_at = _native.now() + int(options.queue_scan_refresh_interval * 1e9)
                    self._refresh()
                    self._audit(bell)
                while not bell.stopped:
                    chosen = self._choose()
                    if not chosen or self._scan(chosen, bell) <= dirty_share * len(chosen):
                        break
                bell.wait(self._rest())
                while not bell.stopped:
                    left = began + options.queue_scan_interval - time.monotonic()
                    if left <= 0:
                        break
                    bell.wait(left)
        finally:
            self._resize(1)

    def _rest(self) -> float:
        """Seconds until something times out or is due, as far as is known now."""
        now, realtime = _native.now(), _native.realtime()
        self._broker.scan_at(now + _LONGEST_NS, realtime + _LONGEST_NS)
        deadline, due = self._roster.earliest()
        return max(min(deadline - now, due - realtime, _LONGEST_NS), 0) / 1e9

    def overdue(self) -> list[int]:
        """Queues whose earliest deadline or due time has passed. (Lower bounds: a scan may find
        nothing, and corrects them.)"""
        return self._roster.overdue(_native.now(), _native.realtime())

    def _refresh(self) -> None:
        self._queues = [queue.index for queue in self._roster.queues]
        most = self._options.queue_scan_worker_pool_max
        self._resize(max(1, min(len(self._queues) // 4, most)))

    def _audit(self, bell: Bell) -> None:
        for index in self._queues:
            if bell.stopped:
                break
            try:
                if self._broker.audit(index):
                    _log.error("queue %d: something overwrote it; it was rebuilt", index)
                self._corrupt.discard(index)
            except (Gone, Busy):
                pass
            except LayoutMismatch as exc:
                self._cannot(index, exc)
                self._broken(index)
            except ShmqError as exc:
                self._cannot(index, exc)

    def _cannot(self, index: int, exc: ShmqError) -> None:
        if index not in self._corrupt:
            self._corrupt.add(index)
            _log.error("%s", exc)

    def _resize(self, workers: int) -> None:
        """A single worker is the loop's own thread."""
        if workers == self._workers:
            return
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None if workers == 1 else ThreadPoolExecutor(workers, "scan worker")
        self._workers = workers

    def _choose(self) -> list[int]:
        count = min(self._options.queue_scan_selection_count, len(self._queues))
        return list({*random.sample(self._queues, count), *self.overdue()})

    def _scan(self, chosen: list[int], bell: Bell) -> int:
        """How many of these queues were dirty."""

        def one(index: int) -> bool:
            return self._expire(index, bell)

        if self._pool is None or len(chosen) <= self._options.queue_scan_selection_count:
            return sum(map(one, chosen))  # a hand-over would take longer than the work
        return sum(self._pool.map(one, chosen))

    def _expire(self, index: int, bell: Bell) -> bool:
        """Whether a queue had anything; bite after bite, so that its consumers get in between."""
        dirty = False
        while not bell.stopped:
            try:
                timed_out, due = self._broker.expire(index, _BITE)
            except (Gone, Busy):
                break
            except ShmqError as exc:
                self._cannot(index, exc)
                break
            self.timed_out += timed_out
            self.due += due
            dirty = dirty or timed_out + due > 0
            if timed_out + due < _BITE:
                break
        return dirty
