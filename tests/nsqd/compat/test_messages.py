"""A real nsqd delivers the messages that shmq left on disk, and the other way round: every message
once, in order, with its id, its timestamp and its attempts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nsqd.compat.handover import (
    FILE,
    ON_DISK,
    SMALL,
    complaints,
    files,
    numbered,
    publish,
    stop,
    take,
)
from support.deliveries import Delivered, take_all
from support.processes import Child, eventually
from support.real_nsqd import Nsqd, Subscription

import shmq
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import unpack

pytestmark = pytest.mark.peers

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]
Start = Callable[..., Nsqd]

COUNT = 100_000


def test_nsqd_delivers_what_shmq_left(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    server = serve(**SMALL)
    broker = attach()
    broker.create_channel("t", "c")
    bodies = numbered(COUNT)
    began = time.time_ns()
    ids = publish(broker, "t", bodies)
    published = time.time_ns()
    read = COUNT // 8
    assert take(broker, "t", "c", read).ids == ids[:read]
    with broker.consumer("t", "c") as consumer:
        held: list[int] = []
        while len(held) < 100:  # what was in memory may be less; the rest is read from disk
            batch = consumer.take_many(100 - len(held), timeout=10)
            assert len(batch)
            held += batch.timestamps.tolist()
        stop(server)
    assert len(files(data_path, "t:c").numbers) >= 8

    peer = nsqd(**ON_DISK)
    assert peer.channel("t", "c")["depth"] == COUNT - read
    came = peer.take_all("t", "c")
    assert came.bodies == bodies[read:]
    assert came.ids == ids[read:]
    assert came.attempts == [2] * 100 + [1] * (COUNT - read - 100)
    assert came.timestamps[:100] == held
    assert came.timestamps == sorted(came.timestamps)
    assert began <= came.timestamps[0] <= came.timestamps[-1] <= published
    peer.stop()
    assert complaints(peer, "t:c") == []
    assert files(data_path, "t:c").bad == []


def test_shmq_delivers_what_nsqd_left(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    peer = nsqd(**ON_DISK)
    peer.post("/topic/create?topic=t")
    peer.post("/channel/create?topic=t&channel=c")
    bodies = numbered(COUNT)
    began = time.time_ns()
    peer.publish("t", bodies)
    published = time.time_ns()
    read = COUNT // 8
    first = peer.take("t", "c", read)
    assert first.bodies == bodies[:read]
    eventually(lambda: peer.channel("t", "c")["depth"] == COUNT - read)
    peer.stop()
    assert len(files(data_path, "t:c").numbers) >= 8

    server = serve(**SMALL)
    broker = attach()
    # what is read back meanwhile may be counted on disk and in memory
    eventually(lambda: broker.stats().channel("t", "c").depth == COUNT - read)
    came = take_all(broker, "t", "c")
    assert came.bodies == bodies[read:]
    assert len({*first.ids, *came.ids}) == COUNT
    assert set(came.attempts) == {1}
    assert came.timestamps == sorted(came.timestamps)
    assert began <= came.timestamps[0] <= came.timestamps[-1] <= published
    stop(server)
    assert files(data_path, "t:c").bad == []


def test_what_nsqd_had_in_memory_and_in_flight_is_there_too(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    """At its end nsqd writes what is in memory behind what is on disk, so the order is another."""
    peer = nsqd(mem_queue_size=5000, max_bytes_per_file=FILE)
    peer.post("/topic/create?topic=t")
    peer.post("/channel/create?topic=t&channel=c")
    bodies = numbered(20_000)
    peer.publish("t", bodies)
    held = Delivered()
    with Subscription(peer, "t", "c") as subscription:
        subscription.ready(100)
        while len(held.ids) < 100:
            assert subscription.receive(held)
        peer.stop()
    serve(**SMALL)
    came = take_all(attach(), "t", "c")
    assert sorted(came.bodies) == bodies
    attempts = dict(zip(came.ids, came.attempts, strict=True))
    assert {number for number, count in attempts.items() if count == 2} == set(held.ids)
    assert set(came.attempts) == {1, 2}


def test_there_and_back_again_loses_and_doubles_nothing(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    """Each takes a part, adds a part, and leaves the rest to the other; with two channels."""
    published: list[bytes] = []
    came: dict[str, list[bytes]] = {"a": [], "b": []}
    share = {"a": 2500, "b": 1100}

    def read_offsets() -> list[int]:
        metas = [DiskQueue(data_path, f"t:{channel}").load_meta() for channel in came]
        return [unpack(meta.read_position)[1] for meta in metas if meta is not None]

    def more() -> list[bytes]:
        added = numbered(4000, len(published))
        published.extend(added)
        return added

    def with_shmq() -> None:
        server = serve(mem_queue_size=300, max_bytes_per_file=400_000)
        broker = attach()
        for channel in came:
            broker.create_channel("t", channel)
        publish(broker, "t", more())
        for channel, bodies in came.items():
            bodies += take(broker, "t", channel, share[channel]).bodies
        stop(server)

    def with_nsqd() -> None:
        peer = nsqd(mem_queue_size=0, max_bytes_per_file=150_000)
        peer.publish("t", more())
        for channel, bodies in came.items():
            bodies += peer.take("t", channel, share[channel]).bodies
            assert complaints(peer, f"t:{channel}") == []
        eventually(lambda: peer.stats()["t"]["depth"] == 0)
        peer.stop()

    left_by_shmq, left_by_nsqd = [], []
    for _ in range(2):
        with_shmq()
        left_by_shmq += read_offsets()
        with_nsqd()
        left_by_nsqd += read_offsets()
    assert any(left_by_shmq), "never left within a file"
    assert any(left_by_nsqd), "never left within a file"
    serve()
    broker = attach()
    for channel, bodies in came.items():
        assert bodies + take_all(broker, "t", channel).bodies == published
    assert not [name for base in ("t:a", "t:b") for name in files(data_path, base).bad]


def test_a_consumed_queue_leaves_nothing_behind_and_nothing_comes_back(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    server = serve(**SMALL)
    broker = attach()
    broker.create_channel("t", "c")
    bodies = numbered(5000)
    publish(broker, "t", bodies)
    assert take_all(broker, "t", "c").bodies == bodies
    stop(server)
    peer = nsqd(**ON_DISK)
    assert peer.is_empty("t", "c")
    more = numbered(3000, 5000)
    peer.publish("t", more)
    eventually(lambda: peer.channel("t", "c")["depth"] == len(more))
    assert peer.take_all("t", "c").bodies == more
    peer.stop()
    assert complaints(peer, "t:c") == []
    serve(**SMALL)
    broker = attach()
    assert broker.stats().channel("t", "c").depth == 0
    last = numbered(3000, 8000)
    publish(broker, "t", last)
    assert take_all(broker, "t", "c").bodies == last


def test_bodies_of_all_sizes_and_bytes(serve: Serve, attach: Attach, nsqd: Start) -> None:
    """Up to --max-msg-size, in files that one of them fills alone."""
    most = 1 << 20
    every_byte = bytes(range(256))
    bodies = [b"\0", b"\n", every_byte, every_byte * 4095, every_byte * (most // 256), b"end"]
    server = serve(mem_queue_size=0, max_bytes_per_file=most // 2)
    broker = attach()
    broker.create_channel("t", "c")
    for body in bodies:
        broker.producer("t").publish(body)
    stop(server)
    peer = nsqd(mem_queue_size=0, max_bytes_per_file=most // 2)
    assert peer.take("t", "c", 2).bodies == bodies[:2]
    for body in bodies:
        peer.publish("t", [body])
    eventually(lambda: peer.channel("t", "c")["depth"] == 2 * len(bodies) - 2)
    peer.stop()
    assert complaints(peer, "t:c") == []
    serve()
    assert take_all(attach(), "t", "c").bodies == bodies[2:] + bodies


def test_a_killed_nsqd_loses_nothing_that_was_on_disk(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    """Its positions are from before: what was read since, of the topic too, comes again."""
    peer = nsqd(**ON_DISK, sync_timeout="1h")
    peer.post("/topic/create?topic=t")
    peer.post("/channel/create?topic=t&channel=c")
    bodies = numbered(20_000)
    peer.publish("t", bodies)
    eventually(lambda: peer.channel("t", "c")["depth"] == len(bodies))
    finished = peer.take("t", "c", 2 * 2500 + 100)
    peer.kill()
    serve(**SMALL)
    came = take_all(attach(), "t", "c").bodies
    assert set(bodies[len(finished.ids) :]) <= set(came) <= set(bodies)


@pytest.mark.parametrize("first", ["shmq", "nsqd"])
def test_they_never_share_a_data_path(
    first: str, serve: Serve, nsqd: Start, data_path: Path
) -> None:
    if first == "shmq":
        serve()
        with pytest.raises(AssertionError, match="failed to lock data-path"):
            nsqd()
        return
    nsqd()
    refused = serve(wait=False)
    assert refused.wait() == 1
    assert str(data_path) in refused.errors
