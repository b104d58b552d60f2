"""The pace of the spiller, one round after the other, in the thread of the test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import eventually
from support.still_supervisor import no_backlog, no_fork, still_supervisor

from shmq import _native
from shmq.client import Batch, Consumer, Producer
from shmq.errors import Full
from shmq.supervisor.supervisor import Supervisor

LIST = 32


class Stage:
    """A supervisor whose loops do not run, a producer and a consumer of one channel."""

    def __init__(self, supervisor: Supervisor, client: _native.Broker) -> None:
        topic = supervisor._manager.create_topic("t")
        self.queue = supervisor._manager.create_channel("t", "c")
        self.spiller = supervisor._spiller
        # whether its consumers are fast is a question of time, so they never are
        self.spiller._policy.is_fast = lambda *_: False  # type: ignore[method-assign]
        self.producer = Producer(client, topic.index, topic.generation, "t", no_backlog, no_fork)
        self.consumer = Consumer(
            client, self.queue.index, self.queue.serial, "t", "c", 1000, 0, Batch, no_fork
        )
        self.published: list[bytes] = []
        self.taken: list[bytes] = []

    def round(self) -> None:
        self.spiller._round(time.monotonic())

    def publish(self) -> int:
        """Publish lists until there is no more room. Returns the number of messages."""
        before = len(self.published)
        with contextlib.suppress(Full):
            while True:
                first = len(self.published)
                bodies = [b"%08d" % number for number in range(first, first + LIST)]
                self.producer.publish_many(bodies, timeout=0)
                self.published += bodies
        return len(self.published) - before

    def take(self) -> int:
        """Take and finish all that may be taken now. Returns the number of messages."""
        before = len(self.taken)
        while batch := self.consumer.take_many(1000, 0):
            self.taken += batch.bodies()
            batch.finish()
        return len(self.taken) - before

    @property
    def on_disk(self) -> int:
        return self.queue.view.read("disk_depth")


@pytest.fixture
def stage(data_path: Path, instance: str) -> Iterator[Stage]:
    limits = {"mem_queue_size": 512, "in_flight_slots": 512}
    with still_supervisor(instance, data_path, **limits) as (supervisor, client):
        made = Stage(supervisor, client)
        yield made
        made.consumer.close()


def overflow(stage: Stage, count: int) -> None:
    """Have so many messages on disk."""
    while stage.on_disk < count:
        stage.publish()
        stage.round()


def test_a_queue_leaves_the_disk_though_its_producer_never_pauses(stage: Stage) -> None:
    """If its consumer waits for what is on disk: the producer then gets half of its pace."""
    overflow(stage, 20_000)
    before, rounds = len(stage.published), 0
    while stage.on_disk:
        stage.take()
        stage.publish()
        stage.round()
        rounds += 1
        assert rounds < 2000, stage.on_disk
    assert len(stage.published) - before > 10_000, "the producer came to nothing meanwhile"
    while stage.take():
        stage.round()
    assert stage.taken == stage.published


def test_a_producer_gets_all_the_room_it_needs_when_the_consumer_stops(stage: Stage) -> None:
    overflow(stage, 5000)
    for _ in range(10):
        stage.take()
        stage.publish()
        stage.round()
    more = stage.on_disk + 10_000

    def goes_on() -> bool:
        stage.publish()
        stage.round()
        return stage.on_disk > more

    eventually(goes_on)


def test_a_consumer_that_does_not_wait_for_the_disk_costs_the_producer_no_room(
    stage: Stage,
) -> None:
    overflow(stage, 5000)
    stage.publish()
    for _ in range(100):
        stage.consumer.take_many(20, 0).finish()
        stage.round()
        assert stage.publish() >= stage.queue.capacity // 4
