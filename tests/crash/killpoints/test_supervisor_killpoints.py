"""A supervisor dies at every named point of its work; the next one adopts what it finds.

Each test has a supervisor of its own, with the build that has killpoints, and arms
it when it is up. Nothing may be lost, and as no consumer dies or times out, nothing may come
twice.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash.killpoints import points
from support.deliveries import Background, Delivered, take_all
from support.processes import Child, arm_server, eventually, say
from support.recount import recount, recount_all

import shmq
from shmq import shm, sources
from shmq.errors import Gone, NotRunning

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%07d" % i for i in range(start, start + count)]


def check_whole(came: Delivered, expected: list[bytes], *, ordered: bool = True) -> None:
    """Everything came, once, and in order unless that is not promised."""
    assert came.twice == []
    found = came.bodies if ordered else sorted(came.bodies)
    assert len(found) == len(expected), f"{len(found)} of {len(expected)} came"
    assert found == expected


def no_strangers(instance: str) -> bool:
    """Every segment in /dev/shm is in the directory, and the other way round."""
    with sources.open_readonly(instance) as source:
        entered = {entry.serial for entry in source.directory.live_queues()}
        entered |= {entry.serial for entry in source.directory.live_stores()}
    found = {item.serial for item in shm.list_objects(instance) if item.kind == "queue"}
    return entered == found


# ---- the start ----


@pytest.mark.parametrize(("point", "count"), points.STARTED)
def test_an_instance_half_made_is_made_anew(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    serve(killpoint=(point, count), wait=False).die()
    serve()
    broker = attach()
    broker.producer("t").publish(b"x")
    check_whole(take_all(broker, "t", "c"), [b"x"])


# ---- creating and deleting ----


@pytest.mark.parametrize(("point", "count"), points.CREATED)
def test_creation_and_deletion_cut_short_are_finished_or_undone(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    server = serve(killpoint=(point, count))
    broker = attach()
    arm_server(server)

    def again(action: Callable[[], Any]) -> Any:
        """Until it works: it may be cut short once, then there is another supervisor."""
        try:
            return action()
        except NotRunning:
            server.die()
            serve()
            return action()

    def delete(action: Callable[[], Any]) -> None:
        try:
            again(action)
        except Gone:  # the first attempt did it
            assert server.process.poll() is not None

    producer = again(lambda: broker.producer("t"))
    for body in numbered(5):
        again(lambda body=body: producer.publish(body))
    again(lambda: broker.create_channel("t", "a"))
    again(lambda: broker.create_channel("t", "b"))
    producer.publish(b"both")
    again(lambda: broker.create_channel("d", "a"))
    again(lambda: broker.create_channel("d", "b"))
    broker.producer("d").publish_many(numbered(3))
    delete(lambda: broker.delete_channel("d", "a"))
    delete(lambda: broker.delete_topic("d"))
    server.die()
    assert [topic.name for topic in broker.stats().topics] == ["t"]
    recount_all(instance)
    eventually(lambda: no_strangers(instance))
    check_whole(take_all(broker, "t", "a"), [*numbered(5), b"both"])
    check_whole(take_all(broker, "t", "b"), [b"both"])


@pytest.mark.parametrize(("point", "count"), points.STORED)
def test_a_results_store_half_made_or_removed_is_finished_or_undone(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    server = serve(killpoint=(point, count))
    broker = attach()
    kept = broker.results("kept") if point == "remove_store.generation" else None
    arm_server(server)
    try:
        store = broker.results("r")
        store.set("k", b"v")
        broker.delete_results("r")
    except NotRunning:
        pass
    server.die()
    serve()
    eventually(lambda: no_strangers(instance))
    store = broker.results("r")
    store.set("k", b"w")
    assert broker.results("r").get("k") == b"w"
    assert kept is None or kept.get("k") is None
    broker.delete_results("r")
    eventually(lambda: no_strangers(instance))


# ---- timeouts ----


@pytest.mark.parametrize(("point", "count"), points.EXPIRED)
def test_a_scan_cut_short_returns_every_message_once(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    server = serve(killpoint=(point, count))
    broker = attach()
    producer = broker.producer("t")
    consumer = broker.consumer("t", "c", msg_timeout=0.05)
    arm_server(server)
    for body in numbered(20, 20):
        producer.publish(body, defer=0.05)
    producer.publish_many(numbered(20))
    assert len(consumer.take_many(20, timeout=5)) == 20
    server.die()
    serve()
    came = take_all(broker, "t", "c")
    check_whole(came, numbered(40), ordered=False)
    attempts = dict(zip(came.bodies, came.attempts, strict=True))
    assert {attempts[body] for body in numbered(20)} == {2}
    recount(instance, "t", "c")


# ---- overflow ----


@pytest.mark.parametrize(("point", "count"), points.SPILLED)
def test_a_spill_cut_short_keeps_everything_in_order(
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    keep: Callable[[Any], Any],
    instance: str,
    point: str,
    count: int,
) -> None:
    server = serve(killpoint=(point, count), mem_queue_size=256, max_bytes_per_file=20_000)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    arm_server(server)

    def publish() -> None:
        for body in numbered(1500):
            producer.publish(body)

    publishing = keep(Background(publish))
    server.die()
    recount(instance, "t", "c", undecided=True)
    serve(mem_queue_size=256)
    publishing.result()
    check_whole(take_all(broker, "t", "c"), numbered(1500))
    recount(instance, "t", "c")


def fill_disk(broker: shmq.Broker, count: int) -> None:
    """Publish this many messages to t/c, most of which go to disk."""
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    for first in range(0, count, 100):
        producer.publish_many(numbered(100, first))


@pytest.mark.parametrize(("point", "count"), points.RESTORED)
def test_a_restore_cut_short_keeps_everything_in_order(
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    keep: Callable[[Any], Any],
    instance: str,
    point: str,
    count: int,
) -> None:
    options = {"mem_queue_size": 256, "in_flight_slots": 256}
    server = serve(killpoint=(point, count), **options)
    broker = attach()
    arm_server(server)
    came = Delivered()
    filling = keep(Background(lambda: fill_disk(broker, 3000)))
    consume_until_dead(server, filling, broker, came)
    serve(**options)
    filling.result()
    check_whole(take_all(broker, "t", "c", into=came), numbered(3000))
    recount(instance, "t", "c")


def consume_until_dead(
    server: Child, filling: Background, broker: shmq.Broker, came: Delivered
) -> None:
    """Let it fill the disk, then take what it reads from there, until it dies."""
    eventually(lambda: not filling.running or server.process.poll() is not None)
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        eventually(lambda: took(consumer, came) == 0 and server.process.poll() is not None)
    server.die()


def took(consumer: shmq.Consumer, into: Delivered) -> int:
    """Take, remember and finish a batch; how many messages."""
    batch = consumer.take_many(100, timeout=0.05)
    into.add(batch)
    batch.finish()
    return len(batch)


def read_ahead(instance: str) -> int:
    """Messages of t/c that were read from disk and wait."""
    with sources.open_readonly(instance) as source:
        topic = source.directory.find_topic("t")
        assert topic is not None
        queue = source.directory.find_queue(topic.index, "c")
        assert queue is not None
        return source.queue(queue).ring_length("requeue")


@pytest.mark.parametrize(("point", "count"), points.FLUSHED)
def test_a_flush_cut_short_keeps_everything_in_order(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    server = serve(killpoint=(point, count), mem_queue_size=256, in_flight_slots=256)
    broker = attach()
    fill_disk(broker, 4000)
    came = Delivered()
    with broker.consumer("t", "c", max_in_flight=500) as consumer:
        # so far that only what was read from disk waits in the requeue ring
        while len(came.ids) < 700:
            took(consumer, came)
    eventually(lambda: read_ahead(instance) > count, what="enough is read ahead")
    arm_server(server)
    server.kill(signal.SIGTERM)
    server.die()
    serve(mem_queue_size=256, in_flight_slots=256)
    check_whole(take_all(broker, "t", "c", into=came), numbered(4000))
    recount(instance, "t", "c")


# ---- a backlog's way to several channels ----


@pytest.mark.parametrize(("point", "count"), points.PUMPED)
def test_a_backlog_whose_move_was_cut_short_is_in_all_channels_once(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    server = serve(killpoint=(point, count))
    broker = attach()
    broker.create_channel("t", "a")
    broker.create_channel("t", "b")
    broker.pause_topic("t")
    broker.producer("t").publish_many(numbered(60))
    arm_server(server)
    broker.unpause_topic("t")
    server.die()
    broker.producer("t").publish(b"after", timeout=20)
    serve()
    eventually(
        lambda: (
            not any(
                found.waiting for name, found in recount_all(instance).items() if name[1] is None
            )
        )
    )
    for channel in ("a", "b"):
        check_whole(take_all(broker, "t", channel), [*numbered(60), b"after"])
    recount_all(instance)


# ---- the dead ----


def hold_messages(instance, count):
    consumer = shmq.attach(instance).consumer("t", "c", msg_timeout=60)
    held = consumer.take_many(count, 10)
    view = held[0].view
    say("holds", len(held), len(view))
    time.sleep(600)


@pytest.mark.parametrize(("point", "count"), points.REAPED)
def test_a_reaping_cut_short_returns_every_message_once(
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    child: Callable[..., Child],
    instance: str,
    point: str,
    count: int,
) -> None:
    server = serve(killpoint=(point, count))
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish_many(numbered(20))
    holder = child(hold_messages, instance, 15)
    holder.said("holds 15")
    arm_server(server)
    holder.kill()
    server.die()
    serve()
    eventually(lambda: len(broker.stats().clients) == 2)
    came = take_all(broker, "t", "c")
    check_whole(came, numbered(20))
    assert came.attempts == [2] * 15 + [1] * 5
    recount(instance, "t", "c")
    free = sources.open_readonly(instance).directory.free_clients
    assert shm.Permits(instance).free == free


# ---- adoption ----


@pytest.mark.parametrize(("first", "point"), points.ADOPTED)
def test_an_adoption_cut_short_is_done_by_the_next_one(
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    keep: Callable[[Any], Any],
    instance: str,
    first: str,
    point: str,
) -> None:
    options = {"mem_queue_size": 256, "in_flight_slots": 256}
    server = serve(killpoint=(first, 1), **options)
    broker = attach()
    arm_server(server)
    came = Delivered()
    filling = keep(Background(lambda: fill_disk(broker, 1000)))
    if first.startswith("restore"):
        consume_until_dead(server, filling, broker, came)
    server.die()
    serve(killpoint=(point, 1), wait=False, **options).die()
    serve(**options)
    filling.result()
    check_whole(take_all(broker, "t", "c", into=came), numbered(1000))
    recount(instance, "t", "c")


def test_every_killpoint_of_the_sources_is_some_tests() -> None:
    assert points.in_sources() - points.COVERED == set()
    assert points.COVERED - points.in_sources() == set()
