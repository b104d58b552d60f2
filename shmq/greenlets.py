"""Waits of a process whose threads are greenlets, because gevent or eventlet has patched them.

A wait in shared memory would hold up all greenlets of the process, so these look and sleep instead:
`time.sleep` lets the others run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from shmq.errors import Full
from shmq.patience import Patience

#: Seconds between two looks: the first, and the most.
_FIRST: Final = 0.0005
_MOST: Final = 0.01


def are_threads() -> bool:
    """Whether `threading` is patched."""
    monkey, patcher = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return (monkey is not None and bool(monkey.is_module_patched("threading"))) or (
        patcher is not None and bool(patcher.is_monkey_patched("thread"))
    )


def patient(take: Callable[[float], Any]) -> Callable[[float], Any]:
    """A function that takes something within so many seconds, or None, and lets greenlets run while
    it waits. If there are none, it is the same function."""
    if not are_threads():
        return take

    def look(timeout: float) -> Any:
        end, pause = time.monotonic() + timeout, _FIRST
        while (found := take(0)) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 2, _MOST)
        return found

    return look


def until_there_is_room(put: Callable[[float], Any], timeout: float | None) -> None:
    """Call a function that raises Full until there is room, for so many seconds at most; None: no
    limit. Raises Full after that."""
    end, pause = None if timeout is None else time.monotonic() + timeout, _FIRST
    patience = Patience()
    while True:
        try:
            put(0)
            return
        except Full as exc:
            if end is not None and time.monotonic() >= end:
                raise
            patience.refused(exc)
        time.sleep(pause)
        pause = min(pause * 2, _MOST)
