"""Memory is bounded, the rest goes to disk and comes back, in order, also over restarts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import Background, Delivered, Drain, take_all
from support.processes import WATCHDOG, Child, eventually

import shmq
from shmq import shm, sources
from shmq.errors import Full
from shmq.storage import metadata
from shmq.storage.data_path import existing_files
from shmq.storage.records import Record, decode_records

Open = Callable[..., shmq.Broker]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


def numbered(count: int) -> list[bytes]:
    return [b"%07d" % i for i in range(count)]


def shared_bytes(instance: str) -> int:
    """The bytes that the instance takes in /dev/shm: pages, not sizes."""
    files = [
        shm.path_of(item.name) for item in shm.list_objects(instance) if item.kind != "semaphore"
    ]
    return sum(os.stat(file).st_blocks * 512 for file in files)


def channel_stats(broker: shmq.Broker, topic: str, channel: str) -> shmq.ChannelStats:
    (found,) = [
        entry
        for item in broker.stats().topics
        if item.name == topic
        for entry in item.channels
        if entry.name == channel
    ]
    return found


def test_what_does_not_fit_in_memory_waits_on_disk_and_memory_stays_bounded(
    open_broker: Open,
) -> None:
    broker = open_broker(mem_queue_size=1000)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    expected = [b"%07d" % i + bytes(193) for i in range(50_000)]
    most = 0
    for first in range(0, 50_000, 100):
        producer.publish_many(expected[first : first + 100])
        if first % 5000 == 0:
            most = max(most, shared_bytes(broker.instance))
    stats = channel_stats(broker, "t", "c")
    assert stats.depth == 50_000
    assert stats.backend_depth > 40_000
    # the directory, and for 50 000 messages much less than their 10 MB of bodies and 6 MB of slots
    assert most < 8 << 20
    assert take_all(broker, "t", "c").bodies == expected


@pytest.mark.parametrize("size", [0, 300])
def test_order_is_kept_from_memory_over_disk_to_memory_while_both_sides_work(
    open_broker: Open, keep: Any, size: int
) -> None:
    broker = open_broker(mem_queue_size=size, max_bytes_per_file=100_000)
    for channel in ("slow", "fast"):
        broker.create_channel("t", channel)
    fast = keep(Drain(broker, "t", "fast"))
    expected = numbered(20_000)

    def publish() -> None:
        producer = broker.producer("t")
        for first in range(0, len(expected), 40):
            producer.publish_many(expected[first : first + 40])

    publishing = keep(Background(publish))
    eventually(lambda: channel_stats(broker, "t", "slow").backend_depth > 2000)
    slow = keep(Drain(broker, "t", "slow"))  # from now on takes while it is still published
    publishing.result()
    slow.close()
    assert take_all(broker, "t", "slow", into=slow.delivered).bodies == expected
    fast.close()
    assert take_all(broker, "t", "fast", into=fast.delivered).bodies == expected


def test_memory_full_of_large_bodies_makes_way_for_older_ones_on_disk(
    serve: Serve, attach: Attach
) -> None:
    """Ready messages may not be taken before older ones on disk, and must not keep the memory that
    those need, even if they are few and no publisher waits for room."""
    server = serve(mem_queue_size=1000, arena_size=1 << 20, max_msg_size=100_000)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    expected = [b"%07d" % i + bytes(40_000) for i in range(100)]
    left = iter(expected)
    for body in itertools.islice(left, 60):
        producer.publish(body, timeout=10)
    delivered = Delivered()
    server.stop()  # so that nothing is read back meanwhile
    with broker.consumer("t", "c") as consumer:
        while batch := consumer.take_many(500, timeout=0):
            delivered.add(batch)
            batch.finish()
    with contextlib.suppress(Full):
        for body in left:
            producer.publish(body, timeout=0)
    producer.publish(b"small", timeout=0)  # fits: nobody lacks room
    assert channel_stats(broker, "t", "c").backend_depth > 0
    os.kill(server.pid, signal.SIGCONT)
    take_all(broker, "t", "c", into=delivered)
    count = len(delivered.bodies) - 1
    assert count > 60
    assert delivered.bodies == [*expected[:count], b"small"]


def test_everything_is_kept_over_a_clean_stop_in_nsqds_files(
    serve: Serve, attach: Attach, data_path: Path, instance: str
) -> None:
    server = serve(mem_queue_size=1000, max_bytes_per_file=50_000)
    broker = attach()
    broker.create_channel("t", "c")
    broker.create_channel("t", "paused")
    broker.pause_channel("t", "paused")
    producer = broker.producer("t")
    expected = numbered(5000)
    ids = [
        number
        for first in range(0, 5000, 100)
        for number in producer.publish_many(expected[first : first + 100])
    ]
    with broker.consumer("t", "c") as consumer:
        finished = consumer.take_many(100, timeout=10)
        finished.finish()
        held = consumer.take_many(50, timeout=10)
        assert len(held) == 50
        assert server.kill(signal.SIGTERM) == 0
    assert not shm.list_objects(instance)
    with pytest.raises(shmq.Gone):
        producer.publish(b"too late")

    left = dict(zip(ids, expected, strict=True))
    for number in finished.ids.tolist():
        del left[number]
    found = existing_records(data_path, "t:c")
    assert {int(record.id, 16): record.body for record in found} == left
    assert len(found) == len(left)
    attempts = {int(record.id, 16): record.attempts for record in found}
    assert {number for number in attempts if attempts[number]} == set(held.ids.tolist())
    assert len(existing_records(data_path, "t:paused")) == 5000
    (topic,) = metadata.load(data_path)
    assert {(c.name, c.paused) for c in topic.channels} == {("c", False), ("paused", True)}

    serve()
    broker = attach()
    assert channel_stats(broker, "t", "paused").paused
    came = take_all(broker, "t", "c")
    assert {int(name, 16): body for name, body in zip(came.ids, came.bodies, strict=True)} == left
    assert came.twice == []
    assert int(broker.producer("t").publish(b"next"), 16) > max(ids)
    broker.unpause_channel("t", "paused")
    assert sorted(take_all(broker, "t", "paused").bodies) == [*expected, b"next"]


@pytest.mark.parametrize("count", [200, 5000])
def test_order_is_kept_over_a_clean_stop(serve: Serve, attach: Attach, count: int) -> None:
    server = serve(mem_queue_size=1000)
    broker = attach()
    broker.create_channel("t", "c")
    for first in range(0, count, 100):
        broker.producer("t").publish_many(numbered(count)[first : first + 100])
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve(mem_queue_size=1000)
    assert take_all(attach(), "t", "c").bodies == numbered(count)


def test_order_is_kept_over_a_stop_after_a_second_overflow(
    serve: Serve, attach: Attach, instance: str
) -> None:
    """Some of what waits in memory was on disk before; what overflowed last was not, and its
    records are not as long."""
    server = serve(mem_queue_size=1000)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    expected = [body + bytes(i * 7919 % 151) for i, body in enumerate(numbered(2700))]
    with sources.open_readonly(instance) as source:
        queue = source.queue(source.directory.live_queues()[0])
        producer.publish_many(expected[:900])
        eventually(lambda: queue.read("restored"))
        eventually(lambda: queue.read("disk_read") == queue.read("disk_write"))
        producer.publish_many(expected[900:1800])
        producer.publish_many(expected[1800:])
        eventually(lambda: len(queue.ready) < 750)
    assert server.kill(signal.SIGTERM) == 0
    serve()
    assert take_all(attach(), "t", "c").bodies == expected


def existing_records(data_path: Path, base: str) -> list[Record]:
    """The messages in the files of a queue between the positions of its meta file."""
    depth, read, _ = (data_path / f"{base}.diskqueue.meta.dat").read_text().splitlines()
    number, offset = map(int, read.split(","))
    records: list[Record] = []
    for file in existing_files(data_path)[base].numbers:
        data = (data_path / f"{base}.diskqueue.{file:06d}.dat").read_bytes()
        if file >= number:
            records += decode_records(data[offset if file == number else 0 :], 1 << 20)
    assert len(records) == int(depth)
    return records


def test_a_full_queue_without_a_supervisor_is_full_and_goes_on_with_the_next_one(
    serve: Serve, attach: Attach, keep: Any, instance: str
) -> None:
    server = serve(mem_queue_size=256)
    broker = attach()
    broker.create_channel("t", "c")
    server.kill()
    producer = broker.producer("t")
    expected = []
    for body in numbered(256):
        producer.publish(body, timeout=0.05)
        expected.append(body)
    with pytest.raises(Full, match="supervisor"):
        producer.publish(b"one too many", timeout=0.05)
    with broker.consumer("t", "c") as consumer:
        batch = consumer.take_many(56, timeout=0)
        assert batch.bodies() == expected[:56]
        batch.finish()
    more = numbered(2000)
    waiting = keep(Background(lambda: [producer.publish(body) for body in more]))
    eventually(
        lambda: (
            len(
                sources.open_readonly(instance)
                .queue(sources.open_readonly(instance).directory.live_queues()[0])
                .ready
            )
            == 256
        )
    )
    assert waiting.running
    serve(mem_queue_size=256)
    waiting.result()
    assert take_all(broker, "t", "c").bodies == [*expected[56:], *more]


def test_a_message_or_batch_that_never_fits_is_refused_at_once(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=256, arena_size=1 << 20, max_msg_size=100_000)
    producer = broker.producer("t")
    broker.create_channel("t", "c")
    with pytest.raises(shmq.MessageTooBig, match="max_msg_size"):
        producer.publish(bytes(100_001))
    with pytest.raises(shmq.MessageTooBig, match="mem_queue_size"):
        producer.publish_many([b"x"] * 257)
    with pytest.raises(shmq.MessageTooBig, match="arena_size"):
        producer.publish_many([bytes(90_000)] * 12)
    with pytest.raises(shmq.ShmqError, match="empty"):
        producer.publish(b"")
    for _ in range(30):  # 3 MB through 1 MiB
        producer.publish(bytes(100_000), timeout=30)
    assert len(take_all(broker, "t", "c").bodies) == 30


@pytest.mark.parametrize("every", [0.002, 0.2])
@pytest.mark.parametrize("channels", [0, 1])
def test_who_tries_again_and_again_gets_room_as_who_waits(
    open_broker: Open, channels: int, every: float
) -> None:
    """A batch that fits, but not beside what is there, which alone is no reason to spill."""
    broker = open_broker(mem_queue_size=300)
    producer = broker.producer("t")
    for number in range(channels):
        broker.create_channel("t", f"c{number}")
    expected = numbered(600)
    for first in range(0, 600, 200):

        def published(first: int = first) -> bool:
            with contextlib.suppress(Full):
                producer.publish_many(expected[first : first + 200], timeout=0)
                return True
            time.sleep(every)
            return False

        eventually(published)
    assert take_all(broker, "t", "c0").bodies == expected


def test_what_was_read_ahead_does_not_keep_a_large_message_waiting(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=0, arena_size=1 << 20, max_msg_size=700_000)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    bodies = [bytes([number]) * 50_000 for number in range(20)]
    for body in bodies:
        producer.publish(body, timeout=WATCHDOG)
    eventually(lambda: broker.stats().channel("t", "c").restored > 5)
    for number in range(4):
        bodies.append(bytes([100 + number]) * 700_000)
        producer.publish(bodies[-1], timeout=WATCHDOG)
    for body in bodies:
        message = consumer.take(timeout=WATCHDOG)
        assert message is not None
        assert message.body == body
        message.finish()


@pytest.mark.parametrize("held", [0, 40])
def test_what_goes_before_the_disk_makes_room_for_deferred_messages(
    open_broker: Open, held: int
) -> None:
    """Nobody consumes, and what waits in memory can neither be read again from where it was on disk
    nor go behind what is there. held: in flight all the time."""
    broker = open_broker(mem_queue_size=256, in_flight_slots=256)
    producer, consumer = broker.producer("t"), broker.consumer("t", "c")
    expected = numbered(500)

    def on_disk() -> int:
        return channel_stats(broker, "t", "c").backend_depth

    producer.publish_many(expected[:held] or [b"x"], timeout=WATCHDOG)
    batch = consumer.take_many(held or 1, timeout=WATCHDOG)
    producer.publish_many(expected[held : held + 200], timeout=WATCHDOG)  # overflows, comes back
    eventually(lambda: channel_stats(broker, "t", "c").restored and not on_disk())
    producer.publish_many(expected[held + 200 : 400], timeout=WATCHDOG)  # overflows again
    eventually(on_disk)
    for _ in range(3):
        producer.publish_many([b"later"] * 200, defer=600, timeout=WATCHDOG)
    producer.publish_many(expected[400:], timeout=WATCHDOG)
    batch.finish()
    came = Delivered()
    while len(came.ids) < 500 - held:
        some = consumer.take_many(500, timeout=WATCHDOG)
        assert some
        came.add(some)
        some.finish()
    assert (came.bodies, set(came.attempts)) == (expected[held:], {1})
    assert channel_stats(broker, "t", "c").deferred == 600
