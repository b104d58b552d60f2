"""The way back, `shmq forward t --from=...`: every message is in the topic once, whoever dies."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.forwarding import KILLS, publish, summary, taken, wrong
from support.processes import Child, eventually
from support.real_kafka import KafkaServer
from support.real_nats import NatsServer

import shmq

Back = Callable[..., Child]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


class Far(Protocol):
    """Another system with a sequence of messages."""

    url: str

    def fill(self, bodies: Sequence[bytes]) -> None: ...

    def kill(self) -> None: ...

    def start_again(self) -> None: ...


class Stream:
    """A stream of JetStream."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.kill, self.start_again = server.kill, server.start_again
        self.url = f"{server.url}/IN?consumer=me"
        assert "error" not in server.make("IN", "in.>")

    def fill(self, bodies: Sequence[bytes]) -> None:
        self._server.fill("IN", "in.x", bodies)


class Topic:
    """A topic of Kafka, of two partitions."""

    def __init__(self, server: KafkaServer, name: str) -> None:
        self._server, self._name = server, f"{name}-in"
        self.kill, self.start_again = server.kill, server.start_again
        self.url = f"{server.url}/{self._name}?group={name}"
        server.make(self._name, 2)

    def fill(self, bodies: Sequence[bytes]) -> None:
        self._server.fill(self._name, bodies[::2], 0)
        self._server.fill(self._name, bodies[1::2], 1)


@pytest.fixture(params=["jetstream", "kafka"])
def far(request: pytest.FixtureRequest) -> Far:
    """Each of the two."""
    if request.param == "kafka":
        return Topic(request.getfixturevalue("kafka"), request.getfixturevalue("out"))
    return Stream(request.getfixturevalue("nats"))


def numbers(first: int, count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + count)]


def until(found: list[bytes], broker: shmq.Broker, count: int) -> None:
    """Take messages until there are so many."""
    eventually(lambda: found.extend(taken(broker)) or len(found) >= count)


def told(far: Far) -> str:
    return f"when {'JetStream' if isinstance(far, Stream) else 'Kafka'} was told"


def test_messages_arrive_in_their_order(serve: Serve, attach: Attach, far: Far, back: Back) -> None:
    """One without a body is left out, and a second run finds nothing."""
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    sent = numbers(0, 2000)
    far.fill([*sent, b""])
    done = summary(back(far.url, "--until-empty"))
    assert (done["messages"], done["bytes"], done["skipped"]) == (2000, 12000, 1)
    found = taken(broker)
    assert found[:1] == sent[:1]
    # a topic's partitions have no order between them
    assert [found.index(body) for body in sent[::2]] == sorted(map(found.index, sent[::2]))
    assert wrong(found, sent) == {}
    assert summary(back(far.url, "--until-empty"))["messages"] == 0


@pytest.mark.parametrize("point", ["before the publish", "when it was published", ""])
def test_a_forwarder_that_dies_publishes_nothing_twice(
    serve: Serve, attach: Attach, far: Far, back: Back, point: str
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    sent = numbers(0, 600)
    far.fill(sent)
    back(far.url, "--batch=50", die=point or told(far)).die()
    done = summary(back(far.url, "--until-empty"))
    assert wrong(taken(broker), sent) == {}
    assert done["messages"] < 600


def test_a_forwarder_that_ignores_marks_is_found(
    serve: Serve, attach: Attach, far: Far, back: Back
) -> None:
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    sent = numbers(0, 600)
    far.fill(sent)
    back(far.url, "--batch=50", die="when it was published").die()
    summary(back(far.url, "--until-empty", fault=True))
    doubled = wrong(taken(broker), sent)
    assert len(doubled) >= 10
    assert set(doubled.values()) == {2}


@pytest.mark.parametrize("kills", KILLS)
def test_forwarders_killed_at_any_instant_publish_every_message_once(
    serve: Serve, attach: Attach, far: Far, back: Back, kills: int
) -> None:
    """Every tenth death is also one of the other system and of the supervisor."""
    server = serve()
    broker, chance = attach(), random.Random(kills)
    broker.create_channel("t", "c")
    sent = numbers(0, 3000)
    far.fill(sent)
    found: list[bytes] = []
    for death in range(kills):
        running = back(far.url, "--batch=20")
        ahead = len(found) + chance.randrange(1, 900)
        until(found, broker, ahead)
        running.kill(signal.SIGKILL)
        if death % 10 == 9:
            far.kill()
            server.kill(signal.SIGKILL)
            server = serve()
            far.start_again()
        more = numbers(len(sent), 1500)
        far.fill(more)
        sent += more
    done = summary(back(far.url, "--until-empty"))
    assert wrong(found + taken(broker), sent) == {}, done


def test_a_supervisor_that_dies_costs_nothing(
    serve: Serve, attach: Attach, far: Far, back: Back
) -> None:
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    sent = numbers(0, 2000)
    far.fill(sent)
    running = back(far.url, "--batch=20")
    eventually(lambda: broker.channel_depth("t", "c") >= 100)
    server.kill(signal.SIGKILL)
    serve()
    far.fill(more := numbers(2000, 1000))
    eventually(lambda: broker.channel_depth("t", "c") == 3000)
    assert running.kill(signal.SIGTERM) == 0
    assert wrong(taken(broker), sent + more) == {}


def test_fresh_memory_goes_on_behind_what_was_acknowledged(
    serve: Serve, attach: Attach, far: Far, back: Back
) -> None:
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    sent = numbers(0, 500)
    far.fill(sent)
    summary(back(far.url, "--until-empty"))
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve()
    far.fill(more := numbers(500, 500))
    assert summary(back(far.url, "--until-empty"))["messages"] == 500
    assert wrong(taken(attach()), sent + more) == {}


def test_the_position_of_another_host_is_refused(
    serve: Serve, attach: Attach, far: Far, back: Back
) -> None:
    serve()
    far.fill([b"x"])
    assert summary(back(far.url, "--until-empty", "--host=one"))["messages"] == 1
    other = back(far.url, "--until-empty", "--host=two")
    assert other.wait() == 1
    assert "belongs to one/" in other.errors


def test_messages_that_were_forwarded_come_back(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Back, back: Back
) -> None:
    """They have headers, of the batch that they were stored with."""
    serve()
    broker = attach()
    sent = publish(broker, 2000)
    summary(forward(f"{nats.url}/S?subject=s", "--until-empty"))
    summary(back(f"{nats.url}/S?subject=s", "--until-empty"))
    assert taken(broker) == sent


def test_a_forwarder_waits_for_room(
    serve: Serve, attach: Attach, nats: NatsServer, back: Back
) -> None:
    """A supervisor that is stopped writes nothing to disk, so the channel gets full."""
    server = serve(mem_queue_size=100)
    far = Stream(nats)
    broker = attach()
    broker.create_channel("t", "c")
    sent = numbers(0, 1000)
    far.fill(sent)
    server.stop()
    running = back(far.url)
    found: list[bytes] = []
    until(found, broker, 1000)
    server.go_on()
    assert running.kill(signal.SIGTERM) == 0
    assert found == sent


def test_a_second_consumer_ends_the_first_in_jetstream(
    serve: Serve, attach: Attach, nats: NatsServer, back: Back
) -> None:
    """A death between the new consumer and the end of the older one leaves both."""
    serve()
    far = Stream(nats)
    broker = attach()
    broker.create_channel("t", "c")
    far.fill(sent := numbers(0, 100))
    summary(back(far.url, "--until-empty"))
    back(far.url, die="when the consumer was made", count=1).die()
    assert nats.consumers("IN") == {"me-1": 100, "me-2": 100}
    assert summary(back(far.url, "--until-empty"))["messages"] == 0
    assert nats.consumers("IN") == {"me-3": 100}
    assert wrong(taken(broker), sent) == {}


def test_a_source_that_cannot_give_is_named(
    serve: Serve, nats: NatsServer, back: Back, tmp_path: Path, keep: Callable[[Any], Any]
) -> None:
    serve()
    nats.make("WORK", "work", retention="workqueue")
    for place, words in (
        ("MISSING", "there is no such stream"),
        ("WORK", "its retention is workqueue"),
        ("S?group=x", "has no setting group"),
    ):
        child = back(f"{nats.url}/{place}", "--until-empty")
        assert child.wait() == 1
        assert words in child.errors
        assert "Traceback" not in child.errors
