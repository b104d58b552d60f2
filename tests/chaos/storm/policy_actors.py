"""Actors of channels with settings: producers whose messages expire, consumers that fail, reject or
are slow, and those who look after dead letters."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from chaos.storm import history
from chaos.storm.actors import Consumer, Delivery, Drainer, Producer, Requeuer
from chaos.storm.history import Reason, Settling, What, record

import shmq
from shmq.errors import BadArgument, Full, Gone, MessageTooBig, NotInFlight, NotRunning

LIVES = (0.02, 0.2, 1.0, 300.0)  # seconds


class PolicyProducer(Producer):
    """Some of its messages have a time to live, some a property that names their publish."""

    role = "policy-producer"
    burst = 20
    lends = False

    def publish(self, number: int, *arguments: Any) -> None:
        self.terms = self.terms_of(number)
        super().publish(number, *arguments)

    def terms_of(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.choice.random() < 0.15 and not self.lends:
            found["ttl"] = self.choice.choice(LIVES)
        if self.choice.random() < 0.3:
            found["properties"] = {"publish": f"{self.number}/{number}"}
        return found

    def _lend(self, number: int, size: int, defer: float | None = None) -> None:
        self.lends = True  # a loan has no time to live
        super()._lend(number, size, defer)
        self.lends = False


class Witness(Consumer):
    """Looks at properties, too."""

    def more_of(self, op: int, message: shmq.Message, number: int, key: int) -> bytes:
        try:
            properties = dict(message.properties)
        except NotInFlight:
            return b""
        named = properties.get("publish")
        assert (
            not named
            or not key
            or history.describe_key(key).startswith(f"message {named.decode()}/")
        ), f"{history.describe_key(key)} has the properties {properties}"
        return b""


class Failer(Requeuer, Witness):
    """Fails in every way there is."""

    role = "failer"

    def handle(self, taken: list[Delivery], batch: shmq.Batch | None) -> None:
        way = self.choice.random()
        this = batch or taken[0].message
        if way < 0.12:
            self.settle(Settling.RETRY, taken, this.requeue)
        elif way < 0.24:
            self.settle(Settling.RELEASE, taken, lambda: this.requeue(failed=False))
        elif way < 0.28:
            delay = self.choice.expovariate(1 / 0.05)
            self.settle(Settling.RELEASE, taken, lambda: this.requeue(delay, failed=False), delay)
        elif way < 0.34:
            self.settle(Settling.REJECT, taken, lambda: this.reject("all"))
        elif way < 0.42:
            for each in taken:
                self.settle(
                    Settling.REJECT, [each], lambda e=each: e.message.reject(f"{e.key:016x}")
                )
        else:
            super().handle(taken, batch)


class Sloth(Witness):
    """Slower than its producers."""

    role = "sloth"
    max_in_flights = (1, 7)

    def one_round(self, consumer: shmq.Consumer, most: int) -> None:
        super().one_round(consumer, most)
        time.sleep(self.choice.expovariate(1 / 0.02))


class Mourner(Consumer):
    """Reads what a dead letter says of itself."""

    @cached_property
    def since(self) -> int:
        """The round's begin, CLOCK_REALTIME ns."""
        return (self.place.directory / history.SETTINGS).stat().st_mtime_ns

    def more_of(self, op: int, message: shmq.Message, number: int, key: int) -> bytes:
        try:
            notes = {name: value.decode() for name, value in message.properties.items()}
        except NotInFlight:
            notes = {}
        reason = notes.get("dead-reason", "none").upper()
        origin = notes.get("dead-from", "")
        if notes.get("dead-error") not in (None, "all", f"{key:016x}") and key:
            origin = ""
        if "dead-error" in notes and reason != Reason.REJECTED.name:
            origin = ""
        if notes and not self.since <= int(notes.get("dead-when", 0)) <= time.time_ns():
            origin = ""
        return record(
            What.LETTER,
            op=op,
            flag=Reason[reason],
            count=int(notes.get("dead-failures", 0)),
            id=number,
            key=history.packed(origin) if len(origin) <= 8 else 0,
        )


class Undertaker(Mourner):
    """Takes dead letters, ends some and sends some back."""

    role = "undertaker"
    max_in_flights = (1, 20)

    def work(self) -> None:
        assert self.broker is not None
        topic, channel = history.home_of(self.place.directory, self.place.topic)
        native = self.broker.native()
        found = native.find_topic(topic)
        assert found is not None
        back = native.find_queue(found[0], channel)
        assert back is not None
        self.back = back
        super().work()

    def open(self, max_in_flight: int) -> shmq.Consumer:
        consumer = super().open(max_in_flight)
        self.consumer = consumer
        return consumer

    def handle(self, taken: list[Delivery], batch: shmq.Batch | None) -> None:
        for each in taken:
            way = self.choice.random()
            if way < 0.5:
                self.settle(Settling.REDRIVE, [each], lambda e=each: self.redrive(e))
            elif way < 0.6:
                self.settle(
                    Settling.RELEASE, [each], lambda e=each: e.message.requeue(0, failed=False)
                )
            elif way < 0.95:
                self.settle(Settling.FINISH, [each], each.message.finish)
        if self.choice.random() < 0.2:
            time.sleep(self.choice.expovariate(1 / 0.1))

    def redrive(self, each: Delivery) -> None:
        """NotInFlight if it stays where it is, Gone if the instance is about to stop."""
        try:
            self.consumer.redrive(each.message, *self.back)
        except NotRunning as exc:
            raise Gone(str(exc)) from None
        except (Full, MessageTooBig, BadArgument) as exc:
            raise NotInFlight(str(exc)) from None


class LetterDrainer(Mourner, Drainer):
    """At the end: takes and finishes dead letters until none is left."""

    role = "letter-drainer"
