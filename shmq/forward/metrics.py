"""The counts of a forwarder in Prometheus' text format, on an address of its own.

The instance's gateway does not know its forwarders, and one may run where no gateway does.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from shmq.errors import ShmqError
from shmq.forward.loop import Loop
from shmq.prometheus import CONTENT_TYPE, escape

_FAMILIES: Final[tuple[tuple[str, str, str, Callable[[Loop], int | float]], ...]] = (
    ("messages_total", "counter", "Messages stored by this process.",
     lambda loop: loop.progress.messages),
    ("bytes_total", "counter", "Bytes of their bodies.",
     lambda loop: loop.progress.bytes),
    ("batches_total", "counter", "Batches stored.",
     lambda loop: loop.progress.batches),
    ("resumed_total", "counter", "Messages that were stored already when they came.",
     lambda loop: loop.progress.resumed),
    ("skipped_total", "counter", "Messages left out: without a body, or by --refused=skip.",
     lambda loop: loop.progress.skipped),
    ("refused_total", "counter", "Messages that the other side, or the topic, never takes.",
     lambda loop: loop.progress.refused),
    ("dead_total", "counter", "Messages of them that became dead letters.",
     lambda loop: loop.progress.dead),
    ("away_total", "counter", "How often the other system was away.",
     lambda loop: loop.progress.away),
    ("connected", "gauge", "Whether the other system answered last.",
     lambda loop: int(loop.connected)),
    ("last_stored_timestamp_seconds", "gauge",
     "When the last batch was stored, Unix time; 0: none was.",
     lambda loop: loop.stored_at),
    ("start_time_seconds", "gauge", "When this process began, Unix time.",
     lambda loop: loop.began_at),
)  # fmt: skip


def page(loop: Loop, labels: Mapping[str, str]) -> str:
    """The text."""
    shown = ",".join(f'{name}="{escape(value)}"' for name, value in labels.items())
    lines = []
    for name, kind, text, value in _FAMILIES:
        name = f"shmq_forward_{name}"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines.append(f"{name}{{{shown}}} {value(loop)}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def served(loop: Loop, labels: Mapping[str, str], host: str, port: int) -> Iterator[int]:
    """Answer `GET /metrics` while the block runs. Yields the port. Raises ShmqError."""

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10.0  # seconds for a request

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = page(loop, labels).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    try:
        server = http.server.ThreadingHTTPServer((host, port), Handler)
    except OSError as exc:
        how = (
            "name another port" if exc.errno == errno.EADDRINUSE else "name an address of this host"
        )
        raise ShmqError(f"serve metrics on {host}:{port}: {exc.strerror}; {how}") from exc
    thread = threading.Thread(target=server.serve_forever, name="shmq-forward-metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
