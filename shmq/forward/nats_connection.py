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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from shmq import __version__
from shmq.errors import ShmqError
from shmq.forward.login import NatsLogin
from shmq.forward.refusal import Refused
from shmq.forward.target import Away
from shmq.peers.documents import BadAnswer, number, parsed, table
from shmq.peers.sockets import connected, left, seconds_for, secured, sent
from shmq.printing import said

#: Seconds within which the server answers a request, to the last byte.
_TIMEOUT: Final = 10.0
_BUFFER: Final = 64 << 10
#: More than any line of the protocol has.
_LONGEST_LINE: Final = 256 << 10
#: The largest max_payload of any server; and the headers that a server itself adds to a message.
_MOST_PAYLOAD: Final = 64 << 20
_HEADROOM: Final = 64 << 10
#: Errors that do not end by themselves.
_LASTING: Final = ("authorization", "permissions", "user authentication")
_TOO_BIG: Final = "maximum payload"


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


def _connected(
    servers: Sequence[tuple[str, int]], deadline: float
) -> tuple[socket.socket, str, int]:
    """Connect to the first server that is there."""
    told = []
    for host, port in servers:
        try:
            return connected(host, port, deadline), host, port
        except (OSError, UnicodeError) as exc:
            told.append(f"nats://{host}:{port}: {exc}")
    raise Away("; ".join(told))


class NatsConnection:
    """Publishes, and waits for one answer at a time. Every method raises Away if the connection
    breaks or the server does not answer; then it must be closed."""

    def __init__(self, servers: Sequence[tuple[str, int]], login: NatsLogin) -> None:
        """servers: those of a cluster; the first that answers is used. Raises ShmqError if it
        refuses the login."""
        self._held, self._at = b"", 0
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._asked = 0
        self._is_secure = False
        self.info: dict[str, Any] = {}
        """The words of the server about itself, as far as they can be believed."""
        self.likely_payload = 1 << 20
        """As `max_payload`, but perhaps said before TLS: for what is asked for only."""
        self._most_message = 1 << 20
        self._info: dict[str, Any] | None = None
        self._deadline = time.monotonic() + _TIMEOUT
        self._sock, host, port = _connected(servers, self._deadline)
        self._name = f"nats://{host}:{port}"
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(login, host)
        except BadAnswer as exc:
            self.close()
            raise Away(f"{self._name}: the greeting is not as a NATS server's: {exc}") from None
        except BaseException:
            self.close()
            raise

    def _greet(self, login: NatsLogin, host: str) -> None:
        """Learn what the server says of itself. With TLS that came before the handshake, so it
        says no more than whether to go on with TLS, and what to sign."""
        line = self._line()
        if not line.startswith(b"INFO "):
            raise ShmqError(f"connect to {self._name}: the server there is no NATS server")
        info = table(parsed(line[5:]), "INFO")
        fields = login.fields(info)
        if info.get("tls_required") or info.get("tls_available") or login.is_secure:
            self._secure(login.context(), host)
            # A hint for what is asked for; nothing is refused because of it.
            self.likely_payload = max(1 << 20, self._bounded(info))
            info = {}
        elif not info.get("headers"):
            raise ShmqError(f"connect to {self._name}: the server is older than 2.12")
        wishes = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "name": "shmq forward",
            "lang": "python",
            "version": __version__,
            **fields,
        }
        self._info = self.info = info
        self._most_message = self.max_payload + _HEADROOM
        if not self._is_secure:
            self.likely_payload = self.max_payload
        hello = b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n" % (_json(wishes), self._inbox.encode())
        self._send(hello)
        while self._line() != b"PONG":
            pass

    def _secure(self, context: ssl.SSLContext, host: str) -> None:
        """Go on with TLS. The server said its INFO without, and nothing else."""
        try:
            held = self._held[self._at :]
            self._sock = secured(
                self._sock, context, host, self._deadline, held=held, peer=self._name
            )
        except ssl.SSLError as exc:
            raise ShmqError(
                f"connect to {self._name} with TLS: {exc}; see `ca`, `cert` and `key` of --login"
            ) from exc
        except OSError as exc:
            raise Away(f"{self._name}: {exc}") from exc
        self._is_secure = True

    @property
    def max_payload(self) -> int:
        """Bytes that the headers and the body of one message may have: as the server says, or, if
        it has not said so over TLS, no more than any server takes; it refuses what is too much."""
        if self._is_secure and "max_payload" not in self.info:
            return _MOST_PAYLOAD
        return self._bounded(self.info)

    @staticmethod
    def _bounded(info: dict[str, Any]) -> int:
        found = number(info, "max_payload") if "max_payload" in info else 1 << 20
        return max(1, min(found, _MOST_PAYLOAD))

    # ---- bytes ----

    def begin(self, seconds: float = _TIMEOUT) -> None:
        """A request begins: its whole answer must come within `seconds`."""
        self._deadline = time.monotonic() + seconds

    def send(self, data: bytes) -> None:
        """Send protocol lines, with which a request begins."""
        self.begin(seconds_for(len(data), _TIMEOUT))
        self._send(data)

    def _send(self, data: bytes) -> None:
        try:
            sent(self._sock, data, self._deadline, _TIMEOUT)
        except OSError as exc:
            self._say_why()
            raise Away(f"{self._name}: {exc}") from exc

    def _say_why(self) -> None:
        """Raise the error that the server sent before it closed the connection, if it sent one."""
        until = time.monotonic() + 0.2
        with contextlib.suppress(OSError):
            while b"-ERR" not in self._held and len(self._held) < _LONGEST_LINE:
                self._sock.settimeout(left(until))
                if not (more := self._sock.recv(_BUFFER)):
                    break
                self._held += more
        for line in self._held[self._at :].split(b"\r\n"):
            if line.startswith(b"-ERR"):
                self._refused(line)

    def _more(self) -> None:
        try:
            self._sock.settimeout(left(self._deadline))
            more = self._sock.recv(_BUFFER)
        except OSError as exc:
            raise Away(f"{self._name}: {exc}") from exc
        if not more:
            raise Away(f"{self._name}: the server closed the connection")
        self._held, self._at = self._held[self._at :] + more, 0

    def _line(self) -> bytes:
        """The next line but PING, which it answers, and INFO, which it keeps."""
        while True:
            while (end := self._held.find(b"\r\n", self._at)) < 0:
                if len(self._held) - self._at > _LONGEST_LINE:
                    raise Away(f"{self._name}: the bytes that came are no line of NATS")
                self._more()
            line, self._at = self._held[self._at : end], end + 2
            if line == b"PING":
                self._send(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                self._refused(line)
            elif line.startswith(b"INFO ") and self._info is not None:
                # the one word that is asked for: a server could send others without end
                told = table(parsed(line[5:]), "INFO")
                self._info.update({name: told[name] for name in ("max_payload",) if name in told})
            else:
                return line

    def _refused(self, line: bytes) -> None:
        words = said(line[4:].strip()).strip("'")
        text = f"{self._name} refused: {words}"
        if words.lower().startswith(_TOO_BIG):
            raise Refused(text)
        if words.lower().startswith(_LASTING):
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
        """The next message that comes before the deadline of the request."""
        while True:
            words = self._line().split()
            if words[:1] == [b"MSG"] and len(words) in (4, 5):
                body = self._body(words[-1])
                return Message(words[1], words[3] if len(words) == 5 else b"", b"", body)
            if words[:1] == [b"HMSG"] and len(words) in (5, 6):
                data = self._body(words[-1])
                head = self._size(words[-2])
                if head > len(data):
                    raise Away(f"{self._name}: a message is shorter than its headers")
                reply = words[3] if len(words) == 6 else b""
                return Message(words[1], reply, data[:head], data[head:])
            if words[:1] in ([b"MSG"], [b"HMSG"]):
                raise Away(f"{self._name}: the bytes that came are no line of NATS")

    def _size(self, word: bytes) -> int:
        """The number of bytes that a line of the protocol says."""
        most = self._most_message
        if not word.isdigit() or len(word) > 12 or int(word) > most:
            raise Away(f"{self._name}: a message of {said(word, 40)} bytes, of at most {most}")
        return int(word)

    def _body(self, word: bytes) -> bytes:
        data = self._exactly(self._size(word) + 2)
        if data[-2:] != b"\r\n":
            raise Away(f"{self._name}: a message does not end where it says")
        return data[:-2]

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
        found = self.answer()
        if found is None:
            raise Away(f"{self._name}: JetStream does not answer; `nats-server -js` has it")
        return document_of(found, self._name)

    def idle(self) -> None:
        """Answer the server's PINGs. Raises Away if the connection has ended."""
        self.begin()
        while self._has_bytes():
            self._send(b"PING\r\n")
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


def document_of(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object of an answer."""
    try:
        return table(parsed(data))
    except BadAnswer as exc:
        raise Away(f"{name}: the answer is no JSON object: {exc}") from None


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
