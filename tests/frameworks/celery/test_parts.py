"""The transport's parts without Celery: names, frames, queues, bindings, prefetch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import kombu
import kombu.exceptions
import pytest
from support import traps
from support.processes import WATCHDOG, eventually

import shmq
import shmq.integrations.celery.alias
from shmq.integrations.celery import attachment, frame, names
from shmq.integrations.celery.inbox import GreenInbox
from shmq.integrations.celery.queues import Queues
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


# ---- turns ----


def drained(channel: Any, queues: list[Any], count: int, **how: Any) -> str:
    """The bodies of the next messages, with one consumer of all these queues."""
    got: list[str] = []

    def heard(body: str, message: Any) -> None:
        got.append(body)
        message.ack()

    with kombu.Consumer(channel, queues, callbacks=[heard], **how):
        for _ in range(count):
            channel.connection.client.drain_events(timeout=WATCHDOG)
    return "".join(got)


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        (None, "babababa"),
        ("round_robin", "babababa"),
        ("priority", "bbbbbbaa"),
        ("sorted", "aaaaaabb"),
        ("kombu.utils.scheduling:sorted_cycle", "aaaaaabb"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("green", [False, True])
def test_queues_are_served_as_the_strategy_says(
    connect: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    strategy: str | None,
    order: str,
    prefetch: int,
    green: bool,
) -> None:
    if green:
        monkeypatch.setattr("shmq.integrations.celery.transport.inbox", GreenInbox)
    channel = connect(**({} if strategy is None else {"queue_order_strategy": strategy}))
    queues = [kombu.Queue(name) for name in "ba"]
    for queue in queues:
        published(channel, queue, *(6 * queue.name))
    assert drained(channel, queues, 8, prefetch_count=prefetch) == order


@pytest.mark.parametrize("strategy", ["round_robin", "priority"])
def test_a_flood_in_one_channel_holds_up_no_other(
    connect: Callable[..., Any], strategy: str
) -> None:
    """As the tasks and the remote control of a worker."""
    channel = connect(queue_order_strategy=strategy)
    other = channel.connection.client.channel()
    flood, control = kombu.Queue("flood"), kombu.Queue("control")
    got: list[str] = []

    def heard(body: str, message: Any) -> None:
        got.append(body)
        message.ack()
        if body == "flood":
            published(channel, flood, "flood")

    published(channel, flood, "flood", "flood")
    with (
        kombu.Consumer(channel, [flood], callbacks=[heard]),
        kombu.Consumer(other, [control], callbacks=[heard]),
    ):
        for _ in range(3):
            channel.connection.client.drain_events(timeout=WATCHDOG)
        published(channel, control, "ping")

        def answered() -> bool:
            channel.connection.client.drain_events(timeout=WATCHDOG)
            return "ping" in got

        eventually(answered)


def test_the_last_consumer_of_a_queue_on_a_channel_gets_its_messages(
    connect: Callable[..., Any],
) -> None:
    channel, queue = connect(), kombu.Queue("q")
    client = channel.connection.client
    published(channel, queue, 1, 2)
    first, second = [], []
    with kombu.Consumer(channel, [queue], on_message=first.append):
        with kombu.Consumer(channel, [queue], on_message=second.append):
            client.drain_events(timeout=WATCHDOG)
        client.drain_events(timeout=WATCHDOG)
    assert [len(first), len(second)] == [1, 1]


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


def test_the_arguments_of_a_queue_hold_for_all_priorities(
    connect: Callable[..., Any], broker: shmq.Broker
) -> None:
    channel = connect()
    queue = kombu.Queue("few", queue_arguments={"x-max-length": 5})
    for priority in (0, 5, 9):
        published(channel, queue, *range(10), priority=priority)
    # what goes is of the lowest priority, and the oldest
    assert queue(channel).queue_declare(passive=True).message_count == 5
    assert queue(channel).get(no_ack=True).payload == 5
    published(channel, queue, "low", priority=9)
    assert queue(channel).queue_declare(passive=True).message_count == 5
    queue = kombu.Queue("short", message_ttl=0.1)
    for priority in (0, 5, 9):
        published(channel, queue, *range(10), priority=priority)
    eventually(lambda: queue(channel).queue_declare(passive=True).message_count == 0)
    for topic in ("kombu.short", "kombu.short.p3", "kombu.short.p9"):
        assert broker.settings(topic, "queue").message_ttl == 0.1


def test_all_priorities_follow_what_somebody_sets(
    connect: Callable[..., Any], broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmq.integrations.celery.queues._LOOK_SECONDS", 0)
    channel, queue = connect(), kombu.Queue("q")
    published(channel, queue, "a", priority=9)
    for most in (3, 4):  # before and after the channel got some already
        broker.configure("kombu.q", "queue", max_attempts=most)
        for priority in (5, 9):
            published(channel, queue, "a", priority=priority)
        for lane in ("p3", "p9"):
            assert broker.settings(f"kombu.q.{lane}", "queue").max_attempts == most
    broker.configure("kombu.q.p9", "queue", max_attempts=77)  # one that has its own keeps it
    published(channel, queue, "a", priority=9)
    assert broker.settings("kombu.q.p9", "queue").max_attempts == 77


def test_arguments_without_an_effect_are_told_once(
    connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    channel = connect()
    dead = {"x-dead-letter-exchange": "x", "x-expires": 1000, "x-max-priority": 9}
    for _ in range(2):
        kombu.Queue("q", queue_arguments=dead)(channel).declare()
    kombu.Queue("mine", auto_delete=True, queue_arguments={"x-expires": 1000})(channel).declare()
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("shmq")]
    assert "x-dead-letter-exchange, x-expires;" in told


def test_a_purge_counts_what_is_for_later(connect: Callable[..., Any]) -> None:
    channel, queue = connect(), kombu.Queue("q")
    eta = (datetime.now(UTC) + timedelta(hours=3)).isoformat()
    published(channel, queue, *range(11), headers={"eta": eta})
    published(channel, queue, *range(5), priority=9)
    assert queue(channel).purge() == 16
    assert queue(channel).purge() == 0


def test_a_message_that_can_never_fit_is_refused_at_the_first_try(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, queue, tries = connect(), kombu.Queue("q"), []
    published(channel, queue, "fits")
    publish = Queues.publish

    def counted(self: Any, *words: Any) -> None:
        tries.append(1)
        publish(self, *words)

    monkeypatch.setattr(Queues, "publish", counted)
    with pytest.raises(kombu.exceptions.OperationalError, match="max_msg_size is 1048576"):
        kombu.Producer(channel).publish(
            "x" * (2 << 20), routing_key="q", retry=True, retry_policy={"max_retries": 5}
        )
    assert len(tries) == 1


def test_a_task_that_has_expired_reaches_its_worker(connect: Callable[..., Any]) -> None:
    channel, queue = connect(), kombu.Queue("q")
    published(channel, queue, "told", headers={"expires": "2020-01-01"}, expiration=0.001)
    published(channel, queue, "dropped", expiration=0.001)
    published(channel, queue, "last")
    eventually(lambda: queue(channel).queue_declare(passive=True).message_count == 2)
    assert [queue(channel).get(no_ack=True).payload for _ in range(2)] == ["told", "last"]


def test_in_flight_slots_that_run_out_are_told(
    open_broker: Callable[..., shmq.Broker],
    keep: Callable[[Any], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = open_broker(in_flight_slots=64)
    channel = keep(kombu.Connection(f"shmq://{broker.instance}")).channel()
    queue = kombu.Queue("q")
    published(channel, queue, *range(100))
    for _ in range(60):
        queue(channel).get()
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("shmq")]
    assert "--in-flight-slots" in told
    channel.connection.client.release()
    attachment.detach(broker.instance)


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
