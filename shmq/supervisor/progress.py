"""How far a long start or stop has come: a line every two seconds, in the log and for the service
manager, and nothing at all if it is over before."""

from __future__ import annotations

import logging
import time

from shmq.supervisor.systemd import Notifier

_EVERY = 2.0  # seconds
_EXTEND_BY = 30.0  # seconds: the manager gives up no earlier after a line

_log = logging.getLogger(__name__)


class Progress:
    """Of one piece of work on a known number of queues."""

    def __init__(self, what: str, queues: int, notifier: Notifier | None = None) -> None:
        """what: the work, as in `adopting`. notifier: who else is told; while it stops, a broker
        tells its manager by itself (`Service.stopping`)."""
        self._what = what
        self._queues = queues
        self._notifier = notifier
        self._done = 0
        self._next = time.monotonic() + _EVERY

    def step(self) -> None:
        """One more queue is done."""
        self._done += 1
        self.within()

    def within(self, detail: str = "") -> None:
        """The queue under way has come some way; detail: how far."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        line = f"{self._what}: {self._done} of {self._queues} queues"
        line += f"; {detail}" if detail else ""
        _log.info("%s", line)
        if self._notifier is not None:
            self._notifier.extend(_EXTEND_BY, line)
