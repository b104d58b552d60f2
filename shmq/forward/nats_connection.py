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
from typing import Any, Final

from shmq import __version__
from shmq.errors import ShmqError
from shmq.forward.target import Away

#: Seconds within which the server answers.
_TIMEOUT: Final = 10.0
_BUFFER: Final = 64 << 10
#: More than any line of the protocol has.
_LONGEST_LINE: Final = 1 << 20
#: Errors that do not end by themselves.
_LASTING: Final = ("authorization", "permissions", "maximum payload", "user authentication")


class NatsConnection:
    """Publishes, and waits for one answer at a time. Every method raises Away if the connection
    breaks or the server does not answer; then it must be closed."""

    def __init__(self, host: str, port: int, login: dict[str, str]) -> None:
        """login: `user` and `pass`, or `auth_token`, or nothing. Raises ShmqError if the server
        refuses it."""
        self._name = f"nats://{host}:{port}"
        self._held = b""
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._asked = 0
        try:
            self._sock = socket.create_connection((host, port), _TIMEOUT)
        except OSError as exc:
            raise Away(f"{self._name}: {exc}") from exc
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.info = self._greet(login)
        except BaseException:
            self.close()
            raise

    def _greet(self, login: dict[str, str]) -> dict[str, Any]:
        line = self._line()
        if not line.startswith(b"INFO "):
            raise ShmqError(f"connect to {self._name}: the server there is no NATS server")
        info: dict[str, Any] = json.loads(line[5:])
        if info.get("tls_required"):
            raise ShmqError(f"connect to {self._name}: it asks for TLS, which forward has not")
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
            **login,
        }
        self.send(b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n" % (_json(wishes), self._inbox.encode()))
        while self._line() != b"PONG":
            pass
        return info

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
        for line in self._held.split(b"\r\n"):
            if line.startswith(b"-ERR"):
                self._refused(line)

    def _more(self) -> None:
        try:
            more = self._sock.recv(_BUFFER)
        except OSError as exc:
            raise Away(f"{self._name}: {exc}") from exc
        if not more:
            raise Away(f"{self._name}: the server closed the connection")
        self._held += more

    def _line(self) -> bytes:
        """The next line but PING, which it answers."""
        while True:
            while b"\r\n" not in self._held:
                if len(self._held) > _LONGEST_LINE:
                    raise Away(f"{self._name}: the bytes that came are no line of NATS")
                self._more()
            line, _, self._held = self._held.partition(b"\r\n")
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
        while len(self._held) < count:
            self._more()
        data, self._held = self._held[:count], self._held[count:]
        return data

    # ---- requests ----

    def reply_subject(self) -> bytes:
        """Where the answer to the next request goes; answers to earlier ones are dropped."""
        self._asked += 1
        return f"{self._inbox}.{self._asked}".encode()

    def answer(self) -> bytes | None:
        """The body of the answer to the last request; None if nobody answers such requests."""
        expected = f"{self._inbox}.{self._asked}".encode()
        while True:
            words = self._line().split()
            if words[:1] == [b"MSG"]:
                body = self._exactly(int(words[-1]) + 2)[:-2]
                if words[1] == expected:
                    return body
            elif words[:1] == [b"HMSG"]:
                data = self._exactly(int(words[-1]) + 2)[:-2]
                if words[1] == expected:
                    head, body = data[: int(words[-2])], data[int(words[-2]) :]
                    return None if b" 503" in head.partition(b"\r\n")[0] else body

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
        while b"\r\n" in self._held or select.select([self._sock], [], [], 0)[0]:
            self.send(b"PING\r\n")
            while self._line() != b"PONG":
                pass

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
