"""A session without a socket: whatever bytes come, in whatever pieces, it answers the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sessions import Host, drive
from wire import mpub, sized

from shmq.gateway import protocol
from shmq.gateway.session import Session

_WORDS = [
    b"IDENTIFY", b"SUB", b"PUB", b"MPUB", b"DPUB", b"RDY", b"FIN", b"REQ", b"TOUCH", b"CLS", b"NOP",
    b"AUTH", b"t", b"u.v-w_x", b"c#ephemeral", b"0", b"1", b"99999999999999999999", b"-1",
    b"0123456789abcdef", b"", b"\xff\xfe", b"a" * 64, b"a" * 65,
]  # fmt: skip


def some_bytes(random_: random.Random) -> bytes:
    """Commands, most of them whole, and what is none."""
    parts = [b"  V2" if random_.random() < 0.95 else random_.randbytes(4)]
    for _ in range(random_.randrange(8)):
        body = random_.randbytes(random_.choice((0, 1, 5, 30, 300)))
        bodies = [b"x" * random_.randrange(1, 20) for _ in range(random_.randrange(1, 9))]
        parts.append(
            random_.choice((
                b"NOP\n",
                b"NOP\r\n",
                b"PUB t\n" + sized(body),
                b"DPUB t 5\n" + sized(body),
                mpub(b"t", bodies, random_.choice((None, 1))),
                mpub(b"t", [*bodies, body]),
                b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"snappy":false}'),
                b"IDENTIFY\n" + sized(body),
                b"AUTH\n" + sized(body),
                b" ".join(random_.choices(_WORDS, k=random_.randrange(1, 4))) + b"\n",
                random_.randbytes(random_.randrange(40)),
                b"PUB t\n" + random_.randbytes(4),
                b"MPUB t\n" + random_.randbytes(12),
            ))
        )  # fmt: skip
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
    [(b"", 0), (b"0", 0), (b"18446744073709551617", 1), (b"9" * 9000, None), (b"-1", "no"),
     (b"+1", "no"), (b"1.0", "no"), (b" 1", "no"), ("٣".encode(), "no")],
)  # fmt: skip
def test_numbers(text: bytes, value: Any) -> None:
    found = protocol.number(text)
    if value is None:
        assert found == (10**9000 - 1) % 2**64
    else:
        assert found == (None if value == "no" else value)


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b"a", '"a"'), (b'"\\', '"\\"\\\\"'), (b"\n\t\x01\x7f", '"\\n\\t\\x01\\x7f"'),
     (b"\xff", '"\\xff"'), ("é€".encode(), '"é€"'), ("\u200b".encode(), '"\\u200b"'),
     ("\u00a0".encode(), '"\\u00a0"')],
)  # fmt: skip
def test_quoting_is_gos(raw: bytes, text: str) -> None:
    assert protocol.quoted(raw) == text


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
