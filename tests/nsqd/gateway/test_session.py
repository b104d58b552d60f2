"""A session without a socket answers the same bytes the same way, however they are cut."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.nsq_client import mpub, sized
from support.session_without_socket import Direct, Host, drive

import shmq
from shmq.gateway import protocol
from shmq.gateway.session import Session

_WORDS = [
    b"IDENTIFY",
    b"SUB",
    b"PUB",
    b"MPUB",
    b"DPUB",
    b"RDY",
    b"FIN",
    b"REQ",
    b"TOUCH",
    b"CLS",
    b"NOP",
    b"AUTH",
    b"t",
    b"u.v-w_x",
    b"c#ephemeral",
    b"0",
    b"1",
    b"99999999999999999999",
    b"-1",
    b"0123456789abcdef",
    b"",
    b"\xff\xfe",
    b"a" * 64,
    b"a" * 65,
]


def lease_request(random_: random.Random) -> bytes:
    """A request of the lease protocol, most of them good."""
    body = {"lease": random_.choice((1, 5, 0)), "credit": random_.choice((1, 2000, 1 << 40))}
    body |= {
        "holder": random_.choice(([1, "0" * 16], [1], "x")),
        "n": 3,
        "timeout": 1,
        "through": 7,
    }
    lines = (b"LREAD t c", b"LEASE t c", b"LWAIT t c", b"LRET t c", b"LFIN t", b"LMAKE t")
    line = random_.choice(lines)
    return line + b"\n" + sized(json.dumps(body).encode())


def some_bytes(random_: random.Random) -> bytes:
    """Commands, most of them whole, and what is none."""
    parts = [b"  V2" if random_.random() < 0.95 else random_.randbytes(4)]
    for _ in range(random_.randrange(8)):
        body = random_.randbytes(random_.choice((0, 1, 5, 30, 300)))
        bodies = [b"x" * random_.randrange(1, 20) for _ in range(random_.randrange(1, 9))]
        parts.append(
            random_.choice(
                (
                    b"NOP\n",
                    b"NOP\r\n",
                    b"PUB t\n" + sized(body),
                    b"DPUB t 5\n" + sized(body),
                    mpub(b"t", bodies, random_.choice((None, 1))),
                    mpub(b"t", [*bodies, body]),
                    b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"snappy":false}'),
                    b"IDENTIFY\n" + sized(body),
                    b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"leases":true}'),
                    lease_request(random_),
                    b"AUTH\n" + sized(body),
                    b" ".join(random_.choices(_WORDS, k=random_.randrange(1, 4))) + b"\n",
                    random_.randbytes(random_.randrange(40)),
                    b"PUB t\n" + random_.randbytes(4),
                    b"MPUB t\n" + random_.randbytes(12),
                )
            )
        )
    data = b"".join(parts)
    if random_.random() < 0.3 and data:
        at = random_.randrange(len(data))
        data = data[:at] + random_.randbytes(1) + data[at + 1 :]
    return data


@pytest.mark.parametrize("seed", range(8))
def test_pieces_make_no_difference(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(150):
        data = some_bytes(random_)
        whole = drive(data, [])
        for count in (1, 3, len(data)):
            cuts = sorted(random_.randrange(len(data) + 1) for _ in range(count))
            if count == len(data):
                cuts = list(range(1, len(data)))
            pieces = drive(data, cuts)
            assert pieces == whole, (data, cuts)


@pytest.mark.parametrize("seed", range(4))
def test_the_extension_publishes_as_the_session_does(
    seed: int, open_broker: Callable[..., shmq.Broker]
) -> None:
    """Any input may come in one piece after the first command to a topic."""
    random_ = random.Random(seed)
    broker = open_broker()
    direct = Direct(broker.producer("t"), broker.consumer("t", "c", 5000))
    for _ in range(100):
        data = some_bytes(random_)
        more = [
            b"PUB t\n" + sized(b"x" * random_.choice((1, 9, 300, 2000) * 9 + (2001,)))
            for _ in range(5)
        ]
        data += b"".join([*more, mpub(b"t", [b"y", b"z"]), b"PUB u\n" + sized(b"w")])
        ends = [match.end() for match in re.finditer(rb"(?=M?PUB )", data)]
        whole = drive(data, [])
        for cuts in (ends, ends[::2], [min(end + 1, len(data)) for end in ends], ends[:-3]):
            assert drive(data, cuts, direct=direct) == whole, (data, cuts)
    assert direct.count > 100
    direct.close()


def test_a_full_queue_is_waited_for() -> None:
    host = Host()
    topic = host.open_producer(b"t")
    topic.full = 3
    done = drive(b"  V2PUB t\n" + sized(b"a") + b"PUB t\n" + sized(b"b"), [], host)
    assert done.said == protocol.OK * 2
    assert done.published == [(b"a", None), (b"b", None)]


def test_a_batch_that_does_not_fit_goes_in_parts() -> None:
    host = Host()
    host.open_producer(b"t").most = 3
    done = drive(b"  V2" + mpub(b"t", [b"%d" % i for i in range(20)]), [50], host)
    assert done.said == protocol.OK
    assert [body for body, _ in done.published] == [b"%d" % i for i in range(20)]


def test_a_batch_has_a_limit_whatever_its_sizes_say() -> None:
    data = b"  V2" + mpub(b"t", [b"x" * 2000] * 20, size=10)
    done = drive(data, list(range(1000, len(data), 1000)))
    assert b"E_BAD_BODY MPUB body too big" in done.said
    assert done.published == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"", 0),
        (b"0", 0),
        (b"18446744073709551617", 1),
        (b"9" * 9000, None),
        (b"-1", "no"),
        (b"+1", "no"),
        (b"1.0", "no"),
        (b" 1", "no"),
        ("٣".encode(), "no"),
    ],
)
def test_numbers(text: bytes, value: Any) -> None:
    found = protocol.number(text)
    if value is None:
        assert found == (10**9000 - 1) % 2**64
    else:
        assert found == (None if value == "no" else value)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a", '"a"'),
        (b'"\\', '"\\"\\\\"'),
        (b"\n\t\x01\x7f", '"\\n\\t\\x01\\x7f"'),
        (b"\xff", '"\\xff"'),
        ("é€".encode(), '"é€"'),
        ("\u200b".encode(), '"\\u200b"'),
        ("\u00a0".encode(), '"\\u00a0"'),
    ],
)
def test_quoting_is_gos(raw: bytes, text: str) -> None:
    assert protocol.quoted(raw) == text


def leases(*requests: bytes) -> bytes:
    """The bytes of a client that negotiates leases."""
    wishes = b'{"feature_negotiation":true,"leases":true}'
    return b"  V2IDENTIFY\n" + sized(wishes) + b"".join(requests)


def said_after_identify(data: bytes) -> list[tuple[int, bytes]]:
    """The frames of an output, without the first."""
    frames = []
    while data:
        size = int.from_bytes(data[:4], "big")
        frames.append((int.from_bytes(data[4:8], "big"), data[8 : 4 + size]))
        data = data[4 + size :]
    return frames[1:]


@pytest.mark.parametrize("takes", [None, 1 << 20, 308, 21, 20, 0])
def test_a_part_is_sent_within_the_credit(takes: int | None) -> None:
    host = Host()
    ask = b"LREAD t c\n" + sized(b'{"lease":1,"credit":400}')
    more = b"LREAD t c\n" + sized(b'{"lease":1,"credit":4000,"from":6}')
    said = said_after_identify(drive(leases(ask, more), [], host, takes=takes).said)
    assert [kind for kind, _ in said] == [3, 3, 0, 3, 0]
    assert json.loads(said[2][1]) == {"identity": "1-2", "next": 6, "end": False}
    assert json.loads(said[4][1]) == {"identity": "1-2", "next": 9, "end": True}
    assert len(host.leases.asked) == 1  # the second goes on with what the first has opened
    again = b"LREAD t c\n" + sized(b'{"lease":1,"credit":4000,"from":3}')
    said = said_after_identify(drive(leases(ask, again), [], host, takes=takes).said)
    assert [data[:1] for _, data in said] == [b"0", b"3", b"{", b"3", b"6", b"{"]


def test_a_lost_lease_ends_the_request_and_not_the_connection() -> None:
    ask = b"LLOOK t c\n" + sized(b'{"lease":5,"holder":[1,"0000000000000002"]}')
    done = drive(leases(ask, b"LREAD t c\n" + sized(b'{"lease":5}'), ask), [])
    said = said_after_identify(done.said)
    assert said == [(1, b"E_LEASE_LOST lease 5 was lost")] * 3


def test_the_end_of_the_instance_is_no_answer() -> None:
    ask = b"LLOOK t c\n" + sized(b'{"lease":6,"holder":[1,"0000000000000002"]}')
    done = drive(leases(ask, ask), [])
    assert said_after_identify(done.said) == []
    assert done.closing


def test_a_lease_is_waited_for() -> None:
    host = Host()
    ask = b"LEASE t c\n" + sized(b'{"n":1,"holder":[1,"0000000000000002"],"timeout":5}')
    said = said_after_identify(drive(leases(ask), [], host).said)
    assert json.loads(said[0][1])["lease"] == [3]
    assert len(host.leases.asked) == 3


def test_leases_are_for_those_who_ask() -> None:
    ask = b"LMAKE t\n" + sized(b"{}")
    assert b"E_INVALID invalid command LMAKE" in drive(b"  V2" + ask, []).said
    plain = b"  V2IDENTIFY\n" + sized(b'{"feature_negotiation":true,"leases":false}')
    done = drive(plain + ask, [])
    assert b"leases" not in done.said
    assert b"E_INVALID invalid command LMAKE" in done.said


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"LREAD t\n" + sized(b"{}"), b"E_INVALID"),
        (b"LREAD t t!\n" + sized(b"{}"), b"E_BAD_CHANNEL"),
        (b"LREAD ! c\n" + sized(b"{}"), b"E_BAD_TOPIC"),
        (b"LREAD t c\n" + sized(b"{}"), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b"[]"), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b"[" * 4000), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b'{"lease":%b}' % (b"1" * 4000)), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b'{"lease":true}'), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b'{"lease":1,"credit":67108865}'), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b'{"lease":1,"rows":65537}'), b"E_BAD_BODY"),
        (b"LREAD t c\n" + sized(b'{"lease":1,"part":32}'), b"E_BAD_BODY"),
        (b"LREAD t c\n\x7f\xff\xff\xff", b"E_BAD_BODY"),
        (b"LREAD t c\n\xff\xff\xff\xff", b"E_BAD_BODY"),
        (b"LWAIT t c\n" + sized(b'{"holder":[1,"0000000000000002"],"timeout":NaN}'), b"E_BAD_BODY"),
        (b"LWAIT t c\n" + sized(b'{"holder":[1,"0000000000000002"],"timeout":31}'), b"E_BAD_BODY"),
        (b"LHOLD t c\n" + sized(b'{"name":"%b"}' % (b"x" * 80)), b"E_BAD_BODY"),
        (b"LHOLD t c\n" + sized(b'{"name":"a\\u0000"}'), b"E_BAD_BODY"),
        (b"LHOLD t c\n" + sized(b'{"name":"\\ud800"}'), b"E_BAD_BODY"),
        (b"STAGE t\n" + sized(b"\0\0\0\x09{}"), b"E_BAD_BODY"),
        (b"COMMIT t\n" + sized(b'{"writer":"w","epoch":1,"attempts":[{}]}'), b"E_BAD_BODY"),
    ],
)
def test_a_request_that_is_none(request_: bytes, code: bytes) -> None:
    host = Host()
    done = drive(leases(request_), [], host)
    (frame,) = said_after_identify(done.said)
    assert frame[0] == 1
    assert frame[1].startswith(code), frame
    assert done.closing
    assert host.leases.asked == []


def test_heartbeats_and_deadlines() -> None:
    session = Session(Host(), "@", "", 0.0, 0.0)
    session.receive(bytearray(b"  V2"), 0, 4)
    assert session.wake_at == 30.0
    session.now = 30.0
    session.tick()
    assert session.output == [protocol.HEARTBEAT]
    session.written()
    session.now = 59.0
    session.receive(bytearray(b"NOP\n"), 0, 4)
    session.now = 60.5
    session.tick()
    assert session.output == [protocol.HEARTBEAT]
    assert not session.closing
    session.now = 120.0
    session.tick()
    assert session.aborted


@pytest.mark.parametrize(
    "began",
    [
        b"",
        b"  ",
        b"  V2",
        b"  V2PU",
        b"  V2PUB t\n",
        b"  V2PUB t\n\0\0\0\x05abc",
        b"  V2MPUB t\n\0\0\0\x50\0\0\0\x05",
    ],
)
@pytest.mark.parametrize("heartbeats", [True, False])
def test_a_command_has_its_time(began: bytes, heartbeats: bool) -> None:
    """Counted from the accept on, however its bytes are cut, with heartbeats off too."""
    session = Session(Host(), "@", "", 0.0, 0.0)
    off = b"IDENTIFY\n" + sized(b'{"heartbeat_interval":-1}')
    data = bytearray(began if heartbeats else began[:4] + off + began[4:])
    if len(began) < 4 and not heartbeats:
        data = bytearray(began)
    at = session.receive(data, 0, len(data))
    for job in filter(None, [session.job]):
        session.done(job.call(), None) if job.call else None
        session.receive(data, at, len(data))
    for session.now in (29.0, 31.0, 59.0):
        session.tick()
        assert not session.closing
    session.now = 61.0
    session.tick()
    idle = began == b"  V2" and not heartbeats
    assert session.closing == (not idle)


def test_a_line_and_its_body_share_their_time() -> None:
    session = Session(Host(), "@", "", 0.0, 0.0)
    session.receive(bytearray(b"  V2"), 0, 4)
    session.now = 50.0
    line = bytearray(b"PUB t\n")
    assert session.receive(line, 0, len(line)) == len(line)
    session.now = 61.0
    session.tick()
    assert session.closing


def test_commands_of_one_turn_have_a_limit() -> None:
    session = Session(Host(), "@", "", 0.0, 0.0)
    data = bytearray(b"  V2" + b"NOP\n" * 5000)
    turns, at = 0, 0
    while at < len(data):
        at = session.receive(data, at, len(data))
        turns += 1
        assert session.behind == (at < len(data))
    assert turns == 5
    assert session.goes_on


def test_a_process_without_files_answers() -> None:
    """Nothing that the system refuses leaves a client without an answer."""
    host = Host()

    def refuse(*args: object, **how: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/shmq.x.1")

    topic = host.open_producer(b"t")
    topic.publish_framed = topic.publish_run = refuse
    done = drive(b"  V2PUB t\n" + sized(b"x"), [], host)
    assert done.said == protocol.frame(1, b"E_PUB_FAILED PUB failed too many open files")
    host.producers.clear()
    host.open_producer = refuse  # type: ignore[method-assign]
    done = drive(b"  V2" + mpub(b"t", [b"x"]), [], host)
    assert done.said == protocol.frame(1, b"E_MPUB_FAILED MPUB failed too many open files")
    host.open_consumer = refuse  # type: ignore[method-assign]
    done = drive(b"  V2SUB t c\n", [], host)
    assert done.said == protocol.frame(1, b"E_SUB_FAILED SUB failed too many open files")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\\ud800", "\ufffd"),
        ("a\\udc00b", "a\ufffdb"),
        ("\\ud83d\\ude00", "😀"),
        ("x" * 900, "x" * 512),
    ],
)
def test_names_of_clients_can_be_shown(text: str, shown: str) -> None:
    """Lone surrogates are what Go's decoder makes of them; nobody's name fills a page."""
    session = Session(Host(), "@", "", 0.0, 0.0)
    names = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
    body = "{" + ",".join(f'"{name}":"{text}"' for name in names) + "}"
    data = bytearray(b"  V2IDENTIFY\n" + sized(body.encode()))
    session.receive(data, 0, len(data))
    described = session.describe()
    assert {described[name] for name in names} == {shown}
    json.dumps(described, ensure_ascii=False).encode()


class Window:
    """As `_native.Window`: gives out what is put into `there`, one message at a time."""

    def __init__(self) -> None:
        self.there: list[bytes] = []
        self.in_flight = 0

    def take(self, n: int, max_bytes: int, sample_rate: int) -> tuple[bytes, int] | None:
        return (self.there.pop(0), 1) if self.there else None


def subscribed(**wishes: object) -> tuple[Session, Window]:
    """A session that may have many messages, at 0 seconds."""
    session, window = Session(Host(), "@", "", 0.0, 0.0), Window()
    data = bytearray(b"  V2IDENTIFY\n" + sized(json.dumps(wishes).encode()))
    session.receive(data, 0, len(data))
    session.written()
    session.delivery.consumer = session.delivery.window = window
    session.delivery.ready = 100
    return session, window


def flushes(session: Session, window: Window, times: list[float]) -> list[float]:
    """When what comes at these times is written to the client."""
    written: list[float] = []

    def write() -> None:
        if session.flush:
            if session.output:
                written.append(round(session.now, 6))
            session.written()

    for now in times:
        while session.wake_at <= now:
            session.now = session.wake_at
            session.tick()
            write()
        session.now = now
        window.there.append(b"message")
        while session.delivery.pump(session):
            write()
        write()
    while session.output:
        session.now = session.wake_at
        session.tick()
        write()
    return written


@pytest.mark.parametrize(
    "wishes", [{}, {"output_buffer_timeout": 250}, {"output_buffer_timeout": 25}]
)
def test_a_lone_message_does_not_wait(wishes: dict[str, object]) -> None:
    assert flushes(*subscribed(**wishes), [1.0, 1.6, 2.2]) == [1.0, 1.6, 2.2]


def test_a_stream_is_gathered() -> None:
    """A message each 0.1 ms for 100 ms: its first goes at once, then 10 ms' worth each time."""
    times = [1 + number / 10_000 for number in range(1000)]
    written = flushes(*subscribed(output_buffer_size=65536), times)
    assert written == [round(1 + number / 100, 6) for number in range(11)]


def test_a_full_buffer_does_not_wait() -> None:
    times = [1 + number / 1_000_000 for number in range(1 + 2 * 10)]
    written = flushes(*subscribed(output_buffer_size=64), times)
    assert len(written) == 3  # the first, and each 10 messages of 7 bytes


def test_who_asks_for_no_timer_has_none() -> None:
    session, window = subscribed(output_buffer_timeout=-1)
    window.there.append(b"message")
    session.now = 1.0
    while session.delivery.pump(session):
        pass
    assert not session.flush
    assert session.wake_at == 30.0  # the heartbeat takes it along
