"""The actors of a storm. Each is a process of its own, forked by the storm, that logs what it does
(`history`) and may be killed or stopped at any instant.

An actor ends by itself only when the storm is over (`Control.ending`). An unexpected exception ends
it with status 1 and a traceback in its `.err` file, which the storm takes as a violation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from chaos.storm import history
from chaos.storm.aim import Aim
from chaos.storm.history import LEAST_BYTES, Log, Outcome, Settling, Verb, What, key_of, record
from support import recount

import shmq
from shmq import sources
from shmq.errors import (
    BadArgument,
    Full,
    Gone,
    MessageTooBig,
    NotInFlight,
    NotRunning,
    ShmqError,
)

T = TypeVar("T")

LARGE = 66_000  # bytes from which a body is copied outside of the lock
LARGEST = 200_000
LATE = "late"  # the topic that has no channel at first


class Control:
    """Instructions of the storm to all actors: some bytes of shared memory."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def ending(self) -> bool:
        """Come to an end."""
        return bool(self._page[0])

    @ending.setter
    def ending(self, on: bool) -> None:
        self._page[0] = on

    @property
    def throttle(self) -> bool:
        """Too much is waiting: publish slowly."""
        return bool(self._page[1])

    @throttle.setter
    def throttle(self, on: bool) -> None:
        self._page[1] = on

    def doom(self, seat: int, on: bool) -> None:
        """The process of that place is to die in one of its next calls."""
        self._page[_SEATS + seat] = on

    def doomed(self, seat: int) -> bool:
        return bool(self._page[_SEATS + seat])


_SEATS = 16  # where their bytes begin


@dataclass(frozen=True)
class Place:
    """Where an actor works."""

    instance: str
    directory: Path
    control: Control
    filler: bytes
    topic: str = ""
    channel: str = ""
    seat: int = 0
    port: int = 0


class Actor:
    """One process's work. `run` returns when the storm is over."""

    role: ClassVar[str]
    #: Share of its kills that are a SIGTERM, on which it may end in order.
    asked: ClassVar[float] = 0.0
    #: Whether it leads a process group, some of which may outlive it for a while.
    leads_group: ClassVar[bool] = False

    def __init__(self, place: Place, number: int, seed: int) -> None:
        self.place, self.number = place, number
        self.choice = random.Random(seed)
        self.log = Log(place.directory / self.file_name(place, number))
        self.broker: shmq.Broker | None = None
        self.aim = Aim(self.choice)

    @classmethod
    def file_name(cls, place: Place, number: int) -> str:
        return history.file_name(number, cls.role, place.topic, place.channel)

    @property
    def over(self) -> bool:
        return self.place.control.ending

    def attach(self) -> None:
        self.broker = shmq.attach(self.place.instance, timeout=60)

    def run(self) -> None:
        """Work until the storm is over."""
        self.log.write(record(What.ACTOR, key=self.number, id=self.timeout_ns))
        try:
            with contextlib.suppress(Gone):  # the instance was stopped
                self.attach()
                self.work()
        finally:
            if self.broker is not None:
                self.broker.close()

    @property
    def timeout_ns(self) -> int:
        """Of messages; 0: never."""
        return 0

    def work(self) -> None:
        raise NotImplementedError

    def core(self, call: Callable[[], T]) -> T:
        """A call into the core; the last one, if we are to die."""
        if self.place.control.doomed(self.place.seat):
            self.aim.fire()
        return call()

    def ask(self, verb: Verb, channel: str, call: Callable[[], object], key: int = 0) -> None:
        """Log, ask, log."""
        op = self.log.next_op()
        self.log.write(record(What.ASK, op=op, flag=verb, id=history.packed(channel), key=key))
        outcome = Outcome.DONE
        try:
            self.core(call)
        except BadArgument:
            outcome = Outcome.REFUSED
        except (Gone, NotRunning):
            outcome = Outcome.UNKNOWN  # the supervisor may have died over it
        except ShmqError as exc:
            if "the time is over" not in str(exc):
                raise
            outcome = Outcome.UNKNOWN
        self.log.write(record(What.ANSWERED, op=op, flag=outcome))

    def patiently(self, call: Callable[[], T]) -> T:
        """Again and again while nobody supervises."""
        while True:
            try:
                return call()
            except NotRunning:
                if self.over:
                    raise Gone("the storm is over and nobody supervises") from None
                time.sleep(0.02)


# ---- producers ----


class Producer(Actor):
    """Publishes in every way there is."""

    role = "producer"
    terms: Mapping[str, Any] = MappingProxyType({})  # of the next publish
    burst = 60  # publishes between two pauses
    pause = 0.03  # at most; it is kills that count, not messages
    kinds: ClassVar[dict[str, int]] = {
        "single": 60,
        "batch": 20,
        "loan": 6,
        "deferred": 8,
        "large": 3,
        "large_batch": 1,
        "large_loan": 2,
    }

    def work(self) -> None:
        assert self.broker is not None
        self.producer = self.patiently(lambda: self.broker.producer(self.place.topic))
        self.publish_until_over()

    def publish_until_over(self) -> None:
        kinds, weights = list(self.kinds), list(self.kinds.values())
        for number in itertools.count(1):
            if self.over:
                return
            getattr(self, self.choice.choices(kinds, weights)[0])(number)
            slow = self.place.control.throttle
            if number % self.burst == 0 or slow:
                time.sleep(self.pause * self.choice.random() * (5 if slow else 1))

    def size(self) -> int:
        return LEAST_BYTES + int(self.choice.expovariate(1 / 150))

    def large_size(self) -> int:
        return self.choice.randrange(LARGE, LARGEST)

    def wait(self) -> float:
        """How long to wait for room."""
        return 0.0 if self.choice.random() < 0.05 else 5.0

    def bodies(self, number: int, sizes: Iterable[int]) -> list[bytes]:
        return [
            history.make_body(key_of(self.number, number, part), size, self.place.filler)
            for part, size in enumerate(sizes)
        ]

    def publish(
        self, number: int, parts: int, defer: float | None, call: Callable[[], int | str | None]
    ) -> None:
        """Log, publish, log."""
        ttl = self.terms.get("ttl")
        lives = record(What.TTL, op=number, id=int(ttl * 1e9)) if ttl else b""
        self.log.write(
            lives
            + record(
                What.PUBLISH,
                op=number,
                key=key_of(self.number, number),
                count=parts,
                id=int((defer or 0) * 1e9),
            )
        )
        outcome, first = Outcome.DONE, 0
        try:
            found = self.core(call)
            first = int(found, 16) if isinstance(found, str) else int(found or 0)
        except (Full, NotRunning, MessageTooBig):
            outcome = Outcome.REFUSED
        except ShmqError as exc:
            if "the time is over" not in str(exc) and not isinstance(exc, Gone):
                raise
            outcome = Outcome.REFUSED
        self.log.write(record(What.PUBLISHED, op=number, flag=outcome, id=first))
        if outcome is Outcome.REFUSED:
            time.sleep(0.005)

    def _publish_one(self, number: int, size: int, defer: float | None = None) -> None:
        (body,) = self.bodies(number, [size])
        wait = self.wait()
        self.publish(
            number, 1, defer, lambda: self.producer.publish(body, defer, wait, **self.terms)
        )

    def _publish_many(self, number: int, sizes: list[int], defer: float | None = None) -> None:
        bodies, wait = self.bodies(number, sizes), self.wait()
        self.publish(
            number,
            len(bodies),
            defer,
            lambda: self.producer.publish_many(bodies, defer, wait, **self.terms).start,
        )

    def _lend(self, number: int, size: int, defer: float | None = None) -> None:
        (body,) = self.bodies(number, [size])
        wait, lazy = self.wait(), self.choice.random() < 0.3

        def call() -> str | None:
            loan = self.producer.loan(size, defer, wait, **self.terms)
            with loan as buffer:
                buffer[: size // 2] = body[: size // 2]
                if lazy:
                    time.sleep(0.002)
                buffer[size // 2 :] = body[size // 2 :]
            return loan.id

        self.publish(number, 1, defer, call)

    def single(self, number: int) -> None:
        self._publish_one(number, self.size())

    def batch(self, number: int) -> None:
        self._publish_many(number, [self.size() for _ in range(self.choice.randrange(2, 60))])

    def loan(self, number: int) -> None:
        self._lend(number, self.size())

    def deferred(self, number: int) -> None:
        delay = self.choice.expovariate(1 / 0.3)
        if self.choice.random() < 0.5:
            self._publish_one(number, self.size(), delay)
        else:
            count = self.choice.randrange(2, 20)
            self._publish_many(number, [self.size() for _ in range(count)], delay)

    def large(self, number: int) -> None:
        self._publish_one(number, self.large_size())

    def large_batch(self, number: int) -> None:
        self._publish_many(number, [self.large_size() for _ in range(self.choice.randrange(2, 4))])

    def large_loan(self, number: int) -> None:
        self._lend(number, self.large_size())


class SlowProducer(Producer):
    """For a channel whose consumers hold what they take: a few small messages at a time."""

    role = "slow-producer"
    burst = 1
    pause = 0.02
    kinds: ClassVar[dict[str, int]] = {"single": 3, "batch": 1}

    def batch(self, number: int) -> None:
        self._publish_many(number, [self.size() for _ in range(self.choice.randrange(2, 6))])


# ---- consumers ----


@dataclass(frozen=True)
class Delivery:
    """A message that was taken, and what the log calls it."""

    message: Any
    id: int
    key: int
    attempts: int


class Consumer(Actor):
    """Takes, finishes, touches, holds views; requeues nothing and has no timeout, so that its
    channel is first in, first out."""

    role = "consumer"
    max_in_flights = (1, 7, 60, 400)
    takes_until_closed = 400

    def work(self) -> None:
        assert self.broker is not None
        while not self.over:
            most = self.choice.choice(self.max_in_flights)
            consumer = self.patiently(lambda most=most: self.open(most))
            for _ in range(self.choice.randrange(1, self.takes_until_closed)):
                if self.over:
                    break
                self.one_round(consumer, most)
            self.close(consumer)

    def open(self, max_in_flight: int) -> shmq.Consumer:
        assert self.broker is not None
        timeout = self.timeout_ns / 1e9 if self.timeout_ns else None
        return self.broker.consumer(
            self.place.topic, self.place.channel, max_in_flight=max_in_flight, msg_timeout=timeout
        )

    def close(self, consumer: shmq.Consumer) -> None:
        """The messages it still holds go back."""
        op = self.log.next_op()
        self.log.write(record(What.SETTLE, op=op, flag=Settling.CLOSE))
        self.core(consumer.close)
        self.log.write(record(What.SETTLED, op=op, flag=Outcome.DONE))

    def one_round(self, consumer: shmq.Consumer, most: int) -> None:
        """Take once, do something with it."""
        if self.choice.random() < 0.4:
            taken, batch = self.take(consumer, 0.2), None
        else:
            taken, batch = self.take_many(consumer, self.choice.randrange(1, most + 1), 0.2)
        if taken:
            self.handle(taken, batch)

    def handle(self, taken: list[Delivery], batch: shmq.Batch | None) -> None:
        way = self.choice.random()
        if way < 0.1:
            self.settle(Settling.TOUCH, taken, (batch or taken[0].message).touch)
        if way < 0.15:
            self.finish_behind_views(taken)
        elif batch is not None and way < 0.7:
            self.settle(Settling.FINISH, taken, batch.finish)
        else:
            self.one_by_one(Settling.FINISH, taken)

    def one_by_one(self, kind: Settling, taken: list[Delivery]) -> None:
        for delivery in taken:
            self.settle(kind, [delivery], getattr(delivery.message, kind.name.lower()))

    def finish_behind_views(self, taken: list[Delivery]) -> None:
        """A view keeps its body where it is, finished or not."""
        views = []
        for delivery in taken[:10]:
            with contextlib.suppress(NotInFlight):
                views.append((delivery.key, delivery.message.view))
        self.one_by_one(Settling.FINISH, taken)
        for key, view in views:
            assert history.read_body(view) == (key, True), "a view's bytes have changed"

    # ---- calls with their log ----

    def take(self, consumer: shmq.Consumer, timeout: float) -> list[Delivery]:
        return self._taking(1, lambda: _listed(consumer.take(timeout)))

    def take_many(
        self, consumer: shmq.Consumer, n: int, timeout: float
    ) -> tuple[list[Delivery], shmq.Batch]:
        batches: list[shmq.Batch] = []

        def call() -> list[shmq.Message]:
            batches.append(consumer.take_many(n, timeout))
            return list(batches[0])

        return self._taking(n, call), batches[0]

    def _taking(self, n: int, call: Callable[[], list[shmq.Message]]) -> list[Delivery]:
        op = self.log.next_op()
        self.log.write(record(What.TAKE, op=op, count=n))
        return self._taken(op, self.core(call))

    def _taken(self, op: int, messages: list[shmq.Message]) -> list[Delivery]:
        now = time.monotonic_ns()
        lines = [record(What.TAKEN, op=op, count=len(messages), at=now)]
        taken = []
        for message in messages:
            try:
                key, good = history.read_body(message.body)
            except NotInFlight:  # a long one is copied when it is asked for
                key, good = 0, True
            number = int(message.id, 16)
            taken.append(Delivery(message, number, key, message.attempts))
            lines.append(
                record(
                    What.DELIVERY,
                    op=op,
                    flag=good,
                    count=message.attempts,
                    id=number,
                    key=key,
                    at=now,
                )
            )
            lines.append(self.more_of(op, message, number, key))
        self.log.write(b"".join(lines))
        return taken

    def more_of(self, op: int, message: shmq.Message, number: int, key: int) -> bytes:
        """Further records of a delivery."""
        return b""

    def settle(
        self, kind: Settling, taken: list[Delivery], call: Callable[[], None], delay: float = 0.0
    ) -> bool:
        """Whether it said that it was done for all."""
        op = self.log.next_op()
        lines = [record(What.SETTLE, op=op, flag=kind, count=len(taken), id=int(delay * 1e9))]
        lines += [
            record(What.ITEM, op=op, count=each.attempts, id=each.id, key=each.key)
            for each in taken
        ]
        self.log.write(b"".join(lines))
        outcome = Outcome.DONE
        try:
            self.core(call)
        except NotInFlight:
            outcome = Outcome.REFUSED if len(taken) == 1 else Outcome.UNKNOWN
        self.log.write(record(What.SETTLED, op=op, flag=outcome))
        return outcome is Outcome.DONE


def _listed(message: shmq.Message | None) -> list[shmq.Message]:
    return [] if message is None else [message]


class Requeuer(Consumer):
    """Also requeues, lets time out, dies slowly."""

    role = "requeuer"

    def __init__(self, place: Place, number: int, seed: int) -> None:
        super().__init__(place, number, seed)
        self._timeout = self.choice.choice((0.05, 0.3, 60))

    @property
    def timeout_ns(self) -> int:
        return int(self._timeout * 1e9)

    def handle(self, taken: list[Delivery], batch: shmq.Batch | None) -> None:
        way = self.choice.random()
        if way < 0.15:
            self.requeue(taken, batch, 0.0)
        elif way < 0.25:
            self.requeue(taken, batch, self.choice.expovariate(1 / 0.1))
        elif way < 0.3 and self._timeout < 1:
            time.sleep(self._timeout * self.choice.uniform(0.5, 2))
            self.one_by_one(Settling.TOUCH, taken)
            self.one_by_one(Settling.FINISH, taken)
        elif way < 0.33:
            pass  # until it times out, or we close, or die
        else:
            super().handle(taken, batch)

    def requeue(self, taken: list[Delivery], batch: shmq.Batch | None, delay: float) -> None:
        if batch is not None:
            self.settle(Settling.REQUEUE, taken, lambda: batch.requeue(delay), delay)
        else:
            self.settle(Settling.REQUEUE, taken, lambda: taken[0].message.requeue(delay), delay)


class AsyncConsumer(Consumer):
    """Four tasks that take beside each other."""

    role = "async-consumer"
    tasks = 4

    def one_round(self, consumer: shmq.Consumer, most: int) -> None:
        asyncio.run(self._tasks(consumer, most))

    async def _tasks(self, consumer: shmq.Consumer, most: int) -> None:
        results = await asyncio.gather(
            *(self._task(consumer, most) for _ in range(self.tasks)), return_exceptions=True
        )
        for error in filter(None, results):
            raise error

    async def _task(self, consumer: shmq.Consumer, most: int) -> None:
        for _ in range(self.choice.randrange(1, 30)):
            if self.over:
                return
            op = self.log.next_op()
            if self.choice.random() < 0.5:
                self.log.write(record(What.TAKE, op=op, count=1))
                self.handle(self._taken(op, _listed(await consumer.take_async(0.2))), None)
            else:
                n = self.choice.randrange(1, most + 1)
                self.log.write(record(What.TAKE, op=op, count=n))
                batch = await consumer.take_many_async(n, 0.2)
                self.handle(self._taken(op, list(batch)), batch)
            await asyncio.sleep(0)

    def handle(self, taken: list[Delivery], batch: shmq.Batch | None) -> None:
        if taken:
            super().handle(taken, batch)


class Holder(Consumer):
    """Always waits for more and holds each message for a while, so that it dies with some, and
    takes at once what another one dies with."""

    role = "holder"
    most = 200
    seconds = 0.2

    def work(self) -> None:
        consumer = self.patiently(lambda: self.open(self.most))
        held: list[tuple[float, Delivery]] = []
        while not self.over:
            now = time.monotonic()
            wait = min(max(held[0][0] - now, 0), 0.2) if held else 0.2
            for delivery in self.take(consumer, wait):
                held.append((time.monotonic() + self.seconds, delivery))
            now = time.monotonic()
            due = [delivery for until, delivery in held if until <= now]
            held = held[len(due) :]
            self.one_by_one(Settling.FINISH, due)
        self.close(consumer)


class Drainer(Consumer):
    """At the end: takes and finishes until nothing is left."""

    role = "drainer"

    def work(self) -> None:
        assert self.broker is not None
        consumer = self.patiently(lambda: self.open(2000))
        while True:
            taken, batch = self.take_many(consumer, 500, 0.05)
            if taken:
                self.settle(Settling.FINISH, taken, batch.finish)
            elif self.is_empty():
                break
        self.close(consumer)

    def is_empty(self) -> bool:
        """The topic's backlog first: it comes to the channels."""
        topic = self.place.topic
        with sources.open_readonly(self.place.instance) as source:
            entry = source.directory.find_topic(topic)
            assert entry is not None
            backlog = source.directory.find_queue(entry.index, None)
        return all(
            recount.is_empty(self.place.instance, topic, channel)
            for channel in ([None] if backlog else []) + [self.place.channel]
        )


def waiting(instance: str) -> int:
    """Messages on disk and in memory that are to be delivered, over all queues."""
    total = 0
    with sources.open_readonly(instance) as source, contextlib.suppress(Gone, ShmqError):
        for entry in source.directory.live_queues():
            view = source.queue(entry)
            total += view.read("disk_depth") + view.ring_length("ready")
            total += view.ring_length("requeue")
    return total
