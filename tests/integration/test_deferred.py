"""P8: a deferred message keeps its due time, over restarts and on disk; and nobody waits for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import Background, take_all
from support.processes import WATCHDOG, Child, eventually

import shmq
from shmq import peek, sources
from shmq.storage import deferred

Open = Callable[..., shmq.Broker]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%07d" % i for i in range(start, start + count)]


def chunk_files(data_path: Path) -> list[deferred.ChunkFile]:
    return [file for files in deferred.existing(data_path).values() for file in files]


def word(instance: str, name: str, channel: str | None = "c") -> int:
    with sources.open_readonly(instance) as source:
        (entry,) = [e for e in source.directory.live_queues() if e.channel == channel]
        return source.queue(entry).read(name)


def in_memory(instance: str, channel: str | None = "c") -> dict[str, int]:
    """Due time of every deferred message that is in memory, by id."""
    with sources.open_readonly(instance) as source:
        (entry,) = [e for e in source.directory.live_queues() if e.channel == channel]
        found = peek.peek(source.queue(entry), "deferred", 1 << 20)
    return {message.id: message.due or 0 for message in found}


def on_disk(data_path: Path) -> dict[str, int]:
    """The same of those in chunks."""
    found = {}
    for file in chunk_files(data_path):
        contents = deferred.decode((data_path / file.name).read_bytes())
        assert not contents.wrong
        for due, record in contents.entries[file.read - contents.first :]:
            found[record[14:30].decode()] = due
    return found


def test_few_deferred_messages_make_few_files(open_broker: Open, data_path: Path) -> None:
    """Nobody reads the channel, memory is full of what has come back, and now and then a deferred
    message comes: it takes the place of many of those, not of one."""
    broker = open_broker(data_path=data_path, mem_queue_size=256, in_flight_slots=256)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    bodies = numbered(4000)
    for i, body in enumerate(bodies):
        producer.publish(body, defer=None if i % 4 else 2.0, timeout=30)
        if not i % 4:  # the supervisor finds one at a time
            time.sleep(0.002)
    made = word(broker.instance, "deferred_write")
    assert made <= 1000 * 16 // 256  # a file for each sixteenth of what may be held
    came = take_all(broker, "t", "c")
    assert sorted(came.bodies) == bodies


def come(broker: shmq.Broker, count: int, watchdog: float = 60.0) -> list[tuple[int, bytes]]:
    """Finish this many messages of t/c; returns the time and the body of each."""
    came: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + watchdog
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        while len(came) < count:
            batch = consumer.take_many(200, timeout=0.5)
            now = time.time_ns()
            came += [(now, body) for body in batch.bodies()]
            batch.finish()
            assert time.monotonic() < deadline, f"{len(came)} of {count} came"
    return came


def test_due_times_are_kept_over_a_clean_stop(
    serve: Serve, attach: Attach, data_path: Path, instance: str
) -> None:
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    producer.publish(b"now")
    soon = time.time_ns() + 4 * 10**9
    for body in numbered(20):
        producer.publish(body, defer=4.0)
    producer.publish_many(numbered(5, 100), defer=3600.0)
    before = in_memory(instance)
    assert len(before) == 25
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    assert on_disk(data_path) == before

    server = serve()
    broker = attach()
    late = max(soon, time.time_ns()) + 3 * 10**9
    stats = broker.stats().topics[0].channels[0]
    assert stats.depth + stats.deferred == 26
    came = come(broker, 21)
    assert [body for _, body in came] == [b"now", *numbered(20)]
    assert all(when >= soon for when, body in came if body != b"now")
    assert max(when for when, _ in came) < late
    broker.close()
    assert server.kill(signal.SIGTERM) == 0  # and over a second one
    left = on_disk(data_path)
    assert len(left) == 5
    assert left == {name: due for name, due in before.items() if name in left}


def test_what_was_requeued_with_a_delay_keeps_its_due_time_and_attempts(
    serve: Serve, attach: Attach
) -> None:
    server = serve()
    broker = attach()
    broker.producer("t").publish(b"x")
    with broker.consumer("t", "c") as consumer:
        message = consumer.take(timeout=10)
        assert message is not None
        message.requeue(delay=3.0)
    due = time.monotonic() + 2.9
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve()
    came = take_all(attach(), "t", "c")
    assert came.bodies == [b"x"]
    assert came.attempts == [2]
    assert time.monotonic() >= due


def test_due_times_on_disk_and_in_memory_are_kept_when_the_supervisor_is_killed(
    serve: Serve, attach: Attach, data_path: Path, instance: str
) -> None:
    server = serve(in_flight_slots=1000)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    due = time.time_ns() + 10 * 10**9
    ids = [
        f"{number:016x}"
        for first in range(0, 3000, 100)
        for number in producer.publish_many(numbered(100, first), defer=10.0)
    ]
    eventually(lambda: word(instance, "deferred_depth") >= 2000)
    server.kill()
    serve(in_flight_slots=1000)
    eventually(lambda: sorted([*in_memory(instance), *on_disk(data_path)]) == ids)
    came = come(attach(), 3000)
    assert sorted(body for _, body in came) == numbered(3000)
    assert min(when for when, _ in came) >= due
    eventually(lambda: not chunk_files(data_path))


@pytest.mark.deep
def test_publishers_of_far_more_than_fits_in_memory_do_not_wait_for_ever(
    serve: Serve, attach: Attach, keep: Any, instance: str, data_path: Path
) -> None:
    serve(in_flight_slots=1000)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    dues: dict[bytes, int] = {}

    def publish() -> None:
        bodies = numbered(50_000)
        for first in range(0, 50_000, 50):
            part = bodies[first : first + 50]
            earliest = time.time_ns() + 12 * 10**9
            producer.publish_many(part, defer=12.0, timeout=30)
            dues.update(dict.fromkeys(part, earliest))

    keep(Background(publish)).result(4 * WATCHDOG)  # a publish that waited 30 s would have raised
    eventually(lambda: broker.stats().topics[0].channels[0].deferred == 50_000)
    came = come(broker, 50_000, 4 * WATCHDOG)
    assert sorted(body for _, body in came) == numbered(50_000)
    assert all(when >= dues[body] for when, body in came)
    latest = 0
    for _, body in came:  # by due time, as far as that was to be told apart when there was no room
        assert dues[body] > latest - 2 * 10**9
        latest = max(latest, dues[body])
    eventually(lambda: not chunk_files(data_path))
    assert word(instance, "deferred_depth") == 0


@pytest.mark.deep
def test_due_times_all_over_come_in_time(serve: Serve, attach: Attach, data_path: Path) -> None:
    serve(in_flight_slots=400)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    dues: dict[bytes, int] = {}
    start = time.time() + 9
    for i, body in enumerate(numbered(4000)):
        # 0 to 8 s, mixed; at once where the machine took long to get here
        delay = max(start + (i * 7919 % 4000) / 500 - time.time(), 0.001)
        dues[body] = time.time_ns() + int(delay * 1e9)
        producer.publish(body, defer=delay, timeout=30)
    came = come(broker, 4000)
    assert sorted(body for _, body in came) == numbered(4000)
    late = [when - dues[body] for when, body in came]
    assert min(late) >= 0
    assert max(late) < 30 * 10**9  # a watchdog
    eventually(lambda: not chunk_files(data_path))


def test_what_is_due_later_in_memory_makes_room_for_what_is_due_now_on_disk(
    open_broker: Open, tmp_path: Path
) -> None:
    path = tmp_path / "here"
    path.mkdir()
    broker = open_broker(in_flight_slots=400, data_path=path)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    due = time.time() + 7
    for first in range(0, 1000, 20):
        producer.publish_many(numbered(20, first), defer=due - time.time(), timeout=20)
    for first in range(1000, 1190, 10):
        producer.publish_many(numbered(10, first), defer=3600.0, timeout=20)
    came = come(broker, 1000)
    assert sorted(body for _, body in came) == numbered(1000)
    assert max(when for when, _ in came) < (due + 2) * 1e9
    assert broker.stats().topics[0].channels[0].deferred == 190


def test_a_deferred_publisher_does_not_wait_for_a_consumer_of_what_is_due(
    open_broker: Open,
) -> None:
    broker = open_broker(in_flight_slots=256)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    producer.publish_many(numbered(10, 5000))
    for first in range(0, 256, 16):
        producer.publish_many(numbered(16, first), defer=0.001, timeout=20)
        eventually(lambda due=first + 16: broker.stats().topics[0].channels[0].depth >= 10 + due)
    for first in range(1000, 2000, 20):
        producer.publish_many(numbered(20, first), defer=3600.0, timeout=20)
    came = come(broker, 266)
    assert sorted(body for _, body in came) == numbered(256) + numbered(10, 5000)
    assert broker.stats().topics[0].channels[0].deferred == 1000


def test_empty_and_delete_take_what_is_on_disk_too(open_broker: Open, tmp_path: Path) -> None:
    path = tmp_path / "here"
    path.mkdir()
    broker = open_broker(in_flight_slots=256, data_path=path)
    producer = broker.producer("t")
    for channel in ("a", "b"):
        broker.create_channel("t", channel)
    for first in range(0, 1000, 20):
        producer.publish_many(numbered(20, first), defer=3600.0, timeout=20)
    eventually(lambda: set(deferred.existing(path)) == {"t:a", "t:b"})
    assert broker.empty_channel("t", "a") == 1000
    eventually(lambda: set(deferred.existing(path)) == {"t:b"})
    broker.delete_channel("t", "b")
    eventually(lambda: not chunk_files(path))
    producer.publish_many(numbered(100, 5000), defer=0.1, timeout=20)
    assert sorted(take_all(broker, "t", "a").bodies) == numbered(100, 5000)


@pytest.mark.parametrize("channels", [["c"], ["c", "d"]])
def test_a_backlogs_chunks_go_to_the_channels(
    open_broker: Open, tmp_path: Path, channels: list[str]
) -> None:
    path = tmp_path / "here"
    path.mkdir()
    broker = open_broker(in_flight_slots=256, data_path=path)
    broker.create_topic("t")
    producer = broker.producer("t")
    if len(channels) > 1:
        broker.pause_topic("t")
    due = time.time() + 6
    for first in range(0, 1000, 20):
        producer.publish_many(numbered(20, first), defer=due - time.time(), timeout=20)
    eventually(lambda: set(deferred.existing(path)) == {"t"})
    for channel in channels:
        broker.create_channel("t", channel)
    if len(channels) > 1:
        broker.unpause_topic("t")
    eventually(lambda: "t" not in deferred.existing(path))
    for channel in channels:
        came = take_all(broker, "t", channel)
        assert sorted(came.bodies) == numbered(1000)
        assert time.time() >= due


def test_order_over_a_clean_stop_with_messages_in_flight_and_on_disk(
    serve: Serve, attach: Attach, data_path: Path
) -> None:
    server = serve(mem_queue_size=1000, max_bytes_per_file=20_000)
    broker = attach()
    broker.create_channel("t", "c")
    for first in range(0, 8000, 100):
        broker.producer("t").publish_many(numbered(100, first))
    for batches in (0, 8, 7, 6):  # finished before each stop, in the order of coming
        consumer = attach().consumer("t", "c", max_in_flight=500)
        for _ in range(batches):
            consumer.take_many(100, timeout=10).finish()
        held = [consumer.take_many(50, timeout=10) for _ in range(4)]
        assert all(held)
        assert server.kill(signal.SIGTERM) == 0
        server = serve(mem_queue_size=1000, max_bytes_per_file=20_000)
    bodies = take_all(attach(), "t", "c").bodies
    assert bodies == sorted(bodies)
    assert bodies[-1] == numbered(8000)[-1]
    assert len(bodies) == len(set(bodies))
    assert not list(data_path.glob("*.bad"))
