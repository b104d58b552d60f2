"""nsqd's TCP protocol: the same said to a real nsqd and to shmq, the same answered."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable

import pytest
from support.nsq_client import ERROR, OK, RESPONSE, Client, Server, mpub, sized
from support.processes import eventually

Connect = Callable[..., Client]
Start = Callable[..., Server]

FIN = b"FIN 0123456789abcdef\n"


def size(number: int) -> bytes:
    return struct.pack(">i", number)


# ---- lines ----


def test_the_magic_may_come_byte_by_byte(connect: Connect) -> None:
    client = connect(magic=b" ")
    for byte in (b" ", b"V", b"2", b"N", b"O", b"P", b"\r", b"\n"):
        client.send(byte)
        time.sleep(0.002)
    client.pub("slow", b"x")


#: what is sent on a new connection -> the error that ends it
FATAL = [
    (b"\n", b"E_INVALID invalid command "),
    (b"\r\n", b"E_INVALID invalid command "),
    (b" NOP\n", b"E_INVALID invalid command "),
    (b"nop\n", b"E_INVALID invalid command nop"),
    (b"GARBAGE \xff x\n", b"E_INVALID invalid command GARBAGE"),
    (b"IDENTIFY\n" + size(0), b"E_BAD_BODY IDENTIFY invalid body size 0"),
    (b"IDENTIFY\n" + size(-5), b"E_BAD_BODY IDENTIFY invalid body size -5"),
    (b"IDENTIFY\n" + size(5242881), b"E_BAD_BODY IDENTIFY body too big 5242881 > 5242880"),
    *(
        (b"IDENTIFY\n" + sized(body), b"E_BAD_BODY IDENTIFY failed to decode JSON body")
        for body in (
            b"{",
            b"[]",
            b"5",
            b"{} x",
            b'{"client_id":5}',
            b'{"snappy":1}',
            b'{"heartbeat_interval":1.5}',
            b'{"msg_timeout":"1"}',
            b'{"a":NaN}',
        )
    ),
    *(
        (
            b"IDENTIFY\n" + sized(b'{"%b":%d}' % (field, value)),
            b"E_BAD_BODY IDENTIFY %b (%d) is invalid" % (field.replace(b"_", b" "), value),
        )
        for field, value in (
            (b"heartbeat_interval", 100),
            (b"heartbeat_interval", 60001),
            (b"heartbeat_interval", -2),
            (b"output_buffer_timeout", 24),
            (b"output_buffer_timeout", 30001),
            (b"output_buffer_size", 63),
            (b"output_buffer_size", 65537),
            (b"sample_rate", 100),
            (b"sample_rate", -1),
            (b"msg_timeout", 999),
            (b"msg_timeout", 900001),
            (b"msg_timeout", -1),
        )
    ),
    (
        b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"snappy":true,"deflate":true}'),
        b"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression",
    ),
    (b"AUTH x\n", b"E_INVALID AUTH invalid number of parameters"),
    (b"AUTH\n" + size(0), b"E_BAD_BODY AUTH invalid body size 0"),
    (b"AUTH\n" + size(5242881), b"E_BAD_BODY AUTH body too big 5242881 > 5242880"),
    (b"AUTH\n" + sized(b"secret"), b"E_AUTH_DISABLED AUTH disabled"),
    (b"SUB\n", b"E_INVALID SUB insufficient number of parameters"),
    (b"SUB t\n", b"E_INVALID SUB insufficient number of parameters"),
    (b"SUB  c\n", b'E_BAD_TOPIC SUB topic name "" is not valid'),
    (b"SUB t:x c\n", b'E_BAD_TOPIC SUB topic name "t:x" is not valid'),
    (b"SUB t #ephemeral\n", b'E_BAD_CHANNEL SUB channel name "#ephemeral" is not valid'),
    (b"SUB t c#Ephemeral\n", b'E_BAD_CHANNEL SUB channel name "c#Ephemeral" is not valid'),
    (b"RDY 1\n", b"E_INVALID cannot RDY in current state"),
    (b"CLS\n", b"E_INVALID cannot CLS in current state"),
    (FIN, b"E_INVALID cannot FIN in current state"),
    (b"REQ 0123456789abcdef 0\n", b"E_INVALID cannot REQ in current state"),
    (b"TOUCH 0123456789abcdef\n", b"E_INVALID cannot TOUCH in current state"),
    (b"PUB\n", b"E_INVALID PUB insufficient number of parameters"),
    (
        b'PUB a"b\\c\x01\xff\xc3\xa9\n',
        'E_BAD_TOPIC PUB topic name "a\\"b\\\\c\\x01\\xffé" is not valid'.encode(),
    ),
    (b"PUB t\n" + size(0), b"E_BAD_MESSAGE PUB invalid message body size 0"),
    (b"PUB t\n" + size(-1), b"E_BAD_MESSAGE PUB invalid message body size -1"),
    (b"DPUB t\n", b"E_INVALID DPUB insufficient number of parameters"),
    (b"DPUB t! 1\n", b'E_BAD_TOPIC DPUB topic name "t!" is not valid'),
    (b"DPUB t 1.5\n", b"E_INVALID DPUB could not parse timeout 1.5"),
    (b"DPUB t -1\n", b"E_INVALID DPUB could not parse timeout -1"),
    (b"DPUB t 1\n" + size(0), b"E_BAD_MESSAGE DPUB invalid message body size 0"),
    (b"MPUB\n", b"E_INVALID MPUB insufficient number of parameters"),
    (b"MPUB t!\n", b'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "t!" is not valid'),
    (b"MPUB t\n" + size(0), b"E_BAD_BODY MPUB invalid body size 0"),
    (b"MPUB t\n" + size(5242881), b"E_BAD_BODY MPUB body too big 5242881 > 5242880"),
    (b"MPUB t\n" + size(100) + size(0), b"E_BAD_BODY MPUB invalid message count 0"),
    (mpub(b"t", [b"a", b""]), b"E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
    (
        b"MPUB t\n" + size(100) + size(2) + sized(b"a") + size(1048577),
        b"E_BAD_MESSAGE MPUB message too big 1048577 > 1048576",
    ),
]


@pytest.mark.parametrize(("sent", "error"), FATAL, ids=[repr(sent)[2:40] for sent, _ in FATAL])
def test_an_error_is_told_and_ends_the_connection(
    client: Client, sent: bytes, error: bytes
) -> None:
    assert client.ask(sent) == (ERROR, error)
    assert client.ended()


#: what is sent before the client stops sending -> the error
CUT = [
    (b"IDENTIFY\n\0\0", b"E_BAD_BODY IDENTIFY failed to read body size"),
    (b"IDENTIFY\n" + size(9) + b"{}", b"E_BAD_BODY IDENTIFY failed to read body"),
    (b"AUTH\n" + size(9) + b"x", b"E_BAD_BODY AUTH failed to read body"),
    (b"PUB t\n\0", b"E_BAD_MESSAGE PUB failed to read message body size"),
    (b"PUB t\n" + size(9) + b"x", b"E_BAD_MESSAGE PUB failed to read message body"),
    (b"DPUB t 1\n" + size(9), b"E_BAD_MESSAGE DPUB failed to read message body"),
    (b"MPUB t\n\0", b"E_BAD_BODY MPUB failed to read body size"),
    (b"MPUB t\n" + size(20) + b"\0", b"E_BAD_BODY MPUB failed to read message count"),
    (
        b"MPUB t\n" + size(20) + size(2) + sized(b"a") + b"\0",
        b"E_BAD_MESSAGE MPUB failed to read message(1) body size",
    ),
    (
        b"MPUB t\n" + size(20) + size(2) + sized(b"a") + size(3) + b"x",
        b"E_BAD_MESSAGE MPUB failed to read message body",
    ),
]


@pytest.mark.parametrize(("sent", "error"), CUT, ids=[repr(sent)[2:40] for sent, _ in CUT])
def test_what_is_cut_off_is_told(client: Client, sent: bytes, error: bytes) -> None:
    client.send(sent)
    client.sock.shutdown(1)
    assert client.frame() == (ERROR, error)
    assert client.ended()


#: what a subscribed client sends -> the error that ends the connection
SUBSCRIBED = [
    (b"IDENTIFY\n" + sized(b"{}"), b"E_INVALID cannot IDENTIFY in current state"),
    (b"AUTH\n" + sized(b"x"), b"E_INVALID cannot AUTH in current state"),
    (b"SUB t c\n", b"E_INVALID cannot SUB in current state"),
    (b"RDY -1\n", b"E_INVALID RDY could not parse count -1"),
    (b"RDY +1\n", b"E_INVALID RDY could not parse count +1"),
    (b"RDY 2501\n", b"E_INVALID RDY count 2501 out of range 0-2500"),
    (b"RDY 9223372036854775808\n", b"E_INVALID RDY count -9223372036854775808 out of range 0-2500"),
    (b"FIN\n", b"E_INVALID FIN insufficient number of params"),
    (b"FIN 0123456789abcde\n", b"E_INVALID invalid message ID"),
    (b"REQ 0123456789abcdef\n", b"E_INVALID REQ insufficient number of params"),
    (b"REQ 0123456789abcdef -1\n", b"E_INVALID REQ could not parse timeout -1"),
    (b"TOUCH\n", b"E_INVALID TOUCH insufficient number of params"),
]


@pytest.mark.parametrize(
    ("sent", "error"), SUBSCRIBED, ids=[repr(sent)[2:40] for sent, _ in SUBSCRIBED]
)
def test_an_error_ends_a_subscription(client: Client, sent: bytes, error: bytes) -> None:
    client.sub("errors", "c")
    assert client.ask(sent) == (ERROR, error)
    assert client.ended()


def test_three_errors_leave_the_connection_open(client: Client, topic: str) -> None:
    client.sub(topic, "c", 1)
    unknown = b"failed ID not in flight"
    name = b"0123456789ABCDEF"
    assert client.ask(b"FIN %b\n" % name) == (ERROR, b"E_FIN_FAILED FIN %b %b" % (name, unknown))
    assert client.ask(b"REQ %b 0\n" % name) == (ERROR, b"E_REQ_FAILED REQ %b %b" % (name, unknown))
    error = (ERROR, b"E_TOUCH_FAILED TOUCH %b %b" % (name, unknown))
    assert client.ask(b"TOUCH %b\n" % name) == error
    assert client.ask(FIN * 2) == (ERROR, b"E_FIN_FAILED FIN 0123456789abcdef " + unknown)
    assert client.frame() == (ERROR, b"E_FIN_FAILED FIN 0123456789abcdef " + unknown)
    client.pub(topic, b"still here")


# ---- IDENTIFY ----


def test_identify_negotiates(client: Client) -> None:
    answer = client.identify(feature_negotiation=True, msg_timeout=2000, sample_rate=3)
    expected = {
        "max_rdy_count": 2500,
        "version": "1.3.0",
        "max_msg_timeout": 900000,
        "msg_timeout": 2000,
        "tls_v1": False,
        "deflate": False,
        "deflate_level": 6,
        "max_deflate_level": 6,
        "snappy": False,
        "sample_rate": 3,
        "auth_required": False,
        "output_buffer_size": 16384,
        "output_buffer_timeout": 250,
    }
    assert {key: answer[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("wishes", "size", "timeout"),
    [
        ({"output_buffer_size": -1}, 1, 0),
        ({"output_buffer_timeout": -1}, 16384, 0),
        ({"output_buffer_size": 64, "output_buffer_timeout": 25}, 64, 25),
    ],
)
def test_identify_sets_the_output_buffer(
    client: Client, wishes: dict[str, int], size: int, timeout: int
) -> None:
    answer = client.identify(feature_negotiation=True, **wishes)
    assert (answer["output_buffer_size"], answer["output_buffer_timeout"]) == (size, timeout)


def test_identify_as_go_reads_json(client: Client) -> None:
    for body in (b"null", b'{"MSG_timeout":null,"unknown":[1]}', b'{"client_ID":"x"} '):
        assert client.ask(b"IDENTIFY x y\n" + sized(body)) == OK
    answer = client.ask(b"IDENTIFY\n" + sized(b'{"Feature_Negotiation":true,"MSG_timeout":5000}'))
    assert answer is not None
    assert json.loads(answer[1])["msg_timeout"] == 5000


def test_no_subscription_without_heartbeats(client: Client) -> None:
    assert client.identify(heartbeat_interval=-1) == OK
    assert client.ask(b"SUB t c\n") == (ERROR, b"E_INVALID cannot SUB with heartbeats disabled")


# ---- publishing ----


def test_commands_may_follow_one_another_without_waiting(
    client: Client, server: Server, topic: str
) -> None:
    """Many PUB in a piece, of two topics, and one that cannot be at the end."""
    pubs = [b"PUB %b\n" % name.encode() for name in (topic, topic, topic, f"{topic}-other")]
    sent = [pubs[i % 4] + sized(b"%d" % i) for i in range(1000)]
    client.send(b"".join(sent) + b"NOP\n" + b"".join(sent) + pubs[0] + sized(b"x" * 3) * 2 + b"\n")
    for _ in range(2001):
        assert client.frame() == OK
    frame = client.frame()
    assert frame is not None
    assert frame[1].startswith(b"E_INVALID invalid command")
    assert client.ended()
    assert server.topic(topic)["message_count"] == 1501
    assert server.topic(f"{topic}-other")["message_count"] == 500
    reader = server.connect()
    reader.sub(topic, "c", 2500)
    bodies = [reader.delivery().body for _ in range(1501)]
    one = [b"%d" % i for i in range(1000) if i % 4 != 3]
    assert sorted(bodies) == sorted([*one, *one, b"xxx"])


def test_a_bad_size_ends_a_run_of_publishes(client: Client, server: Server, topic: str) -> None:
    line = b"PUB %b\n" % topic.encode()
    client.send((line + sized(b"x")) * 5 + line + b"\0\0\0\0" + line + sized(b"y"))
    for _ in range(5):
        assert client.frame() == OK
    assert client.frame() == (ERROR, b"E_BAD_MESSAGE PUB invalid message body size 0")
    assert client.ended()
    assert server.topic(topic)["message_count"] == 5


def test_publishing_is_allowed_to_a_consumer(client: Client, topic: str) -> None:
    client.sub(topic, "c")
    client.pub(topic, b"x")
    assert client.ask(b"CLS\n") == (RESPONSE, b"CLOSE_WAIT")
    client.pub(topic, b"y")


# ---- delivery ----


def test_a_message_is_delivered_and_finished(client: Client, server: Server, topic: str) -> None:
    before = time.time_ns()
    client.pub(topic, b"hello")
    client.sub(topic, "c", 1)
    message = client.delivery()
    assert (message.body, message.attempts) == (b"hello", 1)
    assert before - 10**9 < message.timestamp < time.time_ns() + 10**9
    int(message.id, 16)
    client.finish(message)
    eventually(lambda: server.channel(topic, "c")["in_flight_count"] == 0)
    assert server.channel(topic, "c")["depth"] == 0


def test_requeue_goes_to_the_end_of_the_line(client: Client, topic: str) -> None:
    for body in (b"0", b"1", b"2"):
        client.pub(topic, body)
    client.sub(topic, "c", 1)
    first = client.delivery()
    client.send(b"REQ %b 0\n" % first.id)
    rest = []
    for _ in range(3):
        rest.append(client.delivery())
        client.finish(rest[-1])
    assert [(item.body, item.attempts) for item in rest] == [(b"1", 1), (b"2", 1), (b"0", 2)]
    assert rest[2].id == first.id


def test_a_requeue_that_overflows_is_one_without_delay(client: Client, topic: str) -> None:
    client.pub(topic, b"x")
    client.sub(topic, "c", 1)
    client.send(b"REQ %b 9223372036855\n" % client.delivery().id)
    assert client.delivery().attempts == 2


def test_ready_is_a_window(client: Client, topic: str) -> None:
    assert client.ask(mpub(topic.encode(), [b"%d" % i for i in range(10)])) == OK
    client.sub(topic, "c", 3)
    taken = [client.delivery() for _ in range(3)]
    assert client.quiet()
    client.finish(taken[0])
    taken.append(client.delivery())
    assert client.quiet(0.1)
    client.send(b"RDY\n")  # 1: less than what is out
    for message in taken[1:]:
        client.finish(message)
    assert client.delivery().body


def test_an_unbuffered_client_gets_messages_at_once(connect: Connect, topic: str) -> None:
    producer, client = connect(), connect()
    assert client.identify(output_buffer_size=-1, heartbeat_interval=60000) == OK
    client.sub(topic, "c", 100)
    for _ in range(20):
        producer.pub(topic, b"x")
        client.finish(client.delivery())


def test_heartbeats_and_the_end_of_who_does_not_answer(connect: Connect) -> None:
    interval = 1.0
    while True:
        client, began = connect(), time.monotonic()
        assert client.identify(heartbeat_interval=round(interval * 1000)) == OK
        assert client.frame(heartbeats=True) == (RESPONSE, b"_heartbeat_")
        assert time.monotonic() - began >= 0.9 * interval
        client.send(b"NOP\n")
        answered = time.monotonic() - began
        if (frame := client.frame(heartbeats=True)) is not None:
            break
        # on a busy machine the answer itself may be late, and the server is right to hang up
        assert answered > 1.5 * interval
        interval *= 2
    assert frame == (RESPONSE, b"_heartbeat_")
    while (frame := client.frame(heartbeats=True)) is not None:
        assert frame == (RESPONSE, b"_heartbeat_")
    assert time.monotonic() - began >= 2.9 * interval


@pytest.mark.parametrize("words", [b"", b"RDY 5\nRDY 0\n", b"RDY 1\nCLS\n"])
def test_a_deletion_ends_who_wants_nothing(
    server: Server, connect: Connect, topic: str, words: bytes
) -> None:
    client = connect()
    client.sub(topic, "c")
    client.send(words)
    eventually(lambda: server.channel(topic, "c")["clients"][0]["ready_count"] == 0)
    assert server.post("/channel/delete", topic=topic, channel="c").status == 200
    while client.frame() is not None:  # CLOSE_WAIT
        pass
