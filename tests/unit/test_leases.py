"""Leases in one process: take, read again, finish, return, expire, fence."""

from __future__ import annotations

import array
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.in_process_broker import SECOND, World
from support.processes import eventually
from support.recount import count

from shmq import LeaseFenced, LeaseLost, ShmqError, layout
from shmq.client import Consumer, LeaseHolder, Producer
from shmq.client.disk import Files
from shmq.client.lease import read_lease
from shmq.client.properties import pack
from shmq.peek import open_leases


class Bench:
    """A channel, who publishes and takes, and lease_holders."""

    def __init__(self, **limits: int) -> None:
        self.world = World(**{"in_flight_slots": 64, "mem_queue_size": 64} | limits)
        self.topic, self.generation = self.world.create_topic("t")
        self.queue, self.serial = self.world.create_channel("t", "c")
        self.client = self.world.attach()
        self.producer: Producer = self.client.producer("t")
        self.consumer: Consumer = self.client.consumer("t", "c")

    def lease_holder(self, name: str = "me", ttl: float = 0, grace: float = 0) -> LeaseHolder:
        native = self.world.attach_native()
        times = (int(ttl * SECOND), int(grace * SECOND))
        return LeaseHolder(
            native, self.queue, self.serial, "t", "c", name, *times, False, self.files
        )

    def files(self) -> Files:
        return Files(self.world.queue_view(self.queue), "", 1 << 20)

    def publish(self, *bodies: bytes) -> None:
        self.producer.publish_many(list(bodies), timeout=0)

    def numbers(self, first: int, last: int) -> list[bytes]:
        bodies = [b"%03d" % number for number in range(first, last)]
        self.publish(*bodies)
        return bodies

    def read(self, lease: int, part: int = 0, **options: int) -> list[bytes]:
        native = self.world.supervisor
        batches = read_lease(native, self.queue, self.serial, lease, part, self.files, **options)
        return [body for batch in batches for body in batch.bodies()]

    def taken(self) -> list[tuple[bytes, int]]:
        batch = self.consumer.take_many(1000, 0)
        found = [(message.body, message.attempts) for message in batch]
        batch.finish()
        return found

    def expire(self, after: float) -> None:
        from shmq import _native

        self.world.supervisor.expire(self.queue, 256, _native.now() + int(after * SECOND), 0)

    def check(self) -> None:
        result = count(self.world.directory, self.world.queue_view(self.queue))
        assert result.problems == []


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.check()
    made.world.close()


def test_a_lease_is_read_again_the_same_until_it_is_finished(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 10), bench.lease_holder()
    lease = holder.lease(6, parts=4)
    assert lease is not None
    assert (lease.count, lease.bytes, lease.parts, lease.parent) == (6, 18, 4, 0)
    for _ in range(3):
        parts = [bench.read(lease.id, part) for part in range(4)]
        assert [len(part) for part in parts] == [1, 2, 1, 2]
        assert [body for part in parts for body in part] == bodies[:6]
    assert bench.read(lease.id, 1, rows=1) == bench.read(lease.id, 1, max_bytes=1) == parts[1]
    (batch,) = holder.read_lease(lease.id, 3)
    assert batch.attempts.tolist() == [1, 1]
    bench.check()
    assert bench.taken() == [(body, 1) for body in bodies[6:]]
    assert holder.finish_lease(lease.id) == 6
    assert holder.finish_lease(lease.id) == 0
    with pytest.raises(LeaseLost):
        bench.read(lease.id)
    assert bench.taken() == []
    assert bench.consumer.take(0) is None


def test_finishing_is_cumulative(bench: Bench) -> None:
    bench.numbers(0, 9)
    holder = bench.lease_holder()
    leases = [holder.lease(2, parent=parent) for parent in (0, 1, 2, 3)]
    ids = [lease.id for lease in leases if lease]
    assert [lease.id for lease in holder.leases()] == ids
    assert holder.finish_lease(ids[1]) == 4
    assert [lease.id for lease in holder.leases()] == ids[2:]
    assert holder.finish_lease(ids[0]) == 0
    assert holder.finish_lease(ids[3]) == 4


def test_what_is_returned_goes_first_with_one_more_attempt(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 8), bench.lease_holder()
    bench.consumer.take(0).requeue()  # type: ignore[union-attr]
    first, second = holder.lease(3), holder.lease(2)
    assert first is not None
    assert second is not None
    assert holder.return_lease(second.id) == 2
    assert holder.return_lease(first.id) == 3
    bench.check()
    with pytest.raises(LeaseLost):
        holder.return_lease(first.id)
    with pytest.raises(LeaseLost):
        holder.finish_lease(first.id)
    came = bench.taken()
    rest = [(bodies[6], 1), (bodies[7], 1), (bodies[0], 2)]
    assert came == [(body, 2) for body in bodies[1:6]] + rest


def test_a_lease_takes_what_came_back_and_keeps_its_attempts(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 2), bench.lease_holder()
    bench.consumer.take_many(2, 0).requeue()
    lease = holder.lease(5)
    assert lease is not None
    for _ in range(2):
        (batch,) = holder.read_lease(lease.id)
        assert batch.bodies() == bodies
        assert batch.attempts.tolist() == [2, 2]


def test_bytes_bound_a_lease_but_it_has_one_message(bench: Bench) -> None:
    bench.publish(b"x" * 50, b"y" * 10, b"z" * 10)
    holder = bench.lease_holder()
    sizes = []
    while lease := holder.lease(100, max_bytes=20):
        sizes.append((lease.count, lease.bytes))
    assert sizes == [(1, 50), (2, 20)]


def test_who_opens_a_name_fences_the_one_before_and_has_its_leases(bench: Bench) -> None:
    bodies, before = bench.numbers(0, 4), bench.lease_holder()
    lease = before.lease(3)
    assert lease is not None
    after = bench.lease_holder()
    for call in (before.touch, lambda: before.lease(1), lambda: before.finish_lease(lease.id)):
        with pytest.raises(LeaseFenced):
            call()
    assert after.leases() == [lease]
    assert bench.read(lease.id) == bodies[:3]
    other = bench.lease_holder("other")
    with pytest.raises(LeaseLost):
        other.finish_lease(lease.id)
    assert after.finish_lease(lease.id) == 3


def test_a_lease_ends_with_its_time_to_live_and_a_sign_of_life_puts_it_off(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 3), bench.lease_holder(ttl=50)
    lease = holder.lease(3)
    assert lease is not None
    bench.expire(49)
    assert len(holder.leases()) == 1
    bench.expire(51)
    with pytest.raises(LeaseLost):
        holder.look(lease.id)
    assert bench.taken() == [(body, 2) for body in bodies]


def test_without_a_time_to_live_it_never_ends(bench: Bench) -> None:
    bench.numbers(0, 3)
    holder = bench.lease_holder()
    holder.lease(3)
    bench.expire(1e9)
    assert len(holder.leases()) == 1


def test_after_its_owner_went_a_lease_waits_for_the_grace(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 3), bench.lease_holder(ttl=1000, grace=5)
    holder.lease(3)
    holder.close()
    bench.expire(4)
    again = bench.lease_holder(ttl=1000, grace=5)
    bench.expire(6)
    assert len(again.leases()) == 1
    again._native.detach()
    bench.expire(4)
    (found,) = open_leases(bench.world.queue_view(bench.queue))
    assert (found.holder, found.pid) == ("me", 0)
    bench.expire(6)
    assert bench.taken() == [(body, 2) for body in bodies]


def test_leased_messages_count_as_held(bench: Bench) -> None:
    holder = bench.lease_holder()
    for first in range(0, 320, 64):
        if not holder.lease(1000) and first:
            break
        bench.numbers(first, first + 64)
    assert bench.world.queue_view(bench.queue).read("in_use") == 64
    assert holder.lease(1) is None
    holder.finish_lease(holder.leases()[-1].id)
    assert holder.lease(1) is not None


def test_an_administrator_ends_leases(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 4), bench.lease_holder()
    first, second = holder.lease(1), holder.lease(1)
    assert first is not None
    assert second is not None
    end = bench.world.supervisor.lease_end
    assert end(bench.queue, bench.serial, first.id, False) == 1
    assert end(bench.queue, bench.serial, second.id, True) == 1
    with pytest.raises(LeaseLost):
        end(bench.queue, bench.serial, second.id, True)
    assert bench.taken() == [(bodies[1], 2), (bodies[2], 1), (bodies[3], 1)]


def test_a_pause_and_an_empty_channel_give_no_lease(bench: Bench) -> None:
    holder = bench.lease_holder()
    assert holder.lease(1) is None
    assert not holder.wait(0)
    bench.numbers(0, 2)
    assert holder.wait(0.001)
    bench.world.supervisor.pause_channel(bench.queue, bench.serial, True)
    assert holder.lease(1) is None
    bench.world.supervisor.pause_channel(bench.queue, bench.serial, False)
    assert holder.lease(5, timeout=1) is not None


def test_emptying_leaves_what_is_leased(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 5), bench.lease_holder()
    lease = holder.lease(2)
    assert lease is not None
    assert bench.world.supervisor.empty(bench.queue, bench.serial) == 3
    assert bench.read(lease.id) == bodies[:2]


def test_a_rebuild_changes_nothing_about_a_lease(bench: Bench) -> None:
    bodies, holder = bench.numbers(0, 5), bench.lease_holder()
    lease = holder.lease(4, parts=2)
    assert lease is not None
    bench.world.supervisor.rebuild(bench.queue)
    bench.check()
    assert bench.read(lease.id, 0) + bench.read(lease.id, 1) == bodies[:4]


def test_tables_are_bounded(bench: Bench) -> None:
    holder = bench.lease_holder()
    bench.world.close()
    bench.__init__(in_flight_slots=256)  # type: ignore[misc]
    bench.numbers(0, 64)
    holder = bench.lease_holder()
    for _ in range(64):
        assert holder.lease(1) is not None
    bench.numbers(0, 1)
    with pytest.raises(ShmqError, match="64 leases"):
        holder.lease(1)
    with pytest.raises(ValueError):
        holder.lease(0)
    with pytest.raises(ValueError):
        holder.lease(1, parts=33)
    for number in range(63):
        bench.lease_holder(f"n{number}").close()
    bench.lease_holder("gives way to")  # the one that was left longest ago, for it has no lease
    with pytest.raises(ShmqError, match="79 bytes"):
        bench.lease_holder("x" * 80)


# ---- publishing in epochs ----


def marked(
    bench: Bench, epoch: int, after: int, *bodies: bytes, key: int = 1, whose: int = 0
) -> bool:
    offsets = array.array("i", [0])
    for body in bodies:
        offsets.append(offsets[-1] + len(body))
    upto, data = after + len(bodies), b"".join(bodies)
    first = bench.producer.publish_once(
        data, offsets, False, 0, len(bodies), key, 2, epoch, after, upto, timeout=0, whose=whose
    )
    return first is not None


@pytest.mark.parametrize("clients", [1, 4, 5, 8, 40])
@pytest.mark.parametrize("whose", [0, 1000], ids=["local", "network"])
def test_a_mark_outlives_those_of_clients_that_have_more(
    bench: Bench, clients: int, whose: int
) -> None:
    assert marked(bench, 0, 0, b"once", key=1, whose=whose)
    for number in range(320):
        assert marked(bench, 0, 0, b"x", key=10 + number, whose=1 + number % clients)
        bench.consumer.take(0).finish()
    assert not marked(bench, 0, 0, b"once", key=1, whose=whose)


def test_an_epoch_has_properties_and_a_time_to_live(bench: Bench) -> None:
    offsets = np.array([0, 1, 2], np.int32)
    where = (b"ab", offsets, False, 0, 2, 1, 2)
    blocks = [pack({"n": b"1"}), b""]
    assert bench.producer.publish_once(*where, 0, 0, 2, 0, blocks, 1000) is not None
    assert bench.producer.publish_once(*where, 0, 0, 2, 0, blocks, 1000) is None
    slots = bench.world.queue_view(bench.queue).slots
    ends = slots["expires"][slots["flags"] & layout.constant("SLOT_EXPIRES") != 0]
    assert len(ends) == 2
    assert all(0 < end - time.time_ns() <= 1000 * 10**9 for end in ends.tolist())
    lease = bench.lease_holder().lease(2)
    assert lease is not None
    (batch,) = read_lease(
        bench.world.supervisor, bench.queue, bench.serial, lease.id, 0, bench.files, properties=True
    )
    assert [dict(each) for each in batch.properties] == [{"n": b"1"}, {}]
    with pytest.raises(ValueError, match="1 properties for 2 messages"):
        bench.producer.publish_once(*where, 1, 0, 2, 0, blocks[:1])
    with pytest.raises(ShmqError):
        bench.producer.publish_once(*where, 1, 0, 2, 0, b"no block")
    assert bench.producer.publish_once(*where, 1, 0, 2, 0, None, 0.001) is not None
    moment = time.time() + 0.001
    eventually(lambda: time.time() > moment)
    assert bench.lease_holder("other").lease(2) is None, "they have expired"


def test_an_epoch_is_published_once(bench: Bench) -> None:
    assert bench.producer.mark(1, 2) == (0, 0)
    assert marked(bench, 0, 0, b"a", b"b")
    assert bench.producer.mark(1, 2) == (1, 2)
    assert not marked(bench, 0, 0, b"a", b"b")
    assert marked(bench, 0, 2, b"c")
    assert not marked(bench, 0, 2, b"c")
    with pytest.raises(ShmqError, match="3 are there"):
        marked(bench, 0, 4, b"e")
    assert marked(bench, 5, 0, b"d")
    assert not marked(bench, 4, 0, b"late")
    assert marked(bench, 0, 0, b"another's", key=9)
    assert [body for body, _ in bench.taken()] == [b"a", b"b", b"c", b"d", b"another's"]


def test_keys_are_bounded_and_the_one_used_longest_ago_gives_way(bench: Bench) -> None:
    for key in range(256):
        bench.producer.mark(key, 2)
    marked(bench, 3, 0, b"x", key=0)
    assert bench.producer.mark(1000, 2) == (0, 0)
    assert bench.producer.mark(0, 2) == (4, 1)
    bench.taken()


def test_writers_of_one_topic_keep_those_of_another_out_of_nothing(bench: Bench) -> None:
    for key in range(300):
        bench.producer.mark(key, 2)
    bench.world.create_topic("u")
    bench.world.create_channel("u", "c")
    other = bench.client.producer("u")
    first, again = (
        other.publish_once(b"x", array.array("i", [0, 1]), False, 0, 1, 7, 2, 0, 0, 1, timeout=0)
        for _ in range(2)
    )
    assert first is not None
    assert again is None
    assert other.mark(7, 2) == (1, 1)


def test_a_writer_whose_mark_gave_way_is_refused(bench: Bench) -> None:
    """It would publish again what is there."""
    for key in range(300):
        assert marked(bench, 0, 0, b"x", key=key)
        assert len(bench.taken()) == 1
    for key in range(44):
        for epoch, after in ((0, 0), (0, 1), (1, 0), (2, 0)):
            with pytest.raises(ShmqError, match="the mark of this writer was forgotten"):
                marked(bench, epoch, after, b"again", key=key)
    assert not marked(bench, 0, 0, b"again", key=44)
    assert marked(bench, 1, 0, b"next", key=44)
    assert marked(bench, 7, 0, b"new", key=1000)  # who was never here may begin anywhere
    assert [body for body, _ in bench.taken()] == [b"next", b"new"]
