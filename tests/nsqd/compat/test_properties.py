"""A real nsqd and messages that have properties, and shmq and bodies that look like them.
docs/nsqd.md has the table that these tests show."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from nsqd.compat.handover import FILE, ON_DISK, complaints, files, stop
from support.deliveries import Delivered, take_all
from support.processes import WATCHDOG, Child
from support.real_nsqd import Nsqd

import shmq
from shmq.client import properties

pytestmark = pytest.mark.peers

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]
Start = Callable[..., Nsqd]

MAGIC = b"\xf5shmqp\x01\n"
SOME = {"key": "17", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
BLOCK = properties.pack(SOME)
MOST = 1 << 20  # --max-msg-size of both


def envelope(block: bytes) -> bytes:
    return MAGIC + struct.pack("<I", len(block)) + block


def left_by_shmq(
    serve: Serve, attach: Attach, messages: list[tuple[bytes, dict[str, str] | None]]
) -> list[str]:
    """Publish these to t/c, and leave them on disk. Returns their ids."""
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    ids = [producer.publish(body, properties=some) for body, some in messages]
    stop(server)
    return ids


def properties_of(broker: shmq.Broker, count: int) -> list[tuple[bytes, dict[str, bytes]]]:
    with broker.consumer("t", "c") as consumer:
        found = []
        while len(found) < count:
            message = consumer.take(timeout=WATCHDOG)
            assert message is not None
            found.append((message.body, dict(message.properties)))
            message.finish()
        assert consumer.take(0) is None
    return found


def test_nsqd_delivers_the_envelope_with_the_body(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    """A message without properties is the same to it; it keeps id, timestamp and order of all."""
    messages = [(b"plain", None), (b"with", SOME), (MAGIC + b"odd", None), (b"last", None)]
    ids = left_by_shmq(serve, attach, messages)
    peer = nsqd(**ON_DISK)
    came = peer.take_all("t", "c")
    assert came.ids == ids
    assert came.bodies == [
        b"plain",
        envelope(BLOCK) + b"with",
        envelope(b"") + MAGIC + b"odd",
        b"last",
    ]
    assert came.attempts == [1] * 4
    assert came.timestamps == sorted(came.timestamps)
    peer.stop()
    assert complaints(peer, "t:c") == []
    assert files(data_path, "t:c").bad == []


def test_properties_survive_an_nsqd_in_between(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    """nsqd reads them, requeues one, writes them again at its end; shmq finds them all."""
    messages = [(b"plain", None), (b"with", SOME), (MAGIC + b"odd", None), (b"too", SOME)]
    left_by_shmq(serve, attach, messages)
    peer = nsqd(mem_queue_size=1000, max_bytes_per_file=FILE)  # it reads them into its memory
    taken = peer.take("t", "c", 1)
    assert taken.bodies == [b"plain"]
    peer.stop()
    assert complaints(peer, "t:c") == []
    serve()
    broker = attach()
    found = properties_of(broker, 3)
    read = {name: value.encode() for name, value in SOME.items()}
    assert sorted(found, key=lambda one: one[0]) == sorted(
        [(b"with", read), (MAGIC + b"odd", {}), (b"too", read)], key=lambda one: one[0]
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"plain", (b"plain", {})),
        (MAGIC, (MAGIC, {})),
        (MAGIC + b"\xff\xff\xff\xff rest", (MAGIC + b"\xff\xff\xff\xff rest", {})),
        (MAGIC + b"\x03\x00\x00\x00\x01K\x00rest", (MAGIC + b"\x03\x00\x00\x00\x01K\x00rest", {})),
        (envelope(b"") + b"rest", (b"rest", {})),
        (envelope(b"\x01k\x01\x00v") + b"rest", (b"rest", {"k": b"v"})),
    ],
    ids=["plain", "magic", "too-long", "no-name", "escaped", "whole"],
)
def test_a_body_of_nsqd_is_a_body_unless_it_is_a_whole_envelope(
    serve: Serve,
    attach: Attach,
    nsqd: Start,
    body: bytes,
    expected: tuple[bytes, dict[str, bytes]],
) -> None:
    peer = nsqd(**ON_DISK)
    peer.post("/topic/create?topic=t")
    peer.post("/channel/create?topic=t&channel=c")
    peer.publish("t", [body, b"after"])
    peer.stop()
    serve()
    assert properties_of(attach(), 2) == [expected, (b"after", {})]


def test_the_longest_message_with_properties_fits_an_nsqd_with_the_same_limit(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    body = b"l" * (MOST - len(BLOCK) - 12)
    left_by_shmq(serve, attach, [(body, SOME), (b"after", None)])
    peer = nsqd(**ON_DISK)
    assert peer.take_all("t", "c").bodies == [envelope(BLOCK) + body, b"after"]
    peer.stop()
    assert complaints(peer, "t:c") == []
    assert files(data_path, "t:c").bad == []


def test_nsqd_leaves_deferred_messages_with_properties_alone(
    serve: Serve, attach: Attach, nsqd: Start
) -> None:
    server = serve()
    broker = attach()
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"late", defer=2.0, properties=SOME)
    stop(server)
    peer = nsqd(**ON_DISK)
    assert peer.take_all("t", "c").bodies == []
    peer.stop()
    serve()
    assert properties_of(attach(), 1) == [
        (b"late", {name: value.encode() for name, value in SOME.items()})
    ]


def test_files_of_messages_without_properties_are_byte_for_byte_nsqds(
    serve: Serve, attach: Attach, data_path: Path
) -> None:
    bodies = [b"a", b"\xf5shmq", b"b" * 5000]
    ids = left_by_shmq(serve, attach, [(body, None) for body in bodies])
    (number,) = files(data_path, "t:c").numbers
    data = (data_path / f"t:c.diskqueue.{number:06d}.dat").read_bytes()
    at = 0
    for body, number_of in zip(bodies, ids, strict=True):
        length, _, attempts, name = struct.unpack_from(">iqH16s", data, at)
        assert (length, attempts, name) == (26 + len(body), 0, number_of.encode())
        assert data[at + 30 : at + 4 + length] == body
        at += 4 + length
    assert at == len(data)
    serve()
    assert take_all(attach(), "t", "c").bodies == Delivered(bodies=bodies).bodies
