"""Where messages come from: what every origin can do, and the origin of an address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shmq.forward.headers import NoProperties
from shmq.forward.place import Place, nats_login


@dataclass(frozen=True)
class Sink:
    """The topic that messages go to."""

    host: str
    instance: str
    topic: str

    def __str__(self) -> str:
        return f"{self.host}/{self.instance}/{self.topic}"


@dataclass(frozen=True)
class Portion:
    """Messages that came one after the other."""

    lane: str
    """The sequence in which their numbers count; no other is ever called so."""
    numbers: Sequence[int]
    """Of each message, 1 or more. They rise, and the same message has the same one again."""
    bodies: Sequence[bytes]
    properties: Sequence[bytes | NoProperties] | None = None
    """Of each message: the block of its properties, or why its headers are none. None: they have
    none."""


Reached = Callable[[str], int]
"""From a lane to the number of its last message that was published; 0: none."""


class Origin(Protocol):
    """A system that gives messages. Every method raises Away, and ShmqError for what does not end
    by itself."""

    def open(self, reached: Reached) -> None:
        """Connect, and begin behind what was acknowledged and what was published."""

    def named(self, lane: str, number: int) -> str:
        """The name of a message there."""

    def take(self, most: int, timeout: float) -> Sequence[Portion]:
        """The next messages, about `most` in all; empty if none come within `timeout` seconds."""

    def done(self, portions: Sequence[Portion]) -> None:
        """Acknowledge what `take` returned."""

    def drained(self) -> bool:
        """Whether there were no more messages when `take` was called last."""

    def idle(self) -> None:
        """Answer what the origin may have asked."""

    def close(self) -> None:
        """Close the connection, if there is one."""


_FORMS: Final = "nats://host:4222/STREAM?consumer=NAME or kafka://host:9092/TOPIC?group=NAME"


def is_origin(text: str) -> bool:
    """Whether an argument is the address of an origin, and not HOST:PORT."""
    return "://" in text


def open_origin(
    url: str, sink: Sink, login: Mapping[str, str] | None = None, bodies_only: bool = False
) -> Origin:
    """The origin of an address; nothing is connected yet. login: see `shmq.forward.login`.
    bodies_only: headers are left out.

    url: `nats://host:4222/STREAM?consumer=NAME&subject=FILTER` or
    `kafka://host:9092/TOPIC?group=NAME`. Raises ValueError, and ShmqError if an extra is missing.
    """
    place = Place.parsed(url, "source", _FORMS)
    name = f"shmq-{sink}".replace("/", "-").replace(".", "_")
    if place.scheme == "kafka":
        place.check({"group"})
        from shmq.forward.kafka_origin import KafkaOrigin

        group = place.wishes.get("group", name)
        names = (place.name, group)
        return KafkaOrigin(place.servers(), login or {}, *names, sink, not bodies_only)
    if place.scheme not in ("nats", "tls"):
        raise ValueError(f"the source must be {_FORMS}, not {place.shown!r}")
    place.check({"consumer", "subject"})
    from shmq.forward.jetstream_origin import JetStreamOrigin

    wishes = {"consumer": name, **place.wishes}
    entry = nats_login(place, login)
    return JetStreamOrigin(place.hosts(4222), entry, place.name, wishes, sink, not bodies_only)
