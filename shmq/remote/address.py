"""Where a gateway listens: `host:port`, `[v6]:port`, or the path of a Unix socket."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Final, Self

from shmq.peers.sockets import connected, left

#: nsqd's TCP port.
PORT: Final = 4150


@dataclass(frozen=True)
class Address:
    """A host and a port, or a path."""

    host: str
    port: int
    """0: `host` is the path of a Unix socket."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises TypeError for anything but a string, and ValueError for one that is no address."""
        if not isinstance(text, str):
            raise TypeError(f"address must be 'host:port', not {text!r}")
        if text.startswith("/"):
            return cls(text, 0)
        host, colon, port = text.rpartition(":")
        if not colon or (":" in host and not host.endswith("]")) or text.endswith("]"):
            host, port = text, str(PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not re.fullmatch("[0-9]{1,9}", port) or not 0 < int(port) < 65536:
            raise ValueError(f"address must be 'host:port' or '/path', not {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        if not self.port:
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def connected(self, deadline: float) -> socket.socket:
        """A new connection. deadline: of time.monotonic. Raises OSError."""
        if self.port:
            sock = connected(self.host, self.port, deadline)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(left(deadline))
            sock.connect(self.host)
        except BaseException:
            sock.close()
            raise
        return sock
