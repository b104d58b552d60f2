"""Log lines that any client can cause: a few of each kind are written, the others are counted."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

_LINES: Final = 10
_SECONDS: Final = 10.0


class Seldom:
    """Writes at most 10 lines in 10 s. The next line after that tells how many were left out."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """what: the events that are counted, such as `bad requests`."""
        self._log = log
        self._what = what
        self._began = -_SECONDS
        self._written = self._left_out = 0

    def __call__(self, level: int, text: str, *args: Any, exc_info: Any = None) -> None:
        """Write the line, or only count it."""
        now = time.monotonic()
        if now - self._began >= _SECONDS:
            if self._left_out:
                self._log.log(level, "%d more %s since", self._left_out, self._what)
            self._began = now
            self._written = self._left_out = 0
        if self._written < _LINES:
            self._written += 1
            self._log.log(level, text, *args, exc_info=exc_info)
        else:
            self._left_out += 1
