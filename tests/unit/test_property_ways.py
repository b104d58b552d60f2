"""Properties keep with their message on every way it may go: back into the queue, to disk and back,
to a chunk and back, out of a backlog, through a lease, out of a damaged segment. The examples are
drawn; bodies are often such that they look like what is on disk."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_broker import SECOND, Client, World

from shmq import _native
from shmq.client import properties
from shmq.client.disk import Files
from shmq.client.lease import LeaseHolder, read_lease
from shmq.errors import LayoutMismatch
from shmq.storage.positions import pack
from shmq.storage.records import RECORD_MORE, decode_records

MAGIC = b"\xf5shmqp\x01\n"
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1, max_size=64).filter(
    lambda name: not name.startswith("shmq-")
)
PROPERTIES = st.none() | st.dictionaries(NAMES, st.binary(max_size=300), max_size=6)
ENVELOPES = st.builds(
    lambda length, rest: MAGIC + struct.pack("<I", length) + rest,
    st.integers(0, 20),
    st.binary(max_size=30),
)
BODIES = st.binary(min_size=1, max_size=200) | ENVELOPES | st.just(MAGIC)
MESSAGES = st.lists(st.tuples(BODIES, PROPERTIES), min_size=1, max_size=8)

Message = tuple[bytes, dict[str, bytes] | None]
LIMITS = {"mem_queue_size": 32, "in_flight_slots": 32, "arena_size": 1 << 20}


class Bench:
    """A world with a client, and a topic and channel for each example."""

    def __init__(self) -> None:
        self.world = World(**LIMITS)
        self.client: Client = self.world.attach()
        self.queue, self.serial = self.world.create_channel("t", "c")
        self.producer = self.client.producer("t")
        self.consumer = self.client.consumer("t", "c", max_in_flight=1000)

    def publish(self, messages: list[Message], defer: float | None = None) -> None:
        """Into the empty channel: an example that failed may have left something."""
        self.world.supervisor.empty(self.queue, self.serial)
        for body, some in messages:
            self.producer.publish(body, defer, 0, some)

    def taken(self) -> list[tuple[bytes, dict[str, bytes]]]:
        batch = self.consumer.take_many(1000, 0)
        found = [(one.body, dict(one.properties)) for one in batch]
        assert [dict(one) for one in batch.properties] == [some for _, some in found]
        batch.finish()
        return found

    def to_disk(self, source: str) -> bytes:
        """Spill all messages, to positions of file 1."""
        supervisor, start = self.world.supervisor, pack(1, 0)
        supervisor.disk_adopt(self.queue, start, start, 0, 0)
        spill = supervisor.spill_begin(self.queue, 100, 1 << 20, _native.CONSTANTS[source])
        assert spill is not None
        at = start
        for number, length in enumerate(spill.lengths):
            spill.positions[number] = at
            at += length
        records = spill.encode()
        assert len(records) == at - start
        assert spill.end(at, True)
        return records

    def from_disk(self, records: bytes) -> None:
        start = pack(1, 0)
        found = self.world.supervisor.restore(self.queue, records, start, start + len(records))
        assert found is not None
        assert found[1] == len(records)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.consumer.close()
    bench.world.close()


def expected(messages: list[Message]) -> list[tuple[bytes, dict[str, bytes]]]:
    return [(body, some or {}) for body, some in messages]


def in_front(record: bytes, some: Mapping[str, bytes] | None, body: bytes) -> None:
    """A record of nsqd has the body alone, unless there is something to put in front of it."""
    (found,) = decode_records(record, len(record))
    block = properties.pack(some)
    plain = not block and not body.startswith(MAGIC)
    envelope = MAGIC + struct.pack("<I", len(block)) + block
    assert found.body == (body if plain else envelope + body)
    assert _native.split_body(found.body) == (block, body)


@given(MESSAGES)
def test_through_memory(bench: Bench, messages: list[Message]) -> None:
    bench.publish(messages)
    batch = bench.consumer.take_many(100, 0)
    batch.requeue()
    assert bench.taken() == expected(messages)


@given(MESSAGES, st.sampled_from(["SPILL_READY", "SPILL_ALL"]))
def test_to_disk_and_back(bench: Bench, messages: list[Message], source: str) -> None:
    bench.publish(messages)
    records = bench.to_disk(source)
    cut = list(decode_records(records, len(records)))
    assert len(cut) == len(messages)
    at = 0
    for one, (body, some) in zip(cut, messages, strict=True):
        length = 30 + len(one.body)
        in_front(records[at : at + length], some, body)
        at += length
    bench.from_disk(records)
    assert bench.taken() == expected(messages)


@given(MESSAGES)
def test_to_a_chunk_and_back(bench: Bench, messages: list[Message]) -> None:
    supervisor = bench.world.supervisor
    number = bench.world.queue_view(bench.queue).read("deferred_write") + 1
    bench.publish(messages, defer=100)
    spill = supervisor.chunk_begin(bench.queue, number, 0, 100, 1 << 20)
    assert spill is not None
    records, dues = spill.encode(), spill.positions.tobytes()
    assert spill.end(0, True)
    assert supervisor.chunk_load(bench.queue, records, dues, number << 24) == len(messages)
    later = _native.realtime() + 200 * SECOND
    assert supervisor.expire(bench.queue, realtime=later)[1] == len(messages)
    assert bench.taken() == expected(messages)


@given(MESSAGES)
def test_through_a_lease(bench: Bench, messages: list[Message]) -> None:
    world = bench.world
    bench.publish(messages)

    def files() -> Files:
        return Files(world.queue_view(bench.queue), "", 1 << 20)

    native = bench.client.native
    holder = LeaseHolder(native, bench.queue, bench.serial, "t", "c", "me", 0, 0, False, files)
    lease = holder.lease(100, parts=3)
    assert lease is not None
    assert lease.bytes == sum(len(body) for body, _ in messages)
    found = []
    for part in range(lease.parts):
        plain = holder.read_lease(lease.id, part, rows=2)
        for batch, bare in zip(
            read_lease(
                native, bench.queue, bench.serial, lease.id, part, files, rows=2, properties=True
            ),
            plain,
            strict=True,
        ):
            found += list(zip(batch.bodies(), map(dict, batch.properties), strict=True))
            assert bare.bodies() == batch.bodies()
            with pytest.raises(ValueError, match="properties=True"):
                bare.properties  # noqa: B018
    assert found == expected(messages)
    holder.return_lease(lease.id)
    holder.close()
    assert bench.taken() == expected(messages)


@settings(max_examples=30)
@given(messages=MESSAGES)
def test_out_of_a_backlog(messages: list[Message]) -> None:
    with World(**LIMITS) as world:
        index, generation = world.create_topic("t")
        client = world.attach()
        producer = client.producer("t")
        for body, some in messages:
            producer.publish(body, None, 0, some)
        world.create_queue("t", "a")
        world.create_queue("t", "b")
        assert world.supervisor.pump(index, generation, 100) == len(messages)
        for channel in "ab":
            consumer = client.consumer("t", channel)
            batch = consumer.take_many(100, 0)
            assert [(one.body, dict(one.properties)) for one in batch] == expected(messages)
            batch.finish()
            consumer.close()


@given(MESSAGES)
def test_the_bytes_of_a_slot_are_enough(bench: Bench, messages: list[Message]) -> None:
    """As when the messages of a damaged segment are saved."""
    bench.publish(messages)
    view = bench.world.queue_view(bench.queue)
    for index, (body, some) in zip(view.ready.tolist(), messages, strict=True):
        slot = view.slots[index]
        at, length = int(slot["body"]), int(slot["length"])
        content = view.arena[at : at + length].tobytes()
        assert content == properties.pack(some) + body
        in_front(_native.encode_slot(slot.tobytes(), content, "t", None), some, body)
    assert bench.taken() == expected(messages)


@given(BODIES, st.binary(max_size=60))
def test_a_body_of_a_real_nsqd_stays_a_body_unless_it_is_an_envelope(
    body: bytes, more: bytes
) -> None:
    """Separating never loses a byte: what it separates, put together again, is what there was."""
    block, rest = _native.split_body(body + more)
    if (block, rest) == (b"", body + more):
        return
    assert (body + more).startswith(MAGIC)
    assert (body + more)[12:].startswith(block)
    assert (body + more).endswith(rest)


def test_overwritten_properties_harm_nobody(bench: Bench) -> None:
    """A reader gets a mapping or an error that says so, whatever stands in the shared memory."""
    some: dict[str, str | bytes] = {"key": "1234567890", "other": "x" * 50}
    chance, refused = random.Random(5), 0
    for _ in range(200):
        bench.producer.publish(b"body", properties=some)
        message = bench.consumer.take(0)
        assert message is not None
        assert message.properties["key"] == b"1234567890"
        message.finish()
        block = bytearray(properties.pack(some))
        for _ in range(3):
            block[chance.randrange(len(block))] = chance.randrange(256)
        try:
            found = properties.unpack(bytes(block))
        except LayoutMismatch:
            refused += 1
        else:
            assert sum(len(name) + len(value) + 3 for name, value in found.items()) <= len(block)
    assert 0 < refused < 200


def test_the_numbers_of_python_are_those_of_the_core() -> None:
    assert _native.CONSTANTS["RECORD_MORE"] == RECORD_MORE
    assert len(MAGIC) + 4 == _native.CONSTANTS["ENVELOPE"]
    text = (Path(__file__).parents[2] / "docs" / "on-disk.md").read_text()
    assert "f5 73 68 6d 71 70 01 0a" in text
