"""Taking what a channel holds and saying what was right about it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import shmq
from support.processes import WATCHDOG
from support.recount import is_drained


@dataclass
class Delivered:
    """The deliveries, in the order in which they came."""

    ids: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)

    def add(self, batch: shmq.Batch) -> None:
        """Remember a batch."""
        self.ids += [f"{number:016x}" for number in batch.ids.tolist()]
        self.bodies += batch.bodies()
        self.attempts += batch.attempts.tolist()
        self.timestamps += batch.timestamps.tolist()

    def add_one(self, number: str, body: bytes, attempts: int, timestamp: int) -> None:
        """Remember a message."""
        self.ids.append(number)
        self.bodies.append(body)
        self.attempts.append(attempts)
        self.timestamps.append(timestamp)

    @property
    def twice(self) -> list[bytes]:
        """Bodies that came more than once."""
        return [body for body, count in Counter(self.bodies).items() if count > 1]


def take_all(
    broker: shmq.Broker,
    topic: str,
    channel: str,
    into: Delivered | None = None,
    watchdog: float = WATCHDOG,
) -> Delivered:
    """Take and finish until nothing is left in the channel: ready, deferred, in flight, on disk."""
    delivered = Delivered() if into is None else into
    deadline = time.monotonic() + watchdog
    with broker.consumer(topic, channel, max_in_flight=2000) as consumer:
        while True:
            if batch := take(consumer):
                delivered.add(batch)
                batch.finish()
            elif is_drained(broker.instance, topic, channel):
                break
            assert time.monotonic() < deadline, (
                f"{topic}/{channel} was not empty after {watchdog} s; {len(delivered.ids)} came"
            )
    return delivered


def take(consumer: shmq.Consumer) -> shmq.Batch:
    """A batch, or an empty one if nothing came for a moment."""
    return consumer.take_many(500, timeout=0.05)


class Drain:
    """A thread that takes and finishes what comes to a channel until told to stop."""

    def __init__(self, broker: shmq.Broker, topic: str, channel: str) -> None:
        self.delivered = Delivered()
        self.error: BaseException | None = None
        self._consumer = broker.consumer(topic, channel, max_in_flight=2000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if batch := take(self._consumer):
                    batch.finish()  # first: what it raises for would come again
                    self.delivered.add(batch)
        except BaseException as exc:
            self.error = exc

    def close(self) -> None:
        """Stop, close the consumer; raises what ended the thread before."""
        self._stop.set()
        self._thread.join(WATCHDOG)
        if not self._consumer.closed:
            self._consumer.close()
        if self.error is not None:
            raise self.error


class Background:
    """Runs a function in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._value: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as exc:
            self._error = exc

    def wait(self, seconds: float) -> bool:
        """Wait so long for its end; whether it has come."""
        self._thread.join(seconds)
        return not self.running

    @property
    def running(self) -> bool:
        """Whether it has not come to its end."""
        return self._thread.is_alive()

    def result(self, watchdog: float = WATCHDOG) -> object:
        """Its result."""
        self._thread.join(watchdog)
        assert not self._thread.is_alive(), f"still running after {watchdog} s"
        if self._error is not None:
            raise self._error
        return self._value

    def close(self) -> None:
        """For `keep`: nothing, it is a daemon."""


def take_bodies(consumer: shmq.Consumer, count: int) -> list[bytes]:
    """The bodies of the next `count` messages, which are finished."""
    found = []
    for _ in range(count):
        message = consumer.take(timeout=WATCHDOG)
        assert message is not None
        found.append(message.body)
        message.finish()
    return found


def sorted_bodies(broker: shmq.Broker, topic: str, channel: str = "c") -> list[bytes]:
    """The bodies, which are numbers, of all messages of the channel, which are finished."""
    consumer, came = broker.consumer(topic, channel), []
    while batch := consumer.take_many(100, 1.0):
        came += batch.bodies()
        batch.finish()
    return sorted(came, key=int)


def taken(broker: shmq.Broker) -> list[tuple[bytes, int]]:
    with broker.consumer("t", "c", max_in_flight=1000) as consumer:
        batch = consumer.take_many(1000, 0)
        found = [(message.body, message.attempts) for message in batch]
        batch.finish()
    return found
