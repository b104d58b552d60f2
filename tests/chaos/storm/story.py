"""Histories that are told, for tests of the checker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaos.storm.checker import ID_STEP_BITS
from chaos.storm.history import (
    Access,
    Counter,
    Log,
    Outcome,
    Promise,
    Reason,
    Settings,
    Settling,
    Verb,
    What,
    file_name,
    key_of,
    packed,
    record,
)

MS = 1_000_000
SECOND = 1000 * MS


@dataclass
class Sent:
    """Messages of one publish."""

    key: int
    id: int
    parts: int = 1

    def __getitem__(self, part: int) -> Sent:
        if part >= self.parts:
            raise IndexError(part)
        return Sent(self.key + part, self.id + (part << ID_STEP_BITS))

    def __iter__(self) -> Iterator[Sent]:
        return (self[part] for part in range(self.parts))


@dataclass
class Teller:
    """An actor's log. Times are in ms from the beginning; a call that `dies` has no end."""

    number: int
    log: Log
    publishes: int = 0

    def write(self, what: What, at: float, **fields: int) -> None:
        self.log.write(record(what, at=SECOND + int(at * MS), **fields))

    def publish(
        self,
        at: float,
        number: int,
        *,
        parts: int = 1,
        outcome: Outcome = Outcome.DONE,
        dies: bool = False,
        defer: float = 0,
        ttl: float = 0,
    ) -> Sent:
        """number: ids rise with it."""
        self.publishes += 1
        op, sent = (
            self.log.next_op(),
            Sent(key_of(self.number, self.publishes), number << 20, parts),
        )
        if ttl:
            self.write(What.TTL, at, op=op, id=int(ttl * MS))
        self.write(What.PUBLISH, at, op=op, key=sent.key, count=parts, id=int(defer * MS))
        if not dies:
            self.write(What.PUBLISHED, at + 1, op=op, flag=outcome, id=sent.id)
        return sent

    def take(
        self, at: float, *messages: Sent, attempts: int = 1, good: bool = True, until: float = 0
    ) -> None:
        until = until or at + 1
        op = self.log.next_op()
        self.write(What.TAKE, at, op=op, count=max(len(messages), 1))
        self.write(What.TAKEN, until, op=op, count=len(messages))
        self.deliver(until, op, messages, attempts, good)

    def bury(
        self,
        at: float,
        sent: Sent,
        reason: Reason = Reason.ATTEMPTS,
        attempts: int = 2,
        failures: int = 1,
        origin: str = "q/x",
    ) -> None:
        """Take a dead letter."""
        self.take(at, sent, attempts=attempts)
        self.write(
            What.LETTER,
            at + 1,
            op=self.log.ops,
            flag=reason,
            count=failures,
            id=sent.id,
            key=packed(origin) if origin else 0,
        )

    def stream(self, at: float) -> int:
        """A connection to the gateway."""
        op = self.log.next_op()
        self.write(What.TAKE, at, op=op)
        return op

    def deliver(
        self, at: float, op: int, messages: Sequence[Sent], attempts: int = 1, good: bool = True
    ) -> None:
        for sent in messages:
            self.write(
                What.DELIVERY, at, op=op, flag=good, count=attempts, id=sent.id, key=sent.key
            )

    def settle(
        self,
        at: float,
        *messages: Sent,
        kind: Settling = Settling.FINISH,
        attempts: int = 1,
        dies: bool = False,
        delay: float = 0,
    ) -> None:
        op = self.log.next_op()
        self.write(What.SETTLE, at, op=op, flag=kind, count=len(messages), id=int(delay * MS))
        for sent in messages:
            self.write(What.ITEM, at, op=op, count=attempts, id=sent.id, key=sent.key)
        if not dies:
            self.write(What.SETTLED, at + 1, op=op)

    def take_and_finish(self, at: float, *messages: Sent, attempts: int = 1) -> None:
        self.take(at, *messages, attempts=attempts)
        self.settle(at + 2, *messages, attempts=attempts)

    def die_in_a_take(self, at: float) -> None:
        self.write(What.TAKE, at, op=self.log.next_op(), count=1)

    def access(
        self,
        at: float,
        access: Access,
        number: int = 0,
        *,
        key: int = 0,
        value: int = 0,
        found: bool = True,
        good: bool = True,
        outcome: Outcome = Outcome.DONE,
        until: float = 0,
        dies: bool = False,
        ttl: float = 0,
    ) -> None:
        """A call on a results store."""
        op = self.log.next_op()
        self.write(What.ACCESS, at, op=op, flag=access, count=number, key=key, id=int(ttl * MS))
        if not dies:
            self.write(
                What.ACCESSED, until or at + 1, op=op, flag=outcome, count=found, key=value, id=good
            )

    def ask(self, at: float, verb: Verb, channel: str, key: int = 0) -> None:
        op = self.log.next_op()
        self.write(What.ASK, at, op=op, flag=verb, id=packed(channel), key=key)
        self.write(What.ANSWERED, at + 1, op=op)


class Story:
    """A history that is told: topic t with the channels a (first in, first out), b, and h, where
    somebody always waits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._number = 0
        channels = [
            Promise("t", "a", fifo=True),
            Promise("t", "b"),
            Promise("p", "h", fifo=True, hungry=True),
        ]
        Settings(1, channels).save(directory)
        self.storm = Teller(0, Log(directory / "000000.storm.log"))
        self.producer = self.actor("producer", "t")
        self.prober = self.actor("producer", "p")
        self.a, self.b = self.consumer("a"), self.consumer("b")

    def actor(self, role: str, topic: str = "", channel: str = "", timeout: float = 0) -> Teller:
        self._number += 1
        return self._log_of(self._number, role, topic, channel, timeout)

    def _log_of(
        self, number: int, role: str, topic: str, channel: str, timeout: float = 0
    ) -> Teller:
        teller = Teller(number, Log(self.directory / file_name(number, role, topic, channel)))
        if topic:
            teller.write(What.ACTOR, 0, key=number, id=int(timeout * MS))
        return teller

    def consumer(self, channel: str, timeout: float = 0) -> Teller:
        return self.actor("consumer", "p" if channel == "h" else "t", channel, timeout)

    def consumer_of_many(self, *places: tuple[str, str]) -> list[Teller]:
        """One actor, with a log for each of its topics."""
        self._number += 1
        return [self._log_of(self._number, "many-consumer", *place) for place in places]

    def tell(self, what: What, at: float, of: Teller | None = None, flag: int = 0) -> None:
        self.storm.write(what, at, key=of.number if of else 0, flag=flag)

    def both(self, at: float, *messages: Sent) -> None:
        """Consumed on a and b."""
        self.a.take_and_finish(at, *messages)
        self.b.take_and_finish(at, *messages)


class PolicyStory(Story):
    """Topic q with the channels x, which has settings and a dead topic, and w, which has none and
    finishes all that is published."""

    topics: ClassVar[dict[str, str]] = {"x": "q", "w": "q", "dead": "grave"}

    def __init__(self, directory: Path, settings: dict[str, Any], later: dict[str, Any]) -> None:
        super().__init__(directory)
        channels = [Promise("q", "w"), Promise("q", "x", settings=1, dead="grave")]
        Settings(1, channels, palette=[{}, settings, later]).save(directory)
        self.producer = self.actor("producer", "q")
        self.x, self.w = self.consumer("x"), self.consumer("w")
        self.dead = self.consumer("dead")

    def consumer(self, channel: str, timeout: float = 0) -> Teller:
        return self.actor("consumer", self.topics.get(channel, "t"), channel, timeout)

    def send(self, at: float, number: int, **how: Any) -> Sent:
        """Published, and finished in w."""
        sent = self.producer.publish(at, number, **how)
        if how.get("outcome", Outcome.DONE) == Outcome.DONE and not how.get("dies"):
            self.w.take_and_finish(at + 2 + how.get("defer", 0), *sent)
        return sent

    def fail(
        self, at: float, *messages: Sent, kind: Settling = Settling.RETRY, attempts: int = 1
    ) -> None:
        """In x."""
        self.x.take(at, *messages, attempts=attempts)
        self.x.settle(at + 2, *messages, kind=kind, attempts=attempts)

    def counted(
        self, at: float, counter: Counter, value: int, quiet: bool = True, waiting: int = 0
    ) -> None:
        """Of x."""
        self.storm.write(What.COUNTED, at, flag=counter, count=1, key=value, op=quiet, id=waiting)
