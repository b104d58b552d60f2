"""A gateway process: `python -m shmq.gateway.worker`, started by the supervisor.

Its stdin is a socket. The first line is a JSON document: `options` (keywords), `fds` (numbers of
the descriptors that come with it), `sockets` (kind -> some of these descriptors), `ports`,
`start_time`, `argv`, `index`, `workers`, `control` (the directory of the control sockets). Later
lines report changes (`health`, `reload`). At the end of stdin the supervisor has ended: the process
ends too, and another supervisor starts other processes. At SIGTERM it closes every connection,
detaches and ends.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmq.broker import attach_gateway
from shmq.door.acceptor import Acceptor
from shmq.errors import Gone, ShmqError
from shmq.gateway import tls
from shmq.gateway.connections import Connections
from shmq.gateway.context import Context
from shmq.gateway.control import Control
from shmq.gateway.lookupd import Lookupd
from shmq.gateway.protocol import ProtocolError
from shmq.gateway.tcp import Connection
from shmq.gateway.tokens import Tokens
from shmq.logs import set_log_level, set_up_logging
from shmq.option_types import OptionError
from shmq.options import Options

if TYPE_CHECKING:
    from shmq.gateway.http import Http
    from shmq.gateway.statsd import Statsd

try:
    import uvloop
except ImportError:
    _run: Callable[..., Any] = asyncio.run
else:
    _run = uvloop.run

_ATTACH_SECONDS = 30.0
_MOST_FDS = 253  # the most descriptors that one message can carry (SCM_MAX_FD)
#: Seconds between two looks at what is staged.
_SWEEP_SECONDS = 60.0
_KEEP_ALIVE_SECONDS = 15

_log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM or the end of stdin; the result is the exit status."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor sends the options to reload
    told = _first_words()
    if told is None or _left_alone():
        return 0
    options = Options.from_keywords(**told["options"])
    options = options.replace(**told.get("reload", {}).get("options", {}))
    give_up_protection()
    try:
        set_up_logging(options)
    except OSError as exc:  # it happens although the supervisor could open it
        _log.critical("the audit log: %s", exc)
        return 1
    with contextlib.suppress(Gone):
        _run(Worker(told).run(options))
    # an exit without joining threads: one may wait for a slow authorisation server
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _load_http() -> type[Http]:
    from shmq.gateway.http import Http  # half of the start-up time, and 12 MiB

    return Http


def _load_statsd() -> type[Statsd]:
    from shmq.gateway.statsd import Statsd

    return Statsd


def _first_words() -> dict[str, Any] | None:
    """Read the document of the first line. Its descriptors are replaced by this process's numbers.

    Returns None if stdin has ended."""
    data = b""
    fds: list[int] = []
    with socket.socket(fileno=os.dup(0)) as supervisor:
        while not data.endswith(b"\n"):
            more, came, _, _ = socket.recv_fds(supervisor, 1 << 20, _MOST_FDS)
            if not more:
                return None
            data += more
            fds += came
    # updates may have arrived too; each replaces whole entries of the document
    first, *news = (json.loads(line) for line in data.splitlines())
    told: dict[str, Any] = first
    for item in news:
        told |= item
    mine = dict(zip(told["fds"], fds, strict=True))
    told["sockets"] = {kind: [mine[fd] for fd in item] for kind, item in told["sockets"].items()}
    return told


def _left_alone() -> bool:
    """Returns true if the supervisor has died since it started this process. The next supervisor
    waits until the ports are free."""
    end = select.poll()
    end.register(0, 0)  # reports only POLLHUP
    return bool(end.poll(0))


def give_up_protection(path: str = "/proc/self/oom_score_adj") -> None:
    """Remove the protection against the kernel's out-of-memory killer that a service may give its
    supervisor. This process holds the clients' data, and the supervisor replaces it."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path(path).read_text()) < 0:
            Path(path).write_text("0")


class Worker:
    """One gateway process: it makes the parts, and passes on changes from the supervisor and the
    other processes."""

    def __init__(self, told: dict[str, Any]) -> None:
        """told: the supervisor's document."""
        self._index: int = told["index"]
        self._told = told
        self._version = 0  # the version of the last change of options
        self._stopped = asyncio.Event()
        self._http: Http | None = None  # until the first connection to it
        self._renewing = asyncio.Lock()  # held while the servers of HTTPS are replaced

    async def run(self, options: Options) -> None:
        """Serve until SIGTERM or the end of stdin."""
        loop, told = asyncio.get_running_loop(), self._told
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        tls_context = tls.server_context(options)
        broker = await asyncio.to_thread(attach_gateway, options.instance, _ATTACH_SECONDS)
        control = Control(told["control"], self._index, told["workers"], self._answer)
        context = self._context = Context(
            options,
            broker,
            control,
            ports=told["ports"],
            start_time=told["start_time"],
            argv=told["argv"],
            tls_context=tls_context,
        )
        context.reported_health = told.get("health", "OK")
        self._lookupd = Lookupd(context)
        tasks = []
        if self._index == 0:
            tasks.append(loop.create_task(self._lookupd.run()))
            tasks.append(loop.create_task(self._sweep()))
        self._connections = Connections(context)
        self._tokens = Tokens(options)
        if context.published.interval:
            tasks.append(loop.create_task(context.published.run(self._connections.all)))
        # Before a client is served: else a change would be confirmed that it does not have.
        await control.start()
        self._change(*control.changes())
        self._servers = self._serve_tcp()
        if self._index == 0 and context.options.statsd_address:
            statsd = await asyncio.to_thread(_load_statsd)
            tasks.append(loop.create_task(statsd(context).run()))
        self._secure: list[Acceptor] = []
        http = loop.create_task(self._serve_http())
        following = await self._follow_supervisor()
        _log.info("gateway %d: serving", self._index)
        try:
            await self._stopped.wait()
            if http.done():
                http.result()  # raises what it failed with; the supervisor starts another process
        finally:
            for server in (*self._servers, *self._secure):
                server.close()
            self._connections.stop()
            if self._http is not None:
                await self._http.close()
            await asyncio.sleep(0)
            for task in (following, http, *tasks):
                task.cancel()
            await control.close()
            self._connections.waiter.close()
            context.published.write()
            context.close()

    async def _sweep(self) -> None:
        """Remove staged rows whose time is over, also if nobody stages any more."""
        context = self._context
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, max(1.0, context.options.staged_ttl)))
            try:
                await context.call(context.leases.sweep)
            except (ShmqError, OSError) as exc:
                _log.warning("gateway %d: cannot remove staged rows: %s", self._index, exc)

    def _serve_tcp(self) -> list[Acceptor]:
        context, connections = self._context, self._connections
        return [
            Acceptor(
                sock,
                "TCP",
                connections.seats,
                lambda seat: Connection(context, connections, seat),
                lambda reason: ProtocolError("E_CONNECT_FAILED", reason).frame,
            )
            for sock in self._sockets("tcp")
        ]

    async def _serve_http(self) -> None:
        """Serve HTTP from the first connection on, which waits until the interface is loaded. Where
        nobody uses it, it costs no memory and no time."""
        await self._first_connection("http", "https")
        try:
            loaded = await asyncio.to_thread(_load_http)
            self._http = http = loaded(self._context, self._tokens, self._connections.seats)
            self._servers += self._serve_web(http, "http", None)
            await self._serve_https(http)
        except Exception:
            self._stopped.set()
            raise

    async def _serve_https(self, http: Http) -> None:
        """Serve HTTPS with the present certificates, in place of the servers before."""
        async with self._renewing:
            again = self._serve_web(http, "https", self._context.tls_context)
            before, self._secure = self._secure, again
            for server in before:
                server.close()

    async def _first_connection(self, *kinds: str) -> None:
        """Wait until a client has connected to a listening socket of these kinds."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        fds = [fd for kind in kinds for fd in self._told["sockets"].get(kind, ())]
        for fd in fds:
            loop.add_reader(fd, came.set)
        try:
            await came.wait()
        finally:
            for fd in fds:
                loop.remove_reader(fd)

    def _serve_web(
        self, http: Http, kind: str, tls_context: ssl.SSLContext | None
    ) -> list[Acceptor]:
        from shmq.door.http_server import refusal  # with aiohttp, which is slow to import

        return [
            Acceptor(
                sock,
                kind.upper(),
                self._connections.seats,
                http.server(tls_context is not None, sock).at,
                refusal,
                (tls_context, self._context.handshakes) if tls_context is not None else None,
            )
            for sock in self._sockets(kind)
        ]

    def _sockets(self, kind: str) -> list[socket.socket]:
        """Duplicate the listening sockets of a kind. A server closes its own sockets at its end,
        and another server may follow it."""
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
                    self._context.reported_health = news.get("health", "OK")
                    await self._reload(news.get("reload", {}))
            self._stopped.set()

        return loop.create_task(follow())

    async def _reload(self, wanted: dict[str, Any]) -> None:
        """Apply the supervisor's reload, if it is a new one: other options, and the certificates
        read again. Open connections keep their settings."""
        if wanted == self._told.get("reload", {}):
            return
        try:
            options = self._context.options.replace(**wanted["options"])
            tls_context = tls.server_context(options)
        except (OptionError, OSError) as exc:
            _log.error("gateway %d: cannot reload: %s", self._index, exc)
            return
        self._told["reload"] = wanted
        self._context.options = options
        self._context.tls_context = tls_context
        self._context.rights.changed(options)
        self._forget()
        if tls_context is not None and self._http is not None:
            await self._serve_https(self._http)
        _log.info("gateway %d: reloaded", self._index)

    async def _answer(self, question: dict[str, Any]) -> Any:
        """Answer a control request of another gateway process, or of this one."""
        if question["ask"] == "connections":
            return self._connections.describe()
        if question["ask"] == "counts":
            context = self._context
            seats = self._connections.seats.counts()
            return {**context.brake.counts(), **context.handshakes.counts(), **seats}
        if question["ask"] == "change":
            self._change(question["version"], question["options"])
            return True
        if question["ask"] == "lookup":
            return await self._lookupd.channels(question["topic"])
        return None

    def _change(self, version: int, options: dict[str, Any]) -> None:
        """Apply a change of options; ignore one that is older than the last."""
        if version > self._version:
            self._version = version
            self._context.options = self._context.options.replace(**options)
            self._forget()

    def _forget(self) -> None:
        """Have each interface make anew what it keeps of the options."""
        options = self._context.options
        set_log_level(options)
        self._tokens.changed(options)
        self._connections.changed()
        if self._http is not None:
            self._http.changed()


def _socket_of(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


def _keep_alive(sock: socket.socket) -> None:
    """Enable TCP keep-alive with Go's interval. Accepted connections inherit it from the listening
    socket."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
