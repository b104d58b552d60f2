"""The browsers that watch: all get the same bytes, once a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from aiohttp import web

from shmq.page import guard
from shmq.page.snapshot import Snapshots

EVERY: Final = 1.0  # seconds between two ticks
#: A browser that has read nothing for so many ticks is disconnected. It comes back by itself, and
#: begins with all rows.
_PATIENCE: Final = 10

_T = TypeVar("_T")


class Viewers:
    """Looks at the instance while somebody watches, and at no other time."""

    def __init__(self, snapshots: Snapshots, most: int) -> None:
        """most: how many may watch at a time."""
        self._snapshots = snapshots
        self._most = most
        self._watching: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        # One thread: a snapshot is not for several, and the event loop must go on meanwhile.
        self._thread = ThreadPoolExecutor(1, "page")

    async def read(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that reads the segments, in the thread that does so."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def state(self) -> bytes:
        """The JSON of everything that a browser needs to begin with."""
        others = bool(self._watching)
        return await self.read(lambda: self._snapshots.state(others).encoded())

    async def watch(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send all rows and then each tick, until the browser goes (server-sent events)."""
        if len(self._watching) >= self._most:
            text = f"{self._most} browsers watch already; shmq page --max-viewers allows more\n"
            return web.Response(status=503, text=text, headers=guard.HEADERS)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **guard.HEADERS}
        )
        ticks: asyncio.Queue[bytes] = asyncio.Queue(_PATIENCE)
        self._watching.add(ticks)  # before the rows are read, so that no change falls between
        try:
            first = await self.read(self._snapshots.state, len(self._watching) > 1)
            await response.prepare(request)
            await response.write(b"event: state\ndata: ")
            for piece in first.pieces():
                await response.write(piece)
            await response.write(b"\n\n")
            del first
            self._start()
            while ticks in self._watching:
                await response.write(await ticks.get())
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._watching.discard(ticks)
        return response

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._watching:
            await asyncio.sleep(EVERY)
            tick = await self.read(lambda: self._snapshots.tick().encoded())
            event = b"event: tick\ndata: %b\n\n" % tick
            for ticks in list(self._watching):
                try:
                    ticks.put_nowait(event)
                except asyncio.QueueFull:
                    self._watching.discard(ticks)
                    _empty(ticks)
                    ticks.put_nowait(b"")  # its sender ends

    async def close(self) -> None:
        """Let all browsers go."""
        for ticks in list(self._watching):
            self._watching.discard(ticks)
            _empty(ticks)
            ticks.put_nowait(b"")
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown()
        self._snapshots.close()


def _empty(ticks: asyncio.Queue[bytes]) -> None:
    with contextlib.suppress(asyncio.QueueEmpty):
        while True:
            ticks.get_nowait()
