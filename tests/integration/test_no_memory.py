"""A take in which Python has no memory raises MemoryError and keeps no message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shmq

_testcapi = pytest.importorskip("_testcapi", reason="this Python cannot fail an allocation")

#: Allocations of one call, more than any of them makes.
_MOST = 14

CALLS: dict[str, Callable[[Any], Any]] = {
    "take": lambda consumer: consumer.take(0),
    "take_many": lambda consumer: consumer.take_many(5, 0),
    "take_body": lambda consumer: consumer.take_body(0),
    "iteration": next,
}


def in_flight(broker: shmq.Broker) -> int:
    return sum(channel.in_flight for topic in broker.stats().topics for channel in topic.channels)


def try_one(broker: shmq.Broker, consumer: Any, call: Callable[[Any], Any], number: int) -> bool:
    """Let one allocation of the call fail. Returns whether that was an error."""
    got = None
    try:
        _testcapi.set_nomemory(number, number + 1)
        try:
            got = call(consumer)
        finally:
            _testcapi.remove_mem_hooks()
    except MemoryError:
        assert in_flight(broker) == 0
        failed = True
    else:
        failed = False
    if got is not None and not isinstance(got, bytes):
        got.finish()
    return failed


@pytest.mark.parametrize("many_topics", [False, True])
@pytest.mark.parametrize("way", CALLS)
def test_what_was_taken_goes_back(
    open_broker: Callable[..., shmq.Broker], way: str, many_topics: bool
) -> None:
    if many_topics and way == "take_body":
        pytest.skip("a consumer of many topics has no such call")
    broker = open_broker(disk=False, data_path=None)
    producer = broker.producer("topic")
    broker.create_channel("topic", "c")
    names: Any = ["topic", "other"] if many_topics else "topic"
    errors = 0
    with broker.consumer(names, "c", 100, msg_timeout=None) as consumer:
        for size in (10, 5000, 100_000):
            for properties in (None, {"a": b"b" * 600}):
                for number in range(_MOST):
                    body = bytes([number]) * size
                    producer.publish(body, properties=properties)
                    if try_one(broker, consumer, CALLS[way], number):
                        errors += 1
                        [back] = broker.peek("topic", "c")
                        assert back.failures == 0
                        again = consumer.take(0)
                        assert again.body == body
                        again.finish()
    assert errors > 5
    assert in_flight(broker) == 0


POPS: dict[str, Callable[[Any], Any]] = {
    "pop": lambda store: store.pop(b"key"),
    "wait": lambda store: store.wait(b"key", 0, delete=True),
    "wait_any": lambda store: store.wait_any([b"key", b"other"], 0, delete=True),
}


@pytest.mark.parametrize("way", POPS)
def test_a_value_that_was_taken_goes_back(
    open_broker: Callable[..., shmq.Broker], way: str
) -> None:
    store = open_broker(disk=False, data_path=None).results("r")
    errors = 0
    for size in (0, 10, 5000, 100_000):
        for number in range(_MOST):
            value = bytes([number]) * size
            store.set(b"key", value)
            try:
                _testcapi.set_nomemory(number, number + 1)
                try:
                    got = POPS[way](store)
                finally:
                    _testcapi.remove_mem_hooks()
            except MemoryError:
                errors += 1
                assert store.pop(b"key") == value
            else:
                assert got in (value, (b"key", value))
                assert store.pop(b"key") is None
    assert errors > 3
