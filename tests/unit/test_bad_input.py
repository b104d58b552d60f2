"""Bad input is refused with a typed error and a sentence that helps, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.in_process_broker import World
from support.processes import WATCHDOG

import shmq
from shmq import (
    BadName,
    Consumer,
    Gone,
    MessageTooBig,
    NotInFlight,
    Producer,
    ShmqError,
)

MOST = 100_000  # max_msg_size
READY = 300  # mem_queue_size


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shmq.Broker]:
    options = {"max_msg_size": MOST, "arena_size": 1 << 20, "mem_queue_size": READY}
    path = tmp_path_factory.mktemp("data")
    instance = f"test-bad-input-{time.time_ns():x}"
    with shmq.Broker(data_path=path, instance=instance, **options) as broker:
        yield broker


@pytest.fixture
def broker(module_broker: shmq.Broker) -> shmq.Broker:
    return module_broker


@pytest.fixture
def producer(broker: shmq.Broker, request: pytest.FixtureRequest) -> Iterator[Producer]:
    """Of a topic of its own."""
    topic = f"topic-{abs(hash(request.node.name))}"
    yield broker.producer(topic)
    with contextlib.suppress(Gone):
        broker.delete_topic(topic)


@pytest.fixture
def consumer(broker: shmq.Broker, producer: Producer) -> Iterator[Consumer]:
    with broker.consumer(producer.topic, "channel", max_in_flight=1000) as consumer:
        yield consumer


def take(consumer: Consumer) -> Any:
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    return message


# ---- bodies ----

WRONG_BODIES: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": (b"", ShmqError, r"message 0 is empty.* 1 byte or more"),
    "too large": (b"x" * (MOST + 1), MessageTooBig, rf"{MOST + 1} bytes; max_msg_size is {MOST}"),
    "text": ("text", TypeError, r"bytes-like, not str; encode it first"),
    "number": (3, TypeError, "bytes-like, not int"),
    "none": (None, TypeError, "bytes-like, not NoneType"),
    "list": ([b"x"], TypeError, "bytes-like, not list"),
    "strided": (np.zeros((4, 4), "u1")[:, 1], ValueError, "contiguous"),
    "strided view": (memoryview(b"abcdef")[::2], ValueError, "contiguous"),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_a_body_that_cannot_be_published(producer: Producer, consumer: Consumer, name: str) -> None:
    body, error, words = WRONG_BODIES[name]
    with pytest.raises(error, match=words) as caught:
        producer.publish(body)
    assert producer.topic in str(caught.value)
    with pytest.raises(error, match=words.replace("message 0", "message 2")):
        producer.publish_many([b"a", b"b", body, b"d"])
    if name in ("text", "number", "none", "list", "strided", "strided view"):
        with pytest.raises(error, match="body 2 "):
            producer.publish_many([b"a", b"b", body, b"d"])
    assert consumer.take(0) is None, "part of a refused batch was published"
    producer.publish(b"good")
    assert take(consumer).body == b"good"


NOT_MANY: dict[str, tuple[Any, type[Exception], str]] = {
    "bytes": (b"abc", TypeError, "many bodies; use publish for one"),
    "bytearray": (bytearray(b"abc"), TypeError, "use publish for one"),
    "text": ("abc", TypeError, "use publish for one"),
    "number": (5, TypeError, "iterable of bodies, not int"),
    "numpy of one dimension": (np.zeros(5, "u1"), TypeError, r"two dimensions .*reshape"),
    "numpy of floats": (np.zeros((5, 2)), TypeError, r"uint8 .* not of float64"),
    "numpy of no width": (np.zeros((5, 0), "u1"), ShmqError, "message 0 is empty"),
    "arrow with nulls": (
        pa.array([b"a", None]),
        ValueError,
        r"1 of the bodies are null.*drop_null",
    ),
    "arrow of numbers": (pa.array([1, 2]), TypeError, "not format .l.: cast"),
    "arrow of categories": (pa.array(["a"]).dictionary_encode(), TypeError, "a dictionary.*cast"),
    "a table": (pa.table({"a": [b"x"]}), TypeError, "one column of a table"),
    "arrow with an empty one": (pa.array([b"a", b""]), ShmqError, "message 1 is empty"),
    "arrow chunks with nulls": (pa.chunked_array([[b"a"], [None]]), ValueError, "null"),
    "a raising generator": ((1 // 0 for _ in "a"), ZeroDivisionError, "division"),
    "too many": ([b"x"] * (READY + 1), MessageTooBig, rf"{READY + 1} messages.*mem_queue_size"),
    "too many bytes": ([b"x" * 90_000] * 10, MessageTooBig, "10 messages of .* arena_size"),
}


@pytest.mark.parametrize("name", NOT_MANY)
def test_what_is_not_many_bodies_is_refused_at_once(
    producer: Producer, consumer: Consumer, name: str
) -> None:
    bodies, error, words = NOT_MANY[name]
    with pytest.raises(error, match=words):
        producer.publish_many(bodies)
    assert consumer.take(0) is None
    producer.publish_many([b"good"])
    assert take(consumer).body == b"good"


def test_a_batch_of_deferred_messages_that_never_fits(producer: Producer) -> None:
    with pytest.raises(MessageTooBig, match="20000 messages"):
        producer.publish_many([b"x"] * 20_000, defer=5)


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (0, ShmqError, "empty"),
        (MOST + 1, MessageTooBig, "max_msg_size"),
    ],
)
def test_a_loan_of_impossible_size(
    producer: Producer, consumer: Consumer, size: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), producer.loan(size):
        pass
    assert consumer.take(0) is None


# ---- numbers ----


def test_nothing_is_deferred_for_ever_or_for_longer_than_max_req_timeout(
    producer: Producer, consumer: Consumer
) -> None:
    with pytest.raises(ValueError, match="defer must be"):
        producer.publish(b"x", defer=math.inf)
    for call in (
        lambda: producer.publish(b"x", defer=3601),
        lambda: producer.publish_many([b"x"], defer=1e12),
    ):
        with pytest.raises(ShmqError, match=r"max_req_timeout \(3600000 ms\)"):
            call()
    producer.publish(b"x", defer=3600)
    assert consumer.take(0) is None


def test_a_loan_deferred_too_long_is_dropped(producer: Producer, broker: shmq.Broker) -> None:
    broker.create_channel(producer.topic, "channel")
    with pytest.raises(ShmqError, match="max_req_timeout"), producer.loan(1, defer=3601):
        pass
    assert broker.peek(producer.topic, "channel", "deferred") == []


def test_unknown_arguments_are_named(producer: Producer, consumer: Consumer) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'delay'"):
        producer.publish(b"x", delay=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        consumer.take(n=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="misses the argument 'body'"):
        producer.publish()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values"):
        producer.publish(b"x", body=b"y")  # type: ignore[misc]
    with pytest.raises(TypeError, match="at most 6"):
        producer.publish(b"x", None, None, None, None, None, None)  # type: ignore[call-arg]


# ---- names ----

WRONG_NAMES = [
    "",
    "a" * 65,
    "a b",
    "é",
    "#ephemeral",
    "a#eph",
    "a#",
    "a/b",
    "a:b",
    "a\0b",
    "a\n",
    "b" * 55 + "#ephemeral",
    "\N{SNOWMAN}",
]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_wrong_names_of_topics_and_channels(broker: shmq.Broker, name: str) -> None:
    for call in (
        lambda: broker.producer(name),
        lambda: broker.consumer(name, "channel"),
        lambda: broker.create_topic(name),
        lambda: broker.delete_topic(name),
        lambda: broker.pause_topic(name),
        lambda: broker.peek(name, "channel"),
    ):
        with pytest.raises(BadName, match=r"topic name .* 1 to 64"):
            call()
    broker.create_topic("names")
    for call in (
        lambda: broker.consumer("names", name),
        lambda: broker.create_channel("names", name),
        lambda: broker.empty_channel("names", name),
        lambda: broker.peek("names", name),
    ):
        with pytest.raises(BadName, match=r"channel name .* 1 to 64"):
            call()


def test_names_must_be_text(broker: shmq.Broker) -> None:
    for name in (None, 5, b"topic"):
        with pytest.raises(TypeError, match="must be str"):
            broker.producer(name)  # type: ignore[arg-type]


def test_names_at_the_limit_are_right(broker: shmq.Broker) -> None:
    longest = "a" * 54 + "#ephemeral"
    consumer = broker.consumer("b" * 64, longest)
    producer = broker.producer("b" * 64)
    producer.publish(b"x")
    message = take(consumer)
    message.finish()
    consumer.close()
    broker.delete_topic("b" * 64)


@pytest.mark.parametrize("name", ["a/b", "x" * 65, "x.5", "a b", "é", "a#ephemeral"])
def test_wrong_names_of_instances(name: str) -> None:
    with pytest.raises(BadName, match="instance name"):
        shmq.attach(name)
    with pytest.raises(BadName, match="instance name"):
        shmq.Broker(instance=name)


def test_what_is_not_there_is_gone(broker: shmq.Broker, producer: Producer) -> None:
    broker.create_channel(producer.topic, "channel")
    nothing = "there is no topic 'nothing'"
    for call in (broker.delete_topic, broker.pause_topic, broker.unpause_topic, broker.empty_topic):
        with pytest.raises(Gone, match=nothing):
            call("nothing")
    for do in (
        broker.delete_channel,
        broker.pause_channel,
        broker.unpause_channel,
        broker.empty_channel,
        broker.peek,
    ):
        with pytest.raises(Gone, match=nothing):
            do("nothing", "channel")
        with pytest.raises(Gone, match=f"there is no channel {producer.topic}/nothing"):
            do(producer.topic, "nothing")
    with pytest.raises(ValueError, match="one of ready, in_flight, deferred"):
        broker.peek(producer.topic, "channel", state="nothing")


# ---- settle ----


def test_finishing_twice(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"x")
    message = take(consumer)
    message.finish()
    for call in (message.finish, message.requeue, message.touch):
        with pytest.raises(NotInFlight, match=rf"{message.id} of '{producer.topic}/channel'"):
            call()


def test_a_message_that_another_consumer_has_now(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"x")
    message = take(consumer)
    message.requeue()
    with broker.consumer(producer.topic, "channel") as other:
        again = take(other)
        assert again.id == message.id
        for call in (message.finish, message.requeue, message.touch):
            with pytest.raises(NotInFlight, match="not in flight to this consumer"):
                call()
        again.finish()


def test_a_batch_of_which_some_are_lost(producer: Producer, consumer: Consumer) -> None:
    producer.publish_many([b"%d" % number for number in range(5)])
    batch = consumer.take_many(5, timeout=WATCHDOG)
    again = list(batch)
    again[1].requeue()
    lost = take(consumer)
    assert lost.id == again[1].id
    other = [batch[0], batch[2]]
    other[0].finish()
    batch.touch()  # what was settled singly is not asked for again
    batch.finish()
    with pytest.raises(NotInFlight):
        other[1].finish()
    lost.finish()
    assert consumer.take(0) is None


def test_a_batch_says_how_many_were_lost_and_finishes_the_others() -> None:
    with World() as world:
        client = world.attach()
        producer, consumer = client.producer("t"), client.consumer("t", "c")
        producer.publish_many([b"%d" % number for number in range(5)])
        batch = consumer.take_many(5, 0)
        assert world.supervisor.expire(0, 2, 1 << 62, 0) == (2, 0)
        with pytest.raises(NotInFlight, match=r"5 messages .* of which 2 failed \(the first: "):
            batch.finish()
        batch.finish()  # the others were finished, the lost are not asked for again
        assert consumer.take_many(5, 0).attempts.tolist() == [2, 2]


def test_a_large_body_that_was_not_read_in_time() -> None:
    with World() as world:
        client = world.attach()
        producer, consumer = client.producer("t"), client.consumer("t", "c")
        producer.publish(b"x" * 5000)
        message = consumer.take(0)
        world.supervisor.expire(0, 1, 1 << 62, 0)
        for read in (lambda: message.body, lambda: message.view):
            with pytest.raises(NotInFlight, match=r"read msg\.body or hold msg\.view"):
                read()


# ---- after the end ----


def test_use_after_close(broker: shmq.Broker, producer: Producer) -> None:
    consumer = broker.consumer(producer.topic, "channel")
    producer.publish_many([b"x" * 5000, b"y"])
    message, other = take(consumer), take(consumer)
    loan = producer.loan(5)
    loan.__enter__()
    consumer.close()
    for call in (lambda: consumer.take(0), lambda: consumer.take_many(5, 0)):
        with pytest.raises(Gone, match="the handle was closed; make a new one"):
            call()
    assert list(consumer) == []
    for settle in (message.finish, message.requeue, message.touch):
        with pytest.raises(NotInFlight, match="closed, which gave it back to the channel"):
            settle()
    assert other.body == b"y"
    assert consumer.in_flight == 0
    producer.close()
    for publish in (
        lambda: producer.publish(b"x"),
        lambda: producer.publish_many([b"x"]),
        lambda: producer.loan(5).__enter__(),
        lambda: loan.__exit__(None, None, None),
    ):
        with pytest.raises(Gone, match="the handle was closed; make a new one"):
            publish()
    with broker.consumer(producer.topic, "channel") as again:
        assert again.take_many(5, timeout=WATCHDOG).bodies() == [b"x" * 5000, b"y"]


def test_use_after_the_broker_is_closed(broker: shmq.Broker, producer: Producer) -> None:
    joined = shmq.attach(broker.instance)
    mine, consumer = joined.producer(producer.topic), joined.consumer(producer.topic, "channel")
    mine.publish(b"x")
    message = take(consumer)
    joined.close()
    joined.close()
    assert joined.closed
    for call in (
        lambda: mine.publish(b"x"),
        lambda: consumer.take(0),
        joined.stats,
        lambda: joined.producer("t"),
        lambda: joined.consumer("t", "c"),
        lambda: joined.create_topic("t"),
        lambda: joined.peek("t", "c"),
        joined.supervisor_alive,
        lambda: joined.supervisor_pid,
        lambda: joined.delete_topic("t"),
    ):
        with pytest.raises(Gone, match="closed"):
            call()
    with pytest.raises(NotInFlight, match="closed"):
        message.finish()
    consumer.close()
    mine.close()
    with broker.consumer(producer.topic, "channel") as other:
        assert take(other).attempts == 2


def test_use_after_the_topic_is_deleted(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"x")
    message = take(consumer)
    broker.delete_topic(producer.topic)
    deleted = "deleted; create it again"
    for call in (
        lambda: producer.publish(b"x"),
        lambda: producer.publish_many([b"x"]),
        lambda: producer.loan(5).__enter__(),
        lambda: consumer.take(0),
        message.finish,
        message.requeue,
        message.touch,
        lambda: next(iter(consumer)),
    ):
        with pytest.raises(Gone, match=deleted):
            call()
    again = broker.producer(producer.topic)  # of the same name, but another topic
    with pytest.raises(Gone, match=deleted):
        producer.publish(b"x")
    again.publish(b"y")
    with broker.consumer(producer.topic, "channel") as other:
        assert take(other).body == b"y"
