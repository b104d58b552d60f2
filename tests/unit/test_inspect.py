"""shmq inspect on files and segments made here: what it shows, what it calls damaged, and that no
bytes whatever bring it down."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_segments import FakeDirectory, FakeQueue

from shmq import layout
from shmq.cli.inspect import _document, _print
from shmq.diagnostics import disk_files, inspect, segment
from shmq.diagnostics.findings import Report
from shmq.errors import ShmqError
from shmq.layout import Ready, State
from shmq.storage import deferred, metadata
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import pack
from shmq.storage.records import encode_records, scan_records

_FIXTURE_IS_FINE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def report_on(path: Path, data: bytes | None = None, count: int = 10) -> Report:
    """The findings of inspect in a file, after printing them in both formats."""
    if data is not None:
        path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        report = inspect.report_on(path, fd, count)
    finally:
        os.close(fd)
    json.dumps(_document(path, report), allow_nan=False)
    _print(path, report)
    return report


def damage(report: Report) -> list[tuple[int | None, str]]:
    return [(item.offset, item.text) for item in report.damage]


def records(*bodies: bytes, first: int = 1) -> bytes:
    count = len(bodies)
    numbers = range(first, first + count)
    return encode_records([10**18 + n for n in numbers], [1] * count, list(numbers), bodies)


# ---- records ----


def test_records_are_counted_and_shown(tmp_path: Path) -> None:
    report = report_on(tmp_path / "t.diskqueue.000000.dat", records(b"one", b"\xff", b"three"), 2)
    assert report.damage == []
    assert report.facts["records"] == 3
    assert report.facts["body bytes"] == 9
    assert report.facts["attempts"] == {"1": 3}
    assert [row[0] for row in report.tables["records"].rows] == [0, 33]


def test_a_record_longer_than_a_block_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_files, "_BLOCK", 64)
    data = records(b"a" * 10, b"b" * 1000, b"c" * 20)
    report = report_on(tmp_path / "t.diskqueue.000000.dat", data)
    assert report.damage == []
    assert (report.facts["records"], report.facts["body bytes"]) == (3, 1030)
    assert [row[4] for row in report.tables["records"].rows] == [10, 1000, 20]


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_a_bad_length_is_named_and_what_follows_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(disk_files, "_BLOCK", block)
    good, middle, after = records(b"one"), records(b"middle"), records(b"x", b"y", first=9)
    broken = struct.pack(">i", 7) + middle[4:]
    report = report_on(tmp_path / "t.diskqueue.000000.dat.bad", good + broken + after)
    ((offset, text),) = damage(report)
    assert offset == len(good)
    assert "length 7" in text
    assert f"at {len(good + broken)}" in text
    assert report.facts["records"] == 3


def test_an_id_that_is_none_and_a_cut_off_end_are_damage(tmp_path: Path) -> None:
    data = records(b"one", b"two")
    bad_id = data[:14] + b"Z" + data[15:]
    ((offset, text),) = damage(report_on(tmp_path / "t.diskqueue.000000.dat", bad_id))
    assert offset == 0
    assert "16 hex digits" in text
    assert "at 33" in text
    ((offset, text),) = damage(report_on(tmp_path / "t.diskqueue.000000.dat", data[:-1]))
    assert offset == 33
    assert "where 32 are left" in text
    ((offset, text),) = damage(report_on(tmp_path / "t.diskqueue.000000.dat", data[:40]))
    assert offset == 33
    assert "7 bytes at the end" in text


def test_what_the_disk_queue_writes_is_never_damaged(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path, "t:c")
    data = records(*[bytes([n]) * n for n in range(1, 50)])
    scan = scan_records(data, 1 << 20)
    positions = queue.plan(0, scan.lengths)
    queue.write(data, positions[:-1], scan.lengths, write_position=0)
    queue.sync(49, 0, int(positions[-1]))
    queue.close()
    metadata.store(tmp_path, [metadata.TopicMeta("t", True, (metadata.ChannelMeta("c"),))])
    metadata.store_reserve(tmp_path, 12345)
    for path in tmp_path.iterdir():
        assert report_on(path).damage == []


# ---- positions ----


def test_positions_beside_their_files(tmp_path: Path) -> None:
    (tmp_path / "t.diskqueue.000001.dat").write_bytes(records(b"one", b"two"))
    meta = tmp_path / "t.diskqueue.meta.dat"
    assert report_on(meta, b"2\n1,0\n1,66\n").damage == []
    assert "not stop cleanly" in report_on(meta, b"1\n1,0\n1,33\n").notes[0]
    assert "has 66 bytes" in damage(report_on(meta, b"3\n1,0\n1,99\n"))[0][1]
    assert "is missing" in damage(report_on(meta, b"3\n0,5\n1,66\n"))[0][1]


@pytest.mark.parametrize(
    ("text", "offset", "what"),
    [
        (b"", 0, "depth"),
        (b"x\n", 0, "depth"),
        (b"1\n0;0\n", 2, "depth"),
        (b"1\n0,0\n0,", 6, "depth"),
        (b"1\n5,0\n4,0\n", 2, "beyond"),
        (b"3\n5,9\n5,9\n", 0, "all was read"),
        (b"-3\n5,9\n5,9\n", 0, "negative"),
        (b"1\n0,0\n0,9999999999999\n", 8, "larger than any file"),
    ],
)
def test_positions_that_cannot_be(tmp_path: Path, text: bytes, offset: int, what: str) -> None:
    found = damage(report_on(tmp_path / "t.diskqueue.meta.dat", text))
    assert (offset, True) in [(at, what in words) for at, words in found]


# ---- deferred messages ----


def chunk(*bodies: bytes, first: int = 0) -> bytes:
    return deferred.encode(
        [(10**18 + n, records(body, first=n + 1)) for n, body in enumerate(bodies)], first
    )


def test_a_chunk_of_deferred_messages(tmp_path: Path) -> None:
    report = report_on(tmp_path / "t:c.deferred.000001.1.dat", chunk(b"one", b"\xff", b"three"), 2)
    assert damage(report) == []
    assert (report.facts["messages"], report.facts["in memory again"]) == (3, 1)
    assert [row[4] for row in report.tables["deferred"].rows] == [3, 1]
    assert report_on(tmp_path / "copy", chunk(b"one")).kind == "deferred messages"


def test_a_damaged_chunk_shows_what_is_intact(tmp_path: Path) -> None:
    path = tmp_path / "t.deferred.000001.dat"
    data = bytearray(chunk(b"one", b"two", b"three"))
    second = len(chunk(b"one")) - 4
    data[second + 20] ^= 1
    report = report_on(path, bytes(data))
    assert report.facts["messages"] == 2
    assert [offset for offset, _ in damage(report)] == [second]
    assert damage(report_on(path, bytes(data[:10])))[0][0] == 0
    assert damage(report_on(path, b"nothing of the kind " * 10))[0][0] == 0


# ---- metadata ----


def test_names_that_are_left_out_are_shown(tmp_path: Path) -> None:
    text = (
        b'{"topics":[{"name":"a","paused":true,"channels":[{"name":"c","paused":false},7]},'
        b'{"name":"no good"},{"name":"a"}],"version":"1.3.0"}'
    )
    report = report_on(tmp_path / "nsqd.dat", text)
    assert ["a", "c", False] in report.tables["topics"].rows
    texts = " ".join(words for _, words in damage(report))
    assert "'no good'" in texts
    assert "no objects" in texts
    assert report.notes == ["topic 'a' is there twice"]


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        (b"", 0),
        (b'{"topics":', 10),
        ('{"ü":1,}'.encode(), None),
        (b'{"a":"\xff"}', 6),
        (b"[1]", 0),
        (b"[" * 100_000, None),
        (b'{"topics":7}', None),
        (rb'{"topics":[{"name":"\ud800\u001b[31m"}],"version":NaN}', None),
    ],
)
def test_metadata_that_is_no_json_object(tmp_path: Path, text: bytes, offset: int | None) -> None:
    found = damage(report_on(tmp_path / "nsqd.dat", text))
    assert found
    assert offset is None or found[0][0] == offset


def test_a_reserve_that_is_no_count(tmp_path: Path) -> None:
    assert report_on(tmp_path / "shmq.dat", b'{"id_clock":5}').damage == []
    assert damage(report_on(tmp_path / "shmq.dat", b'{"id_clock":-5}'))
    assert damage(report_on(tmp_path / "shmq.dat", b'{"id_clock":1e999}'))


# ---- by content ----


def test_files_of_any_name_are_known_by_how_they_begin(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert report_on(copy, records(b"one")).kind == "records of a disk queue"
    assert report_on(copy, b"0\n0,0\n0,0\n").kind == "positions of a disk queue"
    assert report_on(copy, b'{"topics":null}').kind == "topics and channels"
    assert report_on(copy, b'{"id_clock":5}').kind == "reserve of message ids"
    assert report_on(copy, bytes(FakeQueue().buffer)).kind == "queue segment"
    for strange in (b"", b"hello", b"\0" * 100):
        with pytest.raises(ShmqError, match="by its name and its first bytes"):
            report_on(copy, strange)


# ---- segments ----


def full_queue() -> FakeQueue:
    queue = FakeQueue(slots=16)
    ready = [queue.message(State.READY) for _ in range(4)]
    held = [queue.message(State.IN_FLIGHT, deadline=n) for n in range(3)]
    queue.ring("ready", ready)
    queue.heap("in_flight", [(n, slot) for n, slot in enumerate(held)])
    queue.ring("free", list(range(7, 16)))
    queue.header["base"] = b"t:c"
    queue.header["segment"]["boot_id"] = segment.boot_id()
    return queue


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return tmp_path / "image"


def test_a_whole_queue(image: Path) -> None:
    report = report_on(image, bytes(full_queue().buffer))
    assert damage(report) == []
    assert report.notes == []
    assert ["READY", 4, 16] in report.tables["slots"].rows
    assert len(report.tables["messages"].rows) == 7


def test_damaged_queues(image: Path) -> None:
    def found(change: Any) -> list[tuple[int | None, str]]:
        queue = full_queue()
        change(queue)
        return damage(report_on(image, bytes(queue.buffer)))

    fields = layout.dtype("queue").fields
    assert fields is not None

    def at(name: str) -> int:
        return int(fields[name][1])

    def ring_entry(queue: FakeQueue) -> None:
        queue.rings["ready"][1] = 99

    place = int(full_queue().header["ready_at"]) + 4
    assert found(ring_entry) == [(place, "ready ring: 99 is no slot")]

    def twice(queue: FakeQueue) -> None:
        queue.rings["ready"][1] = queue.rings["ready"][0]

    assert (place, "ready ring: slot 0 is there twice") in found(twice)

    def wrong_state(queue: FakeQueue) -> None:
        queue.slots["word"][1] = int(State.PINNED)

    assert found(wrong_state) == [(place, "ready ring: slot 1 is PINNED and not READY")]

    def dirty(queue: FakeQueue) -> None:
        wrong_state(queue)
        queue.header["dirty"] = 1

    assert found(dirty) == []  # rings are rebuilt from the slots

    def no_state(queue: FakeQueue) -> None:
        queue.slots["word"][15] = 77

    offset = int(full_queue().header["slots_at"]) + 15 * layout.dtype("slot").itemsize
    assert (offset, "slot 15 has state 77, which does not exist") in found(no_state)

    def far_body(queue: FakeQueue) -> None:
        queue.slots["body"][2] = (1 << 64) - 1

    assert "outside of the 1024 bytes" in found(far_body)[0][1]

    def heap_order(queue: FakeQueue) -> None:
        queue.heaps["in_flight"][0][0] = 50

    assert "earlier than its parent" in found(heap_order)[0][1]

    def positions(queue: FakeQueue) -> None:
        queue.header["disk_read"], queue.header["disk_write"] = pack(3, 0), pack(2, 0)

    assert found(positions) == [(at("disk_read"), "the read position is beyond the write position")]

    def region(queue: FakeQueue) -> None:
        queue.header["arena_at"] = 1 << 60

    assert found(region)[0][0] == at("arena_at")

    def base(queue: FakeQueue) -> None:
        queue.header["base"] = b"no good"

    assert found(base)[0][0] == at("base")


def test_segments_that_are_not_ready_or_not_ours(image: Path) -> None:
    queue = full_queue()
    queue.header["segment"]["ready"] = Ready.RAW
    assert "not finished" in damage(report_on(image, bytes(queue.buffer)))[0][1]
    queue.header["segment"]["ready"] = 9
    assert "state 9 does not exist" in damage(report_on(image, bytes(queue.buffer)))[0][1]
    queue.header["segment"]["ready"] = Ready.CLOSED
    assert "closed" in report_on(image, bytes(queue.buffer)).notes[0]

    queue = full_queue()
    queue.header["segment"]["layout_version"] = 99
    report = report_on(image, bytes(queue.buffer))
    assert report.damage == []
    assert "layout version 99" in report.notes[0]
    queue = full_queue()
    queue.header["segment"]["boot_id"] = (1, 2)
    assert "before the last boot" in report_on(image, bytes(queue.buffer)).notes[0]
    assert damage(report_on(image, bytes(full_queue().buffer[:-1])))[0][1].startswith("says ")
    assert damage(report_on(image, bytes(full_queue().buffer[:200])))
    assert damage(report_on(image, bytes(full_queue().buffer[:100])))[0][0] == 0


def test_a_directory_and_its_damages(image: Path) -> None:
    def made() -> FakeDirectory:
        directory = FakeDirectory()
        directory.topic(0, "t", messages=3)
        directory.queue(0, 0, "c", 5)
        directory.queue(1, 0, None, 6)
        directory.header["next_serial"] = 7
        return directory

    report = report_on(image, bytes(made().buffer))
    assert damage(report) == []
    assert report.tables["queues"].rows == [[0, 5, "t", "c"], [1, 6, "t", ""]]

    directory = made()
    directory.topics["name"][0] = b"no good"
    directory.queues["topic"][1] = 3
    directory.queues["serial"][1] = 5
    directory.clients["state"][2] = 8
    directory.header["topics_committed"] = 1 << 20
    texts = " | ".join(text for _, text in damage(report_on(image, bytes(directory.buffer))))
    for words in (
        "'no good'",
        "of topic 3",
        "serial 5 of 0",
        "client 2 has state 8",
        "topics_committed is 1048576",
    ):
        assert words in texts


# ---- whatever the bytes are ----

_NAMES = [
    "nsqd.dat",
    "shmq.dat",
    "t.diskqueue.meta.dat",
    "t.diskqueue.000000.dat",
    "t.deferred.000001.dat",
    "image",
]


@_FIXTURE_IS_FINE
@given(name=st.sampled_from(_NAMES), data=st.binary(max_size=400))
def test_garbage_is_reported_and_no_more(tmp_path: Path, name: str, data: bytes) -> None:
    try:
        report_on(tmp_path / name, data)
    except ShmqError:
        if name != "image":  # the others are known by their names
            raise


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["topics", "channels", "name", "paused", "version", "id_clock"]), inner
        )
    ),
    max_leaves=12,
)


@_FIXTURE_IS_FINE
@given(name=st.sampled_from(_NAMES[:2]), document=_JSON)
def test_json_of_any_shape_is_reported_and_no_more(
    tmp_path: Path, name: str, document: Any
) -> None:
    report_on(tmp_path / name, json.dumps(document).encode())


_CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)))


@_FIXTURE_IS_FINE
@given(changes=_CHANGES, cut=st.floats(0, 1))
def test_records_with_bytes_changed_are_walked_to_the_end(
    tmp_path: Path, changes: list[tuple[float, bytes]], cut: float
) -> None:
    data = bytearray(records(*[b"body" * n for n in range(1, 20)]))
    for place, new in changes:
        at = int(place * len(data))
        data[at : at + len(new)] = new
    whole = int(len(data) * (1 - cut / 4))
    report = report_on(tmp_path / "t.diskqueue.000000.dat", bytes(data[:whole]))
    assert all(0 <= (item.offset or 0) <= whole for item in report.damage)


@_FIXTURE_IS_FINE
@given(changes=_CHANGES, cut=st.floats(0, 1))
def test_chunks_with_bytes_changed_are_reported_and_no_more(
    tmp_path: Path, changes: list[tuple[float, bytes]], cut: float
) -> None:
    data = bytearray(chunk(*[b"body" * n for n in range(1, 9)]))
    for place, new in changes:
        at = int(place * len(data))
        data[at : at + len(new)] = new
    report_on(tmp_path / "t.deferred.000002.dat", bytes(data[: int(len(data) * (1 - cut / 4))]))


@_FIXTURE_IS_FINE
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 14), st.binary(min_size=1, max_size=8)), min_size=1
    )
)
def test_segments_with_bytes_changed_are_looked_through(
    tmp_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    queue = full_queue()
    for at, new in changes:
        at = min(at, len(queue.buffer) - len(new))
        queue.buffer[at : at + len(new)] = new
    before, segment._BETWEEN = segment._BETWEEN, 0.0  # between the looks at what seems damaged
    try:
        report_on(tmp_path / "image", bytes(queue.buffer))
    except ShmqError:
        if all(at >= 8 for at, _ in changes):  # the magic number is still there
            raise
    finally:
        segment._BETWEEN = before
