"""Connections to other programs: everything that waits has a deadline (of time.monotonic)."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Final

from shmq.errors import ShmqError

#: Bytes that one `recv` takes at most.
_PIECE: Final = 64 << 10
_LATE: Final = "there was no whole answer in time"
#: Bytes a second over the slowest line that is waited for.
_SLOWEST: Final = 64 << 10


def left(deadline: float) -> float:
    """The seconds until a deadline. Raises TimeoutError if there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(_LATE)
    return seconds


def received(sock: socket.socket, most: int, deadline: float) -> bytes:
    """The bytes that a socket has until a deadline, at most so many. Raises OSError."""
    sock.settimeout(left(deadline))
    try:
        return sock.recv(most)
    except TimeoutError:  # whose text would only be "timed out"
        raise TimeoutError(_LATE) from None


def seconds_for(size: int, answer: float) -> float:
    """Within how many seconds a request of so many bytes is answered over the slowest line that is
    waited for. A time that does not grow with the request would end the same large one for ever.
    answer: the seconds of a small request."""
    return answer + size / _SLOWEST


def sent(sock: socket.socket, data: bytes, deadline: float, stall: float) -> None:
    """Send all of it until a deadline. stall: the seconds within which some of it must go. Raises
    OSError."""
    rest = memoryview(data)
    while rest:
        sock.settimeout(min(left(deadline), stall))
        try:
            rest = rest[sock.send(rest) :]
        except TimeoutError:  # whose text would only be "timed out"
            raise TimeoutError(
                f"it took {len(data) - len(rest)} of {len(data)} bytes, and no more in time"
            ) from None


def connected(host: str, port: int, deadline: float) -> socket.socket:
    """A TCP connection to the first address of a host that accepts one. Raises OSError, and
    UnicodeError for what is no name of a host."""
    error: OSError | None = None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, where in found:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as exc:  # this host has no such addresses
            error = exc
            continue
        try:
            sock.settimeout(left(deadline))
            sock.connect(where)
        except OSError as exc:
            sock.close()
            error = exc
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error or OSError(f"{host} has no address")


def secured(
    sock: socket.socket,
    context: ssl.SSLContext,
    host: str,
    deadline: float,
    *,
    held: bytes | bytearray | memoryview,
    peer: str,
) -> ssl.SSLSocket:
    """Go on with TLS as the client, over a connection of which everything so far was read.

    held: bytes that came and were not used. Nobody vouches for them, so they are an error: somebody
    between could have sent them, and they would count as if they had come inside. Nor is anything
    to be believed that was said before: ask again inside. peer: for the texts of errors.

    Raises OSError (ssl.SSLError is one), and ShmqError for bytes before TLS. Then `sock` must be
    closed.
    """
    if len(held):
        raise ShmqError(
            f"connect to {peer} with TLS: {len(held)} bytes came before TLS, which nobody vouches "
            "for: somebody between may have sent them; find out who, or whether that server speaks "
            "this protocol"
        )
    sock.settimeout(left(deadline))  # of the whole handshake
    return context.wrap_socket(sock, server_hostname=host)


class Incoming:
    """The bytes that come on a connection, until a deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._held = bytearray()
        self.ended = False
        """Whether the peer has closed the connection."""

    def more(self) -> bool:
        """Wait for bytes. Returns False at the end. Raises OSError."""
        found = received(self._sock, _PIECE, self._deadline)
        self._held += found
        self.ended = not found
        return bool(found)

    def line(self, most: int) -> bytes | None:
        """The next line without its end; None if it is longer than `most` bytes, or if the
        connection ends in it. Raises OSError."""
        at = 0
        while (end := self._held.find(b"\n", at)) < 0:
            at = len(self._held)
            if at > most or not self.more():
                return None
        if end > most:
            return None
        found = bytes(self._held[:end]).removesuffix(b"\r")
        del self._held[: end + 1]
        return found

    def some(self, most: int) -> bytes:
        """At least one byte and at most `most`; empty at the end. Raises OSError."""
        if not self._held and not self.more():
            return b""
        found = bytes(self._held[:most])
        del self._held[:most]
        return found
