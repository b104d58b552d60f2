"""aiohttp's server with the manners of Go's: bytes that are not a request get Go's answer and at
most one line in the log, and no answer names the server's software."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from aiohttp import HttpVersion11, http_exceptions, web
from aiohttp.abc import AbstractStreamWriter

from shmq import audit
from shmq.gateway.access import Listener
from shmq.gateway.seldom import Seldom

#: A request line whose method aiohttp's parser does not know, or whose target is not a path.
_REQUEST_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.[01]\r?\n")
#: The method of the request that aiohttp substitutes for one that it cannot parse.
_NO_REQUEST: Final = "UNKNOWN"
_MOST_CHARACTERS: Final = 200

_log = logging.getLogger(__name__)


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
        self._ours = server
        self._last = b""
        self.by = "-"
        """The client's name in the audit log."""
        self.peer = ""
        """The client's address; empty on a Unix socket."""

    @property
    def listener(self) -> Listener:
        """The listening socket that accepted the connection."""
        return self._ours.listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) and peer else ""
        self.by = audit.by_peer(transport)
        super().connection_made(transport)

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
        if status == 500:
            self._ours.crashes(logging.ERROR, "a request of %s crashed", self.by, exc_info=exc)
            return RawResponse(500, "Internal Server Error")
        match = _REQUEST_LINE.match(self._last.lstrip(b"\r\n"))
        of_line = http_exceptions.BadHttpMethod, http_exceptions.InvalidURLError
        if match is not None and isinstance(exc, of_line):
            method, target = (word.decode("latin-1") for word in match.groups())
            return self._ours.unparsed(method, target)
        said = " ".join(str(message or "").split())[:_MOST_CHARACTERS]
        self._ours.bad(logging.INFO, "a bad request of %s: %s", self.by, said)
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
        return resp, lost

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an exception that aiohttp does not pass to `handle_error`."""
        self._ours.crashes(logging.ERROR, "a request of %s was given up", self.by, **kw)


class Request(web.BaseRequest):
    """A request whose answer has no header `Server`, as Go's."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        await super()._prepare_hook(response)
        response.headers.pop("Server", None)


class Server(web.Server):
    """The connections of one listening socket."""

    def __init__(
        self,
        handler: Callable[..., Any],
        listener: Listener,
        unparsed: Callable[[str, str], web.StreamResponse],
        **how: Any,
    ) -> None:
        """unparsed: answers a method and a target that aiohttp's parser refuses."""
        loop = asyncio.get_running_loop()

        def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Any:
            if message.method == _NO_REQUEST:  # its version is not the client's
                message = message._replace(version=HttpVersion11)
            return Request(message, payload, protocol, writer, task, loop)

        super().__init__(handler, request_factory=make_request)
        self._how = {"loop": loop, "access_log": None, **how}
        self.listener = listener
        self.unparsed = unparsed
        self.bad = Seldom(_log, "bad requests")
        self.crashes = Seldom(_log, "requests that crashed")

    def __call__(self) -> Connection:
        return Connection(self, **self._how)
