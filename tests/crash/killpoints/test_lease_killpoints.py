"""A lease holder, and who publishes in epochs, die at every named point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crash.killpoints.points import LEASED, MARKED
from crash.killpoints.test_client_killpoints import joined, running, topic, words_after
from support.deliveries import take_all
from support.processes import Child, eventually, say
from support.recount import recount

import shmq

__all__ = ["joined", "running", "topic"]  # fixtures


def lease_until_killed(instance, topic, point, count):
    from shmq import _native

    broker = shmq.attach(instance)
    _native.killpoint(point, count)
    holder = broker.lease_holder(topic, "c", "me", ttl=60, grace=0.05)
    for _ in range(6):
        returned = holder.lease(3)
        lease = holder.lease(4, parts=2)
        ids = [
            f"{number:016x}"
            for part in range(2)
            for batch in holder.read_lease(lease.id, part)
            for number in batch.ids
        ]
        holder.return_lease(returned.id)
        say("finishing", *ids)
        holder.finish_lease(lease.id)
        say("finished", *ids)
    holder.lease(2)
    broker.close()


@pytest.mark.parametrize(("point", "count"), LEASED)
def test_a_lease_holder_cut_short_loses_nothing_and_what_it_finished_never_comes_again(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
    point: str,
    count: int,
) -> None:
    joined.create_channel(topic, "c")
    producer = joined.producer(topic)
    published = {producer.publish(b"%d" % i) for i in range(60)}
    holder = child(lease_until_killed, running[0], topic, point, count, killpoints=True)
    holder.die()
    published.add(producer.publish(b"after", timeout=20))
    eventually(lambda: joined.stats().channel(topic, "c").leased == 0)
    recount(running[0], topic, "c")
    came = take_all(joined, topic, "c")
    recount(running[0], topic, "c")
    finished, finishing = words_after(holder, "finished"), words_after(holder, "finishing")
    assert came.twice == []
    assert not finished & set(came.ids)
    assert published - set(came.ids) <= finishing


def publish_epochs(instance, topic, point, count):
    """From the last epoch on, which is repeated."""
    import array

    from shmq import _native

    producer = shmq.attach(instance).producer(topic)
    if point:
        _native.killpoint(point, count)
    last, _ = producer.mark(1, 2)
    for epoch in range(max(last - 1, 0), 8):
        for number in range(3):
            body = b"%d:%d" % (epoch, number)
            offsets = array.array("i", [0, len(body)])
            producer.publish_once(body, offsets, False, 0, 1, 1, 2, epoch, number, number + 1)
    say("done")


@pytest.mark.parametrize(("point", "count"), MARKED)
def test_epochs_that_are_repeated_after_a_death_are_there_once(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
    point: str,
    count: int,
) -> None:
    joined.create_channel(topic, "c")
    child(publish_epochs, running[0], topic, point, count, killpoints=True).die()
    child(publish_epochs, running[0], topic, point, count, killpoints=True).die()
    child(publish_epochs, running[0], topic, None, 0).succeed()
    came = take_all(joined, topic, "c")
    assert came.bodies == [b"%d:%d" % (epoch, k) for epoch in range(8) for k in range(3)]
    recount(running[0], topic, "c")
