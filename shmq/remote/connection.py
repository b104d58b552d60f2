"""One connection to a gateway: the handshake, frames, and requests that wait for their answer."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

from shmq.errors import ShmqError, Unauthorized
from shmq.remote.address import Address
from shmq.remote.codes import error_of, is_kept
from shmq.remote.rows import ROWS

RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2

_MAGIC: Final = b"  V2"
_HEARTBEAT: Final = b"_heartbeat_"
_HEAD: Final = struct.Struct(">ii")
_SIZE: Final = struct.Struct(">i")
#: More than any frame may have: a message of the largest max_msg_size.
_MOST_FRAME: Final = (1 << 31) - 1
_BUFFER: Final = 64 << 10
#: Bytes that are read together with the head of a frame: all of a short answer, but little of a
#: long frame, because they are copied once more.
_FIRST: Final = 2 << 10
#: A frame is received into a buffer that grows by this, so that a false length takes no memory.
_STEP: Final = 8 << 20


class Lost(OSError):
    """The connection ended, or the server did not answer in time."""


@dataclass(frozen=True)
class Login:
    """The secrets of a client. tls: None: not encrypted. secret: for AUTH;
    None: no AUTH."""

    tls: ssl.SSLContext | None = None
    secret: str | bytes | None = None


class Connection:
    """A connection that has sent IDENTIFY and AUTH; one thread at a time uses it.

    Every method raises Lost, or another OSError, if the connection breaks or `deadline`
    (time.monotonic) passes; then it must be closed.
    """

    def __init__(
        self,
        address: Address,
        login: Login,
        deadline: float,
        heartbeat: float = 0.0,
        wishes: dict[str, Any] | None = None,
    ) -> None:
        """heartbeat: seconds between two heartbeats; 0: none. wishes: more of IDENTIFY. Raises
        OSError, Unauthorized, and ShmqError if the server does not know leases."""
        self.closed = False
        self._held = b""
        self._sock = address.connected(deadline)
        try:
            self._send(_MAGIC, deadline)
            asked = {"heartbeat_interval": round(heartbeat * 1000) or -1, **(wishes or {})}
            self.server = self._identify(address, login, deadline, asked)
            if login.secret is not None:
                secret = login.secret
                data = secret.encode() if isinstance(secret, str) else bytes(secret)
                self.send(b"AUTH\n" + _SIZE.pack(len(data)) + data, deadline)
                self.response(deadline, f"AUTH at {address}")
            elif self.server.get("auth_required"):
                raise Unauthorized(
                    f"connect to {address}: the broker asks for AUTH; give connect(auth_secret=...)"
                )
        except BaseException:
            self.close()
            raise

    def _identify(
        self, address: Address, login: Login, deadline: float, asked: dict[str, Any]
    ) -> dict[str, Any]:
        wishes: dict[str, Any] = {
            **asked,
            "client_id": socket.gethostname(),
            "hostname": socket.gethostname(),
            "user_agent": "shmq-remote/1",
            "feature_negotiation": True,
            "tls_v1": login.tls is not None,
            "leases": True,
        }
        body = json.dumps(wishes).encode()
        self.send(b"IDENTIFY\n" + _SIZE.pack(len(body)) + body, deadline)
        said = self.response(deadline, f"IDENTIFY at {address}")
        try:
            answer = json.loads(said)
            leases = answer.get("leases")
        except (ValueError, AttributeError):
            leases = None
        if leases is not True:
            raise ShmqError(
                f"connect to {address}: the server there has no leases over the network; it must "
                "be a gateway of shmq (`shmq serve`) of this version"
            )
        if login.tls is not None:
            if not answer.get("tls_v1"):
                raise ShmqError(
                    f"connect to {address}: the broker offers no TLS (--tls-cert, --tls-key)"
                )
            self._sock = login.tls.wrap_socket(self._sock, server_hostname=address.host)
            self.response(deadline, f"TLS at {address}")
        return dict(answer)

    # ---- bytes ----

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Lost("the server did not answer in time")
        self._sock.settimeout(left)

    def _send(self, data: bytes, deadline: float) -> None:
        self._wait(deadline)
        self._sock.sendall(data)

    def send(self, data: bytes, deadline: float) -> None:
        """Send commands."""
        try:
            self._send(data, deadline)
        except OSError:
            self._end_with_error(deadline)
            raise

    def _end_with_error(self, deadline: float) -> None:
        """If the server closed the connection with an error frame, raise that error."""
        try:
            while True:
                kind, data = self.frame(min(deadline, time.monotonic() + 1))
                if kind == ERROR:
                    raise error_of(bytes(data), "a request")
        except OSError:
            return

    def _exactly(self, count: int, deadline: float) -> memoryview:
        """The next `count` bytes."""
        held = self._held
        if len(held) >= count:
            self._held = held[count:]
            return memoryview(held)[:count]
        self._held = b""
        data = bytearray(min(count, max(len(held), _STEP)))
        data[: len(held)] = held
        at = len(held)
        while at < count:
            if at == len(data):
                data += bytes(min(count - at, at))
            self._wait(deadline)
            with memoryview(data) as view:
                got = self._sock.recv_into(view[at:])
            if not got:
                raise Lost("the server closed the connection")
            at += got
        return memoryview(data)

    def _head(self, deadline: float) -> tuple[int, int]:
        while len(self._held) < _HEAD.size:
            self._wait(deadline)
            more = self._sock.recv(_FIRST)
            if not more:
                raise Lost("the server closed the connection")
            self._held += more
        size, kind = _HEAD.unpack_from(self._held)
        self._held = self._held[_HEAD.size :]
        if not 4 <= size <= _MOST_FRAME or kind not in (RESPONSE, ERROR, MESSAGE, ROWS):
            raise Lost(f"these bytes are no frame: {size}, {kind}")
        return size - 4, kind

    def frame(self, deadline: float) -> tuple[int, memoryview]:
        """The next frame but heartbeats, which it answers: its kind and its bytes."""
        while True:
            size, kind = self._head(deadline)
            data = self._exactly(size, deadline)
            if kind == RESPONSE and is_heartbeat(data):
                self._send(b"NOP\n", deadline)
                continue
            return kind, data

    def send_plain(self, data: bytes, deadline: float) -> None:
        """Send commands of a subscriber, whose errors its reader sees."""
        self._send(data, deadline)

    def arrived(
        self, seconds: float, lock: contextlib.AbstractContextManager[Any]
    ) -> list[tuple[int, memoryview]]:
        """The whole frames that have arrived, heartbeats too; none after `seconds` without a byte.
        lock: held while the socket is used, since another thread may send."""
        if not self._is_readable(seconds):
            return []
        with lock:
            self._sock.settimeout(seconds)
            try:
                more = self._sock.recv(_BUFFER)
            except TimeoutError:  # a part of a TLS record
                return []
        if not more:
            raise Lost("the server closed the connection")
        self._held += more
        frames: list[tuple[int, memoryview]] = []
        at, held = 0, memoryview(self._held)
        while len(held) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(held, at)
            if not 4 <= size <= _MOST_FRAME:
                raise Lost(f"these bytes are no frame: {size}, {kind}")
            if len(held) - at < 4 + size:
                break
            frames.append((kind, held[at + 8 : at + 4 + size]))
            at += 4 + size
        self._held = self._held[at:]
        return frames

    def _is_readable(self, seconds: float) -> bool:
        try:
            if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
                return True
            with selectors.DefaultSelector() as selector:
                selector.register(self._sock, selectors.EVENT_READ)
                return bool(selector.select(seconds))
        except ValueError:
            raise Lost("the connection was closed") from None

    def is_stale(self) -> bool:
        """Returns True if bytes or the end came unasked: the server has ended the connection."""
        try:
            return bool(self._held) or self._is_readable(0)
        except OSError:
            return True

    # ---- requests ----

    def response(self, deadline: float, tried: str) -> bytes:
        """The next frame, which must be a response. tried: what was asked, for the texts of errors.
        Raises the error that the server sends."""
        kind, data = self.frame(deadline)
        if kind == ERROR:
            self.refused(data, tried)
        if kind != RESPONSE:
            raise Lost(f"{tried}: a frame of kind {kind} is no answer")
        return bytes(data)

    def refused(self, data: memoryview, tried: str) -> None:
        """Raise the error of an error frame."""
        said = bytes(data)
        if not is_kept(said):
            self.close()
        raise error_of(said, tried)

    def begin(
        self, command: str, words: tuple[str, ...], document: dict[str, Any], deadline: float
    ) -> None:
        """Send a request of the lease protocol; `response` has its answer."""
        line = " ".join((command, *words)).encode()
        body = json.dumps(document, separators=(",", ":")).encode()
        self.send(b"%b\n%b%b" % (line, _SIZE.pack(len(body)), body), deadline)

    def ask(
        self,
        command: str,
        words: tuple[str, ...],
        document: dict[str, Any],
        deadline: float,
    ) -> dict[str, Any]:
        """Send a request of the lease protocol and return the document that answers it."""
        self.begin(command, words, document, deadline)
        return self.answer(deadline, f"{command} {'/'.join(words)}".rstrip())

    def answer(self, deadline: float, tried: str) -> dict[str, Any]:
        """The document that answers a request."""
        return document_of(self.response(deadline, tried), tried)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        with contextlib.suppress(OSError):
            self._sock.close()


def is_heartbeat(data: memoryview) -> bool:
    """Whether a response is a heartbeat, which NOP answers."""
    return len(data) == len(_HEARTBEAT) and bytes(data) == _HEARTBEAT


def document_of(said: bytes, tried: str) -> dict[str, Any]:
    """The JSON object in a response. Raises Lost if it is none: the bytes cannot be trusted."""
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Lost(f"{tried}: the answer is no JSON object: {said[:80]!r}")
    return found
