"""`shmq forward` into JetStream: every message is in the stream once, whoever dies."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forwarding import KILLS, publish, summary, wrong
from support.processes import Child, eventually
from support.real_nats import NatsServer, free_port

import shmq
from shmq.forward.jetstream import JetStream
from shmq.forward.login import NatsLogin
from shmq.forward.marker import Marker
from shmq.forward.target import Away, Source

Forward = Callable[..., Child]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

DEATHS = (
    "before the batch is sent",
    "when the batch was sent",
    "when the batch was stored",
    "when the lease was finished",
)


def target(nats: NatsServer) -> str:
    return f"{nats.url}/S?subject=s"


def missed(nats: NatsServer, expected: list[bytes]) -> dict[bytes, int]:
    """How often each message is in the stream that is not there once."""
    return wrong(nats.bodies("S", "s"), expected)


def test_messages_arrive_in_their_order(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    sent = publish(attach(), 2500)
    done = summary(forward(target(nats), "--until-empty"))
    assert (done["messages"], done["bytes"], done["batches"]) == (2500, 15000, 3)
    assert nats.bodies("S", "s") == sent
    assert attach().channel_stats("t", "c").depth == 0


@pytest.mark.parametrize("point", DEATHS)
def test_a_forwarder_that_dies_stores_nothing_twice(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, point: str
) -> None:
    serve()
    sent = publish(attach(), 500)
    forward(target(nats), "--batch=50", die=point).die()
    done = summary(forward(target(nats), "--batch=50", "--until-empty"))
    assert missed(nats, sent) == {}
    assert done["resumed"] == (50 if point == "when the batch was stored" else 0) or point == (
        "when the batch was sent"
    )


def test_a_forwarder_that_ignores_markers_is_found(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    sent = publish(attach(), 500)
    forward(target(nats), "--batch=50", die="when the batch was stored", fault=True).die()
    summary(forward(target(nats), "--batch=50", "--until-empty", fault=True))
    assert missed(nats, sent) == dict.fromkeys(sent[100:150], 2)


@pytest.mark.parametrize("kills", KILLS)
def test_forwarders_killed_at_any_instant_store_every_message_once(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, kills: int
) -> None:
    """Every tenth death is also one of the other system and of the supervisor."""
    server = serve()
    broker, chance = attach(), random.Random(kills)
    sent = publish(broker, 3000)
    for death in range(kills):
        running = forward(target(nats), "--batch=20")
        ahead = nats.last("S") + chance.randrange(1, 900)
        # a reader's round trip later it may be anywhere in a later batch
        eventually(lambda ahead=ahead: nats.last("S") >= ahead)
        running.kill(signal.SIGKILL)
        if death % 10 == 9:
            nats.kill()
            server.kill(signal.SIGKILL)
            server = serve()
            nats.start_again()
        sent += publish(broker, 1500, len(sent))
    summary(forward(target(nats), "--until-empty"))
    assert missed(nats, sent) == {}


def test_a_nats_server_that_dies_gets_every_message_once(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    broker, chance = attach(), random.Random(1)
    sent = publish(broker, 3000)
    running = forward(target(nats), "--batch=20")
    for death in range(3):
        ahead = nats.last("S") + chance.randrange(1, 900)
        eventually(lambda ahead=ahead: nats.last("S") >= ahead)
        nats.kill()
        eventually(lambda death=death: running.errors.count("trying again") > death)
        nats.start_again()
        sent += publish(broker, 1500, len(sent))
    eventually(lambda: broker.channel_depth("t", "c") == 0)
    assert running.kill(signal.SIGTERM) == 0
    assert "is back" in running.errors
    assert missed(nats, sent) == {}


def test_a_supervisor_that_dies_costs_nothing(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    server = serve()
    broker = attach()
    sent = publish(broker, 2000)
    running = forward(target(nats), "--batch=20")
    eventually(lambda: nats.last("S") >= 100)
    server.kill(signal.SIGKILL)
    serve()
    sent += publish(broker, 1000, len(sent))
    eventually(lambda: broker.channel_depth("t", "c") == 0)
    assert running.kill(signal.SIGTERM) == 0
    assert missed(nats, sent) == {}


def test_messages_that_come_again_from_disk_are_known_by_their_ids(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    """The broker was stopped between a batch and the end of its lease: fresh memory has no lease,
    and the messages are on disk with the others."""
    server = serve()
    broker = attach()
    sent = publish(broker, 500)
    forward(target(nats), "--batch=50", die="when the batch was stored").die()
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve()
    done = summary(forward(target(nats), "--batch=70", "--until-empty"))
    assert missed(nats, sent) == {}
    assert done["resumed"] == 50


def test_a_lease_that_an_operator_returned_is_known_by_its_ids(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    broker = attach()
    sent = publish(broker, 500)
    forward(target(nats), "--batch=50", die="when the batch was stored").die()
    with broker.lease_holder("t", "c", "forward", ttl=None) as holder:
        for lease in holder.leases():
            holder.return_lease(lease.id)
    done = summary(forward(target(nats), "--batch=70", "--until-empty"))
    assert missed(nats, sent) == {}
    assert done["resumed"] == 50


def test_a_batch_of_a_forwarder_that_was_believed_dead_is_refused(nats: NatsServer) -> None:
    source = Source("host", "i", "t", "c")
    wishes = {"subject": "s"}
    first, second = (
        JetStream([("127.0.0.1", nats.port)], NatsLogin({}), "S", source, wishes) for _ in range(2)
    )
    marker = Marker(str(source), "memory", 1, (7,))
    assert first.open() is None
    assert second.open() is None
    second.send([b"once"], marker)
    second.confirm()
    first.send([b"once"], marker)
    with pytest.raises(Away, match="another marker"):
        first.confirm()
    assert nats.bodies("S", "s") == [b"once"]
    assert first.open() == marker
    for each in (first, second):
        each.close()


def test_the_second_forwarder_of_a_channel_ends_the_first(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    sent = publish(attach(), 100)
    first = forward(target(nats))
    eventually(lambda: nats.last("S") > 100)
    second = forward(target(nats))
    assert first.wait() == 1
    assert "somebody else leases under this name now" in first.errors
    assert "Traceback" not in first.errors
    sent += publish(attach(), 100, 100)
    eventually(lambda: len(nats.bodies("S", "s")) == 200)
    assert second.kill(signal.SIGINT) == 130
    assert missed(nats, sent) == {}


def test_a_stream_that_cannot_take_it_is_named(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    publish(attach(), 1)
    nats.make("PLAIN", "plain", "shmq.PLAIN.>", allow_atomic=False)
    nats.make("WORK", "work", "shmq.WORK.>", retention="workqueue")
    for place, words in (
        ("MISSING", "there is no such stream"),
        ("PLAIN?subject=plain", "set allow_atomic"),
        ("WORK?subject=work", "its retention is workqueue"),
        ("S?subject=other", "does not have the subject other"),
    ):
        child = forward(f"{nats.url}/{place}", "--until-empty")
        assert child.wait() == 1
        assert words in child.errors
        assert "Traceback" not in child.errors
    done = summary(forward(f"{nats.url}/NEW", "--create", "--until-empty"))
    assert done["messages"] == 1
    assert nats.bodies("NEW", "t") == [b"000000"]


def test_the_marker_of_another_host_is_refused(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, tmp_path: Path
) -> None:
    serve()
    publish(attach(), 1)
    place = f"{target(nats)}&marker=shmq.S.mine"
    summary(forward(place, "--until-empty", "--host=one"))
    other = forward(place, "--until-empty", "--host=two")
    assert other.wait() == 1
    assert "the last marker there is of one/" in other.errors


def test_a_broker_on_another_host_is_forwarded(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    port = free_port()
    serve(tcp_address=f"127.0.0.1:{port}")
    sent = publish(attach(), 500)
    place = f"--from=127.0.0.1:{port}"
    forward(target(nats), "--batch=50", place, die="when the batch was stored").die()
    done = summary(forward(target(nats), "--until-empty", place))
    assert missed(nats, sent) == {}
    assert done["resumed"] == 50


def test_the_server_asks_for_a_password(
    serve: Serve,
    attach: Attach,
    forward: Forward,
    tmp_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    serve()
    publish(attach(), 1)
    server = keep(NatsServer(tmp_path / "nats", "--user=me", "--pass=a:b"))
    place = f"127.0.0.1:{server.port}/S"
    refused = forward(f"nats://me:wrong@{place}", "--create", "--until-empty")
    assert refused.wait() == 1
    assert "refused: Authorization Violation" in refused.errors
    assert "wrong" not in refused.errors
    done = summary(forward(f"nats://me:a%3Ab@{place}", "--create", "--until-empty"))
    assert done["messages"] == 1
