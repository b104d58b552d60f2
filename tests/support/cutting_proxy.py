"""A proxy of TCP connections that breaks each after so many bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any, Self


class CuttingProxy:
    """Listens on `port` of 127.0.0.1 and passes on what the server there says, `most` bytes of it
    on each connection; then it resets the connection."""

    def __init__(self, server: int, most: int) -> None:
        self.cuts = 0
        self.most = most
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server))
                except OSError:
                    client.close()
                    continue
                for way in ((client, server, None), (server, client, self.most)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, most: int | None) -> None:
        left = most
        with contextlib.suppress(OSError):
            while data := source.recv(65536 if left is None else min(left, 65536)):
                sink.sendall(data)
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        self.cuts += 1
                        break
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
