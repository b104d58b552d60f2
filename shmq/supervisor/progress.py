"""Reports how far a long start or stop has come, every two seconds, in the log and to the service
manager. Work that ends within two seconds is not reported."""

from __future__ import annotations

import logging
import time

from shmq.supervisor.systemd import Notifier

_EVERY = 2.0  # seconds
_EXTEND_BY = 30.0  # seconds that the service manager is asked to wait after each line

_log = logging.getLogger(__name__)


class Progress:
    """The progress of one piece of work on a known number of queues."""

    def __init__(self, what: str, queues: int, notifier: Notifier | None = None) -> None:
        """what: the work, as in `adopting`. notifier: the service manager; none while the broker
        stops, because `Watchdog.stopping` then reports to it."""
        self._what = what
        self._queues = queues
        self._notifier = notifier
        self._done = 0
        self._next = time.monotonic() + _EVERY

    def step(self) -> None:
        """Count one more finished queue."""
        self._done += 1
        self.within()

    def within(self, detail: str = "") -> None:
        """Report, if it is time, from within the work on one queue. detail: how far it is."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        line = f"{self._what}: {self._done} of {self._queues} queues"
        line += f"; {detail}" if detail else ""
        _log.info("%s", line)
        if self._notifier is not None:
            self._notifier.extend(_EXTEND_BY, line)
