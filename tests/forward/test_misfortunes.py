"""Targets, sources and forwarders that end, or misbehave, while messages are on their way."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka import KafkaException
from integration.test_no_room import mounted
from support.deliveries import take_all
from support.forwarding import publish, summary, wrong
from support.hostile import Hostile, frame
from support.processes import WATCHDOG, Child, eventually
from support.real_kafka import KafkaServer
from support.real_nats import NatsServer
from support.real_nsqd import Nsqd

import shmq
from shmq.cli.status import INTERRUPTED, NOT_RUNNING, OK

Forward = Callable[..., Child]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]
Keep = Callable[[Any], Any]


class Far(Protocol):
    """A target that can be deleted and made again."""

    url: str

    def bodies(self) -> list[bytes]: ...
    def make(self) -> None: ...
    def delete(self) -> None: ...


class Stream:
    """Of JetStream."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.url = f"{server.url}/FAR?subject=far"
        self.make()

    def bodies(self) -> list[bytes]:
        return self.server.bodies("FAR", "far")

    def make(self) -> None:
        assert "error" not in self.server.make("FAR", "far", "shmq.FAR.>")

    def delete(self) -> None:
        assert "error" not in self.server.ask("STREAM.DELETE.FAR", {})


class Topic:
    """Of Kafka."""

    def __init__(self, server: KafkaServer, name: str) -> None:
        self.server, self.name = server, name
        self.url = f"{server.url}/{name}?marker={name}-markers"

    def bodies(self) -> list[bytes]:
        return self.server.bodies(self.name)

    def make(self) -> None:
        def made() -> bool:
            try:
                self.server.make(self.name)
            except KafkaException:  # it is not gone yet
                return False
            return True

        eventually(made)

    def delete(self) -> None:
        admin = self.server.admin()  # must live until the answer
        (deleted,) = admin.delete_topics([self.name]).values()
        deleted.result()
        for _ in range(2):  # the broker says so before it takes no more records
            eventually(lambda: self.name not in self.server.admin().list_topics().topics)


class Queue:
    """Of an nsqd."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.server = Nsqd(path)
        self.url = f"nsq://127.0.0.1:{self.server.tcp_port}/out"
        self.make()

    def bodies(self) -> list[bytes]:
        self.server.post("/channel/create?topic=out&channel=all")
        return list(self.server.take_all("out", "all").bodies)

    def make(self) -> None:
        self.server.post("/topic/create?topic=out")
        self.server.post("/channel/create?topic=out&channel=all")

    def delete(self) -> None:
        self.server.post("/topic/delete?topic=out")

    def close(self) -> None:
        self.server.close()


def made(kind: str, request: pytest.FixtureRequest) -> Far:
    if kind == "stream":
        return Stream(request.getfixturevalue("nats"))
    if kind == "kafka":
        return Topic(request.getfixturevalue("kafka"), request.getfixturevalue("out"))
    far: Far = request.getfixturevalue("keep")(Queue(request.getfixturevalue("tmp_path") / "nsqd"))
    return far


@pytest.fixture(params=["stream", "kafka", "nsqd"])
def far(request: pytest.FixtureRequest) -> Far:
    """Each of the targets."""
    return made(request.param, request)


def held(broker: shmq.Broker) -> int:
    """The messages that the forwarder's leases hold."""
    with broker.lease_holder("t", "c", "forward", ttl=None) as holder:
        return sum(lease.count for lease in holder.leases())


# ---- the target ----


def test_a_target_that_is_deleted_meanwhile_costs_no_later_message(
    serve: Serve, attach: Attach, far: Far, forward: Forward
) -> None:
    serve()
    broker = attach()
    publish(broker, 10)
    running = forward(far.url)
    eventually(lambda: broker.stats().channel("t", "c").finished == 10)
    far.delete()
    later = publish(broker, 10, 10)
    if isinstance(far, Stream):
        assert running.wait() == 1
        assert "there is no such stream" in running.errors
        far.make()
        running = forward(far.url)
    elif isinstance(far, Topic):
        eventually(lambda: "there is no topic" in running.errors, 5 * WATCHDOG)
        far.make()
    eventually(lambda: broker.stats().channel("t", "c").finished == 20)
    assert wrong(far.bodies(), later) == {}
    assert running.kill(signal.SIGTERM) == OK
    assert held(broker) == 0


# ---- what does not behave as an nsqd ----


class Nsq:
    """A connection to a server that a test plays."""

    def __init__(self, sock: socket.socket) -> None:
        self.file = sock.makefile("rb")
        self.sock = sock
        assert self.file.read(4) == b"  V2"
        assert self.file.readline() == b"IDENTIFY\n"
        self._sized()
        self.ok()

    def _sized(self) -> bytes:
        (size,) = struct.unpack(">i", self.file.read(4))
        return self.file.read(size)

    def ok(self, times: int = 1) -> None:
        self.sock.sendall(frame(0, b"OK") * times)

    def batch(self) -> list[bytes]:
        """The bodies of the next MPUB; none at the end."""
        if not self.file.readline().startswith(b"MPUB "):
            return []
        data = self._sized()
        (count,) = struct.unpack_from(">i", data)
        found, at = [], 4
        for _ in range(count):
            (size,) = struct.unpack_from(">i", data, at)
            found.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        return found


def test_an_answer_that_comes_twice_stands_for_no_other_batch(
    serve: Serve, attach: Attach, forward: Forward, keep: Keep
) -> None:
    """The second one came before the next batch, so it cannot be about that."""
    serve()
    broker, stored = attach(), []

    def answer(sock: socket.socket) -> None:
        nsq = Nsq(sock)
        stored.extend(nsq.batch())
        nsq.ok(2)
        nsq.batch()  # and is gone before it stores this

    server = keep(Hostile(answer))
    sent = publish(broker, 30)
    running = forward(f"nsq://{server.address}/out", "--batch=3")
    eventually(lambda: len(stored) >= 30)
    eventually(lambda: broker.stats().channel("t", "c").finished == 30)
    assert running.kill(signal.SIGTERM) == OK
    assert set(stored) == set(sent)


def test_a_server_that_closes_after_each_batch_gets_all(
    serve: Serve, attach: Attach, forward: Forward, keep: Keep
) -> None:
    serve()
    broker, stored = attach(), []

    def answer(sock: socket.socket) -> None:
        nsq = Nsq(sock)
        stored.extend(nsq.batch())
        nsq.ok()

    server = keep(Hostile(answer))
    sent = publish(broker, 30)
    done = summary(forward(f"nsq://{server.address}/out", "--batch=3", "--until-empty"))
    assert wrong(stored, sent) == {}
    assert done["messages"] == 30


def test_a_server_that_never_answers_is_left_after_some_seconds(
    serve: Serve, attach: Attach, forward: Forward, keep: Keep
) -> None:
    serve()
    broker, stored = attach(), []

    def answer(sock: socket.socket) -> None:
        nsq = Nsq(sock)
        stored.append(nsq.batch())
        if len(stored) > 1:
            nsq.ok()
        nsq.batch()

    server = keep(Hostile(answer))
    sent = publish(broker, 3)
    child = forward(f"nsq://{server.address}/out", "--until-empty")
    assert summary(child)["away"] >= 1
    assert stored[:2] == [sent, sent]
    assert "there was no whole answer in time" in child.errors


# ---- the dead topic ----


@pytest.mark.parametrize("overflow", ["block", "reject"])
def test_a_dead_topic_that_is_full_is_waited_for(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, overflow: str
) -> None:
    """SIGTERM ends the wait; what was put before is not put twice."""
    serve()
    broker = attach()
    assert "error" not in nats.make("SMALL", "small", "shmq.SMALL.>", max_msg_size=3000)
    broker.create_channel("t", "c")
    broker.create_channel("t.c.dead", "dead")
    dead = broker.dead("t", "c")
    broker.configure(dead.topic, "dead", max_messages=2, overflow=overflow)
    bad = [b"x" * 4000 + b"%d" % number for number in range(5)]
    broker.producer("t").publish_many([*bad, b"good"])
    words = (f"{nats.url}/SMALL?subject=small", "--refused=dead")
    first = forward(*words)
    eventually(lambda: dead.depth == 2)
    eventually(lambda: "t.c.dead" in first.errors, what=first.errors + repr(dead.depth))
    assert first.process.poll() is None
    assert first.kill(signal.SIGTERM) == OK
    assert held(broker) == 6
    second = forward(*words, "--until-empty")
    found: list[bytes] = []
    with broker.consumer(dead.topic, "dead") as consumer:
        while len(found) < 5:
            message = consumer.take(60)
            assert message is not None
            found.append(message.body)
            message.finish()
    assert summary(second)["messages"] == 1
    assert found == bad
    assert nats.bodies("SMALL", "small") == [b"good"]


def test_a_full_disk_behind_the_dead_topic_is_waited_for(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, data_path: Path
) -> None:
    """The dead topic has as much in memory as may be, and the disk takes nothing."""
    server = serve(mem_queue_size=256, in_flight_slots=256, before=mounted(data_path, "4m"))
    disk = Path(f"/proc/{server.pid}/root{data_path}")
    broker = attach()
    assert "error" not in nats.make("SMALL", "small", "shmq.SMALL.>", max_msg_size=3000)
    broker.create_channel("t", "c")
    broker.create_channel("t.c.dead", "dead")
    dead = broker.dead("t", "c")
    bad = [b"x" * 4000 + b"%d" % number for number in range(5)]
    broker.producer("t").publish_many([*bad, b"good"])
    filled = []
    with open(disk / "ballast", "wb", 0) as ballast:
        ballast.write(bytes(2 << 20))
        producer = broker.producer(dead.topic)
        with contextlib.suppress(shmq.Full):
            while True:
                producer.publish(b"%05d" % len(filled) + bytes(3000), timeout=2)
                filled.append(len(filled))
        running = forward(f"{nats.url}/SMALL?subject=small", "--refused=dead")
        eventually(lambda: "t.c.dead" in running.errors, what=running.errors)
        assert running.process.poll() is None
        assert broker.stats().channel("t", "c").finished == 0
        ballast.truncate(0)
        eventually(lambda: broker.stats().channel("t", "c").finished == 6)
    assert running.kill(signal.SIGTERM) == OK
    bodies = take_all(broker, dead.topic, "dead").bodies
    assert [body for body in bodies if body.startswith(b"x")] == bad
    assert len(bodies) == len(filled) + 5
    assert nats.bodies("SMALL", "small") == [b"good"]


# ---- the forwarder ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "point",
    [
        "before the batch is sent",
        "when the batch was sent",
        "when the batch was stored",
        "when the lease was finished",
    ],
)
def test_a_signal_ends_it_in_order_at_each_step(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, point: str, number: int
) -> None:
    serve()
    broker = attach()
    sent = publish(broker, 100)
    url = f"{nats.url}/S?subject=s"
    child = forward(url, "--batch=10", die=point, number=int(number))
    assert child.wait() == (OK if number == signal.SIGTERM else INTERRUPTED)
    assert 0 < len(nats.bodies("S", "s")) < 100
    assert "Traceback" not in child.errors
    summary(forward(url, "--batch=10", "--until-empty"))
    assert nats.bodies("S", "s") == sent
    assert held(broker) == 0


def test_the_second_forwarder_of_a_channel_ends_the_first(
    serve: Serve, attach: Attach, far: Far, forward: Forward
) -> None:
    serve()
    broker = attach()
    sent = publish(broker, 10)
    first = forward(far.url)
    eventually(lambda: broker.stats().channel("t", "c").finished == 10)
    second = forward(far.url)
    assert first.wait() == 1
    assert "somebody else leases under this name now" in first.errors
    sent += publish(broker, 10, 10)
    eventually(lambda: broker.stats().channel("t", "c").finished == 20)
    assert second.kill(signal.SIGTERM) == OK
    assert wrong(far.bodies(), sent) == {}


# ---- the source ----


@pytest.mark.parametrize("on_stop", ["flush", "keep"])
def test_a_source_that_is_started_again_is_forwarded_again(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, on_stop: str
) -> None:
    """Where its memory ended, the forwarder ends with a sentence, and the next one stores nothing
    twice; where it was kept, the forwarder goes on."""
    server = serve(on_stop=on_stop)
    broker = attach()
    sent = publish(broker, 100)
    url = f"{nats.url}/S?subject=s"
    forward(url, "--batch=10", die="when the batch was stored").die()
    running = forward(url, "--batch=10")
    eventually(lambda: len(nats.bodies("S", "s")) == 100)
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    if on_stop == "flush":
        assert running.wait() == 1
        assert len(running.errors.splitlines()) == 1
        assert "Traceback" not in running.errors
        assert forward(url).wait() == NOT_RUNNING
    serve(on_stop=on_stop)
    sent += publish(attach(), 10, 100)
    if on_stop == "flush":
        summary(forward(url, "--batch=10", "--until-empty"))
    else:
        eventually(lambda: len(nats.bodies("S", "s")) == 110)
        assert running.kill(signal.SIGTERM) == OK
    assert nats.bodies("S", "s") == sent
