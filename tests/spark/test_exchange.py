"""Messages that a task of an exchange has taken are finished, or returned, at the right moment. No
JVM."""

from __future__ import annotations

import pytest

import shmq

pytest.importorskip("pyspark")

from shmq.spark import Exchange


@pytest.fixture
def exchange(broker: shmq.Broker) -> Exchange:
    made = Exchange(broker.instance, "t", "c")
    made.create()
    assert made.publish(b"%d" % number for number in range(5)) == 5
    return made


def test_a_message_is_finished_when_the_loop_asks_for_the_next(
    exchange: Exchange, broker: shmq.Broker
) -> None:
    finished = []
    for message in exchange.messages(idle=0.01, at_once=2):
        finished.append(broker.channel_stats("t", "c").finished)
        assert message.attempts == 1
    assert finished == [0, 1, 2, 3, 4]
    assert broker.channel_stats("t", "c").depth == 0


def test_what_a_loop_leaves_goes_back(exchange: Exchange, broker: shmq.Broker) -> None:
    def fails() -> None:
        for message in exchange.messages(idle=0.01, at_once=3):
            if message.body == b"1":
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    for batch in exchange.batches(idle=0.01, at_once=1):
        assert batch.bodies() == [b"1"]
        break
    found = broker.channel_stats("t", "c")
    assert (found.finished, found.in_flight, found.depth) == (1, 0, 4)
    assert sorted(m.body for m in exchange.messages(idle=0.01)) == [b"1", b"2", b"3", b"4"]


def test_a_message_may_be_answered_in_the_loop(exchange: Exchange, broker: shmq.Broker) -> None:
    attempts = []
    for message in exchange.messages(idle=0.05, at_once=1):
        attempts.append(message.attempts)
        if message.body == b"2" and message.attempts == 1:
            message.requeue()
    assert attempts == [1, 1, 1, 1, 1, 2]
    assert broker.channel_stats("t", "c").depth == 0
