"""The life of remote consumers: closed, forgotten, inherited. None of them takes messages that
nobody reads."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from support.nsq_client import Server
from support.processes import WATCHDOG, eventually

import shmq
from shmq.errors import Gone

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has `shmq.connect`'s commands."""
    return "shmq"


def connected(server: Server) -> shmq.RemoteBroker:
    return shmq.connect(f"127.0.0.1:{server.port()}", timeout=WATCHDOG)


@pytest.fixture
def remote(server: Server) -> Iterator[shmq.RemoteBroker]:
    with connected(server) as broker:
        yield broker


def subscribers(topic: str) -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(f"shmq {topic}/")]


def consumers(server: Server, topic: str) -> int:
    return len(server.channel(topic, "c")["clients"])


def test_a_forgotten_consumer_ends(server: Server, remote: shmq.RemoteBroker, topic: str) -> None:
    consumer = remote.consumer(topic, "c")
    assert subscribers(topic)
    del consumer
    gc.collect()
    eventually(lambda: not subscribers(topic))
    eventually(lambda: consumers(server, topic) == 0)
    # Nothing is on its way to nobody: the next one gets it at its first attempt.
    remote.producer(topic).publish(b"x")
    with remote.consumer(topic, "c") as another:
        message = another.take(WATCHDOG)
        assert message is not None
        assert message.attempts == 1
        message.finish()


def test_a_message_keeps_its_consumer(remote: shmq.RemoteBroker, topic: str) -> None:
    remote.producer(topic).publish(b"x")
    message = remote.consumer(topic, "c").take(WATCHDOG)
    gc.collect()
    assert message is not None
    message.finish()  # over the connection by which it came
    del message
    gc.collect()
    eventually(lambda: not subscribers(topic))


def test_a_consumer_that_iterates_is_not_forgotten(remote: shmq.RemoteBroker, topic: str) -> None:
    producer = remote.producer(topic)
    messages = remote.consumer(topic, "c").messages()
    for n in range(3):
        producer.publish(b"%d" % n)
        gc.collect()
        with next(messages) as message:
            assert message.body == b"%d" % n


def test_a_closed_broker_ends_its_consumers(server: Server, topic: str) -> None:
    remote = connected(server)
    consumer, waiting = remote.consumer(topic, "c"), remote.consumer(topic, "d", 1)
    remote.producer(topic).publish(b"x")
    held = waiting.take(WATCHDOG)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            waiting.take()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=take)
    thread.start()
    eventually(lambda: server.channel(topic, "c")["in_flight_count"] == 1)  # read ahead
    remote.close()
    thread.join(WATCHDOG)
    assert [type(exc) for exc in raised] == [Gone]
    with pytest.raises(Gone, match="was closed; connect again"):
        consumer.take(0)
    with pytest.raises(Gone):
        remote.consumer(topic, "c")
    assert consumer.closed
    assert waiting.closed
    assert held is not None
    assert list(consumer) == []
    eventually(lambda: not subscribers(topic))
    eventually(lambda: server.channel(topic, "c")["in_flight_count"] == 0)
    remote.close()


def test_a_program_that_connects_again_leaves_no_consumers(start: Start) -> None:
    """The usual loop around `connect`, whose connections break: no message is delivered to a
    consumer of an earlier turn, so none becomes a dead letter without having been seen."""
    server = start("--msg-timeout=1s")
    with shmq.attach(server.instance) as local:
        local.configure("t", "c", max_attempts=2)

        def turn() -> None:
            with connected(server) as remote:
                remote.consumer("t", "c")
                raise shmq.Unreachable("the connection broke")

        for _ in range(3):
            with pytest.raises(shmq.Unreachable):
                turn()
        local.producer("t").publish_many([b"%d" % n for n in range(10)])
        with connected(server) as remote, remote.consumer("t", "c") as consumer:
            came = [consumer.take(WATCHDOG) for _ in range(10)]
            assert sorted(each.body for each in came if each) == [b"%d" % n for n in range(10)]
            for each in came:
                assert each is not None
                each.finish()
        assert not list(local.dead("t", "c").peek())


def test_a_child_leaves_the_consumer_to_its_parent(remote: shmq.RemoteBroker, topic: str) -> None:
    consumer = remote.consumer(topic, "c")
    for leave in (lambda: consumer.take(0), consumer.close, remote.close, gc.collect):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                leave()
                status = 0
            except Gone:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    remote.producer(topic).publish(b"x")
    message = consumer.take(WATCHDOG)
    assert message is not None
    message.finish()  # over the same connection
    assert message.attempts == 1


def test_the_collector_may_forget_it_amid_any_call(remote: shmq.RemoteBroker, topic: str) -> None:
    """The garbage collector calls a function that takes no lock, so a thread that has one does not
    wait for itself."""
    consumer = remote.consumer(topic, "c")
    subscription = consumer._subscription
    with subscription._writing, subscription.arrivals._changed:
        del consumer
        gc.collect()
    eventually(lambda: not subscribers(topic))
