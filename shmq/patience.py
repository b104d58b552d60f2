"""Says in the log of the process that somebody waits long for room.

A call that publishes, or stores a value, and waits until there is room says so once in each wait,
after `AFTER` seconds: which topic and channel, which limit, and what gives room. The extension
calls `say` for every wait that goes on inside one of its calls. A loop that tries again by itself
has a `Patience`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

#: Seconds that a wait for room lasts before the log is told.
AFTER: Final = 5.0
_SAID: Final = float("inf")

_log = logging.getLogger("shmq")
_saying = threading.local()


def say(refused: object) -> None:
    """Log that a call has waited for room for `AFTER` seconds and goes on waiting.

    refused: the error of the last try, or a sentence that says as much. A handler of the log that
    itself waits for room says nothing more.
    """
    if getattr(_saying, "is_inside", False):
        return
    _saying.is_inside = True
    try:
        _log.warning("still waiting for room after %g s: %s", AFTER, refused)
    finally:
        _saying.is_inside = False


class Patience:
    """One wait for room, of a loop that tries again and again. It costs nothing until a try has
    found none."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None

    def refused(self, why: object) -> None:
        """A try has found no room, and another one follows. why: as for `say`."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= AFTER:
            self._since = _SAID
            say(why)

    def over(self) -> None:
        """There was room, so another wait may begin. A wait that was said stays so: a caller that
        wants each of them said takes a new Patience."""
        if self._since != _SAID:
            self._since = None
