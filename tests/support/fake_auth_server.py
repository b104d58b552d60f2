"""A server that a test tells what to answer to nsqd's question about a secret."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from types import TracebackType
from typing import Any


class Authority(http.server.ThreadingHTTPServer):
    """All requests get `reply`; `asked` has their queries."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self._host = host
        self.reply = (200, b"{}")
        """Status, body."""
        self.asked: list[dict[str, str]] = []
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"{self._host}:{self.server_port}"

    @property
    def flag(self) -> str:
        """For a server that is to ask it."""
        return f"--auth-http-address={self.address}"

    def __enter__(self) -> Authority:
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


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Authority

    def do_GET(self) -> None:
        query = urllib.parse.urlsplit(self.path).query
        self.server.asked.append(dict(urllib.parse.parse_qsl(query, keep_blank_values=True)))
        status, body = self.server.reply
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def rule(**more: Any) -> dict[str, Any]:
    """An authorisation: of everything, but for what is said otherwise."""
    return {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"], **more}


def reply(ttl: Any = 3600, *rules: Any, **more: Any) -> bytes:
    """The body of a reply with these authorisations."""
    return json.dumps({"ttl": ttl, "authorizations": list(rules), **more}).encode()
