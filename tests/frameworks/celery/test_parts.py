"""The transport's parts without Celery: names, frames, queues, bindings, prefetch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import kombu
import pytest
from support import traps
from support.processes import HELPERS, WATCHDOG, Child, eventually

import shmq
import shmq.integrations.celery.alias
from shmq.integrations.celery import attachment, frame, names
from shmq.names import matches, valid_name
from shmq.seal import REASON

TEXT = st.text(min_size=1, max_size=100).filter(lambda text: text.isprintable())


@pytest.fixture
def url(broker: shmq.Broker) -> Iterator[str]:
    yield f"shmq://{broker.instance}"
    attachment.detach(broker.instance)


@pytest.fixture
def connect(url: str, keep: Callable[[Any], Any]) -> Callable[..., Any]:
    """`connect(**options)`: a channel of a connection of its own."""

    def channel(**options: Any) -> Any:
        return keep(kombu.Connection(url, transport_options=options)).channel()

    return channel


def published(channel: Any, queue: Any, *bodies: object, **how: Any) -> None:
    producer = kombu.Producer(channel)
    for body in bodies:
        producer.publish(body, routing_key=queue.name, declare=[queue], **how)


# ---- names ----


@hypothesis.given(TEXT, st.booleans(), st.sampled_from([0, 3, 9]))
def test_every_queue_has_a_valid_topic_whose_pattern_matches_it_alone(
    queue: str, ephemeral: bool, step: int
) -> None:
    topic = names.topic_of(queue, ephemeral, step)
    assert valid_name(topic)
    if not ephemeral:
        assert valid_name(f"{topic}.{names.CHANNEL}.dead")
    assert matches(names.pattern(topic), topic)
    for other in range(names.PRIORITIES):
        if other != step:
            assert not matches(names.pattern(topic), names.topic_of(queue, ephemeral, other))


@hypothesis.given(st.lists(TEXT, min_size=2, max_size=20, unique=True))
def test_different_queues_have_different_topics(queues: list[str]) -> None:
    topics = {names.topic_of(queue, False, step) for queue in queues for step in (0, 3, 6, 9)}
    assert len(topics) == 4 * len(queues)


def test_names_that_look_like_another_queues_topic_are_replaced() -> None:
    hashed = names.encoded("celery@host")
    for queue in ("a.p3", "a.queue.dead", hashed):
        assert names.encoded(queue) != queue


# ---- frames ----


@hypothesis.given(st.binary(), st.dictionaries(TEXT, st.integers() | TEXT | st.none()))
def test_a_message_survives_its_bytes(body: bytes, headers: dict[str, Any]) -> None:
    payload = {"body": body, "headers": headers, "properties": {}, "content-type": "a/b"}
    assert frame.unpack(frame.pack(payload)) == payload


def test_headers_may_have_values_that_plain_json_does_not() -> None:
    at = datetime(2030, 1, 2, tzinfo=UTC)
    found = frame.unpack(frame.pack({"body": "x", "headers": {"at": at}, "properties": {}}))
    assert found == {"body": b"x", "headers": {"at": at}, "properties": {}}


@pytest.mark.parametrize("eta", [None, "", "no time", 7])
def test_a_message_without_a_time_is_due_at_once(eta: object) -> None:
    assert frame.due({"headers": {"eta": eta}}) is None


# ---- queues ----


def test_a_prefetch_limit_holds_back_messages_until_one_is_acknowledged(
    connect: Callable[..., Any],
) -> None:
    channel, queue, got = connect(), kombu.Queue("q"), []
    published(channel, queue, 1, 2, 3)
    consumer = kombu.Consumer(channel, [queue], on_message=got.append, prefetch_count=2)
    with consumer:
        client = channel.connection.client
        client.drain_events(timeout=WATCHDOG)
        client.drain_events(timeout=WATCHDOG)
        with pytest.raises(TimeoutError):
            client.drain_events(timeout=0.05)
        got[0].ack()
        client.drain_events(timeout=WATCHDOG)
    assert [message.payload for message in got] == [1, 2, 3]


def test_another_consumer_gets_what_a_closed_channel_had(connect: Callable[..., Any]) -> None:
    first, second, queue = connect(), connect(), kombu.Queue("q")
    published(first, queue, "a")
    message = queue(first).get()
    assert message.payload == "a"
    assert queue(second).get() is None
    first.close()
    again = eventually(lambda: queue(second).get())
    assert again.payload == "a"
    assert again.delivery_info["redelivered"]
    again.ack()


def test_cancelling_a_queue_keeps_what_is_held_and_a_new_queue_gives_nothing_back(
    connect: Callable[..., Any],
) -> None:
    channel, other = connect(), connect()
    one, two, got = kombu.Queue("one"), kombu.Queue("two"), []
    published(channel, one, "a")
    consumer = kombu.Consumer(channel, [one], on_message=got.append)
    consumer.consume()
    channel.connection.client.drain_events(timeout=WATCHDOG)
    consumer.add_queue(two)
    consumer.consume()
    consumer.cancel_by_queue("one")
    assert one(other).get() is None
    got[0].ack()
    assert one(other).get() is None


def test_each_copy_of_a_fanout_message_is_acknowledged_alone(connect: Callable[..., Any]) -> None:
    exchange, channel = kombu.Exchange("all", type="fanout"), connect()
    queues = [kombu.Queue(name, exchange)(channel) for name in ("one", "two")]
    for queue in queues:
        queue.declare()
    kombu.Producer(channel, exchange).publish("a")
    first, second = (queue.get() for queue in queues)
    assert first.delivery_tag != second.delivery_tag
    first.ack()
    second.requeue()
    assert queues[0].get() is None
    assert queues[1].get().payload == "a"


def test_bindings_are_seen_by_other_connections_and_end(connect: Callable[..., Any]) -> None:
    channel, other = connect(), connect()
    exchange = kombu.Exchange("news", type="topic")
    queue = kombu.Queue("sport", exchange, routing_key="sport.#")(channel)
    queue.declare()
    producer = kombu.Producer(other, exchange)
    producer.publish("a", routing_key="sport.chess")
    producer.publish("b", routing_key="music")
    assert queue.get(no_ack=True).payload == "a"
    assert queue.get() is None
    queue.unbind_from(exchange, "sport.#")
    producer.publish("c", routing_key="sport.chess")
    assert queue.get() is None


def test_a_message_with_an_eta_waits_in_the_broker_unless_an_option_says_no(
    connect: Callable[..., Any], broker: shmq.Broker
) -> None:
    channel, queue = connect(), kombu.Queue("q")
    eta = (datetime.now(UTC) + timedelta(hours=3)).isoformat()
    published(channel, queue, "later", headers={"eta": eta})
    assert queue(channel).get() is None
    assert broker.channel_stats("kombu.q", "queue").deferred == 1
    at_once = connect(defer_eta=False)
    published(at_once, queue, "now", headers={"eta": eta})
    assert queue(at_once).get(no_ack=True).payload == "now"


def test_a_time_beyond_the_brokers_limit_is_kept(
    open_broker: Callable[..., shmq.Broker], keep: Callable[[Any], Any]
) -> None:
    broker = open_broker(max_req_timeout=0.2)
    channel = keep(kombu.Connection(f"shmq://{broker.instance}")).channel()
    queue, began = kombu.Queue("q"), time.time()
    eta = datetime.fromtimestamp(began + 1, UTC).isoformat()
    published(channel, queue, "later", headers={"eta": eta})
    assert eventually(lambda: queue(channel).get(no_ack=True)).payload == "later"
    assert time.time() >= began + 0.99
    channel.connection.client.release()
    attachment.detach(broker.instance)


def test_rejected_messages_are_dropped_or_go_to_the_dead_letters(
    connect: Callable[..., Any], broker: shmq.Broker
) -> None:
    queue = kombu.Queue("q")
    for keeps in (False, True):
        channel = connect(dead_letters=keeps)
        published(channel, queue, "a")
        queue(channel).get().reject()
        assert queue(channel).get() is None
    eventually(lambda: len(broker.dead("kombu.q", "queue").peek()) == 1)


def test_bindings_of_killed_programs_are_forgotten(
    connect: Callable[..., Any], broker: shmq.Broker, keep: Callable[[Any], Any], url: str
) -> None:
    code = (
        "import os, signal, kombu, shmq.integrations.celery.alias\n"
        f"channel = kombu.Connection({url!r}).channel()\n"
        "queue = kombu.Queue('mine', kombu.Exchange('x'), auto_delete=True)\n"
        "kombu.Consumer(channel, [queue]).consume()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = keep(Child([sys.executable, "-c", code], HELPERS))
    assert child.wait() == -signal.SIGKILL, child.errors
    eventually(lambda: "kombu.mine#ephemeral" not in [t.name for t in broker.stats().topics])
    channel = connect()
    assert "mine" in {binding[0] for binding in channel.list_bindings()}
    kombu.Queue("other", auto_delete=True)(channel).declare()
    assert "mine" not in {binding[0] for binding in channel.list_bindings()}


def test_a_forked_child_leaves_its_parents_messages_alone(connect: Callable[..., Any]) -> None:
    channel, queue = connect(), kombu.Queue("q")
    published(channel, queue, "a")
    message = queue(channel).get()
    child = os.fork()
    if not child:
        try:
            message.ack()
            channel.connection.client.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    message.requeue()
    assert eventually(lambda: queue(channel).get(no_ack=True)).payload == "a"


# ---- pickles ----


def test_only_a_pickle_that_kombu_has_sent_is_delivered(
    connect: Callable[..., Any], broker: shmq.Broker, tmp_path: Path
) -> None:
    """Also to a program that accepts pickles."""
    trace = tmp_path / "unpickled"
    channel, queue = connect(), kombu.Queue("jobs")
    published(channel, queue, "text")
    assert queue.bind(channel).get(no_ack=True).decode() == "text"
    forged = {
        "body": traps.item(trace),
        "content-type": "application/x-python-serialize",
        "content-encoding": "binary",
        "headers": {},
        "properties": {"delivery_info": {}, "delivery_tag": "1", "body_encoding": None},
    }
    topic = names.topic_of("jobs", False)
    broker.producer(topic).publish(frame.pack(forged))
    published(channel, queue, {"a": {1, 2}}, serializer="pickle")
    published(channel, queue, {"a": {1, 2}}, serializer="pickle", priority=9)
    bound = queue.bind(channel)
    for _ in range(2):
        message = bound.get(no_ack=True, accept=["pickle"])
        assert message.decode() == {"a": {1, 2}}
    assert bound.get(no_ack=True) is None
    dead = broker.dead(topic, names.CHANNEL)
    eventually(lambda: [each.error for each in dead.peek()] == [REASON])
    assert not trace.exists()
