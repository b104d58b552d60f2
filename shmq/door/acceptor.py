"""One listening socket: each connection gets its seat before anything is made for it, and a process
without descriptors still answers by closing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from shmq import audit
from shmq.door.handshakes import Handshakes, tls_reason
from shmq.door.peer import plain
from shmq.door.seats import Seat, Seats
from shmq.door.seldom import Seldom
from shmq.door.shortage import shortage

#: Connections that are accepted before the others of the event loop get their turn: those that are
#: ended for them have not given their descriptors back before that.
AT_ONCE: Final = 8
#: Seconds for the handshake of TLS.
_HANDSHAKE_SECONDS: Final = 10.0
#: Seconds until a process that cannot accept anything tries again.
_AGAIN: Final = 0.1

_log = logging.getLogger(__name__)
_seldom = Seldom(_log, "connections that could not be accepted")


class Acceptor:
    """Accepts the connections of one listening socket, until `close`."""

    def __init__(
        self,
        sock: socket.socket,
        kind: str,
        seats: Seats,
        make: Callable[[Seat], asyncio.BaseProtocol],
        refusal: Callable[[str], bytes],
        tls: tuple[ssl.SSLContext, Handshakes] | None = None,
    ) -> None:
        """kind: TCP, HTTP or HTTPS. make: the protocol of a connection. refusal: the bytes for one
        that is refused for this reason. tls: None: the connections have none."""
        self._sock = sock
        self._kind = kind
        self._seats = seats
        self._make = make
        self._refusal = refusal
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._spare = _spare()
        self._tasks: set[asyncio.Task[Any]] = set()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more; connections go on."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if shortage(exc):
                    self._without_files(exc)
                    return
                continue  # the client has hung up
            try:
                self._enter(sock, address)
            except OSError:
                sock.close()

    def _enter(self, sock: socket.socket, address: Any) -> None:
        sock.setblocking(False)
        if isinstance(address, tuple):
            host = plain(str(address[0]))
            shown = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{host}:{address[1]}"
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            found = audit.credentials_of(sock)
            host = "" if found is None else f"uid:{found[1]}"
            shown = "@" if found is None else f"pid:{found[0]}/uid:{found[1]}"
        seat, reason = self._seats.take(self._kind, host, shown)
        if seat is None:
            self._refuse(sock, reason)
            return
        if self._tls is not None and not self._tls[1].begin(host):
            seat.leave()
            sock.close()
            return
        work = self._loop.connect_accepted_socket(
            functools.partial(self._make, seat),
            sock,
            ssl=self._tls[0] if self._tls is not None else None,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS if self._tls is not None else None,
        )
        task = self._loop.create_task(work)
        seat.close = functools.partial(_cancel, task)  # until the protocol has it
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._entered, seat, sock, (host, shown)))

    def _entered(
        self, seat: Seat, sock: socket.socket, who: tuple[str, str], task: asyncio.Task[Any]
    ) -> None:
        self._tasks.discard(task)
        if self._tls is not None:
            handshakes = self._tls[1]
            if task.cancelled():
                handshakes.failed(*who, "its place was needed before it was done")
            elif (error := task.exception()) is not None:
                handshakes.failed(*who, tls_reason(error))
            else:
                handshakes.passed(who[0])
        if task.cancelled() or task.exception() is not None:  # no handshake, or hung up
            seat.leave()
            with contextlib.suppress(OSError):
                sock.close()

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):
            if self._tls is None:
                sock.send(self._refusal(reason))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(65536)  # what is left unread would reset the connection, and lose the answer
        sock.close()

    def _without_files(self, exc: OSError) -> None:
        """Close connections that rest, and the one that cannot be accepted, instead of looking at
        it again and again."""
        ended = self._seats.free(8)
        _seldom(logging.ERROR, "%s: cannot accept: %s; %d ended", self._kind, exc.strerror, ended)
        if self._spare >= 0:
            os.close(self._spare)
            with contextlib.suppress(OSError):
                sock, _ = self._sock.accept()
                sock.close()
        self._spare = _spare()
        if self._spare < 0:
            self._loop.remove_reader(self._sock)
            self._loop.call_later(_AGAIN, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)


def _spare() -> int:
    """A descriptor that can be given up; -1: there is none left."""
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
