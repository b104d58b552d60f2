"""Keeps the supervisor's loops running: one thread per loop, restarted after a crash.

A loop is a function that gets a `Bell`, works until the bell is stopped, and sleeps on it between
two rounds of work. This module knows nothing else about a loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_FIRST_PAUSE = 0.1  # seconds before a crashed loop is restarted; doubles with each crash
_LAST_PAUSE = 5.0  # ... up to this
_CALM = 30.0  # seconds without a crash after which the first pause applies again

_log = logging.getLogger(__name__)


class Bell:
    """Wakes one loop: rung when there is work, stopped when the loop is to end."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._stopped = False
        self._also: Callable[[], None] | None = None
        self.beat = time.monotonic()
        """Heartbeat: monotonic seconds of the last `check`."""

    def check(self) -> bool:
        """Note the loop's heartbeat. Returns true if the loop is to end."""
        self.beat = time.monotonic()
        return self._stopped

    def ring(self) -> None:
        """Wake the loop, or make its next `wait` return at once."""
        self._rung.set()
        if self._also is not None:
            self._also()

    def stop(self) -> None:
        """Tell the loop to end."""
        self._stopped = True
        self.ring()

    def call_too(self, function: Callable[[], None]) -> None:
        """Call `function` too at every ring and stop, for a loop that sleeps elsewhere."""
        self._also = function

    def wait(self, seconds: float) -> bool:
        """Sleep until rung, stopped, or `seconds` have passed. Returns true if it was rung."""
        rung = self._rung.wait(seconds)
        if not self.check():
            self._rung.clear()
        return rung


class Pace:
    """Paces work whose cost grows with the number of queues: every `every` seconds, but so rarely
    that it takes at most a share of one core."""

    def __init__(self, every: float, share: float) -> None:
        """every: seconds. share: of a core's time, at most."""
        self._every = every
        self._share = share
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """True if the work is due at `now` (monotonic seconds)."""
        return now >= self._next

    def left(self, now: float) -> float:
        """Seconds from `now` until the work is due."""
        return max(self._next - now, 0.0)

    def did(self, began: float) -> None:
        """Note that the work was done, from `began` (monotonic seconds) until now."""
        self._next = began + max(self._every, (time.monotonic() - began) / self._share)


Loop = Callable[[Bell], None]


class Loops:
    """The loops and their threads."""

    def __init__(self) -> None:
        self._bells: dict[str, Bell] = {}
        self._loops: dict[str, Loop] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._hopeless: dict[str, float] = {}  # when it last crashed, with the longest pause
        self.crashes = 0

    def add(self, name: str, loop: Loop) -> Bell:
        """Add a loop that `start` will run. Returns its bell."""
        self._loops[name] = loop
        self._bells[name] = Bell()
        return self._bells[name]

    def start(self) -> None:
        """Start a thread for every loop."""
        for name in self._loops:
            thread = threading.Thread(target=self._keep, args=(name,), name=name, daemon=True)
            self._threads[name] = thread
            thread.start()

    @property
    def living(self) -> int:
        """How many loops are running."""
        return sum(thread.is_alive() for thread in self._threads.values())

    def ill(self, seconds: float) -> str:
        """A sentence about a loop that has not moved for `seconds`, keeps crashing, or has ended by
        itself. Empty if all are well."""
        now = time.monotonic()
        for name, thread in self._threads.items():
            age = now - self._bells[name].beat
            if not thread.is_alive():
                return f"the {name} has ended"
            if now - self._hopeless.get(name, now - _CALM) < _CALM:
                return f"the {name} keeps crashing"
            if age > seconds:
                return f"the {name} has not moved for {age:.0f} s"
        return ""

    def stop(self, patience: Callable[[str, float], None] | None = None) -> None:
        """Stop every loop and wait for all of them, without a time limit: a loop may wait for a
        lock whose holder is a stopped client. `patience(name, seconds)` is called for every second
        of waiting for one loop."""
        for bell in self._bells.values():
            bell.stop()
        began = time.monotonic()
        for name, thread in self._threads.items():
            while thread.is_alive():
                thread.join(1.0)
                if thread.is_alive() and patience is not None:
                    patience(name, time.monotonic() - began)

    def _keep(self, name: str) -> None:
        bell, pause = self._bells[name], _FIRST_PAUSE
        while not bell.check():
            began = time.monotonic()
            try:
                self._loops[name](bell)
                return
            except Exception:
                crashed = time.monotonic()
                if crashed - began > _CALM:
                    pause = _FIRST_PAUSE
                self.crashes += 1
                _log.exception("%s crashed; starting it again in %.1f s", name, pause)
            if pause == _LAST_PAUSE:
                self._hopeless[name] = crashed
            while (left := crashed + pause - time.monotonic()) > 0 and not bell.check():
                bell.wait(left)  # a ring does not shorten the pause
            pause = min(2 * pause, _LAST_PAUSE)
