"""A connection to a NATS server over a plain socket: as much of the protocol as a publisher needs.

It is written here because a batch must go out as one piece: a client that makes each message by
itself reaches two thirds of the rate.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from shmq import __version__
from shmq.errors import ShmqError
from shmq.forward.login import NatsLogin
from shmq.forward.target import Away

#: Seconds within which the server answers.
_TIMEOUT: Final = 10.0
_BUFFER: Final = 64 << 10
#: More than any line of the protocol has.
_LONGEST_LINE: Final = 1 << 20
#: Errors that do not end by themselves.
_LASTING: Final = ("authorization", "permissions", "maximum payload", "user authentication")


@dataclass(frozen=True, slots=True)
class Message:
    """A message that came."""

    subject: bytes
    reply: bytes
    """Where an answer goes; empty: nowhere."""
    head: bytes
    """Its headers, with the line before them."""
    body: bytes

    @property
    def status(self) -> bytes:
        """A number, of a message that the server itself sent: it follows the version of the head.
        Headers of others begin in a line of their own."""
        return self.head[9:12] if self.head.startswith(b"NATS/1.0 ") else b""


def _connected(servers: Sequence[tuple[str, int]]) -> tuple[socket.socket, str, int]:
    """Connect to the first server that is there."""
    said = []
    for host, port in servers:
        try:
            return socket.create_connection((host, port), _TIMEOUT), host, port
        except OSError as exc:
            said.append(f"nats://{host}:{port}: {exc}")
    raise Away("; ".join(said))


class NatsConnection:
    """Publishes, and waits for one answer at a time. Every method raises Away if the connection
    breaks or the server does not answer; then it must be closed."""

    def __init__(self, servers: Sequence[tuple[str, int]], login: NatsLogin) -> None:
        """servers: those of a cluster; the first that answers is used. Raises ShmqError if it
        refuses the login."""
        self._held, self._at = b"", 0
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._asked = 0
        self._sock, host, port = _connected(servers)
        self._name = f"nats://{host}:{port}"
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.info = self._greet(login, host)
        except BaseException:
            self.close()
            raise

    def _greet(self, login: NatsLogin, host: str) -> dict[str, Any]:
        line = self._line()
        if not line.startswith(b"INFO "):
            raise ShmqError(f"connect to {self._name}: the server there is no NATS server")
        info: dict[str, Any] = json.loads(line[5:])
        if info.get("tls_required") or info.get("tls_available") or login.secure:
            self._secure(login.context(), host)
        if not info.get("headers"):
            raise ShmqError(f"connect to {self._name}: the server is older than 2.12")
        wishes = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "name": "shmq forward",
            "lang": "python",
            "version": __version__,
            **login.fields(info),
        }
        self.send(b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n" % (_json(wishes), self._inbox.encode()))
        while self._line() != b"PONG":
            pass
        return info

    def _secure(self, context: ssl.SSLContext, host: str) -> None:
        """Go on with TLS. The server said its INFO without."""
        try:
            self._sock = context.wrap_socket(self._sock, server_hostname=host)
        except ssl.SSLError as exc:
            raise ShmqError(
                f"connect to {self._name} with TLS: {exc}; see `ca`, `cert` and `key` of --login"
            ) from exc
        except OSError as exc:
            raise Away(f"{self._name}: {exc}") from exc

    @property
    def max_payload(self) -> int:
        """Bytes that the headers and the body of one message may have."""
        return int(self.info.get("max_payload", 1 << 20))

    # ---- bytes ----

    def send(self, data: bytes) -> None:
        """Send protocol lines."""
        try:
            self._sock.sendall(data)
        except OSError as exc:
            self._say_why()
            raise Away(f"{self._name}: {exc}") from exc

    def _say_why(self) -> None:
        """Raise the error that the server sent before it closed the connection, if it sent one."""
        with contextlib.suppress(OSError):
            self._sock.settimeout(0.1)
            while b"-ERR" not in self._held and (more := self._sock.recv(_BUFFER)):
                self._held += more
        for line in self._held[self._at :].split(b"\r\n"):
            if line.startswith(b"-ERR"):
                self._refused(line)

    def _more(self) -> None:
        try:
            more = self._sock.recv(_BUFFER)
        except OSError as exc:
            raise Away(f"{self._name}: {exc}") from exc
        if not more:
            raise Away(f"{self._name}: the server closed the connection")
        self._held, self._at = self._held[self._at :] + more, 0

    def _line(self) -> bytes:
        """The next line but PING, which it answers."""
        while True:
            while (end := self._held.find(b"\r\n", self._at)) < 0:
                if len(self._held) - self._at > _LONGEST_LINE:
                    raise Away(f"{self._name}: the bytes that came are no line of NATS")
                self._more()
            line, self._at = self._held[self._at : end], end + 2
            if line == b"PING":
                self.send(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                self._refused(line)
            elif not line.startswith(b"INFO ") or not self._asked:
                return line

    def _refused(self, line: bytes) -> None:
        said = line[4:].strip().decode("utf-8", "replace").strip("'")
        text = f"{self._name} refused: {said}"
        if said.lower().startswith(_LASTING):
            raise ShmqError(f"{text}; see the user's name, password and permissions there")
        raise Away(text)

    def _exactly(self, count: int) -> bytes:
        parts, missing = [], count
        while len(self._held) - self._at < missing:  # a large body is not copied for each piece
            parts.append(self._held[self._at :])
            missing -= len(parts[-1])
            self._held, self._at = b"", 0
            self._more()
        parts.append(self._held[self._at : self._at + missing])
        self._at += missing
        return b"".join(parts)

    # ---- requests ----

    def reply_subject(self) -> bytes:
        """Where the answer to the next request goes; answers to earlier ones are dropped."""
        self._asked += 1
        return f"{self._inbox}.{self._asked}".encode()

    def message(self) -> Message:
        """The next message that comes."""
        while True:
            words = self._line().split()
            if words[:1] == [b"MSG"]:
                body = self._exactly(int(words[-1]) + 2)[:-2]
                return Message(words[1], words[3] if len(words) == 5 else b"", b"", body)
            if words[:1] == [b"HMSG"]:
                data = self._exactly(int(words[-1]) + 2)[:-2]
                head = int(words[-2])
                reply = words[3] if len(words) == 6 else b""
                return Message(words[1], reply, data[:head], data[head:])

    def answer(self) -> bytes | None:
        """The body of the answer to the last request; None if nobody answers such requests."""
        expected = f"{self._inbox}.{self._asked}".encode()
        while (found := self.message()).subject != expected:
            pass
        return None if found.status == b"503" else found.body

    def ask(self, subject: str, document: dict[str, Any]) -> dict[str, Any]:
        """Make a request of JetStream's API and return the answer, errors too. Raises Away if
        JetStream does not answer."""
        body = _json(document)
        reply = self.reply_subject()
        self.send(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body))
        said = self.answer()
        if said is None:
            raise Away(f"{self._name}: JetStream does not answer; `nats-server -js` has it")
        return document_of(said, self._name)

    def idle(self) -> None:
        """Answer the server's PINGs. Raises Away if the connection has ended."""
        while self._has_bytes():
            self.send(b"PING\r\n")
            while self._line() != b"PONG":
                pass

    def _has_bytes(self) -> bool:
        if self._at < len(self._held):
            return True
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        return bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.close()


def document_of(said: bytes, name: str) -> dict[str, Any]:
    """The JSON object of an answer."""
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Away(f"{name}: the answer is no JSON object: {said[:80]!r}")
    return found


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
