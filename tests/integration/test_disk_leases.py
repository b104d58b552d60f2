"""Leases of what lies on disk: read there, in place, and gone from it only when they are finished.

The messages published last are in memory, after those on disk, so a lease of all there is ends
before it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deliveries import take_all
from support.processes import eventually
from support.recount import recount

import shmq
from shmq import LeaseLost

MANY = 5000
OPTIONS = {
    "mem_queue_size": 300,
    "in_flight_slots": 256,
    "max_bytes_per_file": 50_000,  # so that a lease reaches over several files
}

Open = Callable[..., shmq.Broker]


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%06d" % number for number in range(first, last)]


@pytest.fixture
def full(open_broker: Open) -> shmq.Broker:
    """A broker whose channel t/c holds MANY messages, nearly all of them on disk."""
    broker = open_broker(**OPTIONS)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    for first in range(0, MANY, 100):
        producer.publish_many(numbered(first, first + 100), timeout=30)
    settled(broker)
    return broker


def settled(broker: shmq.Broker) -> None:
    """Nothing is on its way to or from the disk."""

    def rests() -> bool:
        before = broker.channel_stats("t", "c")
        return before.backend_depth > 0 and before.depth + before.leased == MANY

    eventually(rests)


def bodies(broker: shmq.Broker, lease: shmq.Lease, rows: int = 700) -> list[bytes]:
    parts = range(lease.parts)
    batches = [b for p in parts for b in broker.read_lease("t", "c", lease.id, p, rows=rows)]
    assert all(len(batch) <= rows for batch in batches)
    assert {int(n) for batch in batches for n in batch.attempts} == {1}
    return [body for batch in batches for body in batch.bodies()]


def lease_all(holder: shmq.LeaseHolder, parts: int = 1) -> shmq.Lease:
    """Everything; again if it was just then that something was read back."""
    found = eventually(lambda: holder.lease(10**6, parts=parts))
    assert isinstance(found, shmq.Lease)
    return found


def test_a_lease_is_not_bounded_by_memory(full: shmq.Broker) -> None:
    assert full.channel_depth("t", "c") == MANY
    with full.lease_holder("t", "c", "q") as holder:
        lease = lease_all(holder)
        assert lease.parts == 1
        assert lease.count >= lease.on_disk > MANY - 300 - 256
        for _ in range(2):
            assert bodies(full, lease) == numbered(0, lease.count)
        found = full.channel_stats("t", "c")
        assert (found.depth, found.leased) == (MANY - lease.count, lease.count)
        assert full.channel_depth("t", "c") == found.depth
        assert [entry.on_disk for entry in found.leases] == [lease.on_disk]
        recount(full.instance, "t", "c")
        assert holder.finish_lease(lease.id) == lease.count
        assert holder.finish_lease(lease.id) == 0
    recount(full.instance, "t", "c")
    found = full.channel_stats("t", "c")
    assert (found.leased, found.finished) == (0, lease.count)
    assert take_all(full, "t", "c").bodies == numbered(lease.count, MANY)
    eventually(lambda: len(files(full.data_path)) <= 1)


def files(path: Path | None) -> list[str]:
    assert path is not None
    return [p.name for p in path.glob("t:c.diskqueue.[0-9]*.dat")]


def test_parts_are_the_same_at_every_reading_and_together_all(full: shmq.Broker) -> None:
    with full.lease_holder("t", "c", "q") as holder:
        lease = lease_all(holder, parts=3)
        first = bodies(full, lease)
        assert sorted(first) == numbered(0, lease.count)
        assert bodies(full, lease, rows=11) == first
        with full.lease_holder("t", "c", "q") as again:
            assert again.leases() == [lease]
            assert again.finish_lease(lease.id) == lease.count


def test_limits_hold_on_disk_too(full: shmq.Broker) -> None:
    with full.lease_holder("t", "c", "q") as holder:
        came, counts = [], []
        while len(came) < MANY:
            lease = eventually(lambda: holder.lease(1000, max_bytes=6 * 900))
            assert lease.count <= 900
            assert lease.bytes == 6 * lease.count
            came += bodies(full, lease)
            counts.append(lease.on_disk)
            holder.finish_lease(lease.id)
        assert came == numbered(0, MANY)
        assert max(counts) > 300


def test_properties_are_no_part_of_the_bytes_of_a_lease(open_broker: Open) -> None:
    broker = open_broker(**OPTIONS)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    for first in range(0, MANY, 100):
        producer.publish_many(
            numbered(first, first + 100), timeout=30, properties={"name": "x" * (first // 100)}
        )
    settled(broker)
    with broker.lease_holder("t", "c", "q") as holder:
        came, counts = [], []
        while len(came) < MANY:
            lease = eventually(lambda: holder.lease(2000, max_bytes=6 * 900))
            assert lease.bytes == 6 * lease.count <= 6 * 900
            found = bodies(broker, lease)
            assert sum(map(len, found)) == lease.bytes
            came += found
            counts.append(lease.on_disk)
            holder.finish_lease(lease.id)
        assert came == numbered(0, MANY)
        assert max(counts) > 300


def test_what_has_expired_on_disk_is_in_no_lease(open_broker: Open) -> None:
    """A lease in place ends before it, and the rest follows."""
    broker = open_broker(**OPTIONS)
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    lives = {0: None, 1: None, 2: 0.2, 3: 1000.0, 4: None}
    for first in range(0, MANY, 100):
        bodies_ = numbered(first, first + 100)
        producer.publish_many(bodies_, timeout=30, ttl=lives[first // 1000])
    over = time.time() + 0.2
    eventually(lambda: broker.channel_stats("t", "c").backend_depth > 2500 and time.time() > over)
    expected = [*numbered(0, 2000), *numbered(3000, MANY)]
    with broker.lease_holder("t", "c", "q") as holder:
        came, on_disk = [], 0
        while len(came) < len(expected):
            lease = eventually(lambda: holder.lease(10**6))
            came += bodies(broker, lease)
            on_disk += lease.on_disk
            holder.finish_lease(lease.id)
    assert came == expected
    assert on_disk > 1000
    assert broker.channel_stats("t", "c").expired == 1000
    recount(broker.instance, "t", "c")


def test_what_is_returned_comes_again_in_its_order(full: shmq.Broker) -> None:
    with full.lease_holder("t", "c", "q") as holder:
        lease = lease_all(holder)
        assert holder.return_lease(lease.id) == lease.count
        with pytest.raises(LeaseLost):
            bodies(full, lease)
    assert take_all(full, "t", "c").bodies == numbered(0, MANY)


def test_others_get_what_is_behind_it_when_it_ends(full: shmq.Broker) -> None:
    with full.lease_holder("t", "c", "q") as holder, full.lease_holder("t", "c", "other") as other:
        lease = lease_all(holder)
        assert other.lease(10) is None
        with full.consumer("t", "c") as consumer:
            assert consumer.take(0.2) is None
            assert holder.finish_lease(lease.id) == lease.count
            message = consumer.take(30)
            assert message is not None
            assert message.body == numbered(lease.count, MANY)[0]


def test_a_killed_supervisor_keeps_what_is_leased_on_disk(full: shmq.Broker) -> None:
    with full.lease_holder("t", "c", "q") as holder:
        lease = lease_all(holder)
        pid = full.supervisor_pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: full.supervisor_pid != pid and full.supervisor_alive())
        assert bodies(full, lease) == numbered(0, lease.count)
        assert holder.finish_lease(lease.id) == lease.count
    assert take_all(full, "t", "c").bodies == numbered(lease.count, MANY)


def test_leases_in_memory_are_flushed_in_front_of_the_disk(
    open_broker: Open, full: shmq.Broker
) -> None:
    holder = full.lease_holder("t", "c", "q")
    lease = eventually(lambda: holder.lease(50))
    assert not lease.on_disk
    path = full.data_path
    full.close()
    again = open_broker(data_path=path, **OPTIONS)
    assert take_all(again, "t", "c").bodies == numbered(0, MANY)


def test_emptying_ends_it(full: shmq.Broker) -> None:
    with full.lease_holder("t", "c", "q") as holder:
        lease = lease_all(holder)
        full.empty_channel("t", "c")
        with pytest.raises(LeaseLost):
            bodies(full, lease)
        more = [b"%d" % number for number in range(1000)]
        for first in range(0, 1000, 100):
            full.producer("t").publish_many(more[first : first + 100], timeout=30)
        holder.finish_lease(lease.id)
    assert take_all(full, "t", "c").bodies == more


def test_stopping_gives_it_back(open_broker: Open, tmp_path: Path, full: shmq.Broker) -> None:
    holder = full.lease_holder("t", "c", "q")
    lease_all(holder)
    path = full.data_path
    full.close()
    again = open_broker(data_path=path, **OPTIONS)
    assert take_all(again, "t", "c").bodies == numbered(0, MANY)
