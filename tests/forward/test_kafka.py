"""`shmq forward` into Kafka: every message is in the topic once, whoever dies."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import confluent_kafka
import pytest
from support.forwarding import KILLS, publish, summary, wrong
from support.processes import Child, eventually
from support.real_kafka import KafkaServer

import shmq
from shmq.forward.kafka import Kafka
from shmq.forward.marker import Marker
from shmq.forward.target import Away, Source

Forward = Callable[..., Child]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

DEATHS = (
    "before the transaction",
    "when the transaction was filled",
    "when the transaction was committed",
    "when the lease was finished",
)


def target(kafka: KafkaServer, out: str) -> str:
    return f"{kafka.url}/{out}?marker={out}-markers"


def test_messages_arrive_in_their_order(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    serve()
    sent = publish(attach(), 8000)
    done = summary(forward(target(kafka, out), "--until-empty"))
    assert (done["messages"], done["bytes"], done["batches"]) == (8000, 48000, 2)
    assert kafka.bodies(out) == sent
    assert attach().channel_stats("t", "c").depth == 0


@pytest.mark.parametrize("point", DEATHS)
def test_a_forwarder_that_dies_stores_nothing_twice(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward, point: str
) -> None:
    serve()
    sent = publish(attach(), 500)
    forward(target(kafka, out), "--batch=50", die=point).die()
    done = summary(forward(target(kafka, out), "--batch=50", "--until-empty"))
    assert wrong(kafka.bodies(out), sent) == {}
    assert done["resumed"] == (50 if point == "when the transaction was committed" else 0)


def test_a_forwarder_that_ignores_markers_is_found(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    serve()
    sent = publish(attach(), 500)
    point = "when the transaction was committed"
    forward(target(kafka, out), "--batch=50", die=point, fault=True).die()
    summary(forward(target(kafka, out), "--batch=50", "--until-empty", fault=True))
    assert wrong(kafka.bodies(out), sent) == dict.fromkeys(sent[100:150], 2)


@pytest.mark.parametrize("kills", KILLS)
def test_forwarders_killed_at_any_instant_store_every_message_once(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward, kills: int
) -> None:
    """Every tenth death is also one of the other system and of the supervisor."""
    server = serve()
    broker, chance = attach(), random.Random(kills)
    sent = publish(broker, 3000)
    for death in range(kills):
        running = forward(target(kafka, out), "--batch=20")
        ahead = kafka.last(out) + chance.randrange(1, 900)
        # a reader's round trip later it may be anywhere in a later batch
        eventually(lambda ahead=ahead: kafka.last(out) >= ahead)
        running.kill(signal.SIGKILL)
        if death % 10 == 9:
            kafka.kill()
            server.kill(signal.SIGKILL)
            server = serve()
            kafka.start_again()
        sent += publish(broker, 1500, len(sent))
    summary(forward(target(kafka, out), "--until-empty"))
    assert wrong(kafka.bodies(out), sent) == {}


@pytest.mark.deep  # the same with nats-server is not
def test_a_broker_and_a_supervisor_that_die_cost_nothing(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    server = serve()
    broker = attach()
    sent = publish(broker, 3000)
    running = forward(target(kafka, out), "--batch=20")
    eventually(lambda: kafka.last(out) >= 200)
    kafka.kill()
    server.kill(signal.SIGKILL)
    serve()
    sent += publish(broker, 1000, len(sent))
    kafka.start_again()
    eventually(lambda: broker.channel_depth("t", "c") == 0)
    assert running.kill(signal.SIGTERM) == 0
    assert wrong(kafka.bodies(out), sent) == {}


def test_messages_that_come_again_from_disk_are_known_by_their_ids(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    server = serve()
    broker = attach()
    sent = publish(broker, 500)
    forward(target(kafka, out), "--batch=50", die="when the transaction was committed").die()
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve()
    done = summary(forward(target(kafka, out), "--batch=70", "--until-empty"))
    assert wrong(kafka.bodies(out), sent) == {}
    assert done["resumed"] == 50


def test_a_transaction_of_a_forwarder_that_was_believed_dead_is_refused(
    kafka: KafkaServer, out: str
) -> None:
    source = Source("host", "i", "t", "c")
    wishes = {"marker": f"{out}-markers"}
    first, second = (Kafka(kafka.servers, {}, out, source, wishes) for _ in range(2))
    marker = Marker(str(source), "memory", 1, (7,))
    assert first.open() is None
    first.send([b"never"], marker)
    assert second.open() is None
    second.send([b"once"], marker)
    second.confirm()
    with pytest.raises(Away):
        first.confirm()
    assert kafka.bodies(out) == [b"once"]
    assert first.open() == marker
    for each in (first, second):
        each.close()


def test_the_marker_is_found_behind_those_of_other_sources(kafka: KafkaServer, out: str) -> None:
    """One that is open hides them until it ends."""
    wishes = {"marker": f"{out}-markers"}
    mine, other = (
        Kafka(kafka.servers, {}, out, Source(host, "i", "t", "c"), wishes) for host in "ab"
    )
    marker = Marker("a/i/t/c", "memory", 1, (7,))
    assert mine.open() is None
    mine.send([b"mine"], marker)
    mine.confirm()
    assert other.open() is None
    for lease in range(1, 40):
        other.send([b"other"], Marker("b/i/t/c", "memory", lease, (lease,)))
        other.confirm()
    assert mine.open() == marker
    for each in (mine, other):
        each.close()


def test_a_topic_that_cannot_take_it_is_named(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    serve()
    publish(attach(), 1)
    for place, words in (
        (f"missing?marker={out}-markers", "there is no topic missing"),
        (
            f"{out}?marker=missing",
            "there is no topic missing; make it, with cleanup.policy=compact",
        ),
        (f"{out}-markers?marker={out}", f"cleanup.policy of {out} is delete"),
        (f"{out}?marker={out}-markers&partition=1", "it has no partition 1"),
    ):
        child = forward(f"{kafka.url}/{place}", "--until-empty")
        assert child.wait() == 1
        assert words in child.errors
        assert "Traceback" not in child.errors
    done = summary(forward(f"{kafka.url}/{out}-new", "--create", "--until-empty"))
    assert done["messages"] == 1
    assert kafka.bodies(f"{out}-new") == [b"000000"]


def test_an_open_transaction_is_not_in_the_topic(kafka: KafkaServer, out: str) -> None:
    """The planted fault of these tests' own reader: uncommitted records would show."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.servers, "transactional.id": out, "log_level": 0}
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(out, b"open")
    producer.flush()
    assert kafka.last(out) == 1
    assert kafka.bodies(out) == []
    producer.abort_transaction()
