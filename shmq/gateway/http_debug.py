"""The pages below `/debug` of a gateway process, in place of Go's profiles.

The work on a page delays every client of the process. So only one page is made at a time, a profile
has a maximum duration, and the count of all objects is done in pieces, with a pause of nine times
the duration of each piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import gc
import itertools
import json
import marshal
import math
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from aiohttp import web

from shmq.gateway.access import redacted
from shmq.gateway.context import Context
from shmq.gateway.http_messages import Answer, Params, Routes, failure, page

_PROFILE_SECONDS: Final = 30.0  # the default and the maximum
_PIECE: Final = 1000  # objects, some 0.1 ms
_REST: Final = 9.0  # length of a pause, in durations of a piece
_COLLECT_EVERY: Final = 10.0
_MOST_TASKS: Final = 1000


class Busy(Exception):
    """Another debug page is in progress."""


class Debug:
    """The contents of the pages of one process."""

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
        """Profile the event loop for the given time; return the profile in the format of pstats.

        Raises Busy."""
        with self._alone():
            profile = cProfile.Profile()
            profile.enable()
            try:
                await asyncio.sleep(_seconds_of(seconds))
            finally:
                profile.disable()
            return await asyncio.to_thread(_dumped, profile)

    async def heap(self) -> str:
        """Return the number of objects of each type, as text. Raises Busy."""
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
        """Return the stacks of the threads and a list of the tasks, as text. Raises Busy."""
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
        """Run the garbage collector, unless a call has run it recently."""
        now = time.monotonic()
        if now - self._collected >= _COLLECT_EVERY and not self._busy:
            self._collected = now
            gc.collect()


class DebugPages:
    """The handlers of the pages."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._debug = Debug()

    def routes(self) -> Routes:
        """Return the handlers by path and method."""
        return {
            "/debug/pprof/": {"GET": self._index},
            "/debug/pprof/cmdline": {"GET": self._cmdline},
            "/debug/pprof/symbol": {"GET": self._symbol, "POST": self._symbol},
            "/debug/pprof/profile": {"GET": self._profile},
            "/debug/pprof/heap": {"GET": self._heap},
            "/debug/pprof/goroutine": {"GET": self._goroutine},
            "/debug/pprof/block": {"GET": self._meaningless},
            "/debug/pprof/threadcreate": {"GET": self._meaningless},
            "/debug/freememory": {"POST": self._freememory},
            "/debug/setblockrate": {"PUT": self._setblockrate},
        }

    async def _index(self, request: web.BaseRequest, params: Params) -> Answer:
        return page(
            "profiles of this gateway process:\n"
            "cmdline    its command line\n"
            "profile    ?seconds=N: a cProfile of its event loop, to be read with pstats\n"
            "heap       objects by type\n"
            "goroutine  what its threads and tasks do\n"
            "block, threadcreate, symbol: mean nothing in Python\n"
        )

    async def _cmdline(self, request: web.BaseRequest, params: Params) -> Answer:
        return page("\0".join(redacted(word) for word in self._context.argv))

    async def _symbol(self, request: web.BaseRequest, params: Params) -> Answer:
        return page("num_symbols: 0\n")

    async def _meaningless(self, request: web.BaseRequest, params: Params) -> Answer:
        return page("there is no such profile in Python\n")

    async def _profile(self, request: web.BaseRequest, params: Params) -> Answer:
        data = await self._debug.profile(params.get("seconds", ""))
        return web.Response(body=data, headers={"Content-Type": "application/octet-stream"})

    async def _heap(self, request: web.BaseRequest, params: Params) -> Answer:
        return page(await self._debug.heap())

    async def _goroutine(self, request: web.BaseRequest, params: Params) -> Answer:
        return page(self._debug.goroutine())

    async def _freememory(self, request: web.BaseRequest, params: Params) -> Answer:
        self._debug.collect()
        return failure(500, "INTERNAL_ERROR")  # nsqd answers so even though it has done it

    async def _setblockrate(self, request: web.BaseRequest, params: Params) -> Answer:
        rate = params.get("rate", "")
        if not re.fullmatch(r"[+-]?[0-9]+", rate):
            quoted = json.dumps(rate)
            return page(f"invalid block rate : strconv.Atoi: parsing {quoted}: invalid syntax", 400)
        return failure(500, "INTERNAL_ERROR")


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
    return marshal.dumps(profile.stats)  # the format that Profile.dump_stats writes
