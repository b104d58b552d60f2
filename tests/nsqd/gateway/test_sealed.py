"""A client of the gateway gets nothing into a pool or a queue, and nothing out of it.

A message from before the pool or the queue was there becomes a dead letter: nothing of it is
unpickled, whatever way it came in, and after a restart too.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import other_users, pool_tasks, traps
from support.nsq_client import Server, mpub, sized
from support.other_users import STRANGER, become
from support.processes import WATCHDOG, eventually, readable

import shmq
from shmq.seal import REASON

STOP = b"stop".ljust(20, b"-")


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """A directory that is there after somebody has unpickled a trap."""
    made = tmp_path / "unpickled"
    yield made
    assert not made.exists(), "something was unpickled"


@pytest.fixture
def start(tmp_path: Path, instance: str, keep: Callable[[Any], Any]) -> Callable[..., Server]:
    """`start(*words)`: a gateway with its broker; another one goes on with its files."""
    return lambda *words: keep(Server("shmq", tmp_path, instance, *words))


@pytest.fixture
def gateway(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def broker(gateway: Server, keep: Callable[[Any], Any]) -> shmq.Broker:
    return keep(shmq.attach(gateway.instance, timeout=WATCHDOG))


def command(line: bytes, body: bytes = b"") -> Callable[[Server], Any]:
    def send(gateway: Server) -> Any:
        client = gateway.connect()
        client.send(line + b"\n" + body)
        return client.frame()

    return send


def ways(topic: str, body: bytes) -> dict[str, Callable[[Server], Any]]:
    name = topic.encode()
    return {
        "PUB": command(b"PUB " + name, sized(body)),
        "DPUB": command(b"DPUB " + name + b" 50", sized(body)),
        "MPUB": lambda gateway: _frame(gateway, mpub(name, [body, body])),
        "POST /pub": lambda gateway: gateway.post("/pub", body, topic=topic),
        "deferred": lambda gateway: gateway.post("/pub", body, topic=topic, defer="50"),
        "POST /mpub": lambda gateway: gateway.post(
            "/mpub", struct.pack(">i", 1) + sized(body), topic=topic, binary="true"
        ),
        "lines": lambda gateway: gateway.post("/mpub", b"some\ntext", topic=topic),
    }


def _frame(gateway: Server, data: bytes) -> Any:
    client = gateway.connect()
    client.send(data)
    return client.frame()


def refused(broker: shmq.Broker, topic: str, channel: str) -> int:
    """How many dead letters were not sealed."""
    with contextlib.suppress(shmq.Gone):
        found = broker.dead(topic, channel).peek(n=100)
        assert {(each.reason, each.error) for each in found} <= {("rejected", REASON)}
        return len(found)
    return 0


# ---- what came before ----


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_client_published_before_is_never_unpickled(
    start: Callable[..., Server],
    keep: Callable[[Any], Any],
    instance: str,
    trace: Path,
    restarted: bool,
) -> None:
    gateway = start()
    for topic, channel, body in (
        ("jobs", "pool", traps.task(trace)),
        ("work", "queue", traps.item(trace)),
    ):
        gateway.post("/topic/create", topic=topic)
        gateway.post("/channel/create", topic=topic, channel=channel)
        for send in ways(topic, body).values():
            send(gateway)
        gateway.post("/pub", STOP, topic=topic)
    if restarted:
        gateway.stop()
        start()
    broker = keep(shmq.attach(instance, timeout=WATCHDOG))
    work = shmq.Queue(broker=broker, name="work")
    work.put("good")
    assert work.get(timeout=WATCHDOG) == "good"
    with shmq.Executor(1, broker=broker, topic="jobs", attempts=1) as pool:
        assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
        eventually(lambda: refused(broker, "jobs", "pool") == 10)

    def all_refused() -> bool:
        with contextlib.suppress(Exception):
            work.get(False)
        return refused(broker, "work", "queue") == 10

    eventually(all_refused)


# ---- a closed topic ----


@pytest.fixture
def closed(broker: shmq.Broker) -> str:
    """The topic of a durable pool with a task that waits."""
    shmq.Executor(broker=broker, topic="jobs").submit(pool_tasks.same, 1)
    return "jobs"


@pytest.mark.parametrize("way", ways("jobs", b""))
def test_a_client_is_refused_with_the_reason(
    gateway: Server, broker: shmq.Broker, closed: str, trace: Path, way: str
) -> None:
    answer = ways(closed, traps.task(trace))[way](gateway)
    if hasattr(answer, "status"):
        assert (answer.status, answer.message) == (403, "TOPIC_SEALED")
    else:
        kind, data = answer
        assert kind == 1
        assert data.startswith(f"E_{way}_FAILED {way} failed publish to 'jobs': ".encode())
        assert b"pool or a queue" in data
    assert broker.channel_stats(closed, "pool").message_count == 1


@pytest.mark.parametrize("way", ["PUB", "POST /pub"])
def test_a_client_that_was_publishing_when_the_topic_was_closed_is_refused(
    gateway: Server, broker: shmq.Broker, way: str
) -> None:
    """It is on the fast paths, which know its producer already."""
    client = gateway.connect()
    for closed in (False, True, True):
        if closed:
            broker.configure("jobs", sealed=True)
        if way == "PUB":
            client.send(b"PUB jobs\n" + sized(b"x"))
            kind, data = client.frame()
            assert (kind, data[:12]) == ((1, b"E_PUB_FAILED") if closed else (0, b"OK"))
            if closed:
                break
        else:
            status = gateway.post("/pub", b"x", topic="jobs").status
            assert status == (403 if closed else 200)


@pytest.mark.parametrize("topic", ["jobs", "jobs.pool.dead"])
def test_a_client_may_not_read_it(
    gateway: Server, broker: shmq.Broker, closed: str, topic: str
) -> None:
    kind, data = command(f"SUB {topic} pool".encode())(gateway)
    assert (kind, data[:12]) == (1, b"E_SUB_FAILED")
    assert broker.channel_stats(closed, "pool").in_flight == 0
    answer = gateway.post("/channel/create", topic=closed, channel="other")
    assert (answer.status, answer.message) == (403, "TOPIC_SEALED")
    with shmq.connect(gateway.addresses["tcp"], timeout=WATCHDOG) as remote:
        with pytest.raises(shmq.NotSealed, match="pool or a queue"):
            remote.lease_holder(topic, "pool", "me")
        with pytest.raises(shmq.NotSealed, match="pool or a queue"):
            remote.create_channel(topic, "other")
        with pytest.raises(shmq.ShmqError, match="pool or a queue"):
            remote.consumer(topic, "pool").take(WATCHDOG)
    names = [found.name for found in broker.stats().topics]
    assert [name for name in names if name.startswith("jobs")] == [closed]


def test_a_client_that_had_subscribed_before_gets_no_task(
    gateway: Server, broker: shmq.Broker
) -> None:
    client = gateway.connect()
    client.send(b"SUB jobs pool\nRDY 10\n")
    assert client.frame() == (0, b"OK")
    with shmq.Executor(1, broker=broker, topic="jobs", attempts=1) as pool:

        def is_told() -> bool:
            """The gateway looks when it is the one that takes a task, and gives it back."""
            assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
            return readable(client.sock.fileno(), 0)

        eventually(is_told)
    kind, data = client.frame()
    assert (kind, data[:12]) == (1, b"E_SUB_FAILED")


def test_dead_letters_of_a_queue_do_not_leave_the_host(
    gateway: Server, broker: shmq.Broker
) -> None:
    """Also if they go to a topic that was open to everybody until then: the first letter closes it.
    Those who process them on the host go on."""
    work = shmq.Queue(broker=broker, name="work")
    broker.create_channel("open", "mine")
    early = gateway.connect()  # has subscribed while it was open
    early.send(b"SUB open mine\nRDY 1\n")
    assert early.frame() == (0, b"OK")
    broker.configure("work", "queue", dead_letter="open")
    assert not broker.settings("open").sealed
    work.put("secret")
    with broker.consumer("work", "queue") as consumer:
        message = consumer.take(WATCHDOG)
        assert message is not None
        message.reject("by hand")
        eventually(lambda: broker.channel_depth("open", "mine") == 1)
        assert broker.settings("open").sealed
        for name, way in ways("open", b"x").items():
            answer = way(gateway)
            if hasattr(answer, "status"):
                assert (answer.status, answer.message) == (403, "TOPIC_SEALED"), name
            else:
                assert answer[0] == 1, name
        client = gateway.connect()
        client.send(b"SUB open mine\nRDY 1\n")
        kind, data = client.frame()
        assert (kind, data[:12]) == (1, b"E_SUB_FAILED")
        kind, data = early.frame()
        assert (kind, data[:12]) == (1, b"E_SUB_FAILED")
        assert broker.channel_depth("open", "mine") == 1  # only the letter
        broker.configure("work", "queue", dead_letter=None)
        assert broker.settings("open").sealed  # the letter is still there
        broker.configure("work", "queue", dead_letter="open")
        assert broker.dead("work", "queue").redrive() == 1
        again = consumer.take(WATCHDOG)
        assert again is not None
        assert again.sealed
        again.reject("once more")
        eventually(lambda: broker.channel_depth("open", "mine") == 1)
    assert work.empty()


def test_what_a_client_left_among_the_dead_letters_is_never_unpickled(
    gateway: Server, broker: shmq.Broker, trace: Path
) -> None:
    """It is no dead letter of a pool, because a network sets no property, so nothing sends it back;
    and what was refused before is refused again when it comes back."""
    bad = traps.task(trace)
    gateway.post("/topic/create", topic="open")
    gateway.post("/channel/create", topic="open", channel="dead")
    gateway.post("/topic/create", topic="jobs")
    gateway.post("/channel/create", topic="jobs", channel="pool")
    for send in (*ways("open", bad).values(), *ways("jobs", bad).values()):
        send(gateway)
    left = broker.channel_depth("open", "dead")
    broker.configure("jobs", "pool", dead_letter="open")
    with shmq.Executor(1, broker=broker, topic="jobs", attempts=1) as pool:
        assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
        for _ in range(2):  # it comes back, and is refused again
            eventually(lambda: refused(broker, "jobs", "pool") == 9)
            argv = [sys.executable, "-m", "shmq", "dead", "redrive", "jobs", "pool"]
            argv += ["--instance", broker.instance]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done
            assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
        eventually(lambda: refused(broker, "jobs", "pool") == 9)
    with broker.consumer("open", "dead") as consumer:
        found = [consumer.take(WATCHDOG) for _ in range(left)]
        assert not any(message is None or message.sealed for message in found)


def test_a_lease_of_a_topic_ends_when_it_gets_dead_letters_of_a_queue(
    gateway: Server, broker: shmq.Broker
) -> None:
    """The settings count from the moment of their change, and no longer than they are there."""
    shmq.Queue(broker=broker, name="work")
    broker.create_channel("open", "c")
    with shmq.connect(gateway.addresses["tcp"], timeout=WATCHDOG) as remote:
        for number in range(3):
            assert remote.lease_holder("open", "c", f"before-{number}")
            broker.configure("work", "queue", dead_letter="open")
            with pytest.raises(shmq.NotSealed, match="pool or a queue"):
                remote.lease_holder("open", "c", f"then-{number}")
            broker.configure("work", "queue", dead_letter=None)
            assert remote.lease_holder("open", "c", f"after-{number}")
            broker.configure("work", dead_letter="open")
            with pytest.raises(shmq.NotSealed, match="pool or a queue"):
                remote.lease_holder("open", "c", f"topic-{number}")
            broker.configure("work", dead_letter=None)


def test_staged_rows_are_refused(gateway: Server, broker: shmq.Broker, closed: str) -> None:
    with shmq.connect(gateway.addresses["tcp"], timeout=WATCHDOG) as remote:
        with pytest.raises(shmq.NotSealed, match="pool or a queue"):
            remote.stage(closed, "me", 0, [b"x"])
        with pytest.raises(shmq.NotSealed, match="pool or a queue"):
            remote.commit(closed, "me", 0, [])
    assert broker.channel_stats(closed, "pool").message_count == 1


def test_a_remote_producer_is_told_so(gateway: Server, broker: shmq.Broker, closed: str) -> None:
    with shmq.connect(gateway.addresses["tcp"], timeout=WATCHDOG) as remote:
        for _ in range(2):
            with pytest.raises(shmq.NotSealed, match="pool or a queue"):
                remote.producer(closed).publish(b"x")


def test_the_command_line_is_refused(gateway: Server, closed: str) -> None:
    done = other_users.run("pub", f"--instance={gateway.instance}", closed, "text")
    assert done.returncode == 1
    assert "pool or a queue" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_private_pool_is_closed_too(gateway: Server, broker: shmq.Broker, trace: Path) -> None:
    work = shmq.Queue(broker=broker)
    answer = gateway.post("/pub", traps.item(trace), topic=work.name)
    assert (answer.status, answer.message) == (403, "TOPIC_SEALED")
    assert work.qsize() == 0


# ---- another user of the host ----

ATTACK = """
import sys, urllib.request, urllib.error
def post(topic, body):
    try:
        url = f"http://{sys.argv[1]}/pub?topic={topic}"
        urllib.request.urlopen(urllib.request.Request(url, data=body))
        return 200
    except urllib.error.HTTPError as exc:
        return exc.code
jobs, work = map(bytes.fromhex, sys.argv[2:])
print(post("jobs", jobs), post("work", work), os.getuid())
"""


@other_users.needed
@pytest.mark.parametrize("before", [True, False])
def test_another_user_runs_no_code(
    gateway: Server, broker: shmq.Broker, trace: Path, before: bool
) -> None:
    def attack() -> list[str]:
        argv = [sys.executable, "-c", "import urllib.request\n" + become(STRANGER) + ATTACK]
        argv += [gateway.addresses["http"], traps.task(trace).hex(), traps.item(trace).hex()]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=WATCHDOG)
        return done.stdout.split()

    if before:
        broker.create_channel("jobs", "pool")
        broker.create_channel("work", "queue")
        assert attack() == ["200", "200", str(STRANGER)]
    work = shmq.Queue(broker=broker, name="work")
    with shmq.Executor(1, broker=broker, topic="jobs", attempts=1) as pool:
        pool.submit(pool_tasks.same, 1).result(WATCHDOG)
        if not before:
            assert attack() == ["403", "403", str(STRANGER)]
        work.put("good")
        assert work.get(timeout=WATCHDOG) == "good"
        assert pool.submit(pool_tasks.add, 1, 2).result(WATCHDOG) == 3
        expected = 1 if before else 0
        eventually(lambda: refused(broker, "jobs", "pool") == expected)
        eventually(lambda: refused(broker, "work", "queue") == expected)


# ---- what others made before the pool or the queue came ----


def take(broker: shmq.Broker, kind: str) -> tuple[str, str, Callable[[], Any]]:
    """Open a pool or a queue. Returns its topic, its channel, and what puts one in."""
    if kind == "pool":
        pool = shmq.Executor(broker=broker, topic="jobs")
        return "jobs", "pool", lambda: pool.submit(pool_tasks.same, b"1" * 40)
    work = shmq.Queue(broker=broker, name="work")
    return "work", "queue", lambda: work.put(b"1" * 40)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("kind", ["pool", "queue"])
def test_a_channel_from_before_gets_no_more(
    gateway: Server,
    broker: shmq.Broker,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    paused: bool,
    large: bool,
) -> None:
    topic, own = {"pool": ("jobs", "pool"), "queue": ("work", "queue")}[kind]
    for channel in ("other", own):
        gateway.post("/topic/create", topic=topic)
        gateway.post("/channel/create", topic=topic, channel=channel)
    gateway.post("/pub", b"before", topic=topic)
    if paused:
        broker.pause_topic(topic)
    producer = broker.producer(topic)
    producer.publish(b"before")  # it has listed the channels
    _, _, put = take(broker, kind)
    put()
    assert "channel other was there before the pool or queue" in caplog.text
    producer.seal()
    body = b"x" * (300_000 if large else 10)
    producer.publish(body)
    if paused:
        broker.unpause_topic(topic)
    eventually(lambda: broker.channel_depth(topic, own) == 4)
    assert broker.channel_stats(topic, "other").message_count == (1 if paused else 2)
    assert broker.delete_channel(topic, "other") is None
    producer.publish(body)
    assert broker.channel_depth(topic, own) == 5


def test_a_full_channel_from_before_stops_nobody(gateway: Server, broker: shmq.Broker) -> None:
    gateway.post("/topic/create", topic="work")
    gateway.post("/channel/create", topic="work", channel="other")
    broker.configure("work", "other", max_messages=1, overflow="block")
    gateway.post("/pub", b"before", topic="work")
    work = shmq.Queue(broker=broker, name="work")
    for number in range(5):
        work.put(number, timeout=WATCHDOG)
    assert [work.get(timeout=WATCHDOG) for _ in range(5)] == list(range(5))


def test_channels_that_processes_of_the_host_make_later_get_all(broker: shmq.Broker) -> None:
    """They begin with the topic's settings."""
    work = shmq.Queue(broker=broker, name="work")
    broker.create_channel("work", "watch")
    work.put(1)
    assert broker.channel_depth("work", "watch") == broker.channel_depth("work", "queue") == 1
    broker.configure("work", "watch", sealed=False)
    work.put(2)
    assert broker.channel_depth("work", "watch") == 1
    broker.configure("work", "watch", sealed=True)
    work.put(3)
    assert broker.channel_depth("work", "watch") == 2


def test_which_channels_get_messages_is_the_same_after_a_restart(
    start: Callable[..., Server], keep: Callable[[Any], Any], instance: str
) -> None:
    gateway = start()
    gateway.post("/topic/create", topic="work")
    gateway.post("/channel/create", topic="work", channel="other")
    broker = keep(shmq.attach(instance, timeout=WATCHDOG))
    shmq.Queue(broker=broker, name="work").put(1)
    gateway.stop()
    start()
    broker = keep(shmq.attach(instance, timeout=WATCHDOG))
    shmq.Queue(broker=broker, name="work").put(2)
    assert broker.channel_depth("work", "other") == 0
    assert broker.settings("work", "other").sealed is False
    assert broker.settings("work", "queue").sealed is True


def test_a_topic_whose_channels_are_all_open_goes_on(broker: shmq.Broker) -> None:
    """One that a version without seals made, until its pool opens it again."""
    broker.create_channel("jobs", "pool")
    broker.configure("jobs", sealed=True)
    producer = broker.producer("jobs")
    producer.seal()
    producer.publish(b"x")
    assert broker.channel_depth("jobs", "pool") == 1


# ---- the topic of the dead letters ----


@pytest.mark.parametrize("way", [*ways("jobs.pool.dead", b""), "STAGE", "PROCESS"])
@pytest.mark.parametrize("made", ["before", "after", "never"])
def test_a_client_publishes_nothing_among_the_dead_letters(
    gateway: Server, broker: shmq.Broker, way: str, made: str
) -> None:
    name = "jobs.pool.dead"
    if made == "before":
        gateway.post("/topic/create", topic=name)
    shmq.Executor(broker=broker, topic="jobs").submit(pool_tasks.same, 1)
    if made == "after":
        broker.create_channel(name, "dead")
    if way == "STAGE":
        with shmq.connect(gateway.addresses["tcp"], timeout=WATCHDOG) as remote:
            with pytest.raises(shmq.NotSealed, match="pool or a queue"):
                remote.stage(name, "me", 0, [b"x"])
            with pytest.raises(shmq.NotSealed, match="pool or a queue"):
                remote.commit(name, "me", 0, [])
    elif way == "PROCESS":
        with pytest.raises(shmq.NotSealed, match="pool or a queue"):
            broker.producer(name).publish(b"x")
    else:
        answer = ways(name, b"x")[way](gateway)
        if hasattr(answer, "status"):
            assert (answer.status, answer.message) == (403, "TOPIC_SEALED")
        else:
            assert answer[0] == 1
            assert b"pool or a queue" in answer[1]
    broker.create_channel(name, "dead")
    assert broker.channel_depth(name, "dead") == 0


@pytest.mark.parametrize("kind", ["pool", "queue"])
def test_dead_letters_go_into_their_closed_topic_and_come_back(
    broker: shmq.Broker, kind: str
) -> None:
    topic, channel, put = take(broker, kind)
    put()
    with broker.consumer(topic, channel) as consumer:
        message = consumer.take(WATCHDOG)
        assert message is not None
        message.reject("by hand")
        name = f"{topic}.{channel}.dead"
        eventually(lambda: broker.dead(topic, channel).peek(n=10))
        assert broker.settings(name).sealed
        assert broker.dead(topic, channel).redrive() == 1
        again = consumer.take(WATCHDOG)
        assert again is not None
        assert again.sealed
        assert again.body == message.body
