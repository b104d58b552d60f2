"""The connections of the HTTP interface.

A publisher sends the same head again and again. After a publish that was answered OK, the same head
on the same connection is not parsed again: `Again`.
"""

from __future__ import annotations

import asyncio
import email.utils
import hmac
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from shmq.door import http_server
from shmq.door.peer import uid_of
from shmq.gateway.access import Listener
from shmq.gateway.asker import Asker
from shmq.gateway.host import Grant

#: Heads that a connection remembers, the bytes of the longest, and how many it tries to remember: a
#: client whose heads are never the same is not asked for ever.
_HEADS: Final = 8
_HEAD_BYTES: Final = 2048
_TRIES: Final = 64
#: The digits of a Content-Length after which no more are read.
_DIGITS: Final = 10
#: The name of the header whose value may differ in a head that is known.
_LENGTH: Final = re.compile(rb"\r\ncontent-length: ?([1-9][0-9]{0,8})(?=\r\n)", re.IGNORECASE)
#: Headers that change where a request ends, or what comes after it.
_OF_TRANSFER: Final = ("Transfer-Encoding", "Expect", "Upgrade")


@dataclass(slots=True)
class Again:
    """A publish that was answered OK, so that the next one with the same head needs no parser: the
    head says what it said before. Only the digits of Content-Length may differ.

    The bytes are compared in a time that does not depend on them: a head may hold a token."""

    publish: Callable[[bytes], bool]
    """Publishes a body. Returns false if the request must be answered the long way; nothing was
    published then."""
    before: bytes = b""
    """The head up to the digits."""
    after: bytes = b""
    """The head after them."""

    def learn(self, head: bytes) -> bool:
        """Remember a head. Returns false if it does not have the usual form of a length."""
        lengths = list(_LENGTH.finditer(head))
        if len(lengths) != 1:
            return False
        self.before, self.after = head[: lengths[0].start(1)], head[lengths[0].end(1) :]
        return True

    def body(self, data: bytes, start: int) -> tuple[int, int] | None:
        """Return where the body of the request at `start` begins and ends. None: it has another
        head, or has not arrived completely."""
        digits = start + len(self.before)
        if not hmac.compare_digest(data[start:digits], self.before):
            return None
        stop = data.find(b"\r", digits, digits + _DIGITS)
        length = data[digits:stop] if stop > digits else b""
        if not length.isdigit() or length[0] == 0x30:
            return None
        begin = stop + len(self.after)
        end = begin + int(length)
        if end > len(data) or not hmac.compare_digest(data[stop:begin], self.after):
            return None
        return begin, end


class _Ok:
    """The bytes of nsqd's answer OK, as aiohttp writes them."""

    second = 0
    data = b""

    @classmethod
    def now(cls) -> bytes:
        """The answer of this second."""
        second = int(time.time())
        if second != cls.second:
            cls.second = second
            date = email.utils.formatdate(second, usegmt=True)
            cls.data = (
                "HTTP/1.1 200 OK\r\nX-Nsq-Content-Type: nsq; version=1.0\r\n"
                "Content-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n"
                f"Date: {date}\r\n\r\nOK"
            ).encode()
        return cls.data


class Connection(http_server.Connection):
    """One client's connection."""

    def __init__(self, server: Server, **how: Any) -> None:
        super().__init__(server, **how)
        self._ours = server
        self.peer = ""
        """The client's address; empty on a Unix socket."""
        self.uid: int | None = None
        """Of the process at the other end of a Unix socket."""
        self.ends: tuple[Any, Any] = (None, None)
        """The names of its two sockets, the client's first."""
        self.subject: Any = ()
        """Of the client's certificate, which was verified, as `ssl` has it."""
        self.grant: Grant | None = None
        """The rights of who sent the present request; None: there is no access file."""
        self.lost: Callable[[], None] | None = None
        """Called at the end of the connection."""
        self.rules: Any = None
        """The access rules that admitted the present request."""
        self.again: Again | None = None
        """Set by a handler that has published and will be asked for the same again."""
        # `_whole`: aiohttp has all its requests, and has answered them; a new one comes next. Else
        # it has had `_fed` bytes since then, of which `_first` came first.
        self._whole = True
        self._first = b""
        self._fed = 0
        self._heads: list[Again] = []
        self._tries = _TRIES

    @property
    def listener(self) -> Listener:
        """The listening socket that accepted the connection."""
        return self._ours.listener

    def asker(self) -> Asker:
        """The client of the present request, for the threads that execute it."""
        grant = self.grant
        if grant is not None and grant.known is not None and grant.known.proof.kind != "none":
            return Asker(grant.identity, True, self.by, ends=self.ends)
        origin = (self.peer or "@") if self.uid is None else f"{self.peer or '@'} uid {self.uid}"
        return Asker(origin, address=self.by, ends=self.ends)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) and peer else ""
        self.uid = uid_of(transport)
        self.ends = (peer, transport.get_extra_info("sockname"))
        self.subject = (transport.get_extra_info("peercert") or {}).get("subject", ())
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.lost is not None:
            self.lost()
            self.lost = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._whole:
            if self._heads and self.transport is not None and not self.writing_paused:
                data = self._publish(data)
                if not data:
                    return
            self._whole = False
            self._first, self._fed = data, 0
        self._fed += len(data)
        super().data_received(data)

    # ---- publishers that ask for the same again ----

    def _publish(self, data: bytes) -> bytes:
        """Execute the requests at the start of the input whose heads are known. Returns the rest
        of the input."""
        at = answers = 0
        while at < len(data):
            for head in self._heads:
                body = head.body(data, at)
                if body is not None:
                    break
            else:
                break
            if not head.publish(data[body[0] : body[1]]):
                break
            at = body[1]
            answers += 1
        if answers:
            transport: Any = self.transport
            transport.write(_Ok.now() * answers)
            self.seat.rests()
            # aiohttp ends a connection that is silent for so long
            self._next_keepalive_close_time = self._loop.time() + self.keepalive_timeout
        return data[at:]

    def _settle(self, request: web.BaseRequest, resp: web.StreamResponse) -> None:
        """After an answer: find out whether aiohttp has had exactly this request, and remember its
        head. A head that any two parsers might read differently is not looked at."""
        first, self._first = self._first, b""
        end = first.find(b"\r\n\r\n") + 4
        again, self.again = self.again, None
        head = first[:end]
        line = f"{request.method} {request.raw_path} HTTP/1.1\r\n".encode("utf-8", "replace")
        lines = head.count(b"\r\n")
        if (
            not head.startswith(line)
            or not lines == head.count(b"\n") == head.count(b"\r")
            or self._fed != end + (request.content_length or 0)
            or any(name in request.headers for name in _OF_TRANSFER)
            or request.headers.get("Connection", "keep-alive").lower() != "keep-alive"
            or not request.content.is_eof()
        ):
            return
        self._whole = True
        if again is not None and resp.status == 200 and end <= _HEAD_BYTES and again.learn(head):
            self._remember(again)

    def _remember(self, again: Again) -> None:
        for known in self._heads:
            if (known.before, known.after) == (again.before, again.after):
                known.publish = again.publish  # as the options of now say
                return
        if self._tries:
            self._tries -= 1
            self._heads = [again, *self._heads[: _HEADS - 1]]

    # ---- answers ----

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer, and learn the head of the request."""
        resp, lost = await super().finish_response(request, resp, start_time)
        if not self._whole and not lost and resp.keep_alive:
            self._settle(request, resp)
        return resp, lost


class Server(http_server.Server):
    """The connections of one listening socket."""

    connection = Connection

    def __init__(
        self,
        handler: Callable[..., Any],
        listener: Listener,
        unparsed: Callable[[str, str], web.StreamResponse],
        **how: Any,
    ) -> None:
        """unparsed: answers a method and a target that aiohttp's parser refuses."""
        super().__init__(handler, unparsed, **how)
        self.listener = listener
