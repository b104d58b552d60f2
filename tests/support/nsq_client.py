"""nsqd's protocols from a client's side, and the two servers that must speak them alike.

`Server` starts either a real nsqd or an executable named `nsqd` that only execs `shmq serve --nsqd
"$@"`; what a test says to it and expects of it is the same for both.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.external_programs import peer
from support.processes import WATCHDOG, eventually

RESPONSE, ERROR, MESSAGE = 0, 1, 2
OK = (RESPONSE, b"OK")

_LISTENING = re.compile(r"(TCP|HTTPS?): listening on (\S+)")


def drop_in(directory: Path) -> str:
    """An executable named `nsqd` that only execs `shmq serve --nsqd "$@"`."""
    path = directory / "nsqd"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shmq serve --nsqd "$@"\n')
    path.chmod(0o755)
    return str(path)


class Server:
    """A running nsqd of one of the two kinds; `close` kills what is left of it."""

    def __init__(
        self, kind: str, directory: Path, instance: str, *words: str, status: int = 200
    ) -> None:
        """kind: `nsqd` or `shmq`. words: nsqd's flags. status: what /ping answers when it is up."""
        self._up = status
        self.kind = kind
        self.instance = instance
        self.data_path = directory / f"{kind}-{instance}"
        self.data_path.mkdir(exist_ok=True)
        argv = [peer("nsqd") if kind == "nsqd" else drop_in(directory)]
        argv += [f"--data-path={self.data_path}", *words]
        for flag in ("tcp", "http", "https"):
            if not any(word.startswith(f"--{flag}-address=") for word in words):
                argv.append(f"--{flag}-address=127.0.0.1:0")
        self._log = tempfile.TemporaryFile(buffering=0)
        env = {**os.environ, "SHMQ_INSTANCE": instance}
        self.process = subprocess.Popen(argv, stderr=self._log, stdout=self._log, env=env)
        self.addresses: dict[str, str] = {}
        self._clients: list[Client] = []
        try:
            eventually(self._is_ready, what=f"{kind} listens")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"{self.kind} ended\n{self.log}"
        self.addresses = {kind.lower(): where for kind, where in _LISTENING.findall(self.log)}
        if not {"tcp", "http"} <= set(self.addresses):
            return False
        with contextlib.suppress(OSError):
            return self.http("GET", "/ping").status == self._up
        return False

    @property
    def log(self) -> str:
        """Its output so far."""
        fd = self._log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def port(self, kind: str = "tcp") -> int:
        """That it listens on."""
        return int(self.addresses[kind].rpartition(":")[2])

    def connect(self, magic: bytes = b"  V2") -> Client:
        """A new connection of the TCP protocol."""
        where = self.addresses["tcp"]
        if where.startswith("/"):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(where)
        else:
            sock = socket.create_connection(("127.0.0.1", self.port()))
        sock.settimeout(WATCHDOG)
        client = Client(sock)
        self._clients.append(client)
        client.send(magic)
        return client

    def http(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """One HTTP request."""
        where = self.addresses["http"]
        if where.startswith("/"):
            connection = http.client.HTTPConnection("unix", timeout=WATCHDOG)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(WATCHDOG)
            connection.sock.connect(where)
        else:
            connection = http.client.HTTPConnection(
                "127.0.0.1", self.port("http"), timeout=WATCHDOG
            )
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: bytes = b"", **params: str) -> Reply:
        """POST with a query."""
        return self.http("POST", f"{path}?{urllib.parse.urlencode(params)}", body)

    def json(self, path: str) -> Any:
        """A document."""
        return json.loads(self.http("GET", path).body)

    def stats(self, **params: str) -> Any:
        """`/stats?format=json`."""
        return self.json(f"/stats?{urllib.parse.urlencode({'format': 'json', **params})}")

    def topic(self, name: str) -> Any:
        """A topic in `/stats`."""
        return self.stats(topic=name)["topics"][0]

    def channel(self, topic: str, channel: str) -> Any:
        """A channel in `/stats`."""
        return self.stats(topic=topic, channel=channel)["topics"][0]["channels"][0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; its status."""
        self.process.send_signal(number)
        return self.process.wait(WATCHDOG)

    def close(self) -> None:
        """Close its clients, kill it if it lives."""
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
        self.process.wait()
        self._log.close()


@dataclass(frozen=True)
class Reply:
    """To an HTTP request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        """Of an error."""
        return str(json.loads(self.body)["message"])


@dataclass(frozen=True)
class Delivery:
    """A message frame."""

    timestamp: int
    attempts: int
    id: bytes
    body: bytes

    @classmethod
    def parse(cls, data: bytes) -> Delivery:
        """Of the frame's bytes."""
        timestamp, attempts = struct.unpack_from(">qH", data)
        return cls(timestamp, attempts, data[10:26], data[26:])


def sized(body: bytes) -> bytes:
    """With its length before it."""
    return struct.pack(">i", len(body)) + body


def mpub(topic: bytes, bodies: list[bytes], size: int | None = None) -> bytes:
    """An MPUB command."""
    inner = struct.pack(">i", len(bodies)) + b"".join(map(sized, bodies))
    outer = len(inner) if size is None else size
    return b"MPUB " + topic + b"\n" + struct.pack(">i", outer) + inner


class Client:
    """One connection. Frames are read by blocking; the watchdog ends a test that waits in vain."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def _read(self, count: int) -> bytes | None:
        while len(self._held) < count:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._held += data
        data, self._held = self._held[:count], self._held[count:]
        return data

    def frame(self, heartbeats: bool = False) -> tuple[int, bytes] | None:
        """The next frame; None at the end of the connection."""
        while True:
            head = self._read(8)
            if head is None:
                return None
            size, kind = struct.unpack(">ii", head)
            data = self._read(size - 4)
            if data is None:
                return None
            if heartbeats or (kind, data) != (RESPONSE, b"_heartbeat_"):
                return kind, data
            self.send(b"NOP\n")

    def held(self) -> bytes:
        """Take what was read beyond the last frame."""
        held, self._held = self._held, b""
        return held

    def ask(self, data: bytes) -> tuple[int, bytes] | None:
        """Send, and the next frame."""
        self.send(data)
        return self.frame()

    def identify(self, **wishes: Any) -> Any:
        """IDENTIFY; the JSON answer, or the frame if it is none."""
        answer = self.ask(b"IDENTIFY\n" + sized(json.dumps(wishes).encode()))
        if answer is not None and answer[1].startswith(b"{"):
            return json.loads(answer[1])
        return answer

    def sub(self, topic: str, channel: str, ready: int | None = None) -> None:
        """SUB, and RDY if wanted."""
        assert self.ask(f"SUB {topic} {channel}\n".encode()) == OK
        if ready is not None:
            self.send(b"RDY %d\n" % ready)

    def pub(self, topic: str, body: bytes) -> None:
        """PUB that must succeed. To a subscriber, nsqd may send the message before its OK; then it
        is the next frame."""
        self.send(f"PUB {topic}\n".encode() + sized(body))
        early = b""
        while (frame := self.frame()) is not None and frame[0] == MESSAGE:
            early += struct.pack(">ii", len(frame[1]) + 4, MESSAGE) + frame[1]
        self._held = early + self._held
        assert frame == OK, frame

    def delivery(self) -> Delivery:
        """The next frame, which must be a message."""
        frame = self.frame()
        assert frame is not None
        assert frame[0] == MESSAGE, frame
        return Delivery.parse(frame[1])

    def finish(self, delivery: Delivery) -> None:
        self.send(b"FIN " + delivery.id + b"\n")

    def ended(self) -> bool:
        """Whether the server closes the connection without another frame."""
        return self.frame() is None

    def quiet(self, seconds: float = 0.3) -> bool:
        """Whether nothing comes for a while."""
        self.sock.settimeout(seconds)
        try:
            frame = self.frame()
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(WATCHDOG)
        raise AssertionError(f"unexpected: {frame}")

    def close(self) -> None:
        self.sock.close()


def start_admin(run: Callable[..., Any], directory: Path, *words: str) -> str:
    """Start nsqadmin with `run`, which writes its log into the directory; its address."""
    run("nsqadmin", *words, "--http-address=127.0.0.1:0")
    log = directory / "nsqadmin.log"

    def listening() -> str:
        lines = [line for line in log.read_text().splitlines() if "HTTP: listening on" in line]
        return lines[0].rpartition(" ")[2] if lines else ""

    return f"http://{eventually(listening)}"
