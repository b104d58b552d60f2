"""The log of deaths names the locks that a dead process left, and the queues that were rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child, eventually

import shmq
from shmq import deaths
from shmq.deaths import Held, How, Lock


def publish_and_take_until_killed(instance, point):
    from shmq import _native

    broker = shmq.attach(instance)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c", max_in_flight=100)
    for _ in range(3):
        producer.publish(b"x")
        consumer.take(timeout=20)
    producer.publish(b"x")
    _native.killpoint(point, 1)
    producer.publish(b"x")
    consumer.take(timeout=20)


@pytest.mark.parametrize(
    ("point", "locks", "held"),
    [
        ("publish.prepared", Lock.PUBLISH, 3),
        ("publish.head", Lock.PUBLISH, 3),
        ("take.fields", Lock.DELIVER, 3),
        ("take.heap", Lock.DELIVER, 4),
    ],
)
def test_a_death_under_a_lock(
    killpoints: Path,
    serve: Callable[..., Child],
    attach: Callable[[], shmq.Broker],
    child: Callable[..., Child],
    instance: str,
    point: str,
    locks: Lock,
    held: int,
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    victim = child(publish_and_take_until_killed, instance, point, killpoints=True)
    victim.die()
    (death,) = eventually(lambda: [d for d in deaths.read(instance) if d.pid == victim.pid])
    assert death.locks == locks
    assert death.rebuilt == 1
    assert death.how in (How.KILLED, How.DIED)
    assert death.messages >= 3
    assert death.held in ((Held("t", "c", held),), (Held("t", "c", 3),))
    broker.producer("t").publish(b"x", timeout=20)
    assert broker.stats().channel("t", "c").depth in (5, 6)
