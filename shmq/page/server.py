"""The page's own HTTP server: files, what they ask for, and the ticks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

try:
    from aiohttp import web
except ImportError as exc:
    raise ImportError("the page needs aiohttp: pip install 'shmq[gateway]'") from exc

from shmq import audit
from shmq.door import http_server, wishes
from shmq.door.acceptor import Acceptor
from shmq.door.seats import Seats
from shmq.door.seldom import Seldom
from shmq.door.shortage import shortage
from shmq.door.telling import told
from shmq.errors import Gone, LayoutMismatch, NotRunning, ShmqError
from shmq.ownership import OWNER_VARIABLE
from shmq.page import actions, arrow, detail, past
from shmq.page.guard import HEADERS, Guard
from shmq.page.heat import HeatMaps, bounds
from shmq.page.sight import Place, sight_of
from shmq.page.snapshot import Snapshots
from shmq.page.viewers import Viewers

_KINDS: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_STATIC: Final = Path(__file__).with_name("static")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
#: Bytes of a wish, and the seconds in which it comes.
_MOST_BYTES: Final = 64 << 10
_WISH_SECONDS: Final = 10.0
_KEEP_ALIVE_SECONDS: Final = 60.0
_LAST_SECONDS: Final = 1.0
_BACKLOG: Final = 1024

_short = Seldom(logging.getLogger(__name__), "requests that could not go on")


class Page:
    """The pages of one instance. It only reads, unless `admin` allows more."""

    def __init__(
        self,
        instance: str,
        owner: str | int | None = None,
        token: str | None = None,
        most_viewers: int = 200,
        admin: bool = False,
    ) -> None:
        """token: what a browser must know; None: nothing. admin: browsers may change things."""
        self._admin = admin
        self._place = instance, owner
        self._snapshots = Snapshots(instance, owner)
        self._viewers = Viewers(self._snapshots, most_viewers)
        self._heat = HeatMaps()
        self._guard = Guard(token)
        self._arrow = arrow.Reader()
        self._files = {item.name: item.read_bytes() for item in _STATIC.iterdir() if item.is_file()}

    def reads(self) -> dict[str, Handler]:
        """Path -> what answers a GET; all paths are below `/page`."""
        return {
            "/page": self._root,
            "/page/": self._index,
            **{f"/page/static/{name}": self._file(name) for name in self._files},
            "/page/ticks": self._viewers.watch,
            "/page/state": self._state,
            "/page/topic": self._topic,
            "/page/channel": self._channel,
            "/page/heat": self._heat_of,
            "/page/messages": self._messages,
            "/page/message": self._message,
            "/page/dead": self._placed(detail.dead),
            "/page/leases": self._placed(detail.leases),
            "/page/processes": self._list(detail.processes),
            "/page/results": self._list(detail.results),
            "/page/history": self._history,
            "/page/deaths": self._deaths,
            "/page/rights": self._rights,
            "/page/login": self._login,
        }

    def server(self) -> http_server.Server:
        """A server that has nothing else."""
        reads = {"/": self._root, **self.reads()}
        how = {"keepalive_timeout": _KEEP_ALIVE_SECONDS}
        return http_server.Server(lambda request: self._answer_to(request, reads), _unparsed, **how)

    def disconnect(self) -> None:
        """Let all browsers go. They come back by themselves, by the rules of now."""
        self._viewers.disconnect()

    async def close(self) -> None:
        """Let all browsers go."""
        await self._viewers.close()

    async def _answer_to(
        self, request: web.BaseRequest, reads: dict[str, Handler]
    ) -> web.StreamResponse:
        """Refuse strangers, and answer the others."""
        refusal = await self._guard.refusal(request)
        if refusal is not None:
            return refusal
        path, method = request.path, request.method
        methods: dict[str, Handler] = {"POST": self._act} if path == "/page/act" else {}
        if path in reads:
            methods = {"GET": reads[path], "HEAD": reads[path]}
        if not methods:
            return _json({"error": "there is no such path"}, 404)
        if method not in methods:
            answer = _json({"error": f"this path is for {' and '.join(methods)}"}, 405)
            answer.headers["Allow"] = ", ".join(methods)
            return answer
        return await self.answer(request, methods[method])

    @staticmethod
    async def answer(
        request: Any, handler: Callable[[Any], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Call a handler of `reads`, and say its errors as JSON."""
        try:
            return await handler(request)
        except (Gone, NotRunning) as exc:
            return _json({"error": told(exc)}, 404)
        except LayoutMismatch as exc:
            return _json({"error": told(exc)}, 409)
        except (ShmqError, ValueError) as exc:
            return _json({"error": told(exc)}, 400)
        except (OSError, MemoryError, RuntimeError) as exc:
            short = shortage(exc)
            if not short:
                raise
            _short(logging.ERROR, "%s %s cannot go on: %s", request.method, request.path, short)
            answer = _json({"error": f"this process cannot go on: {short}; try again"}, 503)
            answer.headers["Retry-After"] = "1"
            return answer

    # ---- files ----

    async def _root(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=303, headers={"Location": "/page/", **HEADERS})

    async def _index(self, request: web.BaseRequest) -> web.StreamResponse:
        return self._answer("index.html")

    def _file(self, name: str) -> Handler:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return self._answer(name)

        return handle

    def _answer(self, name: str) -> web.Response:
        kind = _KINDS.get(os.path.splitext(name)[1], "application/octet-stream")
        body = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    # ---- data ----

    async def _state(self, request: web.BaseRequest) -> web.StreamResponse:
        return _answer(await self._viewers.state(sight_of(request)), 200)

    def _list(self, function: Callable[[Snapshots], list[dict[str, Any]]]) -> Handler:
        """Of things that belong to the instance."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if not sight_of(request).whole:
                return _json([])
            found = await self._viewers.read(function, self._snapshots)
            return _json(sight_of(request).shown("", None, found))

        return handle

    def _placed(self, function: Callable[[Snapshots], list[dict[str, Any]]]) -> Handler:
        """Of things that each belong to a channel."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            sight, found = sight_of(request), []
            for item in await self._viewers.read(function, self._snapshots):
                place = item["topic"], item["channel"]
                if sight.sees(*place):
                    found.append(sight.shown(*place, item))
            return _json(found)

        return handle

    def _seen(self, request: web.BaseRequest) -> Place:
        """The place that a request names. Raises Gone if it is not shown to who sent it, as if it
        were not there."""
        topic, channel = request.query.get("topic", ""), request.query.get("channel")
        if not sight_of(request).sees(topic, channel):
            raise detail.no_channel(self._place[0], topic, channel)
        return topic, channel

    async def _channel(self, request: web.BaseRequest) -> web.StreamResponse:
        place = self._seen(request)
        found = await self._viewers.read(lambda: detail.channel(self._snapshots.source, *place))
        return _json(sight_of(request).shown(*place, found))

    async def _heat_of(self, request: web.BaseRequest) -> web.StreamResponse:
        place = self._seen(request)
        since = _number("since", request.query.get("since", "0"))

        def look() -> dict[str, Any]:
            _, view = detail.find(self._snapshots.source, *place)
            return self._heat.look(view, since, time.time())

        return _json({"bounds": bounds(), **await self._viewers.read(look)})

    async def _topic(self, request: web.BaseRequest) -> web.StreamResponse:
        name, sight = request.query.get("topic", ""), sight_of(request)
        found = await self._viewers.read(lambda: detail.topic(self._snapshots.source, name))
        channels = found["channels"]
        found["channels"] = [each for each in channels if sight.sees(name, each["channel"])]
        if not found["channels"] and not sight.sees_topic(name):
            raise detail.no_topic(self._place[0], name)
        return _json(sight.shown(name, None, found))

    async def _messages(self, request: web.BaseRequest) -> web.StreamResponse:
        place = self._seen(request)
        state = request.query.get("state", "ready")
        count = _count(request.query.get("n", "50"))
        found = await self._viewers.read(
            lambda: detail.messages(self._snapshots.source, *place, state, count)
        )
        return _json(sight_of(request).shown(*place, found))

    async def _message(self, request: web.BaseRequest) -> web.StreamResponse:
        place, wanted = self._seen(request), request.query.get("id", "")
        found, data = await self._viewers.read(
            lambda: detail.message(self._snapshots.source, *place, wanted)
        )
        sight = sight_of(request)
        if data is not None and sight.reads(*place):
            found["body"]["arrow"] = await self._arrow.describe(data, found["body"]["length"])
        return _json(sight.shown(*place, found))

    async def _history(self, request: web.BaseRequest) -> web.StreamResponse:
        period = request.query.get("period", "second")
        key = self._seen(request) if "topic" in request.query else None
        if key is None and not sight_of(request).whole:
            return _json({"time": []})
        since = float(_number("since", request.query.get("since", "0"))) / 1000
        return _json(await self._viewers.read(past.series, *self._place, period, key, since))

    async def _rights(self, request: web.BaseRequest) -> web.StreamResponse:
        instance, owner = self._place[0], os.environ.get(OWNER_VARIABLE)
        options = ["--instance", instance, *(["--owner", owner] if owner else [])]
        return _json({"admin": self._admin, "options": options})

    async def _login(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"pass": self._guard.login()})

    async def _act(self, request: web.BaseRequest) -> web.StreamResponse:
        refusal = self._guard.refusal_to_act(request)
        if refusal is not None:
            return _json({"error": refusal}, 403)
        if not self._admin:
            return _json({"error": "this page only shows; start `shmq page --admin` to act"}, 403)
        wish = wishes.typed(await _body_of(request), actions.FIELDS)
        by = audit.by_peer(request.transport)
        # A thread of its own: it may wait for the supervisor, and the ticks go on.
        said = await asyncio.to_thread(actions.act, *self._place, wish, by)
        return _json({"done": said})

    async def _deaths(self, request: web.BaseRequest) -> web.StreamResponse:
        if not sight_of(request).whole:
            return _json([])
        found = await self._viewers.read(past.last_deaths, *self._place)
        return _json(sight_of(request).shown("", None, found))


def _unparsed(method: str, target: str) -> web.StreamResponse:
    """Answer a request that aiohttp's parser refuses."""
    answer = _json({"error": "this server answers GET and POST of paths"}, 400)
    answer.force_close()
    return answer


async def _body_of(request: web.BaseRequest) -> bytes:
    """The body of a request. Raises ValueError if it is too long, or does not come."""
    body = bytearray()
    try:
        async with asyncio.timeout(_WISH_SECONDS):
            async for part in request.content.iter_any():
                body += part
                if len(body) > _MOST_BYTES:
                    raise ValueError(f"a body has at most {_MOST_BYTES} bytes")
    except TimeoutError:
        raise ValueError(f"the body did not come within {_WISH_SECONDS:g} s") from None
    except web.RequestPayloadError:
        raise ValueError("the body is not what its headers say") from None
    return bytes(body)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name} is a number of 15 digits at most, not {text[:100]!r}")
    return int(text)


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= count <= detail.MOST_MESSAGES:
        raise ValueError(f"n is a number from 1 to {detail.MOST_MESSAGES}, not {text[:100]!r}")
    return count


def _json(value: Any, status: int = 200) -> web.Response:
    return _answer(json.dumps(value, separators=(",", ":")).encode(), status)


def _answer(document: bytes, status: int) -> web.Response:
    return web.Response(
        status=status,
        body=document,
        content_type="application/json",
        charset="utf-8",
        headers=HEADERS,
    )


# ---- running ----


async def serve(page: Page, host: str, port: int, path: str | None, ready: Any) -> None:
    """Serve until SIGINT or SIGTERM.

    path: of a Unix socket, with mode 0600, instead of host and port. ready: called with the port
    (0 for a socket file) when browsers may come. Raises OSError if the address is taken.
    """
    server, seats = page.server(), Seats(_places, lambda: 0)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        if path is not None:
            _remove_left_socket(path)
            before = os.umask(0o177)
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.bind(path)
            finally:
                os.umask(before)
            sock.listen(_BACKLOG)
        else:
            sock = socket.create_server((host, port), backlog=_BACKLOG)
        acceptor = Acceptor(sock, "HTTP", seats, server.at, http_server.refusal)
        ready(0 if path is not None else sock.getsockname()[1])
        await ended.wait()
        acceptor.close()
    finally:
        await page.close()
        await server.shutdown(_LAST_SECONDS)
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _places() -> int:
    """How many connections there may be: a half of the descriptors is for the looks at segments
    (see `sources.may_keep`), and a quarter for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files // 4, 1) if files != resource.RLIM_INFINITY else 1 << 30


def _remove_left_socket(path: str) -> None:
    """Remove a socket on which nobody listens any more."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{path} is there and no socket: name another --socket, or remove it")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
