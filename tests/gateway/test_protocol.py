"""nsqd's TCP protocol: the same said to a real nsqd and to shmq, the same answered."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import eventually
from wire import ERROR, OK, RESPONSE, Client, Server, mpub, sized

Connect = Callable[..., Client]
Start = Callable[..., Server]

FIN = b"FIN 0123456789abcdef\n"


def size(number: int) -> bytes:
    return struct.pack(">i", number)


# ---- lines ----


@pytest.mark.parametrize("magic", [b"  V1", b"  V3", b"GET ", b"\0\0\0\0"])
def test_another_magic_is_refused(connect: Connect, magic: bytes) -> None:
    client = connect(magic=magic)
    assert client.frame() == (ERROR, b"E_BAD_PROTOCOL")
    assert client.ended()


def test_the_magic_may_come_byte_by_byte(connect: Connect) -> None:
    client = connect(magic=b" ")
    for byte in (b" ", b"V", b"2", b"N", b"O", b"P", b"\r", b"\n"):
        client.send(byte)
        time.sleep(0.002)
    client.pub("slow", b"x")


def test_the_longest_line_is_read_and_a_longer_one_ends_the_connection(connect: Connect) -> None:
    client = connect()
    client.send(b"NOP " + b"A" * 16379 + b"\n")
    client.pub("longest", b"x")
    client = connect()
    client.send(b"NOP " + b"A" * 16380 + b"\n")
    assert client.ended()


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
        for body in (b"{", b"[]", b"5", b"{} x", b'{"client_id":5}', b'{"snappy":1}',
                     b'{"heartbeat_interval":1.5}', b'{"msg_timeout":"1"}', b'{"a":NaN}')
    ),
    *(
        (
            b"IDENTIFY\n" + sized(b'{"%b":%d}' % (field, value)),
            b"E_BAD_BODY IDENTIFY %b (%d) is invalid" % (field.replace(b"_", b" "), value),
        )
        for field, value in (
            (b"heartbeat_interval", 100), (b"heartbeat_interval", 60001),
            (b"heartbeat_interval", -2), (b"output_buffer_timeout", 24),
            (b"output_buffer_timeout", 30001), (b"output_buffer_size", 63),
            (b"output_buffer_size", 65537), (b"sample_rate", 100), (b"sample_rate", -1),
            (b"msg_timeout", 999), (b"msg_timeout", 900001), (b"msg_timeout", -1),
        )
    ),
    (b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"snappy":true,"deflate":true}'),
     b"E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"),
    (b"AUTH x\n", b"E_INVALID AUTH invalid number of parameters"),
    (b"AUTH\n" + size(0), b"E_BAD_BODY AUTH invalid body size 0"),
    (b"AUTH\n" + size(5242881), b"E_BAD_BODY AUTH body too big 5242881 > 5242880"),
    (b"AUTH\n" + sized(b"secret"), b"E_AUTH_DISABLED AUTH disabled"),
    (b"SUB\n", b"E_INVALID SUB insufficient number of parameters"),
    (b"SUB t\n", b"E_INVALID SUB insufficient number of parameters"),
    (b"SUB  c\n", b'E_BAD_TOPIC SUB topic name "" is not valid'),
    (b"SUB " + b"t" * 65 + b" c\n",
     b'E_BAD_TOPIC SUB topic name "' + b"t" * 65 + b'" is not valid'),
    (b"SUB t:x c\n", b'E_BAD_TOPIC SUB topic name "t:x" is not valid'),
    (b"SUB t #ephemeral\n", b'E_BAD_CHANNEL SUB channel name "#ephemeral" is not valid'),
    (b"SUB t c#Ephemeral\n", b'E_BAD_CHANNEL SUB channel name "c#Ephemeral" is not valid'),
    (b"RDY 1\n", b"E_INVALID cannot RDY in current state"),
    (b"CLS\n", b"E_INVALID cannot CLS in current state"),
    (FIN, b"E_INVALID cannot FIN in current state"),
    (b"REQ 0123456789abcdef 0\n", b"E_INVALID cannot REQ in current state"),
    (b"TOUCH 0123456789abcdef\n", b"E_INVALID cannot TOUCH in current state"),
    (b"PUB\n", b"E_INVALID PUB insufficient number of parameters"),
    (b'PUB a"b\\c\x01\xff\xc3\xa9\n',
     'E_BAD_TOPIC PUB topic name "a\\"b\\\\c\\x01\\xffé" is not valid'.encode()),
    (b"PUB t\n" + size(0), b"E_BAD_MESSAGE PUB invalid message body size 0"),
    (b"PUB t\n" + size(-1), b"E_BAD_MESSAGE PUB invalid message body size -1"),
    (b"PUB t\n" + size(1048577), b"E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
    (b"DPUB t\n", b"E_INVALID DPUB insufficient number of parameters"),
    (b"DPUB t! 1\n", b'E_BAD_TOPIC DPUB topic name "t!" is not valid'),
    (b"DPUB t 1.5\n", b"E_INVALID DPUB could not parse timeout 1.5"),
    (b"DPUB t -1\n", b"E_INVALID DPUB could not parse timeout -1"),
    (b"DPUB t 3600001\n", b"E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
    (b"DPUB t 1\n" + size(0), b"E_BAD_MESSAGE DPUB invalid message body size 0"),
    (b"MPUB\n", b"E_INVALID MPUB insufficient number of parameters"),
    (b"MPUB t!\n", b'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "t!" is not valid'),
    (b"MPUB t\n" + size(0), b"E_BAD_BODY MPUB invalid body size 0"),
    (b"MPUB t\n" + size(5242881), b"E_BAD_BODY MPUB body too big 5242881 > 5242880"),
    (b"MPUB t\n" + size(100) + size(0), b"E_BAD_BODY MPUB invalid message count 0"),
    (b"MPUB t\n" + size(100) + size(1048576), b"E_BAD_BODY MPUB invalid message count 1048576"),
    (mpub(b"t", [b"a", b""]), b"E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
    (b"MPUB t\n" + size(100) + size(2) + sized(b"a") + size(1048577),
     b"E_BAD_MESSAGE MPUB message too big 1048577 > 1048576"),
]  # fmt: skip


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
    (b"MPUB t\n" + size(20) + size(2) + sized(b"a") + b"\0",
     b"E_BAD_MESSAGE MPUB failed to read message(1) body size"),
    (b"MPUB t\n" + size(20) + size(2) + sized(b"a") + size(3) + b"x",
     b"E_BAD_MESSAGE MPUB failed to read message body"),
]  # fmt: skip


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
    (b"FIN \n", b"E_INVALID invalid message ID"),
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


def test_a_message_of_another_client_is_not_ours(connect: Connect, topic: str) -> None:
    owner, other = connect(), connect()
    owner.pub(topic, b"x")
    owner.sub(topic, "c", 1)
    name = owner.delivery().id
    other.sub(topic, "c")
    for command, tail in ((b"FIN", b""), (b"TOUCH", b""), (b"REQ", b" 0")):
        text = b"E_%b_FAILED %b %b failed client does not own message" % (command, command, name)
        assert other.ask(b"%b %b%b\n" % (command, name, tail)) == (ERROR, text)
    owner.send(b"FIN %b\n" % name)
    owner.pub(topic, b"y")


# ---- IDENTIFY ----


def test_identify_negotiates(client: Client) -> None:
    answer = client.identify(feature_negotiation=True, msg_timeout=2000, sample_rate=3)
    expected = {
        "max_rdy_count": 2500, "version": "1.3.0", "max_msg_timeout": 900000, "msg_timeout": 2000,
        "tls_v1": False, "deflate": False, "deflate_level": 6, "max_deflate_level": 6,
        "snappy": False, "sample_rate": 3, "auth_required": False, "output_buffer_size": 16384,
        "output_buffer_timeout": 250,
    }  # fmt: skip
    assert {key: answer[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("wishes", "size", "timeout"),
    [({"output_buffer_size": -1}, 1, 0), ({"output_buffer_timeout": -1}, 16384, 0),
     ({"output_buffer_size": 64, "output_buffer_timeout": 25}, 64, 25)],
)  # fmt: skip
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


def test_identify_may_be_repeated_until_sub(client: Client, topic: str) -> None:
    assert client.identify() == OK
    assert client.identify() == OK
    client.sub(topic, "c")
    assert client.identify() == (ERROR, b"E_INVALID cannot IDENTIFY in current state")


def test_no_subscription_without_heartbeats(client: Client) -> None:
    assert client.identify(heartbeat_interval=-1) == OK
    assert client.ask(b"SUB t c\n") == (ERROR, b"E_INVALID cannot SUB with heartbeats disabled")


# ---- publishing ----


def test_sizes_at_the_limit(client: Client, topic: str) -> None:
    client.pub(topic, b"x" * 1048576)
    assert client.ask(f"DPUB {topic} 3600000\n".encode() + sized(b"later")) == OK
    assert client.ask(f"DPUB {topic} 0\n".encode() + sized(b"now")) == OK


def test_mpub_goes_by_the_sizes_inside(client: Client, server: Server, topic: str) -> None:
    assert client.ask(mpub(topic.encode(), [b"a", b"bc"], size=1)) == OK
    assert client.ask(mpub(topic.encode(), [b"d"] * 3000)) == OK
    found = server.topic(topic)
    assert (found["depth"], found["message_count"], found["message_bytes"]) == (3002, 3002, 3003)


def test_size_limits(start: Start) -> None:
    server = start("--max-msg-size=100", "--max-body-size=1000")
    steps: list[tuple[bytes, tuple[int, bytes]]] = [
        (b"PUB t\n" + sized(b"x" * 95), OK),
        (b"PUB t\n" + sized(b"x" * 105), (ERROR, b"E_BAD_MESSAGE PUB message too big 105 > 100")),
        (b"PUB t\n" + sized(b""), (ERROR, b"E_BAD_MESSAGE PUB invalid message body size 0")),
        (mpub(b"t", [b"x" * 95] * 5), OK),
        (mpub(b"t", [b"x" * 5] * 127), (ERROR, b"E_BAD_BODY MPUB body too big 1147 > 1000")),
        (mpub(b"t", [b"x" * 5] * 5 + [b""]),
         (ERROR, b"E_BAD_MESSAGE MPUB invalid message(5) body size 0")),
        (mpub(b"t", [b"x" * 101]), (ERROR, b"E_BAD_MESSAGE MPUB message too big 101 > 100")),
        (b"DPUB t 1000\n" + sized(b"x" * 105),
         (ERROR, b"E_BAD_MESSAGE DPUB message too big 105 > 100")),
    ]  # fmt: skip
    for sent, answer in steps:
        client = server.connect()
        assert client.ask(sent) == answer
        assert answer == OK or client.ended()
        client.close()


def test_commands_may_follow_one_another_without_waiting(
    client: Client, server: Server, topic: str
) -> None:
    """Many PUB in a piece, of two topics, and one that cannot be at the end."""
    pubs = [b"PUB %b\n" % name.encode() for name in (topic, topic, topic, f"{topic}-other")]
    sent = [pubs[i % 4] + sized(b"%d" % i) for i in range(1000)]
    client.send(b"".join(sent) + b"NOP\n" + b"".join(sent) + pubs[0] + sized(b"x" * 3) * 2)
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
    client.send(b"RDY 99999\n")  # ignored
    assert client.ask(b"CLS\n") == (ERROR, b"E_INVALID cannot CLS in current state")


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


def test_a_long_requeue_is_clamped(client: Client, server: Server, topic: str) -> None:
    client.pub(topic, b"x")
    client.sub(topic, "c", 1)
    client.send(b"REQ %b 99999999\n" % client.delivery().id)
    eventually(lambda: server.channel(topic, "c")["deferred_count"] == 1)


def test_dpub_is_deferred(client: Client, server: Server, topic: str) -> None:
    client.sub(topic, "c", 1)
    assert client.ask(f"DPUB {topic} 60000\n".encode() + sized(b"x")) == OK
    found = eventually(
        lambda: [c for c in [server.channel(topic, "c")] if c["deferred_count"] == 1]
    )[0]
    assert (found["message_count"], found["depth"]) == (1, 0)


def test_timeout_gives_the_message_again(client: Client, server: Server, topic: str) -> None:
    assert client.identify(msg_timeout=1000) == OK
    client.pub(topic, b"x")
    client.sub(topic, "c", 1)
    first = client.delivery()
    again = client.delivery()
    assert (again.id, again.attempts) == (first.id, 2)
    client.finish(again)
    error = b"E_FIN_FAILED FIN %b failed ID not in flight" % first.id
    assert client.ask(b"FIN %b\n" % first.id) == (ERROR, error)
    found = server.channel(topic, "c")
    assert (found["timeout_count"], found["requeue_count"]) == (1, 0)


def test_touch_keeps_a_message(client: Client, server: Server, topic: str) -> None:
    assert client.identify(msg_timeout=1000) == OK
    client.pub(topic, b"x")
    client.sub(topic, "c", 1)
    message = client.delivery()
    for _ in range(4):
        time.sleep(0.4)
        client.send(b"TOUCH %b\n" % message.id)
    client.finish(message)
    client.pub(topic, b"y")
    assert client.delivery().body == b"y"
    assert server.channel(topic, "c")["timeout_count"] == 0


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
    client.send(b"RDY \n")  # none


def test_a_lone_message_waits_for_the_buffer_or_its_timeout(client: Client, topic: str) -> None:
    began = time.monotonic()
    assert client.identify(output_buffer_size=65536, output_buffer_timeout=700) == OK
    client.pub(topic, b"x")
    client.sub(topic, "c", 10)
    client.delivery()
    assert time.monotonic() - began >= 0.65


def test_an_unbuffered_client_gets_messages_at_once(connect: Connect, topic: str) -> None:
    producer, client = connect(), connect()
    assert client.identify(output_buffer_size=-1, heartbeat_interval=60000) == OK
    client.sub(topic, "c", 100)
    for _ in range(20):
        producer.pub(topic, b"x")
        client.finish(client.delivery())


def test_sampling(start: Start) -> None:
    server = start()
    producer, client = server.connect(), server.connect()
    for _ in range(10):
        assert producer.ask(mpub(b"sampled", [b"x" * 20] * 1000)) == OK
    assert client.identify(feature_negotiation=True, sample_rate=42)["sample_rate"] == 42
    client.sub("sampled", "c", 2500)
    got = 0
    client.sock.settimeout(1.5)
    try:
        while True:
            client.finish(client.delivery())
            got += 1
    except TimeoutError:
        pass
    assert 0.38 <= got / 10000 <= 0.48
    assert server.channel("sampled", "c")["depth"] == 0


def test_heartbeats_and_the_end_of_who_does_not_answer(client: Client) -> None:
    began = time.monotonic()
    assert client.identify(heartbeat_interval=1000) == OK
    assert client.frame(heartbeats=True) == (RESPONSE, b"_heartbeat_")
    assert time.monotonic() - began >= 0.9
    client.send(b"NOP\n")
    assert client.frame(heartbeats=True) == (RESPONSE, b"_heartbeat_")
    while (frame := client.frame(heartbeats=True)) is not None:
        assert frame == (RESPONSE, b"_heartbeat_")
    assert time.monotonic() - began >= 2.9


# ---- topics and channels ----


def test_the_first_channel_gets_the_backlog(client: Client, server: Server, topic: str) -> None:
    client.pub(topic, b"a")
    client.pub(topic, b"b")
    for channel in ("c1", "c2"):
        assert server.post("/channel/create", topic=topic, channel=channel).status == 200
        if channel == "c1":
            eventually(lambda: server.channel(topic, "c1")["depth"] == 2)
    client.pub(topic, b"c")
    eventually(lambda: server.channel(topic, "c2")["depth"] == 1)
    assert server.channel(topic, "c1")["depth"] == 3


def test_a_paused_topic_keeps_messages(client: Client, server: Server, topic: str) -> None:
    assert server.post("/topic/create", topic=topic).status == 200
    assert server.post("/channel/create", topic=topic, channel="c").status == 200
    assert server.post("/topic/pause", topic=topic).status == 200
    client.pub(topic, b"x")
    found = server.topic(topic)
    assert (found["paused"], found["depth"]) == (True, 1)
    assert server.post("/topic/unpause", topic=topic).status == 200
    eventually(lambda: server.channel(topic, "c")["depth"] == 1)
    assert server.topic(topic)["depth"] == 0


def test_a_paused_channel_delivers_nothing(client: Client, server: Server, topic: str) -> None:
    client.sub(topic, "c", 1)
    client.pub(topic, b"a")
    client.finish(client.delivery())
    assert server.post("/channel/pause", topic=topic, channel="c").status == 200
    time.sleep(0.2)
    client.pub(topic, b"b")
    assert client.quiet()
    assert server.channel(topic, "c")["depth"] == 1
    assert server.post("/channel/unpause", topic=topic, channel="c").status == 200
    assert client.delivery().body == b"b"


def test_emptying_a_channel_drops_what_is_in_flight(
    client: Client, server: Server, topic: str
) -> None:
    assert client.ask(mpub(topic.encode(), [b"x"] * 25)) == OK
    client.sub(topic, "c", 1)
    name = client.delivery().id
    assert server.post("/channel/empty", topic=topic, channel="c").status == 200
    found = server.channel(topic, "c")
    assert (found["depth"], found["in_flight_count"], found["message_count"]) == (0, 0, 25)
    error = b"E_FIN_FAILED FIN %b failed ID not in flight" % name
    assert client.ask(b"FIN %b\n" % name) == (ERROR, error)
    client.pub(topic, b"y")
    assert client.delivery().body == b"y"


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_a_deletion_ends_its_consumers(
    client: Client, connect: Connect, server: Server, topic: str, what: str
) -> None:
    client.sub(topic, "c", 5)
    producer = connect()
    producer.pub(topic, b"x")
    client.delivery()
    params = {"topic": topic} if what == "topic" else {"topic": topic, "channel": "c"}
    assert server.post(f"/{what}/delete", **params).status == 200
    assert client.ended()
    producer.pub(topic, b"makes it anew")
    assert server.topic(topic)["channels"] == []


def test_an_ephemeral_channel_goes_with_its_last_client(
    connect: Connect, server: Server, topic: str
) -> None:
    one, two = connect(), connect()
    one.sub(f"{topic}#ephemeral", "c#ephemeral")
    two.sub(f"{topic}#ephemeral", "c#ephemeral")
    one.close()
    time.sleep(0.3)
    assert server.stats(topic=f"{topic}#ephemeral")["topics"]
    two.close()
    eventually(lambda: server.stats(topic=f"{topic}#ephemeral")["topics"] is None)


def test_consumers_of_a_channel_may_be_limited(start: Start) -> None:
    server = start("--max-channel-consumers=1", "--max-rdy-count=50")
    first = server.connect()
    first.sub("mc", "ch")
    second = server.connect()
    text = b"E_SUB_FAILED SUB failed consumers for mc:ch exceeds limit of 1"
    assert second.ask(b"SUB mc ch\n") == (ERROR, text)
    assert first.ask(b"RDY 51\n") == (ERROR, b"E_INVALID RDY count 51 out of range 0-50")
    assert first.ended()

    def again() -> bool:
        client = server.connect()
        answer = client.ask(b"SUB mc ch\n")
        client.close()
        return answer == OK

    assert eventually(again)


def test_what_a_disk_queue_has_is_there_after_a_kill(start: Start) -> None:
    server = start("--mem-queue-size=0")
    client = server.connect()
    client.sub("durable", "c")
    for i in range(10):
        client.pub("durable", b"%d" % i)
    eventually(lambda: server.channel("durable", "c")["depth"] == 10)
    eventually(lambda: list(server.data_path.glob("durable:c.diskqueue.meta.dat")))
    time.sleep(2.5)  # nsqd's metadata is up to 2 s old
    server.process.kill()
    server.process.wait()
    server = start("--mem-queue-size=0", again=server)
    client = server.connect()
    client.sub("durable", "c", 100)
    bodies = set()
    for _ in range(10):
        message = client.delivery()
        bodies.add(message.body)
        client.finish(message)
    assert bodies == {b"%d" % i for i in range(10)}


def test_a_clean_stop_keeps_everything(start: Start) -> None:
    server = start()
    client = server.connect()
    client.sub("stopped", "c", 1)
    client.pub("stopped", b"A")
    client.delivery()
    client.pub("stopped", b"B")
    eventually(lambda: server.channel("stopped", "c")["depth"] == 1)
    assert server.stop() == 0
    assert client.ended()
    server = start(again=server)
    client = server.connect()
    client.sub("stopped", "c", 5)
    got: dict[bytes, Any] = {}
    for _ in range(2):
        message = client.delivery()
        got[message.body] = message.attempts
    assert got == {b"A": 2, b"B": 1}


def test_unix_sockets(start: Start) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        server = start(f"--tcp-address={directory}/tcp.sock")
        client = server.connect()
        client.sub("t", "c", 1)
        client.pub("t", b"x")
        client.finish(client.delivery())
        found = server.channel("t", "c")["clients"][0]
        assert found["remote_address"] == "@"
        assert json.loads(server.http("GET", "/info").body)["tcp_port"] == -1
