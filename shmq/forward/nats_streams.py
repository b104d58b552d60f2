"""Parts that the target and the origin in JetStream share: names, and questions about a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.forward.nats_connection import NatsConnection
from shmq.forward.target import Away
from shmq.peers.documents import inner
from shmq.printing import LONGEST, printable

SUBJECT: Final = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_NAME: Final = re.compile(r"[^\s.*>/\\]+")
_NOT_FOUND: Final = 404
_AWAY: Final = 503


def check_stream(name: str, what: str = "stream") -> None:
    """Raise ValueError if this is no name of a stream or consumer."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a {what}")


def stream_name(servers: Sequence[tuple[str, int]], stream: str) -> str:
    """The address of a stream, for texts."""
    return f"nats://{','.join(f'{host}:{port}' for host, port in servers)}/{stream}"


def asked(
    connection: NatsConnection, what: str, document: dict[str, Any], name: str
) -> dict[str, Any] | None:
    """Ask JetStream's API; None if the thing does not exist. Raises Away, and ShmqError if it
    refuses."""
    answer = connection.ask(f"$JS.API.{what}", document)
    if answer.get("error") is None:
        return answer
    error = inner(answer, "error")
    if error.get("code") == _NOT_FOUND:
        return None
    text = f"{what} of {name}: {printable(str(error.get('description')), LONGEST)}"
    if error.get("code") == _AWAY:
        raise Away(text)
    raise ShmqError(text)


def matches(pattern: str, subject: str) -> bool:
    """Whether a stream's subject, which may have wildcards, takes this one."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > place
        if place >= len(tokens) or token not in ("*", tokens[place]):
            return False
    return len(wanted) == len(tokens)
