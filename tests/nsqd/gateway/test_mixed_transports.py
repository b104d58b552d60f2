"""Shared memory on the one side, TCP on the other, and one channel between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from support.nsq_client import ERROR, OK, Client, Server, mpub, sized
from support.processes import WATCHDOG, eventually

import shmq

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has both."""
    return "shmq"


def test_shared_memory_and_tcp_are_one_channel(start: Start) -> None:
    server = start()
    with shmq.attach(server.instance) as broker:
        producer = broker.producer("t")
        client = server.connect()
        client.sub("t", "c", 10)
        local = broker.consumer("t", "c", max_in_flight=1)
        producer.publish_many([b"%d" % i for i in range(200)])
        for i in range(200, 400):
            producer.publish(b"%d" % i)
        remote_producer = server.connect()
        assert remote_producer.ask(mpub(b"t", [b"%d" % i for i in range(400, 600)])) == OK
        seen: list[int] = []
        while len(seen) < 600:
            message = local.take(0)
            if message is not None:
                seen.append(int(message.body))
                message.finish()
                continue
            client.sock.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                delivery = client.delivery()
                seen.append(int(delivery.body))
                client.finish(delivery)
        assert sorted(seen) == list(range(600))
        found = eventually(
            lambda: [item for item in [server.channel("t", "c")] if item["in_flight_count"] == 0]
        )[0]
        assert (found["message_count"], found["client_count"]) == (600, 2)
        # given back by the one, taken by the other
        producer.publish(b"shared")
        local.close()
        client.sock.settimeout(WATCHDOG)
        delivery = client.delivery()
        client.send(b"RDY 0\nREQ %b 0\n" % delivery.id)
        again = broker.consumer("t", "c").take(WATCHDOG)
        assert again is not None
        assert (again.id.encode(), again.attempts) == (delivery.id, 2)


def ready(client: Client, count: int) -> None:
    """RDY, and wait until it was read."""
    client.send(b"RDY %d\n" % count)
    client.pub("other", b"x")


def test_the_rules_are_the_same(server: Server, client: Client, topic: str) -> None:
    """The owner of a message, its attempts, timeouts, delays and pauses are the same over both
    transports."""
    with shmq.attach(server.instance) as broker:
        producer = broker.producer(topic)
        client.sub(topic, "c", 1)
        local = broker.consumer(topic, "c", msg_timeout=60.0)
        # published here, taken there, given back, taken here
        name = producer.publish(b"x").encode()
        remote = client.delivery()
        assert (remote.id, remote.attempts, remote.body) == (name, 1, b"x")
        ready(client, 0)
        client.send(b"REQ %b 0\n" % name)
        message = local.take(WATCHDOG)
        assert message is not None
        assert (message.id.encode(), message.attempts, message.body) == (name, 2, b"x")
        assert message.timestamp == remote.timestamp
        # it is whose it is
        text = b"E_FIN_FAILED FIN %b failed client does not own message" % name
        assert client.ask(b"FIN %b\n" % name) == (ERROR, text)
        message.finish()
        text = b"E_FIN_FAILED FIN %b failed ID not in flight" % name
        assert client.ask(b"FIN %b\n" % name) == (ERROR, text)
        # published there, taken here, given back late, taken there
        client.pub(topic, b"y")
        message = local.take(WATCHDOG)
        assert message is not None
        began = time.monotonic()
        message.requeue(delay=0.5)
        ready(client, 1)
        remote = client.delivery()
        assert time.monotonic() - began >= 0.49
        assert (remote.id.decode(), remote.attempts) == (message.id, 2)
        client.finish(remote)
        # a timeout here
        hasty = broker.consumer(topic, "c", msg_timeout=1.0)
        ready(client, 0)
        client.pub(topic, b"z")
        message = hasty.take(WATCHDOG)
        assert message is not None
        ready(client, 1)
        remote = client.delivery()
        assert (remote.id.decode(), remote.attempts) == (message.id, 2)
        with pytest.raises(shmq.NotInFlight):
            message.finish()
        assert server.channel(topic, "c")["timeout_count"] == 1
        client.finish(remote)
        # delays
        began = time.monotonic()
        producer.publish(b"later", defer=0.5)
        remote = client.delivery()
        assert time.monotonic() - began >= 0.49
        client.finish(remote)
        ready(client, 0)
        began = time.monotonic()
        assert client.ask(f"DPUB {topic} 500\n".encode() + sized(b"later")) == OK
        message = local.take(WATCHDOG)
        assert message is not None
        assert time.monotonic() - began >= 0.49
        message.finish()
        # pauses
        broker.pause_channel(topic, "c")
        ready(client, 1)
        producer.publish(b"paused")
        assert local.take(0.2) is None
        assert client.quiet()
        assert server.post("/channel/unpause", topic=topic, channel="c").status == 200
        remote = client.delivery()
        assert (remote.body, remote.attempts) == (b"paused", 1)
        client.finish(remote)
        eventually(lambda: server.channel(topic, "c")["in_flight_count"] == 0)
        # the end of both
        assert server.post("/channel/delete", topic=topic, channel="c").status == 200
        assert client.ended()
        with pytest.raises(shmq.Gone):
            local.take(WATCHDOG)


def test_clients_of_nsqds_protocols_see_the_body_alone(server: Server, topic: str) -> None:
    """Properties of a message from shared memory stay beside it: a TCP client neither sees nor
    loses them."""
    with shmq.attach(server.instance) as broker:
        client = server.connect()
        client.sub(topic, "c", 1)
        name = broker.producer(topic).publish(b"body", properties={"key": "17"}).encode()
        delivery = client.delivery()
        assert (delivery.id, delivery.body) == (name, b"body")
        client.send(b"RDY 0\nREQ %b 0\n" % delivery.id)
        with broker.consumer(topic, "c") as consumer:
            again = consumer.take(WATCHDOG)
            assert again is not None
            assert (again.body, again.properties) == (b"body", {"key": b"17"})
            again.finish()
            client.pub(topic, b"from TCP")
            other = consumer.take(WATCHDOG)
            assert other is not None
            assert (other.body, other.properties) == (b"from TCP", {})
            other.finish()
