"""The browsers that watch: all get the same bytes, once a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from aiohttp import web

from shmq.door.seldom import Seldom
from shmq.door.shortage import shortage
from shmq.page import guard
from shmq.page.sight import Sight, sight_of
from shmq.page.snapshot import Snapshots, Tick

EVERY: Final = 1.0  # seconds between two ticks
#: In a request: whether it may watch only while the share of strangers has room.
GUEST: Final = "shmq.guest"
#: A browser that has read nothing for so many ticks is disconnected. It comes back by itself, and
#: begins with all rows.
_PATIENCE: Final = 10

_T = TypeVar("_T")

_short = Seldom(logging.getLogger(__name__), "ticks without means")


class _Viewer:
    """One browser that watches."""

    def __init__(self, place: str, guest: bool, sight: Sight) -> None:
        self.place = place
        self.guest = guest
        self.sight = sight
        self.ticks: asyncio.Queue[bytes] = asyncio.Queue(_PATIENCE)

    def end(self) -> None:
        """Let its sender end."""
        _empty(self.ticks)
        self.ticks.put_nowait(b"")


class Viewers:
    """Looks at the instance while somebody watches, and at no other time."""

    def __init__(self, snapshots: Snapshots, most: int) -> None:
        """most: how many may watch at a time. Guests have three quarters of that together, and one
        address a quarter of it. A browser that is none takes the place of the guest that has
        watched longest."""
        self._snapshots = snapshots
        self._most = most
        self._watching: dict[_Viewer, None] = {}  # in the order in which they came
        self._task: asyncio.Task[None] | None = None
        # One thread: a snapshot is not for several, and the event loop must go on meanwhile.
        self._thread = ThreadPoolExecutor(1, "page")

    async def read(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that reads the segments, in the thread that does so."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def state(self, sight: Sight) -> bytes:
        """The JSON of everything that a browser needs to begin with."""
        tick = await self.read(self._first, bool(self._watching), sight)
        return tick.encoded()

    def _first(self, others: bool, sight: Sight) -> Tick:
        return self._snapshots.seen_by(sight, self._snapshots.state(others))

    def _next(self, sights: Iterable[Sight]) -> dict[Sight, bytes]:
        """The next tick as JSON, for each of these sights."""
        tick, snapshots = self._snapshots.tick(), self._snapshots
        return {sight: snapshots.seen_by(sight, tick).encoded() for sight in sights}

    async def watch(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send all rows and then each tick, until the browser goes (server-sent events)."""
        client: Any = request.protocol
        if client.seat.reserved:
            return web.Response(status=503, text="no connection is left\n", headers=guard.HEADERS)
        viewer = _Viewer(client.who, request.get(GUEST, False), sight_of(request))
        if not self._has_room(viewer):
            text = f"{len(self._watching)} browsers watch already: "
            text += "close some, show a token, or start `shmq page` with a larger --max-viewers\n"
            return web.Response(status=503, text=text, headers=guard.HEADERS)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **guard.HEADERS}
        )
        self._watching[viewer] = None  # before the rows are read, so that no change falls between
        try:
            first = await self.read(self._first, len(self._watching) > 1, viewer.sight)
            await response.prepare(request)
            await response.write(b"event: state\ndata: ")
            for piece in first.pieces():
                await response.write(piece)
            await response.write(b"\n\n")
            del first
            self._start()
            if viewer.guest:
                client.seat.rests()  # who needs the place gets it
            while viewer in self._watching:
                await response.write(await viewer.ticks.get())
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._watching.pop(viewer, None)
        return response

    def _has_room(self, viewer: _Viewer) -> bool:
        """Whether a browser may watch. For one that is no guest, the oldest guest goes."""
        guests = [each for each in self._watching if each.guest]
        if viewer.guest:
            near = sum(each.place == viewer.place for each in guests)
            share = max(self._most * 3 // 4, 1)
            room = min(share - len(guests), self._most - len(self._watching))
            return room > 0 and near < max(self._most // 4, 1)
        if len(self._watching) < self._most:
            return True
        if guests:
            del self._watching[guests[0]]
            guests[0].end()
        return bool(guests)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._watching:
            await asyncio.sleep(EVERY)
            try:
                ticks = await self.read(self._next, {viewer.sight for viewer in self._watching})
            except (OSError, MemoryError) as exc:
                if not shortage(exc):
                    raise
                _short(logging.ERROR, "no tick for who watches the page: %s", shortage(exc))
                continue  # the next one has what this one lacks
            for viewer in list(self._watching):
                if viewer.sight not in ticks:  # it has come since, and its rows are newer
                    continue
                try:
                    viewer.ticks.put_nowait(b"event: tick\ndata: %b\n\n" % ticks[viewer.sight])
                except asyncio.QueueFull:
                    self._watching.pop(viewer, None)
                    viewer.end()

    def disconnect(self) -> None:
        """Let all browsers go. They come back by themselves, by the rules of now."""
        for viewer in list(self._watching):
            del self._watching[viewer]
            viewer.end()

    async def close(self) -> None:
        """Let all browsers go, and look no more."""
        self.disconnect()
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
