"""Actors that work through what stands around the core: they attach for a moment, call the gateway
by `shmq.connect`, put and get items of queues, send tasks to pools.

An errand is an item or a task with a key of its own. Its history: BEGUN before it is sent, SENT
when the call has returned, HAD when it was got or its outcome came, ENDING and ENDED around the
call that says it is done. `errand_rules` is the verdict."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import queue
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as LateError
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from chaos.storm import history
from chaos.storm.actors import Actor, Consumer, Delivery, Place
from chaos.storm.history import LEAST_BYTES, Errand, Outcome, Settling, What, key_of, record
from support import recount

import shmq
from shmq.errors import Full, Gone, NotInFlight, NotRunning
from shmq.options import Options

POOL = "errands"  # the topic of the durable pool
QUEUES = ("item-queue", "chore-queue")  # a Queue and a JoinableQueue
ATTEMPTS = 30  # more than the workers that a task can meet in a round
SUICIDES = 0.02  # share of the runs of a task that kill their worker
WORKERS = "errands.workers"  # pid and start of each process that ran a task
RUNS = "errands.runs"  # the key of each task, once for each run
CALLS = "celery"  # what calls of Celery's tasks have as their topic
CALL_WORKERS = "celery.workers"
CALL_RUNS = "celery.runs"
#: The other task frameworks that are installed; their tasks have the name as their topic.
FRAMEWORKS = tuple(name for name in ("dramatiq", "taskiq", "django") if find_spec(name))
RUN = struct.Struct("<Q")
WORKER = struct.Struct("<Qd")
LARGE = 200_000


class Errands(Actor):
    """Logs errands."""

    def __init__(self, place: Place, number: int, seed: int) -> None:
        super().__init__(place, number, seed)
        self.keys = (key_of(number, turn) for turn in itertools.count(1))

    def note(self, errand: Errand, key: int = 0, good: bool = True) -> None:
        self.log.write(record(What.ERRAND, flag=errand, key=key, count=good))

    def rest(self) -> None:
        time.sleep(0.03 * self.choice.random() * (5 if self.place.control.throttle else 1))


class Visitor(Errands):
    """Attaches, and is gone again, in order or forgotten."""

    role = "visitor"

    def attach(self) -> None:
        pass

    def work(self) -> None:
        while not self.over:
            self.note(Errand.CAME)
            self.broker = self.patiently(lambda: self.core(super(Visitor, self).attach))
            self.note(Errand.CAME)
            broker, self.broker = self.broker, None
            if broker is not None and self.choice.random() < 0.7:
                self.core(broker.close)
            del broker
            self.rest()


# ---- queues ----


class QueueActor(Errands):
    """Has the queue that its topic names."""

    def open(self) -> shmq.Queue:
        kind = shmq.JoinableQueue if self.place.topic == QUEUES[1] else shmq.Queue
        return kind(broker=self.broker, name=self.place.topic)

    def work(self) -> None:
        items = self.patiently(self.open)
        while not self.over:
            for _ in range(20):
                with contextlib.suppress(NotRunning, queue.Empty, queue.Full):
                    self.one(items)
            self.rest()

    def one(self, items: shmq.Queue) -> None:
        raise NotImplementedError


class Putter(QueueActor):
    """Puts items, small and large."""

    role = "putter"

    def one(self, items: shmq.Queue) -> None:
        key = next(self.keys)
        large = self.choice.random() < 0.02
        size = LARGE if large else LEAST_BYTES + int(self.choice.expovariate(1 / 200))
        body = history.make_body(key, size, self.place.filler)
        self.note(Errand.BEGUN, key)
        self.core(lambda: items.put(body, timeout=5))
        self.note(Errand.SENT, key)


class Getter(QueueActor):
    """Gets items, with `ack` or by `task_done`; gives some back, and dies with some."""

    role = "getter"
    seconds = 0.2  # to wait for an item

    def one(self, items: shmq.Queue) -> None:
        self.note(Errand.ASKED)
        if isinstance(items, shmq.JoinableQueue):
            body = self.core(lambda: items.get(timeout=self.seconds))
            key = self.had(body)
            self.end(key, items.task_done)
            return
        item = self.core(lambda: items.get(timeout=self.seconds, ack=True))
        key = self.had(item.value)
        if self.choice.random() < self.returns:
            self.core(item.requeue)
        else:
            self.end(key, item.done)

    returns = 0.1  # share of the items that go back

    def had(self, body: bytes) -> int:
        key, good = history.read_body(body)
        self.note(Errand.HAD, key, good)
        return key

    def end(self, key: int, call: Callable[[], object]) -> None:
        self.note(Errand.ENDING, key)
        self.core(call)
        self.note(Errand.ENDED, key)


class Sweeper(Getter):
    """At the end: gets and ends what is left."""

    role = "sweeper"
    returns = 0.0

    def work(self) -> None:
        items = self.patiently(self.open)
        while not recount.is_empty(self.place.instance, self.place.topic, "queue"):
            with contextlib.suppress(queue.Empty):
                self.one(items)


# ---- pools ----


def run_task(directory: Path, key: int) -> int:
    """In a worker. Says that it ran, and sometimes kills its process before or after."""
    fate = int.from_bytes(os.urandom(4), "big") / 2**32
    if fate < SUICIDES / 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sign_on(directory / WORKERS)
    append(directory / RUNS, RUN.pack(key))
    if fate < SUICIDES:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * key + 1


def append(path: Path, line: bytes) -> None:
    """In one write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, line)
    os.close(fd)


def sign_on(path: Path) -> None:
    """This process is a worker, of those in the file."""
    append(path, WORKER.pack(os.getpid(), psutil.Process().create_time()))


class Submitter(Errands):
    """Sends tasks to a durable pool, does some of them in workers of its own, waits for values."""

    role = "submitter"
    lead = 20  # tasks that are not waited for yet

    def work(self) -> None:
        with contextlib.suppress(BrokenProcessPool):  # the instance was stopped
            self.submit_until_over()

    def submit_until_over(self) -> None:
        while not self.over:
            executor = self.patiently(self.open)
            with executor:
                for _ in range(self.choice.randrange(10, 200)):
                    if self.over:
                        break
                    with contextlib.suppress(NotRunning):
                        self.one(executor)
                while self.sent:
                    self.collect()

    def open(self) -> shmq.Executor:
        self.sent: deque[tuple[int, Any]] = deque()
        return shmq.Executor(2, attempts=ATTEMPTS, broker=self.broker, topic=POOL)

    def one(self, executor: shmq.Executor) -> None:
        key = next(self.keys)
        self.note(Errand.BEGUN, key)
        future = self.core(lambda: executor.submit(run_task, self.place.directory, key))
        self.note(Errand.SENT, key)
        self.sent.append((key, future))
        if len(self.sent) > self.lead:
            self.collect()
            self.rest()

    def collect(self) -> None:
        """Wait for the first of those that were sent. The log grows meanwhile: a pool has the
        workers that it has, and others' tasks come first."""
        key, future = self.sent.popleft()
        while True:
            with contextlib.suppress(LateError):
                value = future.result(timeout=5)
                break
            self.note(Errand.ASKED, key)
        self.note(Errand.HAD, key, value == 2 * key + 1)


class Finisher(Submitter):
    """At the end: workers for the tasks that nobody waits for any more, and one task more."""

    role = "finisher"

    def work(self) -> None:
        with self.patiently(self.open) as executor:
            while not recount.is_empty(self.place.instance, POOL, "pool"):
                self.note(Errand.ASKED)
                time.sleep(0.05)
            self.one(executor)
            self.collect()


# ---- over TCP ----


class Caller(Consumer):
    """Takes by `shmq.connect`. Nothing confirms what it finishes. It closes its consumer, or its
    broker, or forgets both."""

    role = "caller"
    max_in_flights = (1, 7, 60)

    @property
    def timeout_ns(self) -> int:
        return int(Options().msg_timeout * 1e9)

    def attach(self) -> None:
        pass

    def work(self) -> None:
        while not self.over:
            self.stream = self.log.next_op()
            self.log.write(record(What.TAKE, op=self.stream))
            with contextlib.suppress(NotRunning, Gone):
                self.call_once()
            time.sleep(0.02)

    def call_once(self) -> None:
        broker = shmq.connect(f"127.0.0.1:{self.place.port}", timeout=5)
        consumer = broker.consumer(
            self.place.topic,
            self.place.channel,
            max_in_flight=self.choice.choice(self.max_in_flights),
        )
        way = self.choice.choice(["consumer", "broker", "forgotten"])
        try:
            for _ in range(self.choice.randrange(1, 60)):
                if self.over:
                    break
                take = functools.partial(consumer.take_many, 20, 0.2)
                taken = self._delivered(list(self.core(take)))
                del take
                if taken:
                    self.handle(taken, None)
        finally:
            op = self.log.next_op()
            self.log.write(record(What.SETTLE, op=op, flag=Settling.CLOSE))
            if way == "consumer":
                consumer.close()
            if way != "forgotten":
                broker.close()
            del consumer, broker
            gc.collect()
            self.log.write(record(What.SETTLED, op=op))

    def _delivered(self, messages: list[Any]) -> list[Delivery]:
        taken, lines = [], []
        for message in messages:
            key, good = history.read_body(bytes(message.body))
            taken.append(Delivery(message, int(message.id, 16), key, message.attempts))
            lines.append(
                record(
                    What.DELIVERY,
                    op=self.stream,
                    flag=good,
                    count=message.attempts,
                    id=int(message.id, 16),
                    key=key,
                )
            )
        self.log.write(b"".join(lines))
        return taken

    def handle(self, taken: list[Delivery], batch: shmq.Batch | None) -> None:
        for delivery in taken:
            if self.choice.random() < 0.95:
                self.settle(Settling.FINISH, [delivery], delivery.message.finish)

    def settle(
        self, kind: Settling, taken: list[Delivery], call: Callable[[], None], delay: float = 0.0
    ) -> bool:
        op = self.log.next_op()
        (each,) = taken
        self.log.write(
            record(What.SETTLE, op=op, flag=kind, count=1)
            + record(What.ITEM, op=op, count=each.attempts, id=each.id, key=each.key)
        )
        with contextlib.suppress(NotInFlight, NotRunning, Gone, Full):
            self.core(call)
        self.log.write(record(What.SETTLED, op=op, flag=Outcome.UNKNOWN))
        return False


def living_workers(directory: Path, name: str = WORKERS) -> list[int]:
    """The processes that signed on in this file and are there."""
    path = directory / name
    raw = path.read_bytes() if path.exists() else b""
    found = []
    for pid, began in set(WORKER.iter_unpack(raw[: len(raw) // WORKER.size * WORKER.size])):
        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(pid)
            if one.create_time() == began and one.status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
