"""What `/debug` tells of a gateway process, in the place of Go's profiles.

Each page takes its time from everybody whom the process serves. So there is one at a time, a
profile has an end, and what looks at every object does so in pieces, and rests nine times as long
as each piece took.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import gc
import itertools
import marshal
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

_PROFILE_SECONDS: Final = 30.0  # unless told otherwise, and at most
_PIECE: Final = 1000  # objects, some 0.1 ms
_REST: Final = 9.0  # times what a piece took
_COLLECT_EVERY: Final = 10.0
_MOST_TASKS: Final = 1000


class Busy(Exception):
    """Another page is being made."""


class Debug:
    """The pages of one process."""

    def __init__(self) -> None:
        self._busy = False
        self._collected = -math.inf

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise Busy
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def profile(self, seconds: str) -> bytes:
        """What the event loop does meanwhile, for pstats. Busy."""
        with self._alone():
            profile = cProfile.Profile()
            profile.enable()
            try:
                await asyncio.sleep(_seconds_of(seconds))
            finally:
                profile.disable()
            return await asyncio.to_thread(_dumped, profile)

    async def heap(self) -> str:
        """How many objects there are of each type. Busy."""
        with self._alone():
            counts: Counter[str] = Counter()
            objects = iter(gc.get_objects())
            while True:
                began = time.perf_counter()
                piece = list(itertools.islice(objects, _PIECE))
                if not piece:
                    break
                counts.update(type(thing).__qualname__ for thing in piece)
                del piece
                await asyncio.sleep((time.perf_counter() - began) * _REST)
            return "".join(f"{count:10d} {name}\n" for name, count in counts.most_common())

    def goroutine(self) -> str:
        """What its threads and tasks do. Busy."""
        with self._alone():
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            parts = [
                f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}\n"
                for ident, frame in sys._current_frames().items()
            ]
            tasks = list(asyncio.all_tasks())
            parts += [
                f"task {task.get_name()}: {task.get_coro()}\n" for task in tasks[:_MOST_TASKS]
            ]
            if len(tasks) > _MOST_TASKS:
                parts.append(f"and {len(tasks) - _MOST_TASKS} tasks more\n")
            return "".join(parts)

    def collect(self) -> None:
        """Let the collector run, unless it just did."""
        now = time.monotonic()
        if now - self._collected >= _COLLECT_EVERY and not self._busy:
            self._collected = now
            gc.collect()


def _seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = _PROFILE_SECONDS
    if not math.isfinite(seconds):
        seconds = _PROFILE_SECONDS
    return min(max(seconds, 0.01), _PROFILE_SECONDS)


def _dumped(profile: Any) -> bytes:
    profile.create_stats()
    return marshal.dumps(profile.stats)  # as its dump_stats, into a file
