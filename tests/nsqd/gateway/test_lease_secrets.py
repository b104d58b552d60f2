"""Lease holders over TCP are their owners': nobody finishes, returns, reads or keeps for ever what
another holds, and nobody takes all places."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.fake_auth_server import Authority, reply, rule
from support.nsq_client import ERROR, Client, Server, sized
from support.processes import WATCHDOG, eventually

import shmq
from shmq.errors import LeaseFenced, LeaseLost, ShmqError

Start = Callable[..., Server]
NOBODY = 65534


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours has leases."""
    return "shmq"


@pytest.fixture
def local(server: Server) -> Iterator[shmq.Broker]:
    with shmq.attach(server.instance) as broker:
        yield broker


def remote_of(server: Server, **how: Any) -> shmq.RemoteBroker:
    return shmq.connect(f"127.0.0.1:{server.port()}", timeout=WATCHDOG, **how)


def client_of(server: Server, auth: bytes = b"") -> Client:
    client = server.connect()
    client.identify(feature_negotiation=True, leases=True, heartbeat_interval=-1)
    if auth:
        client.ask(b"AUTH\n" + sized(auth))
    return client


def asked(client: Client, line: str, **document: Any) -> Any:
    """The document that answers, or the error's text."""
    body = json.dumps(document).encode()
    kind, said = client.ask(f"{line}\n".encode() + sized(body)) or (ERROR, b"closed")
    return said.decode() if kind == ERROR else json.loads(said)


def fill(broker: shmq.Broker, topic: str, count: int) -> None:
    broker.create_channel(topic, "c")
    broker.producer(topic).publish_many([b"%d" % number for number in range(count)])


def guesses(entry: int) -> Iterator[list[Any]]:
    """Holders that somebody may try who has not seen this one."""
    yield from ([entry, f"{number:016x}"] for number in range(64))
    yield from ([entry, secrets.token_hex(8)] for _ in range(64))
    yield from ([entry, "f" * 16], [entry, "8" + "0" * 15])


@pytest.mark.parametrize("auth", [False, True])
def test_a_forged_holder_does_nothing(start: Start, authority: Authority, auth: bool) -> None:
    """With AUTH both clients have `subscribe` on the channel."""
    authority.reply = (200, reply(3600, rule()))
    server = start(*([authority.flag] if auth else []))
    secret = b"V" if auth else b""
    with shmq.attach(server.instance) as local:
        fill(local, "jobs", 100)
        victim, evil = client_of(server, secret), client_of(server, secret)
        held = asked(victim, "LHOLD jobs c", name="victim", ttl=600)["holder"]
        lease = asked(victim, "LEASE jobs c", holder=held, n=100)["lease"][0]
        for holder in guesses(held[0]):
            for line, more in (
                ("LFIN jobs c", {"through": lease}),
                ("LRET jobs c", {"lease": lease}),
                ("LLIST jobs c", {}),
                ("LLOOK jobs c", {"lease": lease}),
                ("LREAD jobs c", {"lease": lease}),
                ("LKEEP jobs c", {}),
                ("LCLOSE jobs c", {}),
                ("LWAIT jobs c", {}),
                ("LEASE jobs c", {"n": 1}),
                ("LHOLD jobs c", {"name": "victim"}),
            ):
                said = asked(evil, line, holder=holder, **more)
                assert isinstance(said, str), (line, holder, said)
                assert said.startswith("E_LEASE_FENCED"), said
        said = asked(evil, "LREAD jobs c", lease=lease)
        assert said.startswith("E_BAD_ARGUMENT"), said
        said = asked(evil, "LREAD jobs c", lease=lease, secret="not-the-victim's")
        assert said.startswith("E_LEASE_FENCED"), said
        for numbers in ([held[0], 1], [held[0], int(held[1], 16)], [held[0], 1e18]):
            said = asked(client_of(server, secret), "LLIST jobs c", holder=numbers)
            assert said.startswith("E_BAD_BODY"), said
        assert asked(victim, "LFIN jobs c", holder=held, through=lease)["messages"] == 100
    assert held[1] not in server.log


def test_a_name_is_its_owners(server: Server, local: shmq.Broker, topic: str) -> None:
    fill(local, topic, 6)
    with remote_of(server) as mine, remote_of(server) as other:
        holder = mine.lease_holder(topic, "c", "me")
        with pytest.raises(LeaseFenced, match="secret"):
            other.lease_holder(topic, "c", "me")
        lease = holder.lease(3)
        assert lease
        holder.close()  # its lease waits for the next run
        with pytest.raises(LeaseFenced):
            other.lease_holder(topic, "c", "me")
        with pytest.raises(LeaseFenced):
            next(other.read_lease(topic, "c", lease.id))
        again = mine.lease_holder(topic, "c", "me")
        with pytest.raises(LeaseFenced):
            holder.leases()  # its old proof is none any more
        assert again.leases() == [lease]
        assert again.finish_lease(lease.id) == 3
        again.close()
        taken = other.lease_holder(topic, "c", "me")  # nothing of it is left to protect
        with pytest.raises(LeaseFenced):
            mine.lease_holder(topic, "c", "me")
        taken.close()


def test_a_later_run_has_the_secret(server: Server, local: shmq.Broker, topic: str) -> None:
    """As a driver that was killed: its holder was not closed."""
    fill(local, topic, 6)
    secret = secrets.token_hex()
    with remote_of(server, secret=secret) as first:
        lease = first.lease_holder(topic, "c", "me").lease(3)
        assert lease
    with remote_of(server, secret=secret) as second:
        assert next(second.read_lease(topic, "c", lease.id)).bodies() == [b"0", b"1", b"2"]
        holder = second.lease_holder(topic, "c", "me")
        assert holder.leases() == [lease]
    with shmq.attach(server.instance) as here:  # who may attach may take any name
        assert here.lease_holder(topic, "c", "me").leases() == [lease]


def test_a_local_holder_is_no_strangers(server: Server, local: shmq.Broker, topic: str) -> None:
    fill(local, topic, 3)
    secret = secrets.token_hex()
    with remote_of(server) as stranger, remote_of(server, secret=secret) as friend:
        holder = local.lease_holder(topic, "c", "me", secret=secret)
        lease = holder.lease(3)
        assert lease
        for call in (
            lambda: stranger.lease_holder(topic, "c", "me"),
            lambda: next(stranger.read_lease(topic, "c", lease.id)),
        ):
            with pytest.raises(LeaseFenced):
                call()
        assert len(next(friend.read_lease(topic, "c", lease.id))) == 3
        with pytest.raises(LeaseLost):
            next(friend.read_lease(topic, "c", lease.id + 1))
        assert friend.lease_holder(topic, "c", "me").leases() == [lease]


def test_a_user_opens_its_own_names(start: Start, authority: Authority) -> None:
    """Users whom an authorisation server knows need no secret for what is their own."""
    server = start(authority.flag)
    with shmq.attach(server.instance) as local:
        fill(local, "t", 3)
        authority.reply = (200, reply(3600, rule(), identity="one"))
        first = client_of(server, b"A")
        held = asked(first, "LHOLD t c", name="me", ttl=600)["holder"]
        asked(first, "LEASE t c", holder=held, n=1)
        again = asked(client_of(server, b"A"), "LHOLD t c", name="me", ttl=600)
        assert again["holder"][0] == held[0]
        authority.reply = (200, reply(3600, rule(), identity="two"))
        said = asked(client_of(server, b"B"), "LHOLD t c", name="me", ttl=600)
        assert said.startswith("E_LEASE_FENCED"), said


def test_nothing_is_held_for_ever(start: Start) -> None:
    server = start("--max-lease-ttl=1s")
    with shmq.attach(server.instance) as local:
        fill(local, "jobs", 10)
        evil = client_of(server)
        answer = asked(evil, "LHOLD jobs c", name="evil", ttl=None)
        assert answer["ttl"] == 1
        asked(evil, "LEASE jobs c", holder=answer["holder"], n=2**32 - 1)
        eventually(lambda: local.channel_depth("jobs", "c") == 10)  # it is still connected
        answer = asked(evil, "LHOLD jobs c", name="evil", ttl=1e9, grace=1e9)
        asked(evil, "LEASE jobs c", holder=answer["holder"], n=2**32 - 1)
        assert local.channel_depth("jobs", "c") == 0
        evil.close()
        eventually(lambda: local.channel_depth("jobs", "c") == 10)


def test_a_holder_without_a_connection_has_its_grace(
    server: Server, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 5)
    client = client_of(server)
    other = client_of(server)
    held = asked(client, f"LHOLD {topic} c", name="me", ttl=600, grace=0.001)["holder"]
    assert asked(other, f"LEASE {topic} c", holder=held, n=5)["lease"]
    client.close()  # another one of the same holder is there
    assert len(asked(other, f"LLIST {topic} c", holder=held)["leases"]) == 1
    other.close()
    eventually(lambda: local.channel_depth(topic, "c") == 5)


def test_places_are_given_back(server: Server, local: shmq.Broker, topic: str) -> None:
    """More names than a channel has places for, of one address and user, some of which hold
    something."""
    fill(local, topic, 100)
    evil = client_of(server)
    kept = []
    for number in range(100):
        held = asked(evil, f"LHOLD {topic} c", name=f"x{number}", ttl=None)
        assert isinstance(held, dict), held
        if number < 10:
            kept.append(asked(evil, f"LEASE {topic} c", holder=held["holder"], n=1))
            assert kept[-1]["lease"]
    evil.close()
    with remote_of(server) as honest:
        assert honest.lease_holder(topic, "c", "honest").lease(10)
    assert local.lease_holder(topic, "c", "near").lease(10)


def test_one_client_has_a_share_of_a_channel(
    server: Server, local: shmq.Broker, topic: str
) -> None:
    fill(local, topic, 100)
    evil = client_of(server)
    held: Any = None
    for number in range(16):
        held = asked(evil, f"LHOLD {topic} c", name=f"x{number}", ttl=None)["holder"]
        assert asked(evil, f"LEASE {topic} c", holder=held, n=1)["lease"]
    said = asked(evil, f"LHOLD {topic} c", name="more", ttl=None)
    assert "16 names lease" in said, said
    for number in range(16, 32):
        assert asked(evil, f"LEASE {topic} c", holder=held, n=1, after=1 << 40)["lease"], number
    said = asked(evil, f"LEASE {topic} c", holder=held, n=1, after=1 << 40)
    assert "this client has 32 leases" in said, said
    for what in ("LHOLD", "LEASE"):
        assert f"{what} {topic}/c: client(127.0.0.1" in server.log
    holder = local.lease_holder(topic, "c", "near")
    assert holder.lease(1)


@pytest.mark.parametrize("of_channel", [False, True])
def test_dead_letters_of_a_sealed_topic_are_not_leased(
    server: Server, local: shmq.Broker, topic: str, of_channel: bool
) -> None:
    """They may have a topic of any name."""
    dead = f"{topic}-letters"
    fill(local, dead, 3)
    client = client_of(server)
    held = asked(client, f"LHOLD {dead} c", name="h", ttl=60)["holder"]
    lease = asked(client, f"LEASE {dead} c", holder=held, n=1)["lease"]
    assert lease
    local.create_channel(topic, "work")
    local.configure(topic, *(["work"] if of_channel else []), dead_letter=dead)
    local.configure(topic, sealed=True)
    for line, document in (
        (f"LHOLD {dead} c", {"name": "other", "ttl": 60}),
        (f"LEASE {dead} c", {"holder": held, "n": 1}),
        (f"LLIST {dead} c", {"holder": held}),
        (f"LREAD {dead} c", {"lease": lease[0], "part": 0, "holder": held}),
    ):
        assert str(asked(client, line, **document)).startswith("E_NOT_SEALED"), line


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's client needs root")
def test_users_of_this_host_do_not_share_places(
    server: Server, local: shmq.Broker, topic: str
) -> None:
    """On loopback every client has one address."""
    fill(local, topic, 100)
    program = (
        "import sys, shmq\n"
        "remote = shmq.connect(sys.argv[1])\n"
        "kept = []\n"
        "try:\n"
        "    while True:\n"
        "        kept.append(remote.lease_holder(sys.argv[2], 'c', f'x{len(kept)}', ttl=600))\n"
        "        assert kept[-1].lease(1)\n"
        "except shmq.ShmqError as error:\n"
        "    print(len(kept), error, flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    words += [sys.executable, "-c", program, f"127.0.0.1:{server.port()}", topic]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as evil:
        assert evil.stdout is not None
        said = evil.stdout.readline()
        assert said.startswith("16 "), said
        with remote_of(server) as honest:
            assert honest.lease_holder(topic, "c", "honest").lease(1)
        evil.kill()


def test_two_processes_know_the_same_proof(start: Start) -> None:
    server = start("--gateway-workers=2")
    with shmq.attach(server.instance) as local:
        fill(local, "t", 10)
        held = asked(client_of(server), "LHOLD t c", name="me", ttl=600, secret="k" * 16)["holder"]
        forged = [held[0], f"{int(held[1], 16) ^ 1:016x}"]
        for number in range(8):  # whichever process accepts it
            client = client_of(server)
            assert len(asked(client, "LLIST t c", holder=held)["leases"]) == number
            assert asked(client, "LLIST t c", holder=forged).startswith("E_LEASE_FENCED")
            assert asked(client, "LEASE t c", holder=held, n=1, after=1 << 40)["lease"]
        server.stop(signal.SIGKILL)
        again = start(f"--tcp-address=127.0.0.1:{server.port()}", again=server)
        assert len(asked(client_of(again), "LLIST t c", holder=held)["leases"]) == 8
        assert asked(client_of(again), "LLIST t c", holder=forged).startswith("E_LEASE_FENCED")


def test_an_older_client_is_told(server: Server) -> None:
    client = server.connect()
    answer = client.identify(feature_negotiation=True, leases=True, user_agent="shmq-remote/1")
    assert "leases" not in answer


def test_the_audit_log_has_who_did_what(start: Start, topic: str) -> None:
    server = start("--audit-log=stderr")
    with remote_of(server) as remote, shmq.attach(server.instance) as local:
        fill(local, "t", 9)
        holder = remote.lease_holder("t", "c", "me")
        for _ in range(2):
            assert holder.lease(3)
        first, second = holder.leases()
        holder.finish_lease(first.id)
        holder.return_lease(second.id)
        with pytest.raises(ShmqError):
            holder.return_lease(second.id)
        staged = remote.stage("t", "w", 1, [b"x"])
        assert staged
        remote.commit("t", "w", 1, [staged])
        remote.stage("t", "w", 2, [b"x"])
        remote.abandon("t", "w", 2)
    log = server.log
    for action, rest in (
        ("hold_leases", "name=me"),
        ("lease", f"lease={first.id} messages=3"),
        ("finish_lease", f"lease={first.id} messages=3"),
        ("return_lease", f"lease={second.id} messages=3"),
    ):
        lines = [line for line in log.splitlines() if f"action={action} topic=t channel=c" in line]
        assert any("by=127.0.0.1:" in line and rest in line for line in lines), (action, lines)
    assert any("action=return_lease" in x and "result=refused" in x for x in log.splitlines())
    assert "action=commit_rows topic=t" in log
    assert "writer=w epoch=1 messages=1" in log
    assert "writer=w epoch=2 attempts=1" in log
    assert f"{holder.incarnation[1]:016x}" not in log
    assert str(holder.incarnation[1]) not in log
