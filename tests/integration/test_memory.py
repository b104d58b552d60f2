"""Memory that a queue does not need any more goes back: deleted, or drained."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import Child, eventually, say
from support.recount import recount_all

import shmq
from shmq import shm

Open = Callable[..., shmq.Broker]
Spawn = Callable[..., Child]

MIB = 1 << 20
#: In a mount namespace of its own.
SMALL = 'mount -t tmpfs -o size=48m tmpfs /dev/shm && exec "$@"'


def open_segment(broker: shmq.Broker, topic: str, channel: str) -> int:
    """A descriptor of a channel's segment, which stays when its name goes."""
    serial = int(broker.channel_identity(topic, channel).rpartition("-")[2])
    return shm.open_queue(broker.instance, serial, read_only=True)


def in_use(fd: int) -> int:
    """Bytes of memory behind a segment."""
    return os.fstat(fd).st_blocks * 512


def is_below(fd: int, nbytes: int) -> bool:
    return in_use(fd) < nbytes


def deleted_maps(pid: int, instance: str) -> int:
    """How many segments of the instance the process has mapped whose name is gone."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(f"shmq.{instance}." in line and line.endswith("(deleted)") for line in lines)


def fill(producer: shmq.Producer, nbytes: int) -> int:
    """Publish this many bytes; returns the number of messages."""
    for _ in range(nbytes // 100_000):
        producer.publish_many([bytes(1000)] * 100, timeout=30)
    return nbytes // 100_000 * 100


def test_a_deleted_channel_that_overflowed_gives_its_memory_back(open_broker: Open) -> None:
    """Though its consumer and producer have it mapped still, and a view and a message are held."""
    broker = open_broker(arena_size=8 * MIB)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    producer.publish(b"seen" * 5000)
    producer.publish(b"kept" * 5000)
    fill(producer, 16 * MIB)
    assert broker.channel_stats("t", "c").spilled > 0
    fd = open_segment(broker, "t", "c")
    consumer = broker.consumer("t", "c")
    seen, kept = consumer.take(timeout=10), consumer.take(timeout=10)
    assert seen is not None
    assert kept is not None
    view = seen.view
    before = in_use(fd)
    assert before > 8 * MIB
    broker.delete_channel("t", "c")
    assert in_use(fd) < before - 7 * MIB
    assert bytes(view) == b"seen" * 5000
    assert kept.body == b"kept" * 5000  # was in flight, and not read before
    eventually(lambda: deleted_maps(broker.supervisor_pid, broker.instance) == 0)
    producer.publish(b"x")  # a look at the list of channels lets go of it
    view.release()
    del view, seen, kept
    consumer.close()
    del consumer
    eventually(lambda: deleted_maps(os.getpid(), broker.instance) == 0)
    os.close(fd)


def test_a_deleted_channel_gives_back_all_of_it_though_clients_have_it_mapped(
    open_broker: Open,
) -> None:
    """Slots, rings and bodies, also while a message of it is in flight."""
    broker = open_broker(mem_queue_size=200_000)
    broker.create_channel("t", "c")
    fd = open_segment(broker, "t", "c")
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    producer.publish(b"kept")
    kept = consumer.take(timeout=10)
    assert kept is not None
    before = in_use(fd)
    for _ in range(100):
        producer.publish_many([b"x" * 100] * 1000, timeout=30)
    during = in_use(fd)
    assert during > 24 * MIB  # of which 16 MiB are slots and rings
    broker.delete_channel("t", "c")
    assert deleted_maps(os.getpid(), broker.instance) == 1
    assert in_use(fd) <= before
    assert kept.body == b"kept"
    with pytest.raises(shmq.Gone):
        kept.finish()
    with pytest.raises(shmq.Gone):
        consumer.take(timeout=0)
    assert in_use(fd) <= before
    os.close(fd)


@pytest.mark.deep
def test_a_drained_channel_gives_its_memory_back_and_grows_again(open_broker: Open) -> None:
    broker = open_broker(arena_size=32 * MIB, mem_queue_size=50_000)
    consumer = broker.consumer("t", "c", max_in_flight=1000)
    producer = broker.producer("t")
    fd = open_segment(broker, "t", "c")
    for _ in range(2):
        count = fill(producer, 16 * MIB)
        full = in_use(fd)
        assert full > 15 * MIB
        while count:
            batch = consumer.take_many(1000, timeout=30)
            count -= len(batch)
            batch.finish()
        eventually(functools.partial(is_below, fd, full - 12 * MIB), watchdog=60)
        recount_all(broker.instance)
    os.close(fd)


@pytest.mark.parametrize(
    "held",
    [
        "view",
        pytest.param("loan", marks=pytest.mark.deep),
        pytest.param("in flight", marks=pytest.mark.deep),
        pytest.param("deferred", marks=pytest.mark.deep),
    ],
)
def test_what_is_held_stays_when_memory_is_given_back(open_broker: Open, held: str) -> None:
    broker = open_broker(arena_size=32 * MIB, mem_queue_size=50_000)
    consumer = broker.consumer("t", "c", max_in_flight=100_000, msg_timeout=None)
    producer = broker.producer("t")
    fd = open_segment(broker, "t", "c")
    body = b"held" * 20_000
    loan = producer.loan(len(body))
    buffer = loan.__enter__() if held == "loan" else None
    if buffer is None:
        producer.publish(body, defer=600 if held == "deferred" else None)
    count = fill(producer, 16 * MIB)
    first = consumer.take(timeout=10) if held in ("view", "in flight") else None
    view = first.view if held == "view" and first is not None else None
    if view is not None and first is not None:
        first.finish()
    while count:
        batch = consumer.take_many(1000, timeout=30)
        count -= len(batch)
        batch.finish()
    eventually(lambda: in_use(fd) < 12 * MIB, watchdog=60)
    if view is not None:
        assert bytes(view) == body
        view.release()
    elif held == "in flight":
        assert first is not None
        assert first.body == body
    elif buffer is not None:
        buffer[:] = body
        loan.__exit__(None, None, None)
        message = consumer.take(timeout=10)
        assert message is not None
        assert message.body == body
    else:
        (message,) = broker.peek("t", "c", state="deferred")
        assert message.body == body
    recount_all(broker.instance)
    os.close(fd)


def fill_drain_and_make_others(instance, data_path):
    with shmq.Broker(data_path=data_path, instance=instance, mem_queue_size=100_000) as broker:
        broker.create_channel("t", "c")
        producer = broker.producer("t")
        consumer = broker.consumer("t", "c", max_in_flight=1000)
        room = os.statvfs("/dev/shm")
        least = room.f_bavail
        count = 0
        while least * room.f_frsize > 1 << 20 and count < 200_000:
            producer.publish_many([bytes(1000)] * 100, timeout=30)
            count += 100
            least = min(least, os.statvfs("/dev/shm").f_bavail)
        say("full", count, least * room.f_frsize)
        while count:
            batch = consumer.take_many(1000, timeout=30)
            count -= len(batch)
            batch.finish()
        for i in range(20):
            broker.create_channel(f"other{i}", "c")
            broker.producer(f"other{i}").publish(b"x")
        say("made")


def test_a_drained_channel_does_not_keep_others_from_being_made(
    child: Spawn, instance: str, data_path: Path
) -> None:
    small = ["unshare", "-Urm", "sh", "-c", SMALL, "sh"]
    runner = child(fill_drain_and_make_others, instance, str(data_path), before=small)
    assert runner.succeed(watchdog=100)[-1] == "made"
