"""aiohttp's server for strangers: bytes that are not a request get an answer and at most one line
in the log, and no answer names the server's software."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from aiohttp import HttpVersion11, http_exceptions, web
from aiohttp.abc import AbstractStreamWriter

from shmq import audit
from shmq.door.peer import peer_of
from shmq.door.seats import Seat, Seats
from shmq.door.seldom import Seldom
from shmq.door.shortage import shortage

#: A request line whose method aiohttp's parser does not know, or whose target is not a path.
_REQUEST_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.[01]\r?\n")
#: The method of the request that aiohttp substitutes for one that it cannot parse.
_NO_REQUEST: Final = "UNKNOWN"

_log = logging.getLogger(__name__)
_NOWHERE: Final = Seats(lambda: 1, lambda: 0)


class RawResponse(web.Response):
    """An answer with Go's exact bytes, after which the connection is closed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status=status, reason=reason)
        said = f"{status} {reason}"
        self._raw = (
            f"HTTP/1.1 {said}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Connection: close\r\n\r\n{said}"
        ).encode()
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the whole answer."""
        if request.transport is not None:
            request.transport.write(self._raw)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: `prepare` has written the whole answer."""


class Connection(web.RequestHandler):
    """One client's connection."""

    def __init__(self, server: Server, **how: Any) -> None:
        super().__init__(server, **how)
        self._server_of = server
        self._last = b""
        self.by = "-"
        """The client's name in the audit log."""
        self.who = ""
        """The peer that it counts among: an IP address, or `uid:N` on a Unix socket."""
        self.seat = Seat(_NOWHERE, "HTTP", "", "", False)
        """The place of the connection; set before it is made."""
        self.proven = b""
        """The token that the client has shown on this connection, and that was right."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.by, self.who = audit.by_peer(transport), peer_of(transport)
        self.seat.close = self._give_up
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.seat.leave()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        """End the connection: another one needs its place."""
        transport: Any = self.transport
        if transport is None:
            return
        if transport.get_write_buffer_size() or transport.get_extra_info("sslcontext"):
            transport.abort()
        else:
            transport.close()

    def pause_writing(self) -> None:
        self.seat.rests()  # until the client reads
        super().pause_writing()

    def resume_writing(self) -> None:
        self.seat.works()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._last = data
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer when there was no valid request, or the handler failed."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the client has hung up, or the answer has begun")
        short = shortage(exc) if exc is not None else ""
        if short:
            self._server_of.short(logging.ERROR, "a request of %s cannot go on: %s", self.by, short)
            return RawResponse(503, "Service Unavailable")
        if status == 500:
            self._server_of.crashes(logging.ERROR, "a request of %s crashed", self.by, exc_info=exc)
            return RawResponse(500, "Internal Server Error")
        match = _REQUEST_LINE.match(self._last.lstrip(b"\r\n"))
        of_line = http_exceptions.BadHttpMethod, http_exceptions.InvalidURLError
        if match is not None and isinstance(exc, of_line):
            method, target = (word.decode("latin-1") for word in match.groups())
            return self._server_of.unparsed(method, target)
        said = str(message or "")
        # aiohttp's message may quote the request, and so a secret in it
        self._server_of.bad(logging.INFO, "a bad request of %s: %s", self.by, _kind(exc))
        if said.startswith("Missing 'Host' header"):
            return RawResponse(400, "Bad Request: missing required Host header")
        return RawResponse(status, "Bad Request")

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer. After the last answer of a connection, send the end of the stream at
        once, even if the rest of the request has not arrived. aiohttp then still reads for a while.
        Without that, closing a connection with unread bytes would reset it, and the answer would be
        lost."""
        resp, lost = await super().finish_response(request, resp, start_time)
        transport: Any = self.transport
        unread = not lost and not resp.keep_alive and not request.content.is_eof()
        if unread and transport is not None and transport.can_write_eof():
            transport.write_eof()
        self.seat.rests()
        return resp, lost

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an exception that aiohttp does not pass to `handle_error`."""
        self._server_of.crashes(logging.ERROR, "a request of %s was given up", self.by, **kw)


class Request(web.BaseRequest):
    """A request whose answer has no header `Server`, as Go's."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        await super()._prepare_hook(response)
        response.headers.pop("Server", None)


class Server(web.Server):
    """The connections of one listening socket."""

    connection: Callable[..., Connection] = Connection

    def __init__(
        self,
        handler: Callable[..., Any],
        unparsed: Callable[[str, str], web.StreamResponse],
        **how: Any,
    ) -> None:
        """unparsed: answers a method and a target that aiohttp's parser refuses."""
        loop = asyncio.get_running_loop()

        def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Any:
            if message.method == _NO_REQUEST:  # its version is not the client's
                message = message._replace(version=HttpVersion11)
            return Request(message, payload, protocol, writer, task, loop)

        super().__init__(self._serve, request_factory=make_request)
        self._handle = handler
        self._how = {"loop": loop, "access_log": None, **how}
        self.unparsed = unparsed
        self.bad = Seldom(_log, "bad requests")
        self.crashes = Seldom(_log, "requests that crashed")
        self.short = Seldom(_log, "requests that could not go on")

    def __call__(self) -> Connection:
        return self.connection(self, **self._how)

    def at(self, seat: Seat) -> Connection:
        """A connection that has this seat."""
        made = self()
        made.seat = seat
        return made

    async def _serve(self, request: Any) -> web.StreamResponse:
        client = request.protocol
        client.seat.works()
        response: web.StreamResponse = await self._handle(request)
        if client.seat.reserved:  # it is for one request
            response.force_close()
        return response


def refusal(reason: str) -> bytes:
    """The answer to a connection for which there is no place."""
    body = f'{{"message":"TOO_MANY_CONNECTIONS","reason":"{reason}"}}'.encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


def _kind(exc: BaseException | None) -> str:
    """The kind of a parser's error, in words: `bad status line`."""
    name = type(exc).__name__ if exc is not None else "unreadable"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
