"""Staged rows over TCP: each commit once, and nobody else's rows, marks and room."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fake_auth_server import Authority, reply, rule
from support.nsq_client import ERROR, Client, Server, sized
from support.other_users import STRANGER, as_user, needed
from support.processes import WATCHDOG, eventually

import shmq
from shmq.errors import BadArgument, ShmqError
from shmq.staging_place import staged_paths

Start = Callable[..., Server]
#: With which the honest clients of these tests are one client.
SECRET = "only-these-tests-know-it"


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has staged rows."""
    return "shmq"


@pytest.fixture(scope="session", autouse=True)
def _staged() -> Iterator[None]:
    """Rows that are staged and never committed outlive the servers that tests start."""
    yield
    for left in Path("/dev/shm").glob(f"shmq-staged-wire-{os.getpid()}-*"):
        shutil.rmtree(left)


def connected(server: Server, **how: Any) -> shmq.RemoteBroker:
    given: dict[str, Any] = {"timeout": WATCHDOG, "secret": SECRET, **how}
    return shmq.connect(f"127.0.0.1:{server.port()}", **given)


@pytest.fixture
def remote(server: Server) -> Iterator[shmq.RemoteBroker]:
    with connected(server) as broker:
        yield broker


@pytest.fixture
def stranger(server: Server) -> Iterator[shmq.RemoteBroker]:
    """Another client, which may do the same as `remote` but does not know its secret."""
    with connected(server, secret=None) as broker:
        yield broker


@pytest.fixture
def local(server: Server) -> Iterator[shmq.Broker]:
    with shmq.attach(server.instance) as broker:
        yield broker


def files(server: Server) -> list[Path]:
    """Everything that is staged."""
    places = map(Path, staged_paths(server.instance, os.geteuid()))
    return [path for base in places for path in base.rglob("gateway/*/*") if path.is_file()]


def client_of(server: Server, auth: bytes = b"") -> Client:
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True, heartbeat_interval=-1)
    if auth:
        client.ask(b"AUTH\n" + sized(auth))
    return client


def asked(client: Client, line: str, document: dict[str, Any], rows: bytes = b"") -> Any:
    """The document that answers, or the error's text."""
    body = json.dumps(document).encode()
    kind, said = client.ask(f"{line}\n".encode() + sized(sized(body) + rows if rows else body)) or (
        ERROR,
        b"closed",
    )
    return said.decode() if kind == ERROR else json.loads(said)


def rows_of(*bodies: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(body)) for body in bodies) + b"".join(bodies)


def staged_by(client: Client, topic: str, bodies: list[bytes], **more: Any) -> dict[str, Any]:
    """Stage an attempt; it, as a commit names it, and the writer's secret."""
    attempt = secrets.token_hex(16)
    wish = {"writer": "w", "epoch": 1, "attempt": attempt, "at": 0, "rows": len(bodies), **more}
    found = asked(client, f"STAGE {topic}", wish, rows_of(*bodies))
    assert isinstance(found, dict), found
    entry = {"attempt": attempt, "rows": len(bodies), "size": found["size"]}
    return {"entry": entry, "secret": found.get("secret", more.get("secret"))}


# ---- one client ----


def test_staged_rows_are_published_once(
    remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    local.create_channel(topic, "c")
    bodies = [[b"%d-%d" % (task, k) for k in range(3000)] for task in range(3)]
    staged = [remote.stage(topic, "query", 7, some) for some in bodies]
    assert remote.stage(topic, "query", 7, []) is None
    assert local.channel_depth(topic, "c") == 0
    first, second = staged[0], pickle.loads(pickle.dumps(staged[1]))
    assert first
    assert remote.commit(topic, "query", 7, [first, second]) == 6000
    assert remote.commit(topic, "query", 7, [first, second]) == 0
    again = remote.stage(topic, "query", 7, bodies[2])
    assert again
    with pytest.raises(BadArgument, match="with 6000 rows, and not with these 3000"):
        remote.commit(topic, "query", 7, [again])  # the first commit has decided
    earlier = remote.stage(topic, "query", 6, [b"x"])
    assert earlier
    with pytest.raises(BadArgument, match="a later epoch"):
        remote.commit(topic, "query", 6, [earlier])
    assert remote.commit(topic, "query", 7, [again], skip=True) == 0
    assert remote.commit(topic, "query", 6, [again], skip=True) == 0
    with local.consumer(topic, "c", 10_000).take_many(10_000, 0) as batch:
        assert batch.bodies() == bodies[0] + bodies[1]
    left = remote.stage(topic, "query", 8, [b"x"])
    assert left
    remote.abandon(topic, "query", 8)
    with pytest.raises(ShmqError, match="not staged"):
        remote.commit(topic, "query", 8, [left])


def test_the_first_commit_decides(
    server: Server, remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    local.create_channel(topic, "c")
    local.configure(topic, "c", max_messages=2500, overflow="block")
    bodies = [b"%d" % k for k in range(6000)]
    first, second = (remote.stage(topic, "w", 1, some) for some in (bodies, [b"other"]))
    assert first
    assert second
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True)
    wish = {"writer": "w", "epoch": 1, "attempts": [dataclasses.asdict(first)], "secret": SECRET}
    ask = f"COMMIT {topic}\n".encode() + sized(json.dumps(wish).encode())
    _, said = client.ask(ask) or (0, b"{}")
    assert json.loads(said)["done"] is False
    assert json.loads(said)["published"] == local.channel_depth(topic, "c") < 2500
    found: list[bytes] = []

    def drain() -> None:
        while len(found) < 6000:
            with local.consumer(topic, "c", 3000).take_many(3000, WATCHDOG) as batch:
                found.extend(batch.bodies())

    thread = threading.Thread(target=drain)
    thread.start()
    assert remote.commit(topic, "w", 1, [second]) == 6000 - json.loads(said)["published"]
    thread.join(WATCHDOG)
    assert found == bodies
    assert local.channel_depth(topic, "c") == 0


def test_a_piece_that_is_sent_again_is_there_once(server: Server, topic: str) -> None:
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True)

    def stage(at: int, rows: bytes, count: int = 1) -> tuple[int, bytes] | None:
        who = b'"writer":"w","epoch":1,"secret":"%b"' % SECRET.encode()
        head = b'{%b,"attempt":"%b","at":%d,"rows":%d}' % (who, b"a" * 32, at, count)
        line = f"STAGE {topic}\n".encode()
        return client.ask(line + sized(sized(head) + rows))

    one = b"\1\0\0\0x"
    first = stage(0, one)
    assert first is not None
    assert first[1].endswith(b'"size":13}'), first
    assert stage(0, one) == first
    assert stage(13, one) != first
    for at, rows, count in ((5, one, 1), (99, one, 1), (26, one, 2), (26, b"\0\0\0\0x", 1)):
        kind, said = stage(at, rows, count) or (0, b"")
        assert (kind, said.partition(b" ")[0]) == (ERROR, b"E_BAD_ARGUMENT"), said


# ---- strangers ----


def test_a_forged_epoch_hides_no_rows(
    remote: shmq.RemoteBroker, stranger: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    """The writer's key is known, and both may publish to the topic."""
    local.create_channel(topic, "c")
    first = remote.stage(topic, "query-1", 1, [b"a", b"b"])
    assert first
    assert remote.commit(topic, "query-1", 1, [first]) == 2
    for epoch in (0, 1, 2, 3, (1 << 62) - 1):
        forged = stranger.stage(topic, "query-1", epoch, [b"x"])
        assert forged
        stranger.commit(topic, "query-1", epoch, [forged], skip=True)
    for epoch in (2, 3):
        rows = remote.stage(topic, "query-1", epoch, [b"c", b"d"])
        assert rows
        assert remote.commit(topic, "query-1", epoch, [rows]) == 2
        assert remote.commit(topic, "query-1", epoch, [rows]) == 0  # its answer might get lost


def test_nobody_abandons_or_commits_the_rows_of_others(
    server: Server,
    remote: shmq.RemoteBroker,
    stranger: shmq.RemoteBroker,
    local: shmq.Broker,
    topic: str,
) -> None:
    local.create_channel(topic, "c")
    mine = remote.stage(topic, "query", 1, [b"mine"])
    assert mine
    stranger.abandon(topic, "query", 1)
    stranger.abandon(topic, "query", (1 << 62) - 1)
    with pytest.raises(ShmqError, match="another secret"):
        stranger.commit(topic, "query", 1, [mine])  # it even knows the attempt
    raw = client_of(server)
    entry = {"attempt": mine.attempt, "rows": mine.rows, "size": mine.size}
    for document in (
        {"writer": "query", "epoch": 1, "attempts": [entry]},
        {"writer": "query", "epoch": 1, "attempts": [entry], "secret": "short"},
        {"writer": "query", "epoch": 1, "attempts": [entry], "secret": 7},
    ):
        assert asked(client_of(server), f"COMMIT {topic}", document).startswith("E_BAD_BODY")
    guess = {"writer": "query", "epoch": 1, "secret": "0" * 32}
    assert asked(raw, f"ABANDON {topic}", guess)["abandoned"] == 0
    said = asked(raw, f"COMMIT {topic}", guess | {"attempts": [entry]})
    assert said.startswith("E_FAILED"), said
    assert local.channel_depth(topic, "c") == 0
    assert remote.commit(topic, "query", 1, [mine]) == 1


def test_a_secret_is_given_to_who_has_none(server: Server, local: shmq.Broker, topic: str) -> None:
    local.create_channel(topic, "c")
    client = client_of(server)
    found = staged_by(client, topic, [b"x", b"y"])
    assert len(found["secret"]) == 32
    wish = {"writer": "w", "epoch": 1, "attempts": [found["entry"]], "secret": found["secret"]}
    assert asked(client_of(server), f"COMMIT {topic}", wish)["published"] == 2
    assert found["secret"] != staged_by(client, topic, [b"x"])["secret"]
    assert found["secret"] not in server.log


def test_each_attempt_of_a_commit_counts_once(
    server: Server, local: shmq.Broker, topic: str
) -> None:
    local.create_channel(topic, "c")
    client = client_of(server)
    found = staged_by(client, topic, [b"y" * 1000] * 100, secret=SECRET)
    wish = {"writer": "w", "epoch": 1, "secret": SECRET, "attempts": [found["entry"]] * 8000}
    assert asked(client, f"COMMIT {topic}", wish)["published"] == 100
    assert local.channel_depth(topic, "c") == 100
    # nor do rows count that are not staged
    found = staged_by(client, topic, [b"y"] * 3, secret=SECRET, epoch=2)
    many = {**found["entry"], "rows": found["entry"]["size"]}
    wish = {"writer": "w", "epoch": 2, "secret": SECRET, "attempts": [many]}
    assert asked(client, f"COMMIT {topic}", wish).startswith("E_BAD_ARGUMENT")
    wish["attempts"] = [found["entry"]]
    assert asked(client, f"COMMIT {topic}", wish)["published"] == 3


def test_concurrent_commits_publish_once(
    server: Server, remote: shmq.RemoteBroker, local: shmq.Broker, topic: str
) -> None:
    local.create_channel(topic, "c")
    rows = remote.stage(topic, "w", 1, [b"%d" % k for k in range(20_000)])
    assert rows
    others = [connected(server) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda one: one.commit(topic, "w", 1, [rows]), others))
    assert sum(found) == 20_000 == local.channel_depth(topic, "c")
    for one in others:
        one.close()


def test_what_a_client_left_ends_by_itself(start: Start) -> None:
    """Nobody else stages, commits or abandons anything."""
    server = start("--staged-ttl=1s")
    client = client_of(server)
    staged_by(client, "fill", [b"z" * 100_000], writer="other")
    found = staged_by(client, "fill", [b"z"])
    assert len(files(server)) == 2
    client.close()
    eventually(lambda: not files(server))
    wish = {"writer": "w", "epoch": 1, "secret": found["secret"], "attempts": [found["entry"]]}
    assert "not staged" in asked(client_of(server), "COMMIT fill", wish)


def test_a_long_job_keeps_its_first_rows(start: Start) -> None:
    server = start("--staged-ttl=3s")
    with connected(server) as remote:
        first = remote.stage("t", "w", 1, [b"first"])
        began, rest = time.monotonic(), []
        while time.monotonic() < began + 6:
            rest.append(remote.stage("t", "w", 1, [b"more"]))
            time.sleep(0.3)
        assert remote.commit("t", "w", 1, [item for item in (first, *rest) if item]) == 1 + len(
            rest
        )


def test_a_limited_user_stops_nobody(start: Start, authority: Authority) -> None:
    """With `publish` on a topic of its own it takes no writer of another topic."""
    authority.reply = (200, reply(3600, rule(topic="^(evil|out)$", permissions=["publish"])))
    server = start(authority.flag)
    evil = client_of(server, b"A")
    for number in range(300):
        found = staged_by(evil, "evil", [b"x"], writer=f"w{number}", secret=SECRET)
        wish = {"writer": f"w{number}", "epoch": 1, "secret": SECRET}
        said = asked(evil, "COMMIT evil", wish | {"attempts": [found["entry"]]})
        assert said["published"] == 1, said
    victim = client_of(server, b"V")
    found = staged_by(victim, "out", [b"x"], writer="spark", secret="v" * 16)
    wish = {"writer": "spark", "epoch": 1, "secret": "v" * 16, "attempts": [found["entry"]]}
    assert asked(victim, "COMMIT out", wish)["published"] == 1
    with shmq.attach(server.instance) as broker:
        assert broker.producer("local").mark(1, 2) == (0, 0)


def test_many_users_together_stop_nobody(start: Start, authority: Authority) -> None:
    """The table of 256 marks is full of others' marks on other topics: the oldest of the user who
    has most gives way, and not the mark of who has few."""
    server = start(authority.flag)

    def commit(client: Client, topic: str, writer: str, epoch: int = 1) -> Any:
        found = staged_by(client, topic, [b"x"], writer=writer, epoch=epoch, secret=SECRET)
        wish = {"writer": writer, "epoch": epoch, "secret": SECRET}
        return asked(client, f"COMMIT {topic}", wish | {"attempts": [found["entry"]]})

    def user(name: str) -> Client:
        authority.reply = (200, reply(3600, rule(), identity=name))
        return client_of(server, name.encode())

    early = user("early")
    assert commit(early, "early", "first")["published"] == 1
    for name in ("a", "b", "c", "d", "e"):
        evil = user(name)
        for number in range(64):
            said = commit(evil, f"evil-{name}-{number % 3}", f"w{number}")
            assert said["published"] == 1, said
    late = user("late")
    assert commit(late, "late", "first")["published"] == 1
    assert commit(late, "late", "first", 2)["published"] == 1
    with shmq.attach(server.instance) as broker:
        producer: Any = broker.producer("local")
        offsets = memoryview(struct.pack("<2i", 0, 1)).cast("i")
        assert producer.publish_once(b"x", offsets, False, 0, 1, 1, 2, 0, 0, 1, 5.0)
        assert producer.mark(1, 2) == (1, 1)
    again = commit(early, "early", "first")  # its mark is there still
    assert again["published"] == 0
    assert again["done"]


@needed
def test_a_stranger_who_takes_every_name_that_he_sees_stops_nobody(server: Server) -> None:
    """Somebody removes the directory, and another user of the host is the first to make it again;
    he had names that can be guessed, too."""
    guessed = [f"shmq-staged-{os.geteuid()}", f"shmq-staged-{server.instance}"]
    taken = [Path("/dev/shm", name) for name in guessed]
    try:
        for path in taken:
            as_user(STRANGER, "sh", "-c", 'mkdir -m 0777 "$1"', "sh", path)
        with connected(server) as remote:
            remote.create_channel("t", "c")
            for epoch in range(3):
                staged = remote.stage("t", "w", epoch, [b"%d" % epoch])
                assert remote.commit("t", "w", epoch, [staged]) == 1
                (place,) = staged_paths(server.instance, os.geteuid())
                assert place not in map(str, taken)
                shutil.rmtree(place)
                as_user(STRANGER, "sh", "-c", 'mkdir -m 0777 "$1"', "sh", place)
                taken.append(Path(place))
            staged = remote.stage("t", "w", 3, [b"3"])
            as_user(STRANGER, "sh", "-c", 'rmdir "$1"', "sh", taken[2])
            assert remote.commit("t", "w", 3, [staged]) == 1
    finally:
        for path in taken:
            shutil.rmtree(path, ignore_errors=True)


# ---- limits of channels ----


@pytest.mark.parametrize("overflow", ["block", "reject", "drop-oldest"])
@pytest.mark.parametrize("limit", ["max_messages", "max_bytes"])
def test_an_epoch_is_published_in_pieces_that_a_channel_can_hold(
    server: Server, remote: shmq.RemoteBroker, topic: str, overflow: Any, limit: str
) -> None:
    rows = [b"%04d" % n for n in range(250)]
    with shmq.attach(server.instance) as broker:
        broker.configure(topic, "c", overflow=overflow, **{limit: 400 if "bytes" in limit else 100})
        consumer, came = broker.consumer(topic, "c"), list[bytes]()
        done = threading.Event()

        def drain() -> None:
            while not done.is_set() or broker.channel_depth(topic, "c"):
                batch = consumer.take_many(50, 0.05)
                came.extend(batch.bodies())
                batch.finish()

        thread = threading.Thread(target=drain)
        thread.start()
        staged = remote.stage(topic, "w", 1, rows)
        try:
            while True:
                try:
                    remote.commit(topic, "w", 1, [staged])
                    break
                except shmq.Rejected:  # the channel was full just then: the commit goes on
                    assert overflow == "reject"
        finally:
            done.set()
            thread.join()
        if overflow != "drop-oldest":
            assert came == rows


def test_a_commit_goes_on_where_it_stopped_whatever_the_limits_are_now(
    server: Server, remote: shmq.RemoteBroker, topic: str
) -> None:
    """The pieces of the second try are others: they begin where those of the first one ended."""
    rows = [b"%04d" % n for n in range(250)]
    with shmq.attach(server.instance) as broker:
        broker.configure(topic, "c", overflow="reject", max_messages=70)
        staged = remote.stage(topic, "w", 1, rows)
        with pytest.raises(shmq.Rejected):
            remote.commit(topic, "w", 1, [staged])
        broker.configure(topic, "c", overflow="block", max_messages=1000)
        remote.commit(topic, "w", 1, [staged])
        with broker.consumer(topic, "c", max_in_flight=1000) as consumer:
            assert [consumer.take(WATCHDOG).body for _ in rows] == rows  # type: ignore[union-attr]
            assert consumer.take(0) is None
