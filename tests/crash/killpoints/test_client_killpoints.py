"""A client dies at every named point; the next one goes on, nothing is lost, doubled or half done.

The points come from the core's sources. Children have the build with killpoints; the supervisor and
this process have the ordinary one. Messages say where they belong: `single:17`, `batch:3:1/4`.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash.killpoints.points import CLIENT, PUBLISHED, RECOVERED
from support.deliveries import Delivered, Drain, take_all
from support.processes import Child, arm, eventually, remove_instance, say, serve
from support.recount import recount

import shmq
from shmq import shm


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Child]]:
    """An instance and its supervisor, for all tests of this module; each has topics of its own."""
    instance = f"test-killpoints-{id(tmp_path_factory):x}"
    server = serve(instance, tmp_path_factory.mktemp("data"), queue_scan_interval="20ms")
    yield instance, server
    server.close()
    remove_instance(instance)
    assert not shm.list_objects(instance)


@pytest.fixture
def joined(running: tuple[str, Child]) -> Iterator[shmq.Broker]:
    """This process, attached."""
    with shmq.attach(running[0]) as broker:
        yield broker


@pytest.fixture
def topic(joined: shmq.Broker, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic of the test's own."""
    name = re.sub(r"[^a-z0-9.]", "-", request.node.name.lower())[-60:]
    yield name
    joined.delete_topic(name)


# ---- publish ----


def publish_until_killed(instance, topic, point, count):
    from shmq import _native

    broker = shmq.attach(instance)
    producer = broker.producer(topic)
    producer.publish(b"single:0")
    say("ok", "single:0")
    _native.killpoint(point, count)
    for i in range(1, 60):
        producer.publish(b"single:%d" % i)
        say("ok", f"single:{i}")
        producer.publish_many([b"batch:%d:%d/4" % (i, k) for k in range(4)])
        say("ok", f"batch:{i}")
        producer.publish(b"large:%d:" % i + bytes(70_000))
        say("ok", f"large:{i}")
        with producer.loan(100) as buffer:
            buffer[:] = b"loan:%d:" % i + bytes(100 - len(b"loan:%d:" % i))
        say("ok", f"loan:{i}")
        producer.publish(b"deferred:%d" % i, defer=0.001)
        say("ok", f"deferred:{i}")


def publish_to_sleepers_until_killed(instance, topic, point, count):
    from shmq import _native

    producer = shmq.attach(instance).producer(topic)
    _native.killpoint(point, count)
    for i in itertools.count(1):
        producer.publish(b"single:%d" % i)
        say("ok", f"single:{i}")
        time.sleep(0.02)  # a consumer that is awake need not be woken


def name_of(body: bytes) -> str:
    """The line with which a child reports the publish of this body, alone or in a batch."""
    kind, number = body.split(b":")[:2]
    return f"{kind.decode()}:{int(number)}"


def check_published(child: Child, channels: list[Delivered]) -> None:
    """Every publish that returned came on all channels, whole, once; at most one that did not."""
    returned = [line[3:] for line in child.lines if line.startswith("ok ")]
    for delivered in channels:
        assert delivered.twice == []
        assert Counter(delivered.attempts).keys() == {1}
        assert sorted(delivered.bodies) == sorted(channels[0].bodies)
        came = {name_of(body) for body in delivered.bodies if not body.startswith(b"after")}
        assert came >= set(returned)
        assert len(came - set(returned)) <= 1
    parts = defaultdict(set)
    for body in channels[0].bodies:
        if body.startswith(b"batch"):
            _, number, part = body.split(b":")
            parts[number].add(part)
    assert all(len(found) == 4 for found in parts.values()), parts


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("point", "count"), PUBLISHED)
def test_a_publish_cut_short_is_in_all_channels_or_in_none(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
    point: str,
    count: int,
    channels: int,
) -> None:
    names = [f"c{k}" for k in range(channels)]
    for name in names:
        joined.create_channel(topic, name)
    publisher = child(publish_until_killed, running[0], topic, point, count, killpoints=True)
    publisher.die()
    joined.producer(topic).publish(b"after:0", timeout=20)
    for name in names:
        recount(running[0], topic, name)
    came = [take_all(joined, topic, name) for name in names]
    assert all(b"after:0" in delivered.bodies for delivered in came)
    check_published(publisher, came)
    for name in names:
        recount(running[0], topic, name)


def test_a_waker_that_dies_before_its_post_leaves_no_consumer_asleep(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
) -> None:
    drain = Drain(joined, topic, "c")
    try:
        publisher = child(
            publish_to_sleepers_until_killed, running[0], topic, "wake.post", 1, killpoints=True
        )
        publisher.die()
        said = [line[3:] for line in publisher.lines]
        eventually(lambda: {name_of(body) for body in drain.delivered.bodies} >= set(said))
    finally:
        drain.close()
    rest = take_all(joined, topic, "c", into=drain.delivered)
    check_published(publisher, [rest])


def test_who_leaves_repairs_a_topic_of_which_it_knows_one_queue(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
) -> None:
    instance, server = running
    for name in "abc":
        joined.create_channel(topic, name)
    with shmq.attach(instance) as leaver:
        leaver.consumer(topic, "b")
        server.stop()  # who else would repair it
        try:
            publisher = child(
                publish_until_killed, instance, topic, "publish.flipped", 1, killpoints=True
            )
            publisher.die()
            leaver.close()
            recount(instance, topic, "b")
        finally:
            server.go_on()
    came = [take_all(joined, topic, name) for name in "abc"]
    check_published(publisher, came)


# ---- take, finish, requeue, touch, pins, close, empty ----


def consume_until_killed(instance, topic, point, count):
    from shmq import _native

    broker = shmq.attach(instance)
    producer = broker.producer(topic)
    consumer = broker.consumer(topic, "c", max_in_flight=50)
    say("ready")
    _native.killpoint(point, count)

    def finish(message):
        say("finishing", message.id)
        message.finish()
        say("finished", message.id)

    for _ in range(8):
        producer.publish(b"deferred", defer=0.001)
        say("published")
        finish(consumer.take(5))
        batch = consumer.take_many(4, 5)
        say("finishing", *(m.id for m in batch))
        batch.finish()
        say("finished", *(m.id for m in batch))
        message = consumer.take(5)
        view = message.view
        finish(message)
        view.release()
        message = consumer.take(5)
        message.touch()
        message.requeue()
        consumer.take(5).requeue(delay=0.005)
        held = [consumer.take(5)]
    consumer.take_many(50, 0.2)
    while consumer.take(0.05):
        pass
    _native.Waiter(consumer._broker).wait([consumer], _native.now() + 50_000_000)
    consumer.close()
    say("closed", len(held))


def words_after(child: Child, word: str) -> set[str]:
    """Everything a child said on lines that begin with the word."""
    return {text for line in child.lines for text in line.split()[1:] if line.split()[0] == word}


@pytest.mark.parametrize(("point", "count"), CLIENT)
def test_a_consumer_cut_short_loses_nothing_and_what_it_finished_never_comes_again(
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
    consumer = child(consume_until_killed, running[0], topic, point, count, killpoints=True)
    consumer.die()
    after = producer.publish(b"after", timeout=20)
    published.add(after)
    recount(running[0], topic, "c")
    came = take_all(joined, topic, "c")
    recount(running[0], topic, "c")
    finished, finishing = words_after(consumer, "finished"), words_after(consumer, "finishing")
    assert came.twice in ([], [b"deferred"])
    assert len(set(came.ids)) == len(came.ids)
    assert not finished & set(came.ids)
    assert published - set(came.ids) <= finishing
    assert after in came.ids


def empty_until_killed(instance, topic, point, count):
    from shmq import _native

    broker = shmq.attach(instance)
    _native.killpoint(point, count)
    broker.empty_channel(topic, "c")


@pytest.mark.parametrize(
    ("point", "count"),
    [("empty.dirty", 1), ("empty.slot", 1), ("empty.slot", 20), ("empty.disk", 1)],
)
def test_an_empty_cut_short_drops_some_and_leaves_the_rest_whole(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
    point: str,
    count: int,
) -> None:
    joined.create_channel(topic, "c")
    ids = joined.producer(topic).publish_many([b"%d" % i for i in range(40)])
    child(empty_until_killed, running[0], topic, point, count, killpoints=True).die()
    recount(running[0], topic, "c")
    after = joined.producer(topic).publish(b"after", timeout=20)
    came = take_all(joined, topic, "c")
    recount(running[0], topic, "c")
    assert set(came.ids) <= {after, *(f"{number:016x}" for number in ids)}
    assert came.twice == []
    assert came.ids[-1] == after
    assert len(came.ids) == 41 - {"empty.dirty": 0, "empty.slot": count}.get(point, 40)


# ---- repairing ----


def publish_and_take(instance, topic, point, count, at_once):
    from shmq import _native

    broker = shmq.attach(instance)
    if at_once:
        _native.killpoint(point, count)
    producer = broker.producer(topic)
    consumer = broker.consumer(topic, "c0")
    if not at_once:
        _native.killpoint(point, count)
    for i in range(60):
        producer.publish(b"single:%d" % i)
        say("ok", f"single:{i}")
        consumer.take(5)


@pytest.mark.parametrize(("first", "point", "count"), RECOVERED)
def test_a_repair_cut_short_is_finished_by_the_next_one_also_without_a_supervisor(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    topic: str,
    first: str,
    point: str,
    count: int,
) -> None:
    instance, server = running
    names = ["c0", "c1", "c2"]
    for name in names:
        joined.create_channel(topic, name)
    producer = joined.producer(topic)
    consumer = joined.consumer(topic, "c1")
    server.stop()  # or its reaper would do the repair
    try:
        one = child(publish_and_take, instance, topic, first, 5, False, killpoints=True)
        one.die()
        two = child(publish_and_take, instance, topic, point, count, True, killpoints=True)
        two.die()
        producer.publish(b"after:0", timeout=20)
        with consumer:
            assert consumer.take(20) is not None
    finally:
        server.go_on()
    for name in names:
        recount(instance, topic, name)
    came = [take_all(joined, topic, name) for name in names]
    for name in names:
        recount(instance, topic, name)
    returned = Counter(line[3:] for dead in (one, two) for line in dead.lines)
    for delivered in came:
        counted = Counter(body.decode() for body in delivered.bodies)
        assert counted["after:0"] == 1
        assert counted == Counter(body.decode() for body in came[0].bodies)
        assert not returned - counted
        assert (counted - returned).total() <= 3  # after:0 and what each of the two was publishing


# ---- attach ----


def attach_until_killed(instance, point):
    arm(point)
    broker = shmq.attach(instance)
    broker.create_topic("never-made")


@pytest.mark.parametrize(
    "point", ["attach.generation", "attach.filled", "attach.live", "request.filled"]
)
def test_a_client_that_dies_while_it_attaches_leaves_its_entry_to_others(
    killpoints: Path,
    running: tuple[str, Child],
    joined: shmq.Broker,
    child: Callable[..., Child],
    point: str,
) -> None:
    for _ in range(3):
        child(attach_until_killed, running[0], point, killpoints=True).die()
    eventually(lambda: len(joined.stats().clients) <= 2)
    with shmq.attach(running[0]) as other:
        other.create_topic("made")
        other.delete_topic("made")
