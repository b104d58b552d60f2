"""Odd arguments: a remote handle refuses what a local one refuses, with the same kind of error, and
sends nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.nsq_client import Server
from support.processes import WATCHDOG

import shmq
from shmq.errors import MessageTooBig, NotInFlight
from shmq.remote.consumer import RemoteMessages

#: Every call that takes the argument, of a broker and the name of a topic.
Call = Callable[[Any, str, Any], Any]

BODIES = (5, 0, True, "text", None, [1, 2], 1.5, range(3), {"a": 1}, object(), b"")
SECONDS: tuple[Any, ...] = (-1, -0.5, math.nan, "1", [1], object())
COUNTS = (0, -1, 1.5, "1", None, [1])
LISTS = (5, None, "text", b"text", bytearray(b"text"), [5], [b"a", 3], ["a"], [None], [b""])

CALLS: dict[str, tuple[tuple[Any, ...], Call]] = {
    "publish": (BODIES, lambda broker, topic, value: broker.producer(topic).publish(value)),
    "publish_many": (
        LISTS,
        lambda broker, topic, value: broker.producer(topic).publish_many(value),
    ),
    "defer": (
        (*SECONDS, math.inf, 1e300),
        lambda broker, topic, value: broker.producer(topic).publish(b"x", defer=value),
    ),
    "publish timeout": (
        SECONDS,
        lambda broker, topic, value: broker.producer(topic).publish(b"x", timeout=value),
    ),
    "take": (SECONDS, lambda broker, topic, value: broker.consumer(topic, "c").take(value)),
    "take_many": (
        COUNTS,
        lambda broker, topic, value: broker.consumer(topic, "c").take_many(value, 0),
    ),
    "max_in_flight": (
        (*COUNTS, 1 << 32),
        lambda broker, topic, value: broker.consumer(topic, "c", max_in_flight=value),
    ),
    "msg_timeout": (
        (-1, 0, math.nan, math.inf, "x"),
        lambda broker, topic, value: broker.consumer(topic, "c", msg_timeout=value),
    ),
    "lease": (
        COUNTS,
        lambda broker, topic, value: broker.lease_holder(topic, "c", "name").lease(value),
    ),
    "parts": (
        (*COUNTS, 33),
        lambda broker, topic, value: broker.lease_holder(topic, "c", "n").lease(1, parts=value),
    ),
    "ttl": (
        (-1, 0, math.nan, math.inf, "x"),
        lambda broker, topic, value: broker.lease_holder(topic, "c", "name", ttl=value),
    ),
    "secret": (
        (5, "", "short", "x" * 201, "\n" * 20),
        lambda broker, topic, value: (
            broker.lease_holder(topic, "c", "name", secret=value)
            if isinstance(broker, shmq.Broker)
            else shmq.connect(broker.address, secret=value)
        ),
    ),
}


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has `shmq.connect`'s commands."""
    return "shmq"


@pytest.fixture(scope="module")
def both(server: Server) -> Iterator[tuple[shmq.Broker, shmq.RemoteBroker]]:
    """The same broker, attached and over TCP."""
    with (
        shmq.connect(f"127.0.0.1:{server.port()}", timeout=WATCHDOG) as remote,
        shmq.attach(remote.instance) as local,
    ):
        yield local, remote


def kind_of(call: Call, broker: Any, topic: str, value: Any) -> type[BaseException] | None:
    try:
        call(broker, topic, value)
    except Exception as exc:
        return next(kind for kind in (TypeError, ValueError) if isinstance(exc, kind))
    return None


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_refused_alike(
    both: tuple[shmq.Broker, shmq.RemoteBroker], topic: str, name: str
) -> None:
    local, remote = both
    local.create_channel(topic, "c")
    values, call = CALLS[name]
    found = {repr(value): kind_of(call, remote, topic, value) for value in values}
    assert found == {repr(value): kind_of(call, local, topic, value) for value in values}
    assert None not in found.values()
    assert local.channel_depth(topic, "c") == 0


def test_requeue_refuses_what_is_no_delay(
    both: tuple[shmq.Broker, shmq.RemoteBroker], topic: str
) -> None:
    """The connection stays, with the messages that came by it."""
    _, remote = both
    consumer = remote.consumer(topic, "c")
    remote.producer(topic).publish(b"x")
    message = consumer.take(WATCHDOG)
    assert message is not None
    for value in (*SECONDS, math.inf):
        with pytest.raises((TypeError, ValueError), match="delay must be"):
            message.requeue(value)
    message.finish()
    consumer.close()


@pytest.mark.parametrize("body", [bytearray(b"ab"), memoryview(b"ab"), memoryview(b"abcd")[::2]])
def test_what_is_like_bytes_is_a_body(
    both: tuple[shmq.Broker, shmq.RemoteBroker], topic: str, body: Any
) -> None:
    _, remote = both
    consumer = remote.consumer(topic, "c")
    producer = remote.producer(topic)
    producer.publish(body)
    producer.publish_many([body])
    wanted = [bytes(body)] * 2
    bodies = [
        message.body
        for message in (consumer.take(WATCHDOG), consumer.take(WATCHDOG))
        if message is not None
    ]
    assert bodies == wanted
    consumer.close()


def test_a_list_of_messages_is_finished_but_for_those_that_were(
    both: tuple[shmq.Broker, shmq.RemoteBroker], topic: str
) -> None:
    local, remote = both
    consumer = remote.consumer(topic, "c", max_in_flight=3)
    remote.producer(topic).publish_many([b"a", b"b", b"c"])
    taken = RemoteMessages()
    while len(taken) < 3:
        taken += consumer.take_many(3, WATCHDOG)
    taken[0].finish()
    taken.finish()
    with pytest.raises(NotInFlight):
        taken[2].finish()
    remote.producer(topic).publish(b"d")
    last = consumer.take(WATCHDOG)
    assert last is not None
    assert last.body == b"d"  # the others do not hold it up
    last.finish()
    consumer.close()
    assert local.channel_depth(topic, "c") == 0


@pytest.mark.parametrize("token", [5, [1], "", b""])
def test_a_token_is_text_or_bytes(server: Server, token: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="token must"):
        shmq.connect(f"127.0.0.1:{server.port()}", token=token)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "1", None])
def test_the_time_limit_of_a_connection(server: Server, timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout must be"):
        shmq.connect(f"127.0.0.1:{server.port()}", timeout=timeout)


def test_the_time_limit_may_be_endless(server: Server) -> None:
    shmq.connect(f"127.0.0.1:{server.port()}", timeout=math.inf).close()


def test_what_is_too_big_names_its_limit(
    both: tuple[shmq.Broker, shmq.RemoteBroker], topic: str
) -> None:
    """Also if the broker has ended the connection before all of it was sent."""
    local, remote = both
    producer = remote.producer(topic)
    largest = local.limit("max_msg_size")
    for size in (largest + 1, 20 * largest):
        with pytest.raises(MessageTooBig, match=rf"publish to {topic}: .* raise .*max-msg-size"):
            producer.publish(bytes(size))
    for count in (6, 60):
        with pytest.raises(MessageTooBig, match=rf"publish to {topic}: .* raise .*max-body-size"):
            producer.publish_many([bytes(largest)] * count)
    producer.publish(bytes(largest))  # the next call works
