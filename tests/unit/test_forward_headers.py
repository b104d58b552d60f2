"""Properties as headers of NATS and Kafka, and what a hostile server sends as such."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from support.hostile import EVIL, evil_in

from shmq.client.properties import unpack
from shmq.forward.headers import NoProperties, nats_lines, of_nats, packed, read
from shmq.forward.kafka import record_size


def whole(lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + lines + b"\r\n"


def test_any_properties_come_back() -> None:
    chance = random.Random(1)
    characters = "abcdefghijklmnopqrstuvwxyz0123456789._-"
    for _ in range(500):
        properties = {
            "".join(chance.choices(characters, k=chance.randrange(1, 60))): chance.randbytes(
                chance.randrange(60)
            )
            for _ in range(chance.randrange(8))
        }
        properties = {
            name: value for name, value in properties.items() if not name.startswith("shmq-")
        }
        lines = nats_lines(properties)
        assert lines.count(b"\r\n") == len(properties) == lines.count(b"\r") == lines.count(b"\n")
        assert unpack(of_nats(whole(lines))) == properties


def test_what_the_server_says_is_no_property() -> None:
    head = whole(b"Nats-Msg-Id: 1\r\nNats-Batch-Sequence:7\r\nKind:  a \r\nno colon\r\n")
    assert dict(unpack(of_nats(head))) == {"kind": b"a"}
    assert of_nats(b"") == b""


@pytest.mark.parametrize(
    "lines",
    [
        EVIL.encode("utf-8", "replace").replace(b"\r\n", b"") + b": x\r\n",
        b": x\r\n",
        b"a b: x\r\n",
        b"x" * 30_000 + b": y\r\n",
        b"x: " + b"y" * 30_000 + b"\r\n",
        b"x: y\r\n" * 2,
        b"shmq-property-: y\r\n",
        b"shmq-property-shmq-x: y\r\n",
        b"shmq-x: y\r\n",
        b"k: v\r\n" * 200_000,
    ],
    ids=lambda lines: repr(lines[:20]),
)
def test_what_is_no_property_is_refused_in_printable_words(lines: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(NoProperties) as found:
        of_nats(whole(lines))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert not evil_in(str(found.value))
    assert found.value.size > 0


def test_headers_of_kafka_have_bounds() -> None:
    assert packed([]) == b""
    assert dict(unpack(packed([("A", None), ("b", b"x")]))) == {"a": b"", "b": b"x"}
    endless = ((f"x{number}", b"y" * 100) for number in range(10**9))
    with pytest.raises(NoProperties, match="at most 4096"):
        packed(endless)
    answers = read(packed, [(), [("a b", b"")], [("a", b"x")]])
    assert answers is not None
    assert [type(each) for each in answers] == [bytes, NoProperties, bytes]
    assert read(packed, [(), ()]) is None


@pytest.mark.parametrize(
    ("length", "headers", "size"),
    [
        (1, [], 61 + 1 + 7),
        (63, [], 61 + 2 + 69),
        (64, [], 61 + 2 + 71),
        (1, [("k", b"v")], 61 + 12),
    ],
)
def test_the_size_of_a_batch_of_kafka(
    length: int, headers: list[tuple[str, bytes]], size: int
) -> None:
    """By the format of version 2: lengths are zigzag varints, of 7 bits a byte."""
    assert record_size(b"x" * length, headers) == size
