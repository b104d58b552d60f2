"""Properties travel as headers, to NATS and Kafka and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.forwarding import summary, taken
from support.processes import Child
from support.real_kafka import KafkaServer
from support.real_nats import NatsServer
from support.real_nsqd import Nsqd

import shmq

Forward = Callable[..., Child]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

#: Names that NATS's server would act on, and values that no header of it holds, among others.
SENT: dict[str, bytes] = {
    "key": b"customer 17",
    "content-type": b"text/plain; charset=utf-8",
    "nats-expected-last-sequence": b"7",
    "nats-rollup": b"all",
    "nats-batch-commit": b"1",
    "lines": b"a\r\nNats-Rollup: all\r\n\r\nb",
    "bytes": bytes(range(256)),
    "spaces": b" around ",
    "empty": b"",
    "percent": b"100%25",
}


class Far(Protocol):
    """A place that messages go to and come from."""

    there: str
    back: str

    def put(self, headers: list[tuple[str, bytes]], body: bytes) -> None: ...


class Stream:
    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.there = f"{server.url}/S?subject=s"
        self.back = f"{server.url}/S?subject=s&consumer=me"

    def put(self, headers: list[tuple[str, bytes]], body: bytes) -> None:
        lines = [b"%b: %b\r\n" % (name.encode(), value) for name, value in headers]
        self.server.put("S", "s", b"".join(lines), body)


class Topic:
    def __init__(self, server: KafkaServer, name: str) -> None:
        self.server, self.name = server, name
        self.there = f"{server.url}/{name}?marker={name}-markers"
        self.back = f"{server.url}/{name}?group={name}"

    def put(self, headers: list[tuple[str, bytes]], body: bytes) -> None:
        self.server.put(self.name, headers, body)


@pytest.fixture(params=["jetstream", "kafka"])
def far(request: pytest.FixtureRequest) -> Far:
    """Each of the two."""
    if request.param == "kafka":
        return Topic(request.getfixturevalue("kafka"), request.getfixturevalue("out"))
    return Stream(request.getfixturevalue("nats"))


def received(broker: shmq.Broker) -> list[tuple[bytes, dict[str, bytes]]]:
    """The messages of t/c with their properties."""
    found = []
    with broker.consumer("t", "c") as consumer:
        while broker.channel_depth("t", "c"):
            message = consumer.take(10)
            assert message is not None
            found.append((bytes(message.body), dict(message.properties)))
            message.finish()
    return found


def test_they_come_back_as_they_were(
    serve: Serve, attach: Attach, far: Far, forward: Forward, back: Forward
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    sent = [(b"%d" % n, {"n": b"%d" % n} if n % 3 else {}) for n in range(50)]
    sent += [(b"all", SENT), (b"much", {"big": bytes(4000)})]
    bodies, properties = zip(*sent, strict=True)
    producer.publish_many(list(bodies), properties=list(properties))
    summary(forward(far.there, "--until-empty"))
    assert summary(back(far.back, "--until-empty"))["messages"] == len(sent)
    assert received(broker) == sent


def test_a_consumer_of_nats_sees_headers(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x", properties=SENT)
    broker.producer("t").publish(b"y", properties={"reply-to": "store/key/60"})
    summary(forward(f"{nats.url}/S?subject=s", "--until-empty"))
    (head, body), (other, _) = nats.messages("S", "s")
    assert body == b"x"
    lines = head.split(b"\r\n")
    assert b"key: customer 17" in lines
    assert b"shmq-property-nats-rollup: all" in lines
    assert b"shmq-property-lines: a%0D%0ANats-Rollup%3A%20all%0D%0A%0D%0Ab" in lines
    assert not any(line.lower().startswith(b"nats-rollup") for line in lines)
    assert b"reply-to" not in other


def test_a_consumer_of_kafka_sees_headers(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"x", properties=SENT)
    summary(forward(f"{kafka.url}/{out}?marker={out}-markers", "--until-empty"))
    assert kafka.messages(out) == [(SENT, b"x")]


def test_bodies_alone_are_forwarded_if_that_is_asked_for(
    serve: Serve, attach: Attach, far: Far, forward: Forward, back: Forward
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"there", properties=SENT)
    summary(forward(far.there, "--until-empty", "--bodies-only"))
    far.put([("a b", b"x"), ("big", bytes(5000).replace(b"\0", b"x"))], b"back")
    summary(back(far.back, "--until-empty", "--bodies-only"))
    assert received(broker) == [(b"there", {}), (b"back", {})]


BAD: list[tuple[list[tuple[str, bytes]], str]] = [
    ([("big", b"x" * 5000)], "at most 4096 bytes"),
    ([(f"x{n}", b"x" * 1000) for n in range(60)], "at most 4096 bytes"),
    ([("no name", b"x")], "a property's name has"),
    ([("x" * 65, b"x")], "a property's name has"),
    ([("shmq-trace", b"x")], "are reserved"),
    ([("twice", b"x"), ("Twice", b"y")], "the header twice comes twice"),
]


@pytest.mark.parametrize(("headers", "words"), BAD, ids=[words for _, words in BAD])
def test_headers_that_are_no_properties_are_refused(
    serve: Serve,
    attach: Attach,
    far: Far,
    back: Forward,
    headers: list[tuple[str, bytes]],
    words: str,
) -> None:
    """The messages before are published, and nothing is lost."""
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    far.put([("Key", b"first")], b"first")
    far.put(headers, b"bad")
    far.put([], b"last")
    for _ in range(2):
        child = back(far.back, "--until-empty")
        assert child.wait() == 5
        assert words in child.errors
        assert "--bodies-only" in child.errors
        assert "--refused=skip" in child.errors
        assert json.loads(child.lines[-1])["refused"] == 1
    done = summary(back(far.back, "--until-empty", "--refused=skip"))
    assert (done["messages"], done["refused"], done["skipped"]) == (1, 1, 1)
    assert received(broker) == [(b"first", {"key": b"first"}), (b"last", {})]


def test_a_place_for_a_reply_is_not_believed(
    serve: Serve, attach: Attach, far: Far, back: Forward
) -> None:
    """Otherwise a writer of the source could have a consumer write into any results store."""
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    far.put([("Reply-To", b"store/key/60"), ("kind", b"x")], b"x")
    summary(back(far.back, "--until-empty"))
    assert received(broker) == [(b"x", {"kind": b"x"})]


def test_a_body_that_is_too_big_is_named(
    serve: Serve, attach: Attach, far: Far, back: Forward
) -> None:
    serve(max_msg_size=2000)
    broker = attach()
    broker.create_channel("t", "c")
    for body in (b"first", b"x" * 2001, b"last"):
        far.put([], body)
    child = back(far.back, "--until-empty")
    assert child.wait() == 5
    assert "2001 bytes: max_msg_size is 2000 bytes" in child.errors
    summary(back(far.back, "--until-empty", "--refused=skip"))
    assert taken(broker) == [b"first", b"last"]


def test_nothing_comes_into_a_topic_whose_items_are_unpickled(
    serve: Serve, attach: Attach, far: Far, back: Forward
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.configure("t", sealed=True)
    far.put([], b"foreign")
    child = back(far.back, "--until-empty")
    assert child.wait() == 1
    assert "the topic of a pool or a queue" in child.errors
    assert broker.channel_depth("t", "c") == 0


def test_a_sealed_message_is_not_copied(
    serve: Serve, attach: Attach, far: Far, forward: Forward
) -> None:
    """A copy would lose its seal, or give one to a message that has none."""
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.configure("t", sealed=True)
    child = forward(far.there, "--refused=dead", "--until-empty")
    assert child.wait() == 1
    assert "would lose its seal" in child.errors


def test_nsqd_gets_bodies_and_that_is_said_once(
    serve: Serve, attach: Attach, forward: Forward, tmp_path: Path, keep: Callable[[Any], Any]
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"a", b"b", b"c"], properties={"key": "x"})
    (tmp_path / "nsqd").mkdir()
    nsqd = keep(Nsqd(tmp_path / "nsqd"))
    child = forward(f"nsq://127.0.0.1:{nsqd.tcp_port}/out", "--until-empty", "--batch=1")
    assert summary(child)["messages"] == 3
    assert child.errors.count("takes no properties") == 1
