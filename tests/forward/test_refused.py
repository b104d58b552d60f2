"""Messages that the target never takes, for their size: `shmq forward --refused`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.forwarding import summary, wrong
from support.processes import WATCHDOG, Child, eventually
from support.real_kafka import KafkaServer
from support.real_nats import NatsServer, free_port
from support.real_nsqd import Nsqd

import shmq

Forward = Callable[..., Child]
Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]

#: Status of a forwarder that stopped at a message.
REFUSED = 5
#: The targets below take so many bytes, and not this body.
LIMIT = 3000
BIG = b"x" * (LIMIT + 1)


class Far(Protocol):
    """A target that takes bodies of up to about LIMIT bytes."""

    url: str
    words: str
    """Of the limit, as a forwarder says it."""

    def bodies(self) -> list[bytes]: ...


class Stream:
    """A stream with max_msg_size."""

    words = f"max_msg_size is {LIMIT} bytes"

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.url = f"{server.url}/SMALL?subject=small"
        assert "error" not in server.make("SMALL", "small", "shmq.SMALL.>", max_msg_size=LIMIT)

    def bodies(self) -> list[bytes]:
        return self.server.bodies("SMALL", "small")


class Server:
    """A nats-server with a small max_payload."""

    words = f"max_payload is {LIMIT} bytes"

    def __init__(self, path: Path) -> None:
        settings = path / "nats.conf"
        settings.write_text(f"max_payload: {LIMIT}\n")
        self.server = NatsServer(path / "nats-small", "-c", str(settings))
        self.url = f"{self.server.url}/S?subject=s"
        assert "error" not in self.server.make("S", "s", "shmq.S.>")

    def bodies(self) -> list[bytes]:
        return self.server.bodies("S", "s")

    def close(self) -> None:
        self.server.close()


class Topic:
    """A topic of Kafka with max.message.bytes."""

    words = f"max.message.bytes is {LIMIT}"

    def __init__(self, server: KafkaServer, name: str) -> None:
        self.server, self.name = server, f"{name}-small"
        server.make(self.name, max_message_bytes=str(LIMIT))
        self.url = f"{server.url}/{self.name}?marker={name}-markers"

    def bodies(self) -> list[bytes]:
        return self.server.bodies(self.name)


class Queue:
    """A topic of an nsqd with -max-msg-size."""

    words = f"max-msg-size is {LIMIT} bytes"

    def __init__(self, path: Path) -> None:
        (path / "nsqd").mkdir()
        self.server = Nsqd(path / "nsqd", max_msg_size=LIMIT)
        self.server.post("/topic/create?topic=out")
        self.server.post("/channel/create?topic=out&channel=all")
        self.url = f"nsq://127.0.0.1:{self.server.tcp_port}/out"

    def bodies(self) -> list[bytes]:
        return list(self.server.take_all("out", "all").bodies)

    def close(self) -> None:
        self.server.close()


def _made(kind: str, request: pytest.FixtureRequest) -> Far:
    path, keep = request.getfixturevalue("tmp_path"), request.getfixturevalue("keep")
    if kind == "stream":
        return Stream(request.getfixturevalue("nats"))
    if kind == "kafka":
        return Topic(request.getfixturevalue("kafka"), request.getfixturevalue("out"))
    made: Far = keep(Server(path) if kind == "server" else Queue(path))
    return made


@pytest.fixture(params=["stream", "server", "kafka", "nsqd"])
def far(request: pytest.FixtureRequest) -> Far:
    """Each of the targets."""
    return _made(request.param, request)


def fill(broker: shmq.Broker, bad: Sequence[int], count: int = 200) -> list[bytes]:
    """Publish so many messages of which these are too big; the others."""
    broker.create_channel("t", "c")
    bodies = [BIG + b"%06d" % n if n in bad else b"%06d" % n for n in range(count)]
    broker.producer("t").publish_many(bodies)
    return [body for body in bodies if len(body) < LIMIT]


def printed(child: Child) -> list[str]:
    """The commands that a forwarder printed when it stopped."""
    return [
        line.strip() for line in child.errors.splitlines() if line.startswith("  shmq forward ")
    ]


def run(command: str) -> None:
    """Run a line in a shell, as somebody who copies it."""
    done = subprocess.run(
        ["sh", "-c", f'shmq() {{ {shlex.quote(sys.executable)} -m shmq "$@"; }}; {command}'],
        capture_output=True,
        text=True,
        timeout=10 * WATCHDOG,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr


def metric(port: int, name: str) -> int:
    """A number of a forwarder's /metrics; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WATCHDOG) as answer:
            text = answer.read().decode()
    except OSError:
        return 0
    (line,) = [each for each in text.splitlines() if each.startswith(f"shmq_forward_{name}{{")]
    return int(line.split()[-1])


def held(broker: shmq.Broker) -> int:
    """The messages that the forwarder's leases hold."""
    with broker.lease_holder("t", "c", "forward", ttl=None) as holder:
        return sum(lease.count for lease in holder.leases())


PLACES = [[0], [199], [77], [3, 4, 150], range(200)]


@pytest.mark.parametrize("bad", PLACES, ids=["first", "last", "middle", "three", "all"])
@pytest.mark.parametrize("policy", ["dead", "skip"])
def test_what_is_refused_goes_where_the_option_says(
    serve: Serve, attach: Attach, far: Far, forward: Forward, policy: str, bad: Sequence[int]
) -> None:
    serve()
    broker = attach()
    good = fill(broker, bad)
    child = forward(far.url, f"--refused={policy}", "--until-empty")
    done = summary(child)
    assert wrong(far.bodies(), good) == {}
    assert (done["messages"], done["refused"]) == (len(good), len(bad))
    assert held(broker) == broker.channel_depth("t", "c") == 0
    assert far.words in child.errors
    letters = broker.dead("t", "c").peek(1000)
    assert len(letters) == (len(bad) if policy == "dead" else 0) == done["dead"]
    assert done["skipped"] == (len(bad) if policy == "skip" else 0)
    for letter in letters:
        assert (letter.reason, letter.source) == ("rejected", "t/c")
        assert letter.error is not None
        assert far.words in letter.error


def test_it_stops_and_says_how_to_go_on(
    serve: Serve, attach: Attach, far: Far, forward: Forward
) -> None:
    """The commands work as they are printed: the first one here, the other one below."""
    serve()
    broker = attach()
    good = fill(broker, [77])
    for _ in range(2):
        child = forward(far.url, "--until-empty")
        assert child.wait() == REFUSED
        assert far.words in child.errors
        assert f"{len(BIG) + 6} bytes" in child.errors
        assert "others wait in lease" in child.errors
        assert json.loads(child.lines[-1])["refused"] == 1
    dead, skip = printed(child)
    assert "--refused=dead" in dead
    assert "--refused=skip" in skip
    run(dead)
    assert wrong(far.bodies(), good) == {}
    (letter,) = broker.dead("t", "c").peek()
    assert letter.body == BIG + b"000077"
    assert letter.error is not None
    name = letter.error.split()[2].rstrip(":")
    assert f"message {name}, {len(letter.body)} bytes" in child.errors


def test_the_other_command_works_too(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    broker, far = attach(), Stream(nats)
    good = fill(broker, [77])
    child = forward(far.url, "--batch=50")
    assert child.wait() == REFUSED
    run(printed(child)[1])
    assert wrong(far.bodies(), good) == {}
    assert broker.dead("t", "c").depth == 0
    assert held(broker) == broker.channel_depth("t", "c") == 0


# ---- a target that does not say what it takes ----


@pytest.fixture(params=["server", "kafka", "nsqd"])
def secretive(request: pytest.FixtureRequest) -> Far:
    """Each of the targets that refuses a batch because of one message."""
    return _made(request.param, request)


@pytest.mark.parametrize("bad", PLACES[:4], ids=["first", "last", "middle", "three"])
def test_what_is_refused_is_found_in_a_batch(
    serve: Serve, attach: Attach, secretive: Far, forward: Forward, bad: Sequence[int]
) -> None:
    """The others are stored once, in their order, by parts."""
    serve()
    broker = attach()
    good = fill(broker, bad)
    done = summary(forward(secretive.url, "--refused=dead", "--until-empty", blind=True))
    assert secretive.bodies() == good
    assert (done["messages"], done["dead"]) == (len(good), len(bad))
    assert [each.body[:-6] for each in broker.dead("t", "c").peek()] == [BIG] * len(bad)


DEATHS = [("when a part was sent", 8), ("when a part was stored", 7)]
DEATHS += [("when the letters were put", 1), ("when the lease was finished", 1)]


@pytest.mark.parametrize(("point", "count"), DEATHS)
def test_a_forwarder_that_dies_while_it_looks_stores_nothing_twice(
    serve: Serve,
    attach: Attach,
    tmp_path: Path,
    keep: Any,
    forward: Forward,
    point: str,
    count: int,
) -> None:
    serve()
    broker, far = attach(), keep(Server(tmp_path))
    good = fill(broker, [3, 77])
    forward(far.url, "--refused=dead", blind=True, die=point, count=count).die()
    summary(forward(far.url, "--refused=dead", "--until-empty", blind=True))
    assert far.bodies() == good
    letters = broker.dead("t", "c").peek()
    assert [each.body for each in letters] == [BIG + b"000003", BIG + b"000077"]
    assert held(broker) == broker.channel_depth("t", "c") == 0


def test_a_death_of_the_broker_while_it_looks_stores_nothing_twice(
    serve: Serve, attach: Attach, tmp_path: Path, keep: Any, forward: Forward
) -> None:
    """The lease ends with an orderly stop, so all its messages come again."""
    server = serve()
    broker, far = attach(), keep(Server(tmp_path))
    good = fill(broker, [3, 77])
    forward(far.url, "--refused=skip", blind=True, die="when a part was stored", count=7).die()
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve()
    done = summary(forward(far.url, "--refused=skip", "--until-empty", "--batch=70", blind=True))
    assert far.bodies() == good
    assert done["skipped"] == 2


def test_sigterm_ends_it_while_it_looks(
    serve: Serve, attach: Attach, tmp_path: Path, keep: Any, forward: Forward
) -> None:
    serve()
    broker, far = attach(), keep(Server(tmp_path))
    good = fill(broker, [3, 77])
    how = {"die": "when a part was stored", "count": 7, "number": int(signal.SIGTERM)}
    child = forward(far.url, "--refused=skip", blind=True, **how)
    assert child.wait() == 0
    assert json.loads(child.lines[-1])["skipped"] == 0
    assert 0 < len(far.bodies()) < 198
    summary(forward(far.url, "--refused=skip", "--until-empty"))
    assert far.bodies() == good


# ---- limits that change ----


def test_a_limit_that_is_lowered_is_seen(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    """JetStream says of such a batch only that it is not whole."""
    serve()
    broker, far = attach(), Stream(nats)
    nats.change("SMALL", "small", "shmq.SMALL.>", max_msg_size=100_000)
    running = forward(far.url, "--refused=dead")
    first = fill(broker, [], 10)
    eventually(lambda: len(far.bodies()) == 10)
    nats.change("SMALL", "small", "shmq.SMALL.>", max_msg_size=LIMIT)
    second = fill(broker, [5], 10)
    eventually(lambda: len(far.bodies()) == 19 and broker.dead("t", "c").depth == 1)
    assert running.kill(signal.SIGTERM) == 0
    assert far.bodies() == first + second


def test_a_limit_of_kafka_that_is_lowered_is_seen(
    serve: Serve, attach: Attach, kafka: KafkaServer, out: str, forward: Forward
) -> None:
    serve()
    broker, far = attach(), Topic(kafka, out)
    kafka.change(far.name, "max.message.bytes", "100000")
    running = forward(far.url, "--refused=dead")
    first = fill(broker, [], 10)
    eventually(lambda: len(far.bodies()) == 10)
    kafka.change(far.name, "max.message.bytes", str(LIMIT))
    second = fill(broker, [5], 10)
    eventually(lambda: len(far.bodies()) == 19 and broker.dead("t", "c").depth == 1)
    assert running.kill(signal.SIGTERM) == 0
    assert far.bodies() == first + second


def test_a_limit_that_is_raised_is_seen(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    """No message is given up for a limit of an hour ago."""
    serve()
    broker, far = attach(), Stream(nats)
    running = forward(far.url, "--refused=skip")
    fill(broker, [], 10)
    eventually(lambda: len(far.bodies()) == 10)
    nats.change("SMALL", "small", "shmq.SMALL.>", max_msg_size=100_000)
    fill(broker, [5], 10)
    eventually(lambda: len(far.bodies()) == 20)
    assert running.kill(signal.SIGTERM) == 0


@pytest.mark.parametrize("limit", [1500, 2000])
def test_a_small_limit_has_room_for_the_marker(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward, limit: int
) -> None:
    """A marker has eight bytes for each message of a batch."""
    serve()
    broker = attach()
    nats.make("TINY", "tiny", "shmq.TINY.>", max_msg_size=limit)
    good = fill(broker, [], 999)
    done = summary(forward(f"{nats.url}/TINY?subject=tiny", "--until-empty"))
    assert done["batches"] > 5
    assert nats.bodies("TINY", "tiny") == good


# ---- what is no refusal of a message ----


def test_a_refusal_of_all_messages_ends_it_whatever_the_option_says(
    serve: Serve, attach: Attach, tmp_path: Path, keep: Any, forward: Forward
) -> None:
    """To leave messages out for it would empty the channel."""
    serve()
    broker = attach()
    fill(broker, [], 10)
    settings = tmp_path / "nats.conf"
    settings.write_text(
        "authorization { users = [{user: me, password: me, "
        'permissions: {publish: {deny: ["s"]}}}] }\n'
    )
    server = keep(NatsServer(tmp_path / "denied", "-c", str(settings)))
    url = f"nats://me:me@127.0.0.1:{server.port}/S?subject=s"
    child = forward(url, "--refused=skip", "--create", "--until-empty")
    assert child.wait() == 1
    assert "Permissions Violation" in child.errors
    assert held(broker) == 10


def test_a_stream_that_is_full_is_waited_for_and_said_once(
    serve: Serve, attach: Attach, nats: NatsServer, forward: Forward
) -> None:
    serve()
    broker = attach()
    nats.make("FULL", "full", "shmq.FULL.>", max_msgs=15, discard="new")
    port = free_port()
    words = ("--refused=skip", "--batch=10", f"--metrics-address=127.0.0.1:{port}")
    running = forward(f"{nats.url}/FULL?subject=full", *words)
    good = fill(broker, [], 30)
    eventually(lambda: running.errors.count("trying again") == 1)
    eventually(lambda: metric(port, "away_total") >= 3)
    assert "is back" not in running.errors
    nats.change("FULL", "full", "shmq.FULL.>", max_msgs=1000, discard="new")
    eventually(lambda: len(nats.bodies("FULL", "full")) == 30)
    eventually(lambda: running.errors.count("is back") == 1)
    assert running.kill(signal.SIGTERM) == 0
    assert nats.bodies("FULL", "full") == good
    assert running.errors.count("trying again") == 1


def test_the_largest_message_that_is_taken_is_sent(
    serve: Serve, attach: Attach, far: Far, forward: Forward
) -> None:
    """One byte more is refused by us, so the target need not say so."""
    room = {
        Stream: LIMIT - 96,
        Server: LIMIT - 96,
        Topic: LIMIT - 61 - 2 - 7,
        Queue: LIMIT,
    }[type(far)]
    serve()
    broker = attach()
    broker.create_channel("t", "c")
    bodies = [b"%0*d" % (room, number) for number in range(150)]
    broker.producer("t").publish_many([*bodies, b"x" * (room + 1)])
    child = forward(far.url, "--refused=skip", "--until-empty")
    done = summary(child)
    assert (done["messages"], done["skipped"], done["away"]) == (150, 1, 0)
    assert far.bodies() == bodies
