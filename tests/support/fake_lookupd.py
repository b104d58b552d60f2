"""A nsqlookupd that only writes down what it is told."""

from __future__ import annotations

import contextlib
import json
import socketserver
import struct
import threading
import time
from types import TracebackType
from typing import Any


class Lookupd(socketserver.ThreadingTCPServer):
    """Answers every command as a nsqlookupd does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.identities: list[Any] = []
        """The documents of all IDENTIFY."""
        self.told: list[str] = []
        """REGISTER and UNREGISTER; `connected` and `gone` where a connection began and ended."""
        self.pings: list[float] = []
        """When each came."""
        self._requests: list[Any] = []
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def flag(self) -> str:
        """For a server that is to tell it."""
        return f"--lookupd-tcp-address={self.address}"

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    def hang_up(self) -> None:
        """End the connections there are."""
        for request in self._requests:
            request.shutdown(2)
        self._requests.clear()

    def get_request(self) -> Any:
        found = super().get_request()
        self._requests.append(found[0])
        return found

    def __enter__(self) -> Lookupd:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Connection(socketserver.StreamRequestHandler):
    server: Lookupd

    def handle(self) -> None:
        if self.rfile.read(4) != b"  V1":
            return
        self.server.told.append("connected")
        with contextlib.suppress(OSError):  # hung up amid an answer
            self._answer()
        self.server.told.append("gone")

    def _answer(self) -> None:
        while line := self.rfile.readline().decode().rstrip("\n"):
            answer = b"OK"
            if line == "IDENTIFY":
                (size,) = struct.unpack(">i", self.rfile.read(4))
                self.server.identities.append(json.loads(self.rfile.read(size)))
                # its HTTP port, asked for channels of new topics, is one where nobody listens
                answer = b'{"broadcast_address":"127.0.0.1","tcp_port":1,"http_port":1}'
            elif line == "PING":
                self.server.pings.append(time.monotonic())
            else:
                self.server.told.append(line)
            self.wfile.write(struct.pack(">i", len(answer)) + answer)
