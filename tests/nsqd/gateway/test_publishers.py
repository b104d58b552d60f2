"""Clients that only publish: the extension reads and answers their commands, as long as whole ones
to one topic come. All else that they do is answered as it always is."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from support.nsq_client import OK, RESPONSE, Client, Server, mpub, sized
from support.processes import eventually

Connect = Callable[..., Client]


def command(topic: str, body: bytes) -> bytes:
    return b"PUB %b\n" % topic.encode() + sized(body)


def counted(server: Server, topic: str) -> int:
    """Messages that producers of the topic published, as /stats has it."""
    counts = [
        item["count"]
        for producer in server.stats()["producers"] or ()
        for item in producer.get("pub_counts") or ()
        if item["topic"] == topic
    ]
    return sum(counts)


def bodies(client: Client, topic: str, count: int) -> list[bytes]:
    client.sub(topic, "c", 1000)
    found = [client.delivery() for _ in range(count)]
    for one in found:
        client.finish(one)
    return [one.body for one in found]


def test_publishes_one_at_a_time_are_kept_and_counted(
    server: Server, connect: Connect, topic: str
) -> None:
    client = connect()
    for number in range(20):
        client.pub(topic, b"%d" % number)
    assert counted(server, topic) == 20
    for number in range(20, 40, 2):
        client.pub(topic, b"%d" % number)
        assert client.ask(mpub(topic.encode(), [b"%d" % (number + 1)])) == OK
    assert counted(server, topic) == 40
    assert server.topic(topic)["message_count"] == 40
    assert bodies(connect(), topic, 40) == [b"%d" % number for number in range(40)]


def test_a_command_may_come_in_two_pieces(connect: Connect, topic: str) -> None:
    """Cut anywhere, after commands that came whole."""
    client, whole = connect(), command(topic, b"in pieces")
    for _ in range(3):
        client.pub(topic, b"whole")
    for cut in range(1, len(whole)):
        client.send(whole + whole[:cut])
        assert client.frame() == OK
        client.send(whole[cut:] + whole)
        assert [client.frame(), client.frame()] == [OK, OK]
        client.pub(topic, b"whole")
    assert bodies(connect(), topic, 3 + 4 * (len(whole) - 1)) == [b"whole"] * 3 + [
        *[b"in pieces"] * 3,
        b"whole",
    ] * (len(whole) - 1)


def test_other_commands_are_answered_in_their_turn(connect: Connect, topic: str) -> None:
    """No answer overtakes one that was given before."""
    client = connect()
    for _ in range(5):
        client.pub(topic, b"x")
    run = command(topic, b"x" * 100)
    client.send(run + b"IDENTIFY\n" + sized(b'{"feature_negotiation":true}') + run * 2000)
    assert client.frame() == OK
    answer = client.frame()
    assert answer is not None
    assert answer[1].startswith(b"{")
    assert [client.frame() for _ in range(2000)] == [OK] * 2000
    client.pub(topic, b"x")
    client.pub(f"{topic}-2", b"y")
    client.pub(topic, b"x")
    client.pub(topic, b"x")
    assert client.ask(b"PUB " + topic.encode() + b"\n\0\0\0\0") == (
        1,
        b"E_BAD_MESSAGE PUB invalid message body size 0",
    )
    assert client.ended()
    assert bodies(connect(), f"{topic}-2", 1) == [b"y"]


def test_answers_wait_for_a_client_that_reads_late(
    server: Server, connect: Connect, topic: str
) -> None:
    """It sends until its commands are no longer read, and then reads: no answer is missing."""
    client, run = connect(), command(topic, b"x") * 50
    client.identify(heartbeat_interval=-1)
    for _ in range(5):
        client.pub(topic, b"x")
    sent = 0
    client.sock.setblocking(False)
    while sent < 20_000 * len(run) and select.select([], [client.sock], [], 0.3)[1]:
        at = sent % len(run)
        sent += client.sock.send(run[at:])
    rest = run[sent % len(run) :]
    count = (sent // len(run) + 1) * 50
    answers, held = b"\0\0\0\6\0\0\0\0OK" * count, bytearray()
    while len(held) < len(answers):
        can_read, can_send, _ = select.select([client.sock], [client.sock] if rest else [], [], 60)
        if can_send:
            rest = rest[client.sock.send(rest) :]
        if can_read:
            got = client.sock.recv(1 << 20)
            assert got
            held += got
    assert held == answers
    client.sock.settimeout(60)
    client.pub(topic, b"x")
    assert counted(server, topic) == count + 6


def test_a_publisher_is_asked_for_life_and_stays(client: Client, topic: str) -> None:
    client.identify(heartbeat_interval=1000)
    heartbeats = 0
    while heartbeats < 3:  # without the answers it gives by publishing it would have two seconds
        client.send(command(topic, b"x"))
        while (frame := client.frame(heartbeats=True)) == (RESPONSE, b"_heartbeat_"):
            heartbeats += 1
        assert frame == OK
        select.select([client.sock], [], [], 0.05)


def test_a_topic_that_was_deleted_is_created_again(
    server: Server, connect: Connect, topic: str
) -> None:
    client = connect()
    for _ in range(5):
        client.pub(topic, b"before")
    assert server.post("/topic/delete", topic=topic).status == 200
    client.pub(topic, b"after")
    client.pub(topic, b"after")
    assert bodies(connect(), topic, 2) == [b"after"] * 2


def test_the_end_of_a_publisher_is_seen(server: Server, connect: Connect, topic: str) -> None:
    client = connect()
    for _ in range(5):
        client.pub(topic, b"x")
    client.send(command(topic, b"last"))
    client.close()

    def gone() -> Any:
        return counted(server, topic) == 0 and server.topic(topic)["message_count"] == 6

    eventually(gone, what="the connection has ended")
