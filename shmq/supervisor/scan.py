"""Finds timed-out and due messages: nsqd's queueScanLoop, plus a look at every queue's deadline.

Every `queue_scan_interval` some queues are chosen at random from a list that is refreshed every
`queue_scan_refresh_interval`, and a pool of workers scans them. If more than
`queue_scan_dirty_percent` of them had something, the next round follows at once. With random
choice alone a timeout in one of 10 000 channels would be noticed after 50 s, so each round also
compares the directory's columns `next_deadline[]` and `next_due[]` with the clocks and adds the
overdue queues. While no queue will be overdue soon, the loop sleeps longer than the interval; a
client that sets an earlier deadline rings.

With each refresh every queue is also audited: any process that maps a segment can overwrite it, and
a wrong ring index hides messages that are still intact.

Source: nsqd, `nsqd/nsqd.go` (queueScanLoop, resizePool, queueScanWorker).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmq import _native
from shmq._native import Broker
from shmq.errors import Busy, Gone, LayoutMismatch, ShmqError
from shmq.layout import constant
from shmq.options import Options
from shmq.supervisor.dead_letters import DeadLetters
from shmq.supervisor.loops import Bell
from shmq.supervisor.registry import Registry

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_BITE = 256  # messages a worker moves under one lock
_CONVICTED = constant("DUE_CONVICTED")  # due time of convicted messages
_LONGEST_NS = 1_000_000_000  # longest sleep: a step of the system clock rings no bell

_log = logging.getLogger(__name__)


class Scanner:
    """The loop that scans queues, with its pool of workers."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        options: Options,
        broken: Callable[[int], None] = lambda index: None,
    ) -> None:
        """broken: called with the index of each queue that cannot be repaired, at every audit."""
        self._broken = broken
        self._broker = broker
        self._registry = registry
        self._dead_letters = DeadLetters(broker, registry)
        self._options = options
        self._queues: list[int] = []
        self._workers = 1
        self._pool: ThreadPoolExecutor | None = None
        self._corrupt: set[int] = set()  # indices that were logged
        self.timed_out = 0
        self.due = 0

    def run(self, bell: Bell) -> None:
        """Scan until the bell is stopped."""
        options, refresh_at = self._options, 0
        dirty_share = options.queue_scan_dirty_percent / 100
        try:
            while not bell.check():
                began = time.monotonic()
                if _native.now() >= refresh_at:
                    refresh_at = _native.now() + int(options.queue_scan_refresh_interval * 1e9)
                    self._refresh()
                    self._audit(bell)
                while not bell.check():
                    chosen = self._choose()
                    if not chosen or self._scan(chosen, bell) <= dirty_share * len(chosen):
                        break
                bell.wait(self._rest())
                while not bell.check():
                    self._broker.scan_at(0, _CONVICTED + 1)  # only they ring before the next scan
                    self._bury()
                    left = began + options.queue_scan_interval - time.monotonic()
                    if left <= 0:
                        break
                    bell.wait(left)
        finally:
            self._resize(1)

    def _rest(self) -> float:
        """Seconds until the next known timeout or due time."""
        now, realtime = _native.now(), _native.realtime()
        self._broker.scan_at(now + _LONGEST_NS, realtime + _LONGEST_NS)
        deadline, due = self._registry.earliest()
        return max(min(deadline - now, due - realtime, _LONGEST_NS), 0) / 1e9

    def overdue(self) -> list[int]:
        """Indices of queues whose earliest deadline or due time has passed. (These are lower
        bounds: a scan may find nothing, and then corrects them.)"""
        return self._registry.overdue(_native.now(), _native.realtime())

    def _refresh(self) -> None:
        self._queues = [queue.index for queue in self._registry.queues]
        most = self._options.queue_scan_worker_pool_max
        self._resize(max(1, min(len(self._queues) // 4, most)))

    def _audit(self, bell: Bell) -> None:
        for index in self._queues:
            if bell.check():
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
        """Change the number of workers. With one worker the loop's own thread scans."""
        if workers == self._workers:
            return
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if workers > 1:
            from concurrent.futures import ThreadPoolExecutor  # slow to import

            self._pool = ThreadPoolExecutor(workers, "scan worker")
        self._workers = workers

    def _choose(self) -> list[int]:
        count = min(self._options.queue_scan_selection_count, len(self._queues))
        return list({*random.sample(self._queues, count), *self.overdue()})

    def _scan(self, chosen: list[int], bell: Bell) -> int:
        """Scan these queues. Returns how many had a message that timed out or was due."""

        def one(index: int) -> bool:
            return self._expire(index, bell)

        if self._pool is None or len(chosen) <= self._options.queue_scan_selection_count:
            return sum(map(one, chosen))  # passing it to the pool would take longer than the work
        return sum(self._pool.map(one, chosen))

    def _bury(self) -> None:
        """Move convicted messages without waiting for the next scan."""
        for index in self._registry.convicted():
            try:
                self._dead_letters.move(index)
            except (Gone, Busy):
                pass
            except ShmqError as exc:
                self._cannot(index, exc)

    def _expire(self, index: int, bell: Bell) -> bool:
        """Expire a queue's messages. Returns whether there were any. The work is done in bites, so
        that consumers get the lock in between."""
        dirty = False
        while not bell.check():
            try:
                timed_out, due = self._broker.expire(index, _BITE)
                moved = self._dead_letters.move(index)
            except (Gone, Busy):
                break
            except ShmqError as exc:
                self._cannot(index, exc)
                break
            self.timed_out += timed_out
            self.due += due
            dirty = dirty or timed_out + due + moved > 0
            if timed_out + due + moved < _BITE:
                break
        return self._sweep(index) or dirty

    def _sweep(self, index: int) -> bool:
        """Drop a queue's expired messages if the time of the next one has come. Returns whether
        there were any."""
        queue = self._registry.queue(index)
        if queue is None or queue.view.read("next_expiry") > _native.realtime():
            return False
        try:
            return self._broker.sweep(index) > 0
        except (Gone, Busy):
            return False
        except ShmqError as exc:
            self._cannot(index, exc)
            return False
