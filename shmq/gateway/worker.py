"""A gateway process: `python -m shmq.gateway.worker`, started by the supervisor.

The first line of its stdin is a JSON document: `options` (keywords), `sockets` ({kind: [fd...]}),
`index`, `workers`, `control` (a directory for sockets among the workers). Further lines tell what
changes (`health`). The end of stdin is the end of its supervisor: it ends too, and another
supervisor starts others. SIGTERM: close every connection, detach, end.
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
from typing import Any

from shmq import _native
from shmq.broker import attach_gateway
from shmq.gateway import tls
from shmq.gateway.access import Listener
from shmq.gateway.control import Control
from shmq.gateway.http import Http
from shmq.gateway.hub import Hub
from shmq.gateway.lookupd import Lookupd
from shmq.gateway.statsd import Statsd
from shmq.gateway.tcp import Connection
from shmq.logs import set_up_logging
from shmq.options import Options

_BACKLOG = 1024
_ATTACH_SECONDS = 30.0
_LOOKUP_SECONDS = 15.0

_log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to stop."""
    line = sys.stdin.buffer.readline()
    if not line or _left_alone():
        return 0
    told = json.loads(line)
    options = Options.from_keywords(**told["options"])
    try:
        set_up_logging(options)
    except OSError as exc:  # the supervisor could open it
        _log.critical("the audit log: %s", exc)
        return 1
    try:
        import uvloop
    except ImportError:
        run: Any = asyncio.run
    else:
        run = uvloop.run
    with contextlib.suppress(_native.Gone):
        run(Worker(options, told).run())
    # threads that wait for a slow authorisation server must not delay the end
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _left_alone() -> bool:
    """Whether the supervisor has died since it started us; the next one waits for our ports."""
    end = select.poll()
    end.register(0, 0)  # only POLLHUP
    return bool(end.poll(0))


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
        self.http = Http(self)
        following = await self._follow_supervisor()
        await self.control.start()
        self.lookupd = Lookupd(self)
        self.hub.new_topic = self._channels_elsewhere
        tasks = []
        if self.index == 0:
            tasks.append(loop.create_task(self.lookupd.run()))
            if self.options.statsd_address:
                tasks.append(loop.create_task(Statsd(self).run()))
        servers = await self._serve(context)
        _log.info("gateway %d: serving", self.index)
        try:
            await self._stopped.wait()
        finally:
            for server in servers:
                server.close()
            for connection in list(self.hub.connections):
                connection.stop()
            await asyncio.sleep(0)
            for task in (following, *tasks):
                task.cancel()
            await self.control.close()
            self.hub.close()

    async def _serve(self, context: ssl.SSLContext | None) -> list[asyncio.AbstractServer]:
        loop = asyncio.get_running_loop()
        servers: list[asyncio.AbstractServer] = [
            await loop.create_server(lambda: Connection(self.hub), sock=sock, backlog=_BACKLOG)
            for sock in self._sockets("tcp")
        ]
        for kind, secure in (("http", None), ("https", context)):
            for sock in self._sockets(kind):
                serving = self.http.server(Listener.of(sock, secure is not None))
                servers.append(
                    await loop.create_server(serving, sock=sock, ssl=secure, backlog=_BACKLOG)
                )
        return servers

    def _sockets(self, kind: str) -> list[socket.socket]:
        return [_socket_of(fd) for fd in self._told["sockets"].get(kind, ())]

    # ---- the supervisor and the other processes ----

    async def _follow_supervisor(self) -> asyncio.Task[None]:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", 0)
        )

        async def follow() -> None:
            while line := await reader.readline():
                self.hub.health = json.loads(line).get("health", "OK")
            self._stopped.set()

        return loop.create_task(follow())

    async def _answer(self, question: dict[str, Any]) -> Any:
        """What another gateway process asks, or this one itself."""
        if question["ask"] == "connections":
            pid = os.getpid()
            return [{**item.session.describe(), "pid": pid} for item in self.hub.connections]
        if question["ask"] == "change":
            self.options = self.hub.options = self.options.replace(**question["options"])
            self.http.changed()
            return True
        if question["ask"] == "lookup":
            return await self.lookupd.channels(question["topic"])
        return None

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


if __name__ == "__main__":
    sys.exit(main())
