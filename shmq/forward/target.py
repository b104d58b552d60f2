"""Where messages go: what every target can do, and the target of an address."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shmq.forward.marker import Marker


class Away(Exception):
    """The target does not answer, or cannot take messages now: try again later. Whether the last
    batch was stored is not known."""


@dataclass(frozen=True)
class Source:
    """The channel that is forwarded."""

    host: str
    instance: str
    topic: str
    channel: str

    def __str__(self) -> str:
        return f"{self.host}/{self.instance}/{self.topic}/{self.channel}"


class Target(Protocol):
    """A system that takes batches. Every method raises Away, and ShmqError for what does not end by
    itself."""

    most: int
    """Messages that one batch may have."""
    most_bytes: int
    """Bytes of the bodies of one batch; a single message may have more."""
    exact: bool
    """Whether it keeps markers, and so gets every message once."""

    def open(self) -> Marker | None:
        """Connect, and return the marker that was stored last."""

    def send(self, bodies: Sequence[bytes], marker: Marker) -> None:
        """Begin to store a batch."""

    def confirm(self) -> None:
        """Wait until the batch is stored."""

    def idle(self) -> None:
        """Answer what the target may have asked. Called every second while nothing is sent."""

    def close(self) -> None:
        """Close the connection, if there is one."""


def open_target(url: str, source: Source, create: bool = False) -> Target:
    """The target of an address; nothing is connected yet. create: make the stream if it is missing.

    url: `nats://host:4222/STREAM?subject=S&marker=M` or `nsq://host:4150/TOPIC`. Raises ValueError.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"the target {url!r} is no address: {exc}") from None
    name = urllib.parse.unquote(parts.path.strip("/"))
    if parts.scheme not in ("nats", "nsq") or not parts.hostname or not name or "/" in name:
        raise ValueError(
            f"the target must be nats://host:4222/STREAM?subject=... or nsq://host:4150/TOPIC, "
            f"not {_shown(parts)!r}"
        )
    wishes = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    known = {"subject", "marker"} if parts.scheme == "nats" else set()
    if unknown := sorted(wishes.keys() - known):
        raise ValueError(f"the target {_shown(parts)!r} has no setting {', '.join(unknown)}")
    if parts.scheme == "nsq":
        from shmq.forward.nsqd import Nsqd

        if create or parts.username is not None:
            raise ValueError("nsqd creates topics by itself and takes no user name or --create")
        return Nsqd(parts.hostname, port or 4150, name)
    from shmq.forward.jetstream import JetStream

    where = (parts.hostname, port or 4222)
    return JetStream(where, _login(parts), name, source, wishes, create)


def _login(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Of `user:password@` or `token@`, as NATS's CONNECT names them."""
    if parts.username is None:
        return {}
    user = urllib.parse.unquote(parts.username)
    if parts.password is None:
        return {"auth_token": user}
    return {"user": user, "pass": urllib.parse.unquote(parts.password)}


def _shown(parts: urllib.parse.SplitResult) -> str:
    """An address without its secrets."""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
