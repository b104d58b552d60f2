"""An access file, and clients that it lets in."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from shmq.users import hash_password
from support.nsq_client import ERROR, RESPONSE, Client, Server, sized
from support.processes import eventually

SCANNER, WORKER, ADMIN, READER = (
    f"{name}-0123456789ab" for name in ("scan", "work", "admi", "read")
)

RULES = f"""
[users.scanner]
token = "{SCANNER}"
allow = [{{ do = ["publish", "stage"], topics = ["resize", "scan-*"] }}]

[users.worker]
token = "{WORKER}"
password = "{hash_password(b"open sesame")}"
allow = [{{ do = ["subscribe", "lease"], topics = ["resize"], channels = ["workers", "w-*"] }}]

[users.admin]
token = "{ADMIN}"
allow = [{{ do = ["all"] }}]

[users.reader]
token = "{READER}"
allow = [{{ do = ["statistics"], topics = ["resize"], channels = ["workers"] }}]
"""


class File:
    """An access file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def flag(self) -> str:
        return f"--access-file={self.path}"

    def write(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(self.path)

    def reload(self, server: Server, text: str) -> None:
        """Write it, and wait until all processes have read it."""
        before = server.log.count(": reloaded")
        self.write(text)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: server.log.count(": reloaded") > before, what="the reload")


def http(server: Server, method: str, path: str, token: str = "", body: bytes = b"") -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return server.http(method, path, body, **headers)


def login(server: Server, secret: str | bytes) -> Client:
    """A client that was let in."""
    client = server.connect()
    answer = client.ask(b"AUTH\n" + sized(secret.encode() if isinstance(secret, str) else secret))
    assert answer is not None
    assert answer[0] == RESPONSE, answer
    return client


def denied(client: Client, command: bytes) -> bytes:
    """The refusal of a command, after which the connection ends."""
    answer = client.ask(command)
    assert answer is not None
    assert answer[0] == ERROR, answer
    assert answer[1].startswith((b"E_UNAUTHORIZED ", b"E_AUTH_FIRST ")), answer
    assert client.ended()
    return answer[1]
