"""A gateway process: `python -m shmq.gateway.worker`, started by the supervisor.

Its stdin is a socket. The first line there is a JSON document: `options` (keywords), `fds` (numbers
of the descriptors that come with it), `sockets` ({kind: [some of them...]}), `index`, `workers`,
`control` (a directory for sockets among the workers). Further lines tell what changes (`health`,
`reload`). The end of stdin is the end of its supervisor: it ends too, and another supervisor starts
others. SIGTERM: close every connection, detach, end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmq import _native
from shmq.broker import attach_gateway
from shmq.gateway import tls
from shmq.gateway.control import Control
from shmq.gateway.hub import Hub
from shmq.gateway.lookupd import Lookupd
from shmq.gateway.statsd import Statsd
from shmq.gateway.tcp import Connection
from shmq.logs import set_up_logging
from shmq.options import OptionError, Options

if TYPE_CHECKING:
    from shmq.gateway.http import Http

try:
    import uvloop
except ImportError:
    _run: Callable[..., Any] = asyncio.run
else:
    _run = uvloop.run

_BACKLOG = 1024
_ATTACH_SECONDS = 30.0
_LOOKUP_SECONDS = 15.0
_MOST_FDS = 253  # that one message can carry (SCM_MAX_FD)
_KEEP_ALIVE_SECONDS = 15

_log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to stop."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor says what there is to reload
    # aiohttp takes half of the time of a start: clients of the TCP protocol do not wait for it
    threading.Thread(target=_load_http, name="load http", daemon=True).start()
    told = _first_words()
    if told is None or _left_alone():
        return 0
    options = Options.from_keywords(**told["options"])
    options = options.replace(**told.get("reload", {}).get("options", {}))
    give_up_protection()
    try:
        set_up_logging(options)
    except OSError as exc:  # the supervisor could open it
        _log.critical("the audit log: %s", exc)
        return 1
    with contextlib.suppress(_native.Gone):
        _run(Worker(options, told).run())
    # threads that wait for a slow authorisation server must not delay the end
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _load_http() -> type[Http]:
    """From a thread of its own; who asks a second time waits for the first."""
    from shmq.gateway.http import Http

    return Http


def _first_words() -> dict[str, Any] | None:
    """The document of the first line, its numbers those of this process; None: stdin ended."""
    data = b""
    fds: list[int] = []
    with socket.socket(fileno=os.dup(0)) as supervisor:
        while not data.endswith(b"\n"):
            more, came, _, _ = socket.recv_fds(supervisor, 1 << 20, _MOST_FDS)
            if not more:
                return None
            data += more
            fds += came
    # news may have come already, too; they say it all again
    first, *news = (json.loads(line) for line in data.splitlines())
    told: dict[str, Any] = first
    for item in news:
        told |= item
    mine = dict(zip(told["fds"], fds, strict=True))
    told["sockets"] = {kind: [mine[fd] for fd in item] for kind, item in told["sockets"].items()}
    return told


def _left_alone() -> bool:
    """Whether the supervisor has died since it started us; the next one waits for our ports."""
    end = select.poll()
    end.register(0, 0)  # only POLLHUP
    return bool(end.poll(0))


def give_up_protection(path: str = "/proc/self/oom_score_adj") -> None:
    """Have the kernel, when it is out of memory, look at this process as at any other. A service
    may protect its supervisor; what clients send is here, and a gateway process is replaced."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path(path).read_text()) < 0:
            Path(path).write_text("0")


class Worker:
    """What one process serves."""

    def __init__(self, options: Options, told: dict[str, Any]) -> None:
        self.options = options
        self.index: int = told["index"]
        self.ports: dict[str, int] = told["ports"]
        """Kind (tcp, http, https) -> port listened on; -1: a Unix socket, 0: none."""
        self.start_time: int = told["start_time"]
        self.argv: list[str] = told["argv"]
        self._told = told
        self._version = 0  # of the last change of options
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or the end of stdin."""
        loop = self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        context = tls.server_context(self.options)
        broker = await asyncio.to_thread(attach_gateway, self.options.instance, _ATTACH_SECONDS)
        self.hub = Hub(broker, self.options, context)
        self.hub.health = self._told.get("health", "OK")
        self.control = Control(
            self._told["control"], self.index, self._told["workers"], self._answer
        )
        self.lookupd = Lookupd(self)
        self.hub.new_topic = self._channels_elsewhere
        tasks = []
        if self.index == 0:
            tasks.append(loop.create_task(self.lookupd.run()))
        self.hub.begin()
        self._servers = await self._serve_tcp()
        self.http = (await asyncio.to_thread(_load_http))(self)
        await self.control.start()
        self._change(*self.control.changes())
        if self.index == 0 and self.options.statsd_address:
            tasks.append(loop.create_task(Statsd(self).run()))
        self._servers += await self._serve_http()
        self._secure = await self._serve_https(context)
        following = await self._follow_supervisor()
        _log.info("gateway %d: serving", self.index)
        try:
            await self._stopped.wait()
        finally:
            for server in (*self._servers, *self._secure):
                server.close()
            for connection in list(self.hub.connections):
                connection.stop()
            await asyncio.sleep(0)
            for task in (following, *tasks):
                task.cancel()
            await self.control.close()
            self.hub.close()

    async def _serve_tcp(self) -> list[asyncio.AbstractServer]:
        loop = asyncio.get_running_loop()
        return [
            await loop.create_server(lambda: Connection(self.hub), sock=sock, backlog=_BACKLOG)
            for sock in self._sockets("tcp")
        ]

    async def _serve_http(self) -> list[asyncio.AbstractServer]:
        return await self._serve_web("http", None)

    async def _serve_https(self, context: ssl.SSLContext | None) -> list[asyncio.AbstractServer]:
        return await self._serve_web("https", context)

    async def _serve_web(
        self, kind: str, context: ssl.SSLContext | None
    ) -> list[asyncio.AbstractServer]:
        loop = asyncio.get_running_loop()
        return [
            await loop.create_server(
                self.http.server(context is not None, sock),
                sock=sock,
                ssl=context,
                backlog=_BACKLOG,
            )
            for sock in self._sockets(kind)
        ]

    def _sockets(self, kind: str) -> list[socket.socket]:
        """Anew at each call: a server closes its own, and another may follow it."""
        socks = [_socket_of(os.dup(fd)) for fd in self._told["sockets"].get(kind, ())]
        for sock in socks:
            _keep_alive(sock)
        return socks

    # ---- the supervisor and the other processes ----

    async def _follow_supervisor(self) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        sock = _socket_of(os.dup(0))
        reader, self._supervisor = await asyncio.open_unix_connection(sock=sock)

        async def follow() -> None:
            with contextlib.suppress(OSError):
                while line := await reader.readline():
                    news = json.loads(line)
                    self.hub.health = news.get("health", "OK")
                    await self._reload(news.get("reload", {}))
            self._stopped.set()

        return loop.create_task(follow())

    async def _reload(self, wanted: dict[str, Any]) -> None:
        """Take other options, and read the certificates again, if `wanted` is a new wish.
        Connections that there are keep what they have agreed on."""
        if wanted == self._told.get("reload", {}):
            return
        try:
            options = self.options.replace(**wanted["options"])
            context = tls.server_context(options)
        except (OptionError, OSError) as exc:
            _log.error("gateway %d: cannot reload: %s", self.index, exc)
            return
        self._told["reload"] = wanted
        self.options = self.hub.options = options
        self.hub.tls_context = context
        self.http.changed()
        if context is not None and self._secure:
            before, self._secure = self._secure, await self._serve_https(context)
            for server in before:
                server.close()
        _log.info("gateway %d: reloaded", self.index)

    async def _answer(self, question: dict[str, Any]) -> Any:
        """What another gateway process asks, or this one itself."""
        if question["ask"] == "connections":
            pid = os.getpid()
            return [{**item.session.describe(), "pid": pid} for item in self.hub.connections]
        if question["ask"] == "change":
            self._change(question["version"], question["options"])
            return True
        if question["ask"] == "lookup":
            return await self.lookupd.channels(question["topic"])
        return None

    def _change(self, version: int, options: dict[str, Any]) -> None:
        """Options are others now; an older change that comes late is not done."""
        if version > self._version:
            self._version = version
            self.options = self.hub.options = self.options.replace(**options)
            self.http.changed()

    def _channels_elsewhere(self, topic: str) -> list[str]:
        """Of a topic that is about to be made; called in the pool."""
        if not self.options.lookupd_tcp_address:
            return []
        question = self.control.ask(0, {"ask": "lookup", "topic": topic})
        try:
            asked = asyncio.run_coroutine_threadsafe(question, self._loop)
            return list(asked.result(_LOOKUP_SECONDS) or [])
        except TimeoutError:
            return []

    def statsd_prefix(self) -> str:
        """What statsd names begin with."""
        options = self.options
        port = options.broadcast_http_port or self.ports.get("http", 0)
        host = f"{options.broadcast_address}:{port}".replace(".", "_").replace(":", "_")
        prefix = options.statsd_prefix.replace("%s", host)
        return prefix if prefix.endswith(".") or not prefix else f"{prefix}."


def _socket_of(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask silent clients whether they are there, as often as Go does. Connections
    inherit it from the socket that accepts them."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
