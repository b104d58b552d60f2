"""Where messages go: what every target can do, and the target of an address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shmq.forward.marker import Marker
from shmq.forward.place import Place, nats_login


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
    """Messages that one batch may have. This and `most_bytes` may change with `open`."""
    most_bytes: int
    """Bytes of the bodies of one batch; a single message may have more."""
    exact: bool
    """Whether it keeps markers, and so gets every message once."""
    has_headers: bool
    """Whether it takes properties."""

    def open(self) -> Marker | None:
        """Connect, and return the marker that was stored last."""

    def too_big(
        self, bodies: Sequence[bytes], properties: Sequence[Mapping[str, bytes]] | None
    ) -> Mapping[int, str]:
        """The messages that it is known to refuse, and the limit that each is over, in printable
        words. properties: of each message; None: there are none."""

    def send(
        self,
        bodies: Sequence[bytes],
        marker: Marker,
        properties: Sequence[Mapping[str, bytes]] | None = None,
    ) -> None:
        """Begin to store a batch. Raises Refused if it stored nothing, because of one or several of
        the messages: only `open` may be called then."""

    def confirm(self) -> None:
        """Wait until the batch is stored. Raises as `send`."""

    def idle(self) -> None:
        """Answer what the target may have asked. Called every second while nothing is sent."""

    def close(self) -> None:
        """Close the connection, if there is one."""


_FORMS: Final = (
    "nats://host:4222/STREAM?subject=..., kafka://host:9092/TOPIC or nsq://host:4150/TOPIC"
)


def open_target(
    url: str, source: Source, create: bool = False, login: Mapping[str, str] | None = None
) -> Target:
    """The target of an address; nothing is connected yet. create: make the stream, or the topics,
    if they are missing. login: see `shmq.forward.login`.

    url: `nats://host:4222/STREAM?subject=S&marker=M`, `kafka://host:9092/TOPIC?marker=M` or
    `nsq://host:4150/TOPIC`. Raises ValueError, and ShmqError if an extra is missing.
    """
    place = Place.parsed(url, "target", _FORMS)
    if place.scheme == "nsq":
        place.check(set())
        from shmq.forward.nsqd import Nsqd

        if create or place.user is not None or login:
            raise ValueError("nsqd creates topics by itself and takes no user name or --create")
        hosts = place.hosts(4150)
        if len(hosts) > 1:
            raise ValueError(f"{place.shown!r} names more than one nsqd")
        return Nsqd(*hosts[0], place.name)
    if place.scheme == "kafka":
        place.check({"marker", "partition"})
        from shmq.forward.kafka import Kafka

        return Kafka(place.servers(), login or {}, place.name, source, place.wishes, create)
    place.check({"subject", "marker"})
    from shmq.forward.jetstream import JetStream

    return JetStream(
        place.hosts(4222), nats_login(place, login), place.name, source, place.wishes, create
    )
