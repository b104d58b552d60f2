"""The cells are tried on a site: an instance with low limits, its gateway, a handle of each kind.

A site can say whether something of it was lost: `check` reads back what was published first.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from support import processes
from support.processes import Child, eventually

import shmq

TOPIC, CHANNEL = "numbers", "c"
GONE = "gone"  # a topic whose messages nobody wants
ASKED = "asked"  # a topic whose messages are answered
KEPT = "kept"  # a topic that no cell touches
WAITING = 64  # messages for those that take
MESSAGE = 4096  # max_msg_size
BODY = 16384  # max_body_size
READY = 256  # mem_queue_size
IN_FLIGHT = 256  # in_flight_slots
TOPICS = 40  # max_topics
OPTIONS = {
    "max_msg_size": MESSAGE,
    "max_body_size": BODY,
    "arena_size": 1 << 20,
    "mem_queue_size": READY,
    "in_flight_slots": IN_FLIGHT,
    "gateway_workers": 1,
}


class Site:
    """An instance with a gateway on sockets in a directory."""

    def __init__(self, directory: Path, instance: str, **options: Any) -> None:
        self.instance = instance
        self.directory = directory
        data = directory / "data"
        data.mkdir()
        self.tcp, self.http = str(directory / "tcp"), str(directory / "http")
        addresses = {"tcp_address": self.tcp, "http_address": self.http}
        self.server: Child = processes.serve(instance, data, **addresses, **(OPTIONS | options))
        eventually(self._answers)
        self._open = contextlib.ExitStack()
        self._epochs = itertools.count(1)
        kept = self.broker.producer(KEPT)
        self.broker.create_channel(KEPT, CHANNEL)
        kept.publish_many([b"%d" % number for number in range(WAITING)])
        threading.Thread(target=self._answer, daemon=True).start()

    def _answers(self) -> bool:
        for path in (self.tcp, self.http):
            with socket.socket(socket.AF_UNIX) as found:
                if found.connect_ex(path):
                    return False
        return True

    def keep(self, handle: Any) -> Any:
        """Close it with the site."""
        return self._open.enter_context(contextlib.closing(handle))

    def check(self) -> None:
        """Assert that all that was published first is there, whole, and that the instance works."""
        with self.broker.consumer(KEPT, CHANNEL, max_in_flight=1000) as consumer:
            batch = consumer.take_many(WAITING, 0)
            assert batch.bodies() == [b"%d" % number for number in range(WAITING)]
            batch.requeue()
        assert self.broker.supervisor_alive()

    def close(self) -> None:
        with contextlib.suppress(shmq.ShmqError):
            self._open.close()
        self.server.close()
        processes.remove_instance(self.instance)

    # ---- handles, made when they are first used ----

    @cached_property
    def broker(self) -> shmq.Broker:
        return self.keep(shmq.attach(self.instance, timeout=processes.WATCHDOG))

    @cached_property
    def remote(self) -> shmq.RemoteBroker:
        return self.keep(shmq.connect(self.tcp, timeout=processes.WATCHDOG))

    @cached_property
    def producer(self) -> shmq.Producer:
        return self.broker.producer(TOPIC)

    @cached_property
    def consumer(self) -> shmq.Consumer:
        self.supply(self.producer)
        return self.keep(self.broker.consumer(TOPIC, CHANNEL))

    @cached_property
    def gone_producer(self) -> shmq.Producer:
        self.broker.configure(GONE, CHANNEL, max_messages=100, overflow="drop-oldest")
        return self.broker.producer(GONE)

    @cached_property
    def remote_producer(self) -> Any:
        assert self.gone_producer
        return self.keep(self.remote.producer(GONE))

    @cached_property
    def many(self) -> shmq.MultiConsumer:
        assert self.consumer
        return self.keep(self.broker.consumer([TOPIC], CHANNEL))

    @cached_property
    def remote_consumer(self) -> Any:
        assert self.consumer
        return self.keep(self.remote.consumer(TOPIC, CHANNEL, max_in_flight=10))

    @cached_property
    def holder(self) -> shmq.LeaseHolder:
        assert self.consumer
        return self.keep(self.broker.lease_holder(TOPIC, CHANNEL, "near"))

    @cached_property
    def remote_holder(self) -> Any:
        assert self.consumer
        return self.keep(self.remote.lease_holder(TOPIC, CHANNEL, "remote"))

    @cached_property
    def results(self) -> shmq.Results:
        made = self.broker.results("kept", max_keys=100, max_bytes=1 << 16)
        made.set(b"there", b"v")
        return made

    @cached_property
    def dead(self) -> shmq.DeadLetters:
        self.broker.configure("deadly", CHANNEL, max_attempts=3)
        return self.broker.dead("deadly", CHANNEL)

    @cached_property
    def queue(self) -> shmq.Queue:
        return self.keep(shmq.Queue(5, broker=self.broker))

    @cached_property
    def executor(self) -> shmq.Executor:
        made = shmq.Executor(1)
        self._open.callback(made.kill_workers)
        return made

    def next_epoch(self) -> int:
        """One that was not staged yet."""
        return next(self._epochs)

    def _answer(self) -> None:
        with shmq.attach(self.instance) as broker:
            for question in broker.consumer(ASKED, CHANNEL):
                with contextlib.suppress(shmq.ShmqError):  # nobody waits any more
                    question.reply(question.body)

    def supply(self, producer: shmq.Producer) -> None:
        """Messages to take, each to be given back."""
        self.broker.create_channel(TOPIC, CHANNEL)
        producer.publish_many([b"x"] * WAITING)
