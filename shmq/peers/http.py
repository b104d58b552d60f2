"""One request of HTTP/1.1, whose answer is bounded in all it has: one deadline for the connection,
TLS, head, body and trailers together, and sizes and counts of the parts.

The standard library's client has a timeout for each read alone, so an answer that comes byte by
byte keeps it for ever, and it follows what an answer says without a bound.
"""

from __future__ import annotations

import re
import socket
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shmq.peers.documents import BadAnswer
from shmq.peers.sockets import Incoming, connected, left, secured
from shmq.printing import said

#: Bytes of the status line and the headers (and again of the trailers), and how many there may be.
MOST_HEAD: Final = 64 << 10
MOST_HEADERS: Final = 200
#: Answers of status 1xx before the answer.
_MOST_EARLY: Final = 8
_MOST_CHUNK_LINE: Final = 1 << 10
_MOST_PIECE: Final = 64 << 10

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: .*)?")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
#: Of a request's path: a URL may be one that a peer has named.
_TARGET: Final = re.compile(r"/[!-~]*")
_HOST: Final = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,300}")


class NotHttp(BadAnswer):
    """The bytes that came are no answer of HTTP."""


class TooLong(BadAnswer):
    """The body has more bytes than are taken."""


class BrokenOff(BadAnswer):
    """The connection ended before the end of the body."""


@dataclass(frozen=True)
class Answer:
    """An answer. headers: by their names in small letters; of several of one name the last."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(
    url: str,
    deadline: float,
    *,
    most: int,
    connect_by: float | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
) -> Answer:
    """Send one request, GET or with a body POST, to an http or https URL; no redirect is followed.

    deadline: of the whole, of time.monotonic. connect_by: of the connection alone. most: bytes of
    the body. context: of TLS. Raises OSError, BadAnswer, and ValueError if the URL is none."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{said(url.encode('utf-8', 'replace'))} is no http or https URL")
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = port == (443 if is_secure else 80)
    by = deadline if connect_by is None else min(connect_by, deadline)
    sock = connected(parts.hostname, port, by)
    try:
        if is_secure:
            sock = secured(sock, context(), parts.hostname, by, held=b"", peer=host)
        named = host if usual else f"{host}:{port}"
        return exchange(sock, named, target, deadline, most=most, body=body, headers=headers)
    finally:
        sock.close()


def bearer(token: str) -> dict[str, str]:
    """The header that shows who asks. token: as text of UTF-8, with `surrogateescape`. Raises
    ValueError if it has control characters: they would be another header."""
    text = token.encode("utf-8", "surrogateescape").decode("latin-1")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("a token has no control characters")
    return {"Authorization": f"Bearer {text}"}


def exchange(
    sock: socket.socket,
    host: str,
    target: str,
    deadline: float,
    *,
    most: int,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    spend: Callable[[int], None] = lambda count: None,
) -> Answer:
    """Send one request on a new connection, and read its answer. host: for the Host header. spend:
    called with the number of bytes of each piece of the body; it may raise. Raises as `ask`."""
    if not _TARGET.fullmatch(target) or not _HOST.fullmatch(host):
        raise ValueError(f"{said((host + target).encode('utf-8', 'replace'))} cannot be asked")
    own = {"Host": host, "Connection": "close", "Accept-Encoding": "identity"}
    if body is not None:
        own["Content-Length"] = str(len(body))
    lines = [f"{name}: {value}\r\n" for name, value in {**own, **(headers or {})}.items()]
    verb = "GET" if body is None else "POST"
    head = f"{verb} {target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")
    sock.settimeout(left(deadline))
    sock.sendall(head + (body or b""))
    incoming = Incoming(sock, deadline)
    for _ in range(_MOST_EARLY):
        status, found = _head(incoming)
        if status >= 200:
            return Answer(status, found, _body(incoming, status, found, most, spend))
    # It would go on for ever, so there is no answer in time; nobody has to wait to know that.
    raise TimeoutError(f"it sends more than {_MOST_EARLY} answers of status 1xx")


def _head(incoming: Incoming) -> tuple[int, dict[str, str]]:
    line = incoming.line(MOST_HEAD)
    if line is None and incoming.ended:
        raise ConnectionError("Remote end closed connection without response")
    match = _STATUS.fullmatch(line or b"")
    if match is None:
        raise NotHttp(f"its first line is {said(line or b'', 80)!r}")
    return int(match[1]), _fields(incoming)


def _fields(incoming: Incoming) -> dict[str, str]:
    """The headers, or the trailers, as far as the empty line."""
    found: dict[str, str] = {}
    room = MOST_HEAD
    for _ in range(MOST_HEADERS + 1):
        line = incoming.line(room)
        if line is None:
            if incoming.ended:
                raise ConnectionError("Remote end closed connection in its headers")
            raise NotHttp(f"its headers have more than {MOST_HEAD >> 10} KiB")
        room -= len(line) + 2
        if not line:
            return found
        match = _HEADER.fullmatch(line)
        if match is None:
            raise NotHttp(f"one of its headers is {said(line, 80)!r}")
        name, value = match[1].decode("ascii").lower(), match[2].decode("latin-1")
        if name == "content-length" and found.get(name, value) != value:
            raise NotHttp("it has two lengths")
        found[name] = value
    raise NotHttp(f"it has more than {MOST_HEADERS} headers")


def _body(
    incoming: Incoming,
    status: int,
    headers: Mapping[str, str],
    most: int,
    spend: Callable[[int], None],
) -> bytes:
    if status in (204, 304):
        return b""
    body = bytearray()

    def take(wanted: int | None) -> bool:
        """Take some bytes, at most `wanted`. Returns False at the end of the connection."""
        piece = incoming.some(_MOST_PIECE if wanted is None else min(wanted, _MOST_PIECE))
        spend(len(piece))
        body.extend(piece)
        if len(body) > most:
            raise TooLong(f"its answer is longer than {_size(most)}")
        return bool(piece)

    def whole(count: int) -> None:
        end = len(body) + count
        while len(body) < end:
            if not take(end - len(body)):
                raise BrokenOff(f"its answer breaks off {end - len(body)} bytes before its end")

    coding = headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked":
            raise NotHttp(f"its transfer encoding is {said(coding.encode(), 40)!r}")
        while (size := _chunk_size(incoming)) > 0:
            whole(size)
            if incoming.line(2) != b"":
                raise NotHttp("a chunk does not end where it says")
        _fields(incoming)
    elif (length := headers.get("content-length")) is not None:
        if not _LENGTH.fullmatch(length):
            raise NotHttp(f"its length is {said(length.encode(), 40)!r}")
        if int(length) > most:
            raise TooLong(f"its answer is longer than {_size(most)}")
        whole(int(length))
    else:
        while take(None):
            pass
    return bytes(body)


def _chunk_size(incoming: Incoming) -> int:
    match = _CHUNK.fullmatch(incoming.line(_MOST_CHUNK_LINE) or b"")
    if match is None:
        raise NotHttp("the size of a chunk is no number")
    return int(match[1], 16)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"
