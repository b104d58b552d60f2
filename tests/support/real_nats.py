"""A real nats-server as a process, and as much of its clients as tests need."""

from __future__ import annotations

import json
import secrets
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.external_programs import peer
from support.processes import WATCHDOG, Child, eventually


def free_port() -> int:
    """A port that nobody listens on; a server that is started again has the same one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class NatsServer:
    """A nats-server with JetStream whose files are in `path`."""

    def __init__(self, path: Path, *words: str) -> None:
        self.port = free_port()
        self._argv = [peer("nats-server"), "-js", "-a", "127.0.0.1", "-p", str(self.port)]
        self._argv += ["-sd", str(path), *words]
        self.child = self._started()

    def _started(self) -> Child:
        child = Child(self._argv)
        try:
            eventually(
                lambda: "Server is ready" in child.errors or child.process.poll() is not None
            )
            assert child.process.poll() is None, f"nats-server ended\n{child.errors}"
        except BaseException:
            child.close()
            raise
        return child

    @property
    def url(self) -> str:
        """Where a forwarder finds it."""
        return f"nats://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill(signal.SIGKILL)
        self.child.close()

    def start_again(self) -> None:
        """After `kill`, with the same files and port."""
        self.child = self._started()

    def close(self) -> None:
        """Kill it if it lives."""
        self.child.close()

    # ---- streams ----

    def make(self, stream: str, *subjects: str, **config: Any) -> dict[str, Any]:
        """Make a stream; the answer."""
        wish = {"name": stream, "subjects": subjects, "allow_atomic": True, **config}
        return self.ask(f"STREAM.CREATE.{stream}", wish)

    def ask(self, what: str, document: dict[str, Any]) -> dict[str, Any]:
        """A request of JetStream's API."""
        with _Client(self.port) as client:
            return client.ask(f"$JS.API.{what}", document)

    def last(self, stream: str) -> int:
        """The sequence of the last message of a stream; 0 if there is none, or no stream."""
        return int(self.ask(f"STREAM.INFO.{stream}", {}).get("state", {}).get("last_seq", 0))

    def fill(self, stream: str, subject: str, bodies: Sequence[bytes]) -> None:
        """Publish to a subject of the stream."""
        with _Client(self.port) as client:
            name = subject.encode()
            lines = [b"PUB %b %d\r\n%b\r\n" % (name, len(body), body) for body in bodies]
            client.send(b"".join(lines))
            client.ask(f"$JS.API.STREAM.INFO.{stream}", {})  # behind them

    def put(self, stream: str, subject: str, head: bytes, body: bytes) -> None:
        """Publish a message with headers, whose lines are `head`."""
        with _Client(self.port) as client:
            whole = b"NATS/1.0\r\n%b\r\n" % head
            sizes = (len(whole), len(whole) + len(body))
            client.send(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), *sizes, whole, body))
            client.ask(f"$JS.API.STREAM.INFO.{stream}", {})  # behind it

    def change(self, stream: str, *subjects: str, **config: Any) -> None:
        """Give a stream other settings."""
        wish = {"name": stream, "subjects": subjects, "allow_atomic": True, **config}
        assert "error" not in self.ask(f"STREAM.UPDATE.{stream}", wish)

    def consumers(self, stream: str) -> dict[str, int]:
        """The last message that each consumer has acknowledged, with those before it."""
        found = self.ask(f"CONSUMER.LIST.{stream}", {}).get("consumers") or []
        return {each["name"]: each["ack_floor"]["stream_seq"] for each in found}

    def bodies(self, stream: str, subject: str) -> list[bytes]:
        """All messages of one subject, in their order."""
        return [body for _, body in self.messages(stream, subject)]

    def messages(self, stream: str, subject: str) -> list[tuple[bytes, bytes]]:
        """The head and the body of each message of one subject, in their order."""
        with _Client(self.port) as client:
            # of its own: the consumer of an earlier question may still live
            place = f"all.{secrets.token_hex(8)}"
            wish = {"deliver_subject": place, "ack_policy": "none", "filter_subject": subject}
            found = client.ask(f"$JS.API.STREAM.INFO.{stream}", {"subjects_filter": subject})
            count = (found["state"].get("subjects") or {}).get(subject, 0)
            client.send(b"SUB %b 2\r\n" % place.encode())
            made = client.ask(
                f"$JS.API.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": wish}
            )
            assert "error" not in made, made
            while len(client.came) < count:
                client.read()
            return client.came


class _Client:
    """A connection that keeps the messages that come to subscription 2."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), WATCHDOG)
        self._file = self._sock.makefile("rb")
        self.came: list[tuple[bytes, bytes]] = []
        self._file.readline()
        self.send(b'CONNECT {"verbose":false,"headers":true}\r\nSUB answer 1\r\n')

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def ask(self, subject: str, document: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(document).encode()
        self.send(b"PUB %b answer %d\r\n%b\r\n" % (subject.encode(), len(body), body))
        while (answer := self.read()) is None:
            pass
        found: dict[str, Any] = json.loads(answer)
        return found

    def read(self) -> bytes | None:
        """One line, or message: the body of an answer."""
        words = self._file.readline().split()
        assert words, "nats-server closed the connection"
        if words[0] == b"PING":
            self.send(b"PONG\r\n")
        if words[0] not in (b"MSG", b"HMSG"):
            assert words[0] != b"-ERR", words
            return None
        data = self._file.read(int(words[-1]) + 2)[:-2]
        size = int(words[-2]) if words[0] == b"HMSG" else 0
        head, body = data[:size], data[size:]
        if words[2] == b"2":
            self.came.append((head, body))
            return None
        return body

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._sock.close()
