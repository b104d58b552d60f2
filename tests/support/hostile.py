"""Servers that mean harm: each connection is served by a function of a test."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

#: Text that a terminal would obey, and that would forge lines: the controls of C0 and C1, OSC, CSI,
#: line ends, changes of direction, characters without width, a lone surrogate.
_LINE_ENDS: Final = "\u2028\u2029\r\nshmq: forged\x08\x7f\x85"
EVIL: Final = "\x1b]0;owned\x07\x1b[31mred\x9b31m\u202egnp.exe\u2066\u200e\u200b" + _LINE_ENDS

#: Controls that an output may have.
_ALLOWED: Final = "\n\t"


def evil_in(text: str) -> list[str]:
    """The characters of a text that no terminal should get, as escapes."""
    return [
        char.encode("unicode_escape").decode()
        for char in text
        if char not in _ALLOWED and not char.isprintable()
    ]


class Hostile:
    """A listener of TCP. serve: is called in a thread for each connection, which it may leave open;
    an OSError, also of a client that went, ends it."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.serve = serve
        self.open = 0
        """Connections that are open now."""
        self.met = 0
        """Connections that were accepted."""
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.open += 1
                self.met += 1
                self._socks.add(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, struct.error):
            self.serve(sock)
        sock.close()
        with self._lock:
            self.open -= 1
            self._socks.discard(sock)

    def close(self) -> None:
        """End all connections, and their threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def drip(sock: socket.socket, data: bytes = b"x", pause: float = 0.05) -> None:
    """Send these bytes over and over, one at a time, until the client goes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        for byte in data:
            sock.sendall(bytes([byte]))
            time.sleep(pause)


def flood(sock: socket.socket, data: bytes) -> None:
    """Send these bytes until the client goes."""
    while True:
        sock.sendall(data)


def page(body: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n") -> bytes:
    """An answer of HTTP."""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def frame(kind: int, data: bytes) -> bytes:
    """A frame of nsqd's protocol."""
    return struct.pack(">ii", len(data) + 4, kind) + data


#: A document in which each value can be replaced by these.
WRONG_VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 2**70, 1.5, "", "x", "\x1b[31m", [], [1], [[]], {}, {"x": {}},
)  # fmt: skip


def wrong(document: Any) -> Iterator[Any]:
    """The document with each of its values, at any depth, replaced or left out; and raw texts that
    Python's reader of JSON takes, or fails on in its own way."""

    def variants(value: Any) -> Iterator[Any]:
        yield from WRONG_VALUES
        if isinstance(value, dict):
            for key in value:
                yield {name: each for name, each in value.items() if name != key}
                for other in variants(value[key]):
                    yield {**value, key: other}
        elif isinstance(value, list) and value:
            for other in variants(value[0]):
                yield [other, *value[1:]]

    yield from variants(document)


def wrong_texts(document: Any) -> Iterator[bytes]:
    """As `wrong`, as JSON."""
    for each in wrong(document):
        yield json.dumps(each).encode()
    yield from (b"", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000)
    yield b"\xff\xfe{}"
