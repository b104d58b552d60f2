"""One connection to a gateway: the handshake, frames, and requests that wait for their answer."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import ssl
import struct
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Final

from shmq.errors import ShmqError, Unauthorized
from shmq.peers.documents import BadAnswer, parsed, table
from shmq.peers.sockets import secured
from shmq.remote.address import Address
from shmq.remote.answers import check, check_identity
from shmq.remote.codes import error_of, is_kept
from shmq.remote.rows import ROWS

RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2

_MAGIC: Final = b"  V2"
_HEARTBEAT: Final = b"_heartbeat_"
_HEAD: Final = struct.Struct(">ii")
_SIZE: Final = struct.Struct(">i")
#: Bytes of a frame that answers or refuses a request.
_MOST_OF_KIND: Final = {RESPONSE: 1 << 20, ERROR: 64 << 10}
#: Bytes that the body of a message may have here, whatever the server says: what it sends takes
#: memory of this process.
MOST_BODY: Final = 256 << 20
#: Heartbeats that may come before an answer. A gateway sends one in 30 s.
_MOST_HEARTBEATS: Final = 1000
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
    """The secrets of a client. tls: None: not encrypted. secret: for AUTH; None: no AUTH."""

    tls: ssl.SSLContext | None = None
    secret: str | bytes | None = field(default=None, repr=False)


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
        _open.add(self)
        self.peer = str(address)
        self._pid = os.getpid()
        self._held = bytearray()
        self._heartbeats = 0
        self._sock = address.connected(deadline)
        try:
            self._send(_MAGIC, deadline)
            asked = {"heartbeat_interval": round(heartbeat * 1000) or -1, **(wishes or {})}
            self.server = self._identify(address, login, deadline, asked)
            if login.secret is not None:
                secret = login.secret
                data = secret.encode() if isinstance(secret, str) else secret
                self.send(b"AUTH\n" + _SIZE.pack(len(data)) + data, deadline)
                self.response(deadline, f"AUTH at {address}")
            elif self.server.get("auth_required"):
                raise Unauthorized(
                    f"connect to {address}: the broker asks for AUTH; give connect(token=...)"
                )
        except BaseException:
            self.close()
            raise

    def _identify(
        self, address: Address, login: Login, deadline: float, asked: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what the server says of itself. With TLS that is asked inside: an answer from
        before could be anybody's, and says only whether to go on with TLS."""
        if login.tls is not None:
            first = {"feature_negotiation": True, "tls_v1": True, "heartbeat_interval": -1}
            if self._asked(first, deadline).get("tls_v1") is not True:
                raise ShmqError(
                    f"connect to {address}: the broker offers no TLS (--tls-cert, --tls-key)"
                )
            self._sock = secured(
                self._sock,
                login.tls,
                address.host,
                deadline,
                held=self._held,
                peer=str(address),
            )
            if self.response(deadline, f"TLS at {address}") != b"OK":
                raise Lost(f"TLS at {address}: the server does not say that it has begun")
        wishes: dict[str, Any] = {
            **asked,
            "client_id": socket.gethostname(),
            "hostname": socket.gethostname(),
            "user_agent": "shmq-remote/2",
            "feature_negotiation": True,
            "leases": True,
        }
        answer = self._asked(wishes, deadline)
        if answer.get("leases") is not True:
            raise ShmqError(
                f"connect to {address}: the server there has no leases over the network; it must "
                "be a gateway of shmq (`shmq serve`) of this version"
            )
        return answer

    def _asked(self, wishes: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to IDENTIFY; empty if it is none of a gateway of shmq."""
        body = json.dumps(wishes).encode()
        self.send(b"IDENTIFY\n" + _SIZE.pack(len(body)) + body, deadline)
        said = self.response(deadline, f"IDENTIFY at {self.peer}")
        try:
            answer = table(parsed(said))
            check_identity(answer)
        except BadAnswer:
            return {}
        return answer

    # ---- bytes ----

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Lost("the server did not answer in time")
        self._sock.settimeout(left)

    def _send(self, data: bytes, deadline: float) -> None:
        self._wait(deadline)
        self._sock.sendall(data)

    def send(self, data: bytes, deadline: float, tried: str = "a request") -> None:
        """Send commands. tried: as of `response`."""
        try:
            self._send(data, deadline)
        except OSError:
            self._end_with_error(deadline, tried)
            raise

    def _end_with_error(self, deadline: float, tried: str) -> None:
        """If the server closed the connection with an error frame, raise that error."""
        try:
            while True:
                kind, data = self.frame(min(deadline, time.monotonic() + 1))
                if kind == ERROR:
                    raise error_of(bytes(data), tried)
        except OSError:
            return

    def _exactly(self, count: int, deadline: float) -> memoryview:
        """The next `count` bytes."""
        held = self._held
        if len(held) >= count:
            found = bytes(memoryview(held)[:count])
            del held[:count]
            return memoryview(found)
        self._held = bytearray()
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

    def _head(self, deadline: float, most: int) -> tuple[int, int]:
        while len(self._held) < _HEAD.size:
            self._wait(deadline)
            more = self._sock.recv(_FIRST)
            if not more:
                raise Lost("the server closed the connection")
            self._held += more
        size, kind = _HEAD.unpack_from(self._held)
        del self._held[: _HEAD.size]
        check_head(size, kind, most)
        return size - 4, kind

    def hears(self, seconds: float, deadline: float) -> bool:
        """Wait for the first byte of an answer. Returns False if none has come after `seconds`."""
        if not self._held:
            self._wait(min(deadline, time.monotonic() + seconds))
            try:
                more = self._sock.recv(_FIRST)
            except TimeoutError:
                return False
            if not more:
                raise Lost("the server closed the connection")
            self._held += more
        return True

    def frame(self, deadline: float, most: int = 0) -> tuple[int, memoryview]:
        """The next frame but heartbeats, which it answers: its kind and its bytes. most: the bytes
        of a frame of rows that was asked for."""
        while True:
            size, kind = self._head(deadline, most)
            data = self._exactly(size, deadline)
            if kind == RESPONSE and is_heartbeat(data):
                self._heartbeats += 1
                if self._heartbeats > _MOST_HEARTBEATS:
                    raise Lost("the server sends heartbeats and no answer")
                self._send(b"NOP\n", deadline)
                continue
            self._heartbeats = 0
            return kind, data

    def send_plain(self, data: bytes, deadline: float) -> None:
        """Send commands of a subscriber, whose errors its reader sees."""
        self._send(data, deadline)

    def arrived(
        self, seconds: float, lock: contextlib.AbstractContextManager[Any], most: int
    ) -> list[tuple[int, memoryview]]:
        """The whole frames that have arrived, heartbeats too; none after `seconds` without a byte.
        lock: held while the socket is used, since another thread may send. most: bytes of a
        message's frame."""
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
        if not self._has_frame(most):  # a long one is not copied for each of its pieces
            return []
        held = memoryview(bytes(self._held))
        frames: list[tuple[int, memoryview]] = []
        at = 0
        while len(held) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(held, at)
            check_head(size, kind, most)
            if len(held) - at < 4 + size:
                break
            frames.append((kind, held[at + 8 : at + 4 + size]))
            at += 4 + size
        del self._held[:at]
        return frames

    def _has_frame(self, most: int) -> bool:
        if len(self._held) < _HEAD.size:
            return False
        size, kind = _HEAD.unpack_from(self._held)
        check_head(size, kind, most)
        return 4 + int(size) <= len(self._held)

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
        tried = f"{command} {'/'.join(words)}".rstrip()
        return self.answer(deadline, tried, command, len(words))

    def answer(self, deadline: float, tried: str, command: str, names: int) -> dict[str, Any]:
        """The document that answers a command with so many names. Raises ShmqError if it has not
        the keys and types of such an answer."""
        document = document_of(self.response(deadline, tried), tried)
        try:
            check(command, names, document)
        except BadAnswer as exc:
            self.close()
            raise ShmqError(
                f"{tried}: the answer of {self.peer} is none of a gateway of shmq: {exc}; see "
                "which program listens there, and of which version it is"
            ) from None
        return document

    def close(self) -> None:
        """Close the connection; a forked child closes its descriptor. Idempotent."""
        self.closed = True
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        with contextlib.suppress(OSError):
            self._sock.close()

    def leave(self) -> None:
        """In a forked child: close its descriptor, which would keep the parent's connection open
        after the parent's end."""
        self.closed = True
        sock = getattr(self, "_sock", None)  # none: another thread of the parent was connecting
        if sock is not None:
            sock.close()

    def cut(self) -> None:
        """End the connection and leave its descriptor to the thread that reads. No lock is needed:
        below TLS this is one system call."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


#: The connections of this process.
_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _in_child() -> None:
    for connection in list(_open):
        with contextlib.suppress(OSError):
            connection.leave()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)


def is_heartbeat(data: memoryview) -> bool:
    """Whether a response is a heartbeat, which NOP answers."""
    return len(data) == len(_HEARTBEAT) and bytes(data) == _HEARTBEAT


def check_head(size: int, kind: int, most: int) -> None:
    """Raise Lost if no frame that may come begins so. most: bytes of a message's frame, or of a
    frame of rows, as was asked for; 0: none was."""
    bound = _MOST_OF_KIND.get(kind, most)
    if kind not in (RESPONSE, ERROR, MESSAGE, ROWS) or not 4 <= size <= bound:
        raise Lost(f"these bytes are no frame that was asked for: {size}, {kind}")


def document_of(said: bytes, tried: str) -> dict[str, Any]:
    """The JSON object in a response. Raises Lost if it is none: the bytes cannot be trusted."""
    try:
        return table(parsed(said))
    except BadAnswer as exc:
        raise Lost(f"{tried}: the answer is no JSON object: {exc}") from None
