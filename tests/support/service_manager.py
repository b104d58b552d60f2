"""A service manager as `shmq serve` sees systemd."""

from __future__ import annotations

import re
import select
import socket
import sys
import time

from support.processes import eventually


class Manager:
    """systemd from a service's view: a datagram socket, read as systemd would."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.messages: list[tuple[float, int, dict[str, str]]] = []

    def read(self, seconds: float = 0.0) -> None:
        """Take the messages that have come, or come within `seconds`."""
        while select.select([self._socket], [], [], seconds)[0]:
            data, ancillary, _, _ = self._socket.recvmsg(4096, 128)
            pid = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
            pairs = (line.split("=", 1) for line in data.decode().splitlines())
            self.messages.append((time.monotonic(), pid, dict(pairs)))
            seconds = 0.0

    def wait(self, key: str, pattern: str = "", after: int = 0) -> dict[str, str]:
        """The first message with this, from message `after` on."""

        def found() -> dict[str, str] | None:
            self.read(0.02)
            matching = (
                message
                for _, _, message in self.messages[after:]
                if key in message and re.search(pattern, message[key])
            )
            return next(matching, None)

        message: dict[str, str] = eventually(found, what=f"the service says {key}={pattern}")
        return message

    def close(self) -> None:
        self._socket.close()
