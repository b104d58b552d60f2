"""A real nsqd as a process, and as much of its clients as tests need: HTTP, TCP protocol V2."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from support.deliveries import Delivered
from support.external_programs import peer
from support.processes import WATCHDOG, Child, eventually, readable

READY = 2500  # what nsqd allows at most: --max-rdy-count

_LISTENING = re.compile(r" (TCP|HTTP): listening on 127\.0\.0\.1:(\d+)")
_FRAME = struct.Struct(">iI")  # size of what follows itself, type
_MESSAGE = struct.Struct(">qH16s")  # timestamp, attempts, id; then the body
_RESPONSE, _MESSAGES = 0, 2  # types


class Nsqd:
    """An nsqd on a data path, on ports of its own."""

    def __init__(self, data_path: Path, **options: Any) -> None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        addresses = [f"--{kind}-address=127.0.0.1:0" for kind in ("tcp", "http")]
        self.child = Child([peer("nsqd"), *addresses, f"--data-path={data_path}", *words])
        try:
            eventually(lambda: len(self._ports()) == 2 or self.child.process.poll() is not None)
            assert self.child.process.poll() is None, f"nsqd ended\n{self.log}"
        except BaseException:
            self.close()
            raise
        ports = self._ports()
        self.tcp_port, self.http_port = ports["TCP"], ports["HTTP"]

    def _ports(self) -> dict[str, int]:
        return {kind: int(port) for kind, port in _LISTENING.findall(self.log)}

    @property
    def log(self) -> str:
        """All it has written so far."""
        return self.child.errors

    # ---- HTTP ----

    def post(self, path: str, body: bytes = b"") -> bytes:
        """`post("/topic/pause?topic=t")`: the answer; HTTPError if it refuses."""
        url = f"http://127.0.0.1:{self.http_port}{path}"
        with urllib.request.urlopen(url, body, timeout=WATCHDOG) as answer:
            return bytes(answer.read())

    def publish(self, topic: str, bodies: Sequence[bytes], step: int = 5000) -> None:
        """By /mpub, `step` at a time."""
        for first in range(0, len(bodies), step):
            some = bodies[first : first + step]
            parts = [struct.pack(">i", len(body)) + body for body in some]
            request = struct.pack(">i", len(some)) + b"".join(parts)
            assert self.post(f"/mpub?topic={topic}&binary=true", request) == b"OK"

    def stats(self) -> dict[str, Any]:
        """/stats: topics by name, in each `channels` by name."""
        url = f"http://127.0.0.1:{self.http_port}/stats?format=json"
        with urllib.request.urlopen(url, timeout=WATCHDOG) as answer:
            topics = json.load(answer)["topics"]
        for topic in topics:
            topic["channels"] = {item["channel_name"]: item for item in topic["channels"]}
        return {topic["topic_name"]: topic for topic in topics}

    def channel(self, topic: str, channel: str) -> dict[str, Any]:
        """/stats of one channel."""
        found: dict[str, Any] = self.stats()[topic]["channels"][channel]
        return found

    def is_empty(self, topic: str, channel: str) -> bool:
        """Whether neither the topic nor the channel holds anything."""
        found = self.stats()[topic]
        held = found["channels"][channel]
        counts = [held[name] for name in ("depth", "in_flight_count", "deferred_count")]
        return not any([found["depth"], *counts])

    # ---- messages ----

    def take(self, topic: str, channel: str, count: int) -> Delivered:
        """Take and finish this many messages and no more."""
        delivered = Delivered()
        with Subscription(self, topic, channel) as subscription:
            while lacking := count - len(delivered.ids):
                ids: list[str] = []
                subscription.ready(min(lacking, READY))
                while len(ids) < min(lacking, READY):
                    came = subscription.receive(delivered)
                    assert came, f"nsqd delivered {len(delivered.ids)} of {count}"
                    ids += came
                subscription.ready(0)
                subscription.finish(ids)
            eventually(lambda: self.channel(topic, channel)["in_flight_count"] == 0)
            subscription.leave()
        return delivered

    def take_all(self, topic: str, channel: str) -> Delivered:
        """Take and finish until topic and channel are empty."""
        delivered = Delivered()
        with Subscription(self, topic, channel) as subscription:
            subscription.ready(READY)
            deadline = time.monotonic() + WATCHDOG
            came = True
            while came or not self.is_empty(topic, channel):
                ids = subscription.receive(delivered, 0.05)
                subscription.finish(ids)
                came = bool(ids)
                assert time.monotonic() < deadline, f"not empty when {len(delivered.ids)} had come"
            subscription.leave()
        return delivered

    # ---- the end ----

    def stop(self) -> None:
        """SIGTERM, a clean end."""
        assert self.child.kill(signal.SIGTERM) == 0, self.log

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()

    def close(self) -> None:
        """Kill it if it lives."""
        self.child.close()


class Subscription:
    """A connection that is subscribed to a channel, which it creates when missing."""

    def __init__(self, nsqd: Nsqd, topic: str, channel: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", nsqd.tcp_port), WATCHDOG)
        self._nsqd, self._topic, self._channel = nsqd, topic, channel
        self._come = bytearray()
        self._socket.sendall(f"  V2SUB {topic} {channel}\n".encode())
        eventually(lambda: self._frames() == [(_RESPONSE, b"OK")])

    def ready(self, count: int) -> None:
        """How many messages may be in flight."""
        self._socket.sendall(b"RDY %d\n" % count)

    def finish(self, ids: Sequence[str]) -> None:
        """No answer comes to it, but an error by `receive`."""
        self._socket.sendall(b"".join(b"FIN %b\n" % number.encode() for number in ids))

    def leave(self) -> None:
        """Until nsqd gives it nothing any more; else that would wait for its timeout."""
        self._socket.sendall(b"CLS\n")
        eventually(lambda: (_RESPONSE, b"CLOSE_WAIT") in self._frames())
        self._socket.close()
        eventually(lambda: self._nsqd.channel(self._topic, self._channel)["client_count"] == 0)

    def receive(self, into: Delivered, seconds: float = WATCHDOG) -> list[str]:
        """Wait for messages, at most so long, and add those that came: their ids."""
        ids: list[str] = []
        while not ids and readable(self._socket.fileno(), seconds):
            for kind, data in self._frames():
                if kind == _MESSAGES:
                    timestamp, attempts, number = _MESSAGE.unpack_from(data)
                    ids.append(number.decode())
                    into.add_one(ids[-1], data[_MESSAGE.size :], attempts, timestamp)
                else:
                    assert (kind, data) == (_RESPONSE, b"_heartbeat_")
                    self._socket.sendall(b"NOP\n")
        return ids

    def _frames(self) -> list[tuple[int, bytes]]:
        """(type, data) of each frame that is whole once something more has come."""
        data = self._socket.recv(1 << 20)
        assert data, "nsqd closed the connection"
        self._come += data
        come, frames, at = bytes(self._come), [], 0
        while len(come) - at >= _FRAME.size:
            size, kind = _FRAME.unpack_from(come, at)
            if len(come) - at < 4 + size:
                break
            frames.append((kind, come[at + _FRAME.size : at + 4 + size]))
            at += 4 + size
        del self._come[:at]
        return frames

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
