"""A session without a socket: whatever bytes come, in whatever pieces, it answers the same."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from wire import mpub, sized

from shmq.errors import Full, MessageTooBig
from shmq.gateway import protocol
from shmq.gateway.session import Session
from shmq.options import Options


class Topic:
    """Keeps what is published, in order; as `_native.Producer` for a session."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.full = 0
        self.most = 1 << 30

    def publish_framed(
        self, data: bytearray, start: int, count: int, defer: float | None, timeout: float
    ) -> int:
        if self.full:
            self.full -= 1
            raise Full("full")
        if count > self.most:
            raise MessageTooBig("too big")
        for _ in range(count):
            size = int.from_bytes(data[start : start + 4], "big")
            self.host.published.append((bytes(data[start + 4 : start + 4 + size]), defer))
            start += 4 + size
        return start


class Host:
    """What a session needs of its process, in memory."""

    def __init__(self) -> None:
        self.options = Options(max_msg_size=2000, max_body_size=5000)
        self.producers: dict[bytes, Any] = {}
        self.has_tls = self.auth_enabled = False
        self.published: list[tuple[bytes, float | None]] = []

    def open_producer(self, topic: bytes) -> Any:
        self.producers[topic] = Topic(self)
        return self.producers[topic]

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Any:
        raise protocol.ProtocolError("E_SUB_FAILED", "SUB failed here")

    def query_auth(self, session: Session, secret: bytes) -> None:
        return None

    def no_room(self) -> str:
        return ""

    def is_in_flight(self, consumer: Any, message_id: bytes) -> bool:
        return False


def drive(data: bytes, cuts: list[int], host: Host | None = None) -> SimpleNamespace:
    """What a session says to the bytes, cut at these places, and what it leaves unread."""
    host = host or Host()
    session = Session(host, "1.2.3.4:5", "1.2.3.4", 0.0, 0.0)
    held, said = bytearray(), []
    for piece in [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]:
        if session.closing or session.upgrades:
            break
        held += piece
        while True:
            start = session.receive(held, 0, len(held))
            assert 0 <= start <= len(held)
            del held[:start]
            said += session.output
            session.written()
            job = session.job
            if job is None:
                break
            result, error = None, None
            try:
                result = job.call() if job.call is not None else None
            except Exception as exc:
                error = exc
            session.done(result, error)
            said += session.output
            session.written()
        assert session.need <= 5008 + protocol.MAX_LINE
        if not session.closing and not session.upgrades and session.need:
            assert len(held) < session.need
    if not session.closing and not session.upgrades:
        session.end()
        said += session.output
    return SimpleNamespace(said=b"".join(said), published=host.published, closing=session.closing)


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
