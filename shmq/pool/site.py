"""The place where a pool's tasks wait and its outcomes are stored: a channel and a results store.

A task is a message: the 20 bytes of its key, then the packed function and arguments. Its outcome is
stored under the key. A private pool has a topic and a store of its own, which go at its end. A
durable pool shares both with everybody who names the topic.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import Final

from shmq.broker import Broker, attach
from shmq.claims import Claim, claimed
from shmq.client import Producer
from shmq.errors import ShmqError
from shmq.pool.outcome import Outcomes
from shmq.queues import tree
from shmq.seal import results_seal
from shmq.settings import dead_topic
from shmq.taken import is_taken, take_topic

#: The channel of a pool's topic.
CHANNEL: Final = "pool"
#: The channel of its dead letters.
LETTERS: Final = "dead"
#: Bytes of a task's key.
KEY_BYTES: Final = 20
#: In a key's place: the worker that takes this message ends.
STOP: Final = b"stop".ljust(KEY_BYTES, b"-")
#: Seconds for which a durable pool keeps an outcome that nobody has collected.
KEPT: Final = 86_400.0

_KEYS: Final = 1 << 22
_BYTES: Final = 1 << 34
_PER_KEY: Final = 300  # bytes of a store, without values
#: Bytes of tasks that wait in a private pool's channel.
_AHEAD: Final = 4 << 20
_ALARM: Final = b"broken"
#: Messages in flight that are looked at: more than a channel can have workers.
_MOST: Final = 1 << 16


@dataclass(frozen=True)
class Place:
    """Where a pool is: everything that another process needs to open its site."""

    instance: str
    owner: str | int | None
    topic: str
    attempts: int
    durable: bool
    writable: bool = False
    """Large buffers of arguments and results are copies, which programs may change."""

    @classmethod
    def private(cls, broker: Broker, attempts: int, writable: bool) -> Place:
        """A new one, that no other pool has."""
        topic = f"pool-{secrets.token_hex(6)}"
        return cls(broker.instance, None, topic, attempts, False, writable)

    def claimed(self, broker: Broker) -> Claim | None:
        """Have the supervisor delete a private pool, should this process end without doing it."""
        path = broker.directory().data_path
        fd = claimed(path, [self.topic, self.letters], self.stores)
        return None if fd is None else Claim(fd)

    def remove(self, broker: Broker) -> None:
        """Delete what there is of it."""
        for name in self.stores:
            with contextlib.suppress(ShmqError):
                broker.delete_results(name)
        for topic in (self.topic, self.letters):
            with contextlib.suppress(ShmqError):
                broker.delete_topic(topic)

    @property
    def letters(self) -> str:
        """The topic of the tasks whose workers died."""
        return dead_topic(self.topic, CHANNEL)

    @property
    def stores(self) -> tuple[str, str]:
        """The names of its results stores: of the outcomes, and of the signs."""
        end = "" if self.durable else "#ephemeral"
        return f"{self.topic}{end}", f"{self.topic}.signs{end}"


class Site:
    """A pool's handles in this process."""

    def __init__(self, place: Place, broker: Broker | None = None) -> None:
        """Open the site, and make what is missing. broker: of that instance; None: attach to it.
        Raises what `Broker.producer`, `results` and `configure` raise."""
        self.place = place
        self.durable = place.durable
        self.broken: bytes | None = None
        """The outcome of every task that has none, if the pool cannot go on."""
        self.claim: Claim | None = None
        """Of the process that made a private pool, with which it goes."""
        self._own = broker is None
        self.broker = attach(place.instance, owner=place.owner) if broker is None else broker
        if not is_taken(self.broker, place.topic, CHANNEL):
            take_topic(self.broker, place.topic, CHANNEL)
        if self.broker.settings(place.topic, CHANNEL).max_attempts != place.attempts:
            self.broker.configure(place.topic, CHANNEL, max_attempts=place.attempts)
        outcomes, signs = place.stores
        room = (
            tree.within_reach(_KEYS, tree.STORE_SHARE, _PER_KEY),
            tree.within_reach(_BYTES, tree.STORE_SHARE),
        )
        self.store = self.broker.results(outcomes, *room)
        """The outcomes by the keys of their tasks."""
        self.signs = self.broker.results(signs, *room)
        """Signs between processes: which tasks are cancelled, which workers were ready and ended in
        order. They have room when there is none for outcomes."""
        self.producer: Producer = self.broker.producer(place.topic)
        self.producer.seal()
        key = self.broker.directory().seal_key
        seal = results_seal(key, place.topic) if place.durable else b""
        self.outcomes = Outcomes(seal, place.writable)
        """Makes and reads outcomes. Those of a private pool are never in a file."""
        self.alarm = _ALARM
        """The key that is stored when the pool breaks, for threads that wait for another key."""
        self.alarms = 0 if place.durable else 1 << self.store.stripe(_ALARM)

    def hold(self, most: int = _AHEAD) -> None:
        """Have a private pool's tasks wait in the submitter when those in the channel have so many
        bytes. Memory that is used again costs far less than new memory. The submitter alone calls
        this: it raises the limit for a task that is larger."""
        self.broker.configure(self.place.topic, CHANNEL, max_bytes=most, overflow="block")

    def holds(self, key: bytes) -> bool:
        """Whether a worker has the task just now."""
        seen = self.broker.peek(self.place.topic, CHANNEL, "in_flight", _MOST)
        return any(message.body[:KEY_BYTES] == key for message in seen)

    def is_idle(self) -> bool:
        """Whether nobody holds a message, and none is on its way to the dead letters."""
        counts = self.broker.channel_stats(self.place.topic, CHANNEL)
        return counts.in_flight == 0 and counts.deferred == 0

    def depth(self) -> int:
        """The number of messages that wait."""
        return self.broker.channel_depth(self.place.topic, CHANNEL)

    @property
    def ttl(self) -> float | None:
        """Seconds for which an outcome is kept; None: until it is collected."""
        return KEPT if self.durable else None

    def ring(self, why: bytes) -> None:
        """Break the pool: all that wait get this outcome."""
        self.broken = why
        with contextlib.suppress(ShmqError):
            self.store.set(_ALARM, why)

    def remove(self) -> None:
        """Delete a private pool's channel and store. Its outcomes must have been taken."""
        self.place.remove(self.broker)
        if self.claim is not None:
            self.claim.close()

    def close(self) -> None:
        """Leave the instance."""
        if self._own:
            self.broker.close()
