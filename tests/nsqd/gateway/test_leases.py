"""Leases over TCP: `shmq.connect` against a real `shmq serve`."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cutting_proxy import CuttingProxy
from support.fake_auth_server import Authority, reply, rule
from support.nsq_client import ERROR, Server, sized
from support.processes import ROOT, WATCHDOG, eventually

import shmq
from shmq.errors import (
    BadArgument,
    Gone,
    LeaseFenced,
    LeaseLost,
    MemoryLost,
    NotInFlight,
    ShmqError,
    Unauthorized,
    Unconfirmed,
    Unreachable,
)
from shmq.staging_place import staged_paths

Start = Callable[..., Server]
Columns = list[Any]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has leases."""
    return "shmq"


@pytest.fixture(scope="session", autouse=True)
def _staged() -> Iterator[None]:
    """Rows that are staged and never committed outlive the servers that tests start."""
    yield
    for left in Path("/dev/shm").glob(f"shmq-staged-wire-{os.getpid()}-*"):
        shutil.rmtree(left)


#: With which the clients of these tests are one client.
SECRET = "only-these-tests-know-it"


def connected(server: Server, **how: Any) -> shmq.RemoteBroker:
    given = {"timeout": WATCHDOG, "secret": SECRET, **how}
    return shmq.connect(f"127.0.0.1:{server.port()}", **given)


@pytest.fixture
def remote(server: Server) -> Iterator[shmq.RemoteBroker]:
    with connected(server) as broker:
        yield broker


@pytest.fixture
def local(server: Server) -> Iterator[shmq.Broker]:
    with shmq.attach(server.instance) as broker:
        yield broker


def worker(server: Server) -> psutil.Process:
    """The gateway process that lives."""

    def found() -> psutil.Process | None:
        for child in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "shmq.gateway.worker" in child.cmdline():
                    return child
        return None

    process: psutil.Process = eventually(found)
    return process


def fill(broker: shmq.Broker, topic: str, count: int, most: int = 200) -> None:
    """Publish messages of some sizes, some with properties."""
    broker.create_channel(topic, "c")
    random_ = random.Random(count)
    producer = broker.producer(topic)
    for start in range(0, count, 100):
        bodies = [random_.randbytes(random_.randrange(1, most)) for _ in range(start, start + 100)]
        properties = [{"n": str(k)} if k % 3 else None for k in range(100)]
        producer.publish_many(bodies[: count - start], properties=properties[: count - start])


def columns(batches: Iterator[Any]) -> Columns:
    """All rows of a part."""
    rows: Columns = []
    for batch in batches:
        numbers = (batch.ids.tolist(), batch.timestamps.tolist(), batch.attempts.tolist())
        rows += zip(*numbers, batch.bodies(), map(dict, batch.properties), strict=True)
    return rows


def parts(source: Any, topic: str, lease: shmq.Lease, **how: Any) -> list[Columns]:
    return [
        columns(source.read_lease(topic, "c", lease.id, part, properties=True, **how))
        for part in range(lease.parts)
    ]


# ---- reading ----


def test_rows_are_those_of_shared_memory(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 3000)
    with remote.lease_holder(topic, "c", "me") as holder:
        lease = holder.lease(3000, parts=3)
        assert lease is not None
        assert (lease.count, lease.parts, lease.parent) == (3000, 3, 0)
        wanted = parts(local, topic, lease)
        assert sum(map(len, wanted)) == 3000
        assert parts(remote, topic, lease) == wanted
        assert parts(remote, topic, lease, rows=70, max_bytes=5000) == wanted
        plain = next(remote.read_lease(topic, "c", lease.id, 1, rows=70))
        with pytest.raises(ValueError, match="properties"):
            plain.blocks()
        assert len(plain) == 70
        assert plain.data == b"".join(plain.bodies())
        assert holder.finish_lease(lease.id) == 3000


def test_reading_goes_on_where_a_connection_broke(
    server: Server, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 4000, 1000)
    with CuttingProxy(server.port(), 300_000) as proxy:
        remote = shmq.connect(f"127.0.0.1:{proxy.port}", timeout=WATCHDOG)
        holder = remote.lease_holder(topic, "c", "me")
        lease = holder.lease(4000)
        assert lease is not None
        found = columns(holder.read_lease(lease.id, max_bytes=50_000, properties=True))
        assert found == columns(local.read_lease(topic, "c", lease.id, properties=True))
        assert proxy.cuts > 4
        assert holder.finish_lease(lease.id) == 4000
        remote.close()


def test_a_reader_that_stops_early_disturbs_nobody(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 2000, 1000)
    holder = remote.lease_holder(topic, "c", "me")
    lease = holder.lease(2000)
    assert lease is not None
    for _ in range(20):
        reading = holder.read_lease(lease.id, rows=10)
        assert len(next(reading)) == 10
        reading.close()  # type: ignore[attr-defined]
    assert holder.leases() == [lease]
    assert holder.return_lease(lease.id) == 2000
    with pytest.raises(LeaseLost):
        next(holder.read_lease(lease.id))
    with pytest.raises(LeaseLost):
        next(remote.read_lease(topic, "c", lease.id + 1))


def test_leases_on_disk_are_read(start: Start) -> None:
    server = start("--mem-queue-size=100")
    with connected(server) as remote, shmq.attach(server.instance) as local:
        fill(local, "t", 1500)
        eventually(lambda: remote.channel_depth("t", "c") == 1500)
        holder = remote.lease_holder("t", "c", "me")
        total = 0
        while total < 1500:
            lease = holder.lease(1500, timeout=WATCHDOG)
            assert lease is not None
            assert parts(remote, "t", lease, rows=64) == parts(local, "t", lease)
            total += holder.finish_lease(lease.id)
        assert total == 1500


# ---- holders ----


def test_a_later_holder_fences_the_earlier(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 10)
    first = remote.lease_holder(topic, "c", "me")
    lease = first.lease(4)
    second = remote.lease_holder(topic, "c", "me")
    with pytest.raises(LeaseFenced):
        first.touch()
    assert second.leases() == [lease]
    same = remote.lease_holder(topic, "c", "me", resume=second.incarnation)
    assert same.leases() == second.leases()
    local.lease_holder(topic, "c", "me")  # the fence is that of shared memory
    for fenced in (same, second):
        with pytest.raises(LeaseFenced):
            fenced.leases()
    with pytest.raises(LeaseFenced):
        remote.lease_holder(topic, "c", "me", resume=second.incarnation)


def test_a_repeated_request_takes_one_lease(
    server: Server, remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 20)
    holder = remote.lease_holder(topic, "c", "me")
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True)
    body = b'{"holder":[%d,"%016x"],"n":3,"parent":0}' % holder.incarnation
    ask = f"LEASE {topic} c\n".encode() + sized(body)
    answers = {client.ask(ask) for _ in range(3)}
    assert len(answers) == 1
    assert [lease.count for lease in holder.leases()] == [3]
    holder.finish_lease(holder.leases()[0].id)
    # the client's own calls are requests of their own, as in shared memory
    found = [holder.lease(2), holder.lease(2)]
    assert [lease.count for lease in found if lease] == [2, 2]
    assert holder.leases() == found


def test_an_end_may_be_repeated(remote: shmq.RemoteBroker, local: shmq.Broker, topic: str) -> None:
    fill(local, topic, 9)
    holder = remote.lease_holder(topic, "c", "me")
    first, second, third = (holder.lease(3) for _ in range(3))
    assert first
    assert second
    assert third
    assert holder.look(first.id, replay=True).replays == 1
    assert holder.finish_lease(second.id) == 6
    assert holder.finish_lease(second.id) == holder.finish_lease(first.id) == 0
    assert holder.return_lease(third.id) == 3
    with pytest.raises(LeaseLost):
        holder.return_lease(third.id)
    with pytest.raises(LeaseLost):
        holder.finish_lease(third.id)
    assert remote.channel_stats(topic, "c").finished == 6
    assert remote.channel_stats(topic, "c").depth == remote.channel_depth(topic, "c") == 3
    assert holder.wait(0)
    assert holder.lease(5, parent=7) == holder.leases()[0]
    assert holder.lease(5, timeout=0.05) is None
    assert not holder.wait(0)


def test_a_wait_ends_with_a_message(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    local.create_channel(topic, "c")
    holder = remote.lease_holder(topic, "c", "me")
    local.producer(topic).publish(b"later", defer=0.2)
    assert holder.wait(WATCHDOG)
    lease = holder.lease(1, timeout=WATCHDOG)
    assert lease is not None
    assert [batch.bodies() for batch in holder.read_lease(lease.id)] == [[b"later"]]


def test_a_closed_holders_leases_go_back(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 5)
    with remote.lease_holder(topic, "c", "me", ttl=None, grace=0.001) as holder:
        assert holder.lease(5)
        assert local.channel_stats(topic, "c").leased == 5
    eventually(lambda: local.channel_depth(topic, "c") == 5)


def entry(local: shmq.Broker, topic: str) -> Any:
    """The only holder in shared memory."""
    stats = local.channel_stats(topic, "c")
    return local.views().queue_at(stats.queue, stats.serial).lease_holders[0]


def owner(local: shmq.Broker, topic: str) -> tuple[int, int]:
    """Client entry (0: none) and process of the only holder."""
    found = entry(local, topic)
    return int(found["client"]), int(found["pid"])


def test_a_silent_holder_loses_its_leases(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 5)
    holder = remote.lease_holder(topic, "c", "me", ttl=0.001)
    lease = holder.lease(5)
    assert lease is not None
    eventually(lambda: local.channel_depth(topic, "c") == 5)
    with pytest.raises(LeaseLost):
        holder.finish_lease(lease.id)
    holder.touch()  # its name is still its own


def test_a_thread_keeps_a_holder_alive(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    local.create_channel(topic, "c")
    holder = remote.lease_holder(topic, "c", "me", ttl=0.5, keepalive=True)
    first = int(entry(local, topic)["deadline"])
    eventually(lambda: int(entry(local, topic)["deadline"]) > first)
    holder.close()


def test_a_killed_gateway_process_ends_no_lease(start: Start) -> None:
    server = start()
    with connected(server) as remote, shmq.attach(server.instance) as local:
        fill(local, "t", 3000, 1000)
        holder = remote.lease_holder("t", "c", "me", ttl=600)
        lease = holder.lease(3000)
        assert lease is not None
        wanted = columns(local.read_lease("t", "c", lease.id, properties=True))
        reading = holder.read_lease(lease.id, max_bytes=20_000, properties=True)
        rows = columns(iter([next(reading)]))
        old = worker(server)
        assert owner(local, "t")[1] == old.pid
        os.kill(old.pid, signal.SIGKILL)
        eventually(lambda: owner(local, "t")[0] == 0)  # nobody speaks for the holder: grace begins
        rows += columns(reading)
        assert rows == wanted
        holder.touch()
        assert owner(local, "t") == (owner(local, "t")[0], worker(server).pid)
        assert owner(local, "t")[0]
        assert holder.finish_lease(lease.id) == 3000


def test_leases_outlive_the_supervisor_and_not_the_memory(start: Start) -> None:
    server = start()
    flag = f"--tcp-address=127.0.0.1:{server.port()}"
    with connected(server) as remote:
        remote.producer("t").publish_many([b"%d" % k for k in range(5)])
        holder = remote.lease_holder("t", "c", "me")
        lease = holder.lease(5)
        assert lease is not None
        server.stop(signal.SIGKILL)
        server = start(flag, again=server)
        assert [batch.bodies() for batch in holder.read_lease(lease.id)] == [
            [b"%d" % k for k in range(5)]
        ]
        assert holder.leases() == [lease]
        assert not remote.ended
        staged = remote.stage("t", "w", 1, [b"row"])
        assert staged
        (place,) = staged_paths(server.instance, os.geteuid())
        folder = Path(place, "gateway")
        assert folder.exists()
        server.stop(signal.SIGTERM)
        assert not folder.exists()  # those of other memory can only be in the way
        (folder / "other").mkdir(mode=0o700, parents=True)
        server = start(flag, again=server)
        assert remote.ended
        assert remote.stage("t", "w", 2, [b"row"])
        (place,) = staged_paths(server.instance, os.geteuid())
        assert len(os.listdir(Path(place, "gateway"))) == 1
        for call in (
            lambda: holder.finish_lease(lease.id),
            lambda: next(holder.read_lease(lease.id)),
            lambda: remote.commit("t", "w", 1, [staged]),
        ):
            with pytest.raises(MemoryLost):
                call()
        assert remote.channel_depth("t", "c") == 5


def test_a_restart_that_keeps_the_memory_is_only_waited_for(start: Start) -> None:
    server = start("--on-stop=keep")
    flag = f"--tcp-address=127.0.0.1:{server.port()}"
    done, errors = threading.Event(), list[ShmqError]()
    with connected(server) as remote:
        remote.producer("t").publish_many([b"x", b"y"])
        holder = remote.lease_holder("t", "c", "me")
        lease = holder.lease(2)

        def call() -> None:
            while not done.is_set():
                try:
                    holder.touch()
                except ShmqError as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=call)
        thread.start()
        server.stop(signal.SIGTERM)
        start(flag, "--on-stop=keep", again=server)
        assert holder.leases() == [lease]
        done.set()
        thread.join()
        assert errors == []


def test_a_channel_that_was_made_again_is_another(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 5)
    holder = remote.lease_holder(topic, "c", "me")
    assert holder.identity == remote.channel_identity(topic, "c")
    assert holder.identity == local.channel_identity(topic, "c")
    local.delete_channel(topic, "c")
    with pytest.raises(Gone):
        holder.touch()
    local.create_channel(topic, "c")
    with pytest.raises(MemoryLost, match="created again"):
        holder.touch()


# ---- who may ----


def test_auth(start: Start, authority: Authority) -> None:
    rules = rule(topic="^t$"), rule(topic="^p$", permissions=["publish"])
    authority.reply = (200, reply(3600, *rules))
    server = start(authority.flag)
    with pytest.raises(Unauthorized):
        connected(server)
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True)
    kind, said = client.ask(b"LINFO\n" + sized(b"{}")) or (0, b"")
    assert (kind, said) == (ERROR, b"E_AUTH_FIRST AUTH required before LINFO")
    with connected(server, auth_secret="ok") as remote:
        assert remote.lease_holder("t", "c", "me").leases() == []
        staged = remote.stage("p", "w", 1, [b"x"])
        assert staged
        assert remote.commit("p", "w", 1, [staged]) == 1
        for call in (
            lambda: remote.lease_holder("p", "c", "me"),
            lambda: remote.lease_holder("q", "c", "me"),
            lambda: remote.channel_depth("p", "c"),
            lambda: remote.stage("q", "w", 1, [b"x"]),
            lambda: next(remote.read_lease("p", "c", 1, identity="1-1")),
            lambda: remote.consumer("p", "c"),
            lambda: remote.producer("q"),
        ):
            with pytest.raises(Unauthorized):
                call()
    authority.reply = (403, b"{}")
    with pytest.raises(Unauthorized):
        connected(server, auth_secret="wrong")


def test_tls(start: Start, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    server = start(f"--tls-cert={cert}", f"--tls-key={key}", "--tls-required=tcp-https")
    context = ssl.create_default_context(cafile=cert)
    with connected(server, tls=context) as remote, shmq.attach(server.instance) as local:
        fill(local, "t", 2000, 1000)
        holder = remote.lease_holder("t", "c", "me")
        lease = holder.lease(2000)
        assert lease is not None
        found = columns(holder.read_lease(lease.id, properties=True))
        assert found == columns(local.read_lease("t", "c", lease.id, properties=True))
        with remote.consumer("u", "c") as consumer:
            remote.producer("u").publish_many([b"%d" % k * 1000 for k in range(100)])
            for k in range(100):
                message = consumer.take(WATCHDOG)
                assert message is not None
                assert message.body == b"%d" % k * 1000
                message.finish()
            eventually(lambda: local.channel_stats("u", "c").finished == 100)
    with pytest.raises(ssl.SSLCertVerificationError):
        connected(server, tls=True)
    with pytest.raises(ShmqError, match="TLS"):
        connected(server)


# ---- messages ----


def test_messages_come_and_go(remote: shmq.RemoteBroker, local: shmq.Broker, topic: str) -> None:
    producer = remote.producer(topic)
    consumer = remote.consumer(topic, "c", max_in_flight=3)
    producer.publish(b"one")
    producer.publish_many([b"two", b"three"])
    first = consumer.take(WATCHDOG)
    assert first is not None
    assert (first.body, first.attempts, len(first.id)) == (b"one", 1, 16)
    first.touch()
    first.finish()
    with pytest.raises(NotInFlight):
        first.finish()
    second = consumer.take(WATCHDOG)
    assert second
    second.requeue()
    third = consumer.take(WATCHDOG)
    assert third
    assert third.body == b"three"
    with pytest.raises(ZeroDivisionError), third:
        raise ZeroDivisionError
    found = {}
    for message in consumer:
        found[message.body] = message.attempts
        message.finish()
        if len(found) == 2:
            break
    assert found == {b"two": 2, b"three": 2}
    producer.defer(b"late", 0.1)
    late = consumer.take(WATCHDOG)
    assert late
    late.finish()
    eventually(lambda: local.channel_stats(topic, "c").finished == 4)
    assert consumer.take(0) is None
    for wrong in (lambda: producer.publish(b""), lambda: producer.publish(b"x", defer=1e9)):
        with pytest.raises((BadArgument, ShmqError)):
            wrong()
    producer.publish(b"left")
    assert consumer.take(WATCHDOG)
    consumer.close()
    with pytest.raises(Gone):
        consumer.take(0)
    eventually(lambda: local.channel_depth(topic, "c") == 1)


def test_a_consumer_and_a_producer_find_the_next_gateway_process(start: Start) -> None:
    server = start()
    with connected(server) as remote:
        producer = remote.producer("t")
        consumer = remote.consumer("t", "c")
        producer.publish_many([b"w", b"x"])
        message = consumer.take(WATCHDOG)
        assert message is not None
        eventually(lambda: remote.channel_stats("t", "c").in_flight == 2)

        def is_lost() -> bool:
            try:
                message.touch()
            except NotInFlight:
                return True
            return False

        os.kill(worker(server).pid, signal.SIGKILL)
        eventually(is_lost)
        again = [consumer.take(WATCHDOG) for _ in range(2)]
        assert {(one.body, one.attempts) for one in again if one} == {(b"w", 2), (b"x", 2)}
        for one in again:
            assert one
            one.finish()
        producer.publish(b"y")
        second = consumer.take(WATCHDOG)
        assert second
        assert second.body == b"y"
        consumer.close()


def test_a_publish_without_an_answer_is_unconfirmed(server: Server, topic: str) -> None:
    with CuttingProxy(server.port(), 1 << 20) as proxy:
        remote = shmq.connect(f"127.0.0.1:{proxy.port}", timeout=WATCHDOG)
        producer = remote.producer(topic)
        proxy.most = 1200  # less than the answers to IDENTIFY and to some publishes
        remote.close()
        remote = shmq.connect(f"127.0.0.1:{proxy.port}", timeout=WATCHDOG)
        producer = remote.producer(topic)
        published = 0
        with contextlib.suppress(Unconfirmed):
            for _ in range(200):
                producer.publish(b"x")
                published += 1
        assert 0 < published < 200
        remote.close()


def test_nobody_there() -> None:
    with pytest.raises(Unreachable, match="did not answer"):
        shmq.connect("127.0.0.1:1", timeout=0.1)
    for wrong in ("", "host:", "host:port", "host:99999", "[::1"):
        with pytest.raises((ValueError, Unreachable)):
            shmq.connect(wrong, timeout=0.1)


_BARE = f"""
import sys

class Blocker:
    blocked = {{"shmq._native", "numpy", "posix_ipc", "psutil", "click", "pyarrow"}}

    def find_spec(self, name, path=None, target=None):
        if name in self.blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(ROOT)!r})
import shmq

try:
    shmq.attach
except ImportError as exc:
    assert "needs shmq's extension" in str(exc)
else:
    raise AssertionError
with shmq.connect(sys.argv[1]) as broker:
    broker.producer(sys.argv[2]).publish_many([b"a", b"bc"])
    with broker.lease_holder(sys.argv[2], "c", "me") as holder:
        lease = holder.lease(2, timeout=60)
        (batch,) = holder.read_lease(lease.id, properties=True)
        assert batch.bodies() == [b"a", b"bc"]
        assert batch.offsets.tolist() == [0, 1, 3]
        assert len(batch.ids) == 2
        assert [dict(one) for one in batch.properties] == [{{}}, {{}}]
        assert holder.finish_lease(lease.id) == 2
        try:
            holder.return_lease(lease.id)
        except shmq.LeaseLost:
            print("done")
"""


def test_the_client_needs_nothing_but_python(server: Server, topic: str) -> None:
    words = [sys.executable, "-c", _BARE, f"127.0.0.1:{server.port()}", topic]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
