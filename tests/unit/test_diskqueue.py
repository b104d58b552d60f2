"""Segment files and position files: nsqd's bytes, nsqd's rules, and nothing good lost."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmq.storage import StorageError
from shmq.storage.diskqueue import (
    LAST_FILE,
    MAX_FILE,
    MAX_OFFSET,
    RECORD_OVERHEAD,
    DamagedFile,
    DiskQueue,
    Meta,
    QueueFiles,
    Record,
    decode_records,
    encode_records,
    existing,
    pack,
    remove_temporary,
    scan_records,
    unpack,
)

# written by nsqd 1.3.0: attempts 0, body x3
GOLDEN = bytes.fromhex("0000001c18e9c568cf6dc7a8000031386131663236326139613639303031") + b"x3"
GOLDEN_RECORD = Record(0x18E9C568CF6DC7A8, 0, b"18a1f262a9a69001", b"x3")

LIMIT = 1000  # max_msg_size of these tests


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DiskQueue]:
    with DiskQueue(tmp_path, "t:c", max_bytes_per_file=200, max_msg_size=LIMIT) as it:
        yield it


def records_of(bodies: list[bytes], first: int = 0) -> tuple[bytes, list[int]]:
    numbers = range(first, first + len(bodies))
    data = encode_records([1000 + n for n in numbers], [1] * len(bodies), list(numbers), bodies)
    return data, [RECORD_OVERHEAD + len(body) for body in bodies]


def put(queue: DiskQueue, position: int, bodies: list[bytes]) -> int:
    """Write bodies from a write position on; returns the new one."""
    data, lengths = records_of(bodies)
    positions = queue.plan(position, lengths)
    queue.write(data, positions, lengths, write_position=position)
    return int(positions[-1])


def take_all(
    queue: DiskQueue, read: int, write: int, max_bytes: int = 1 << 20
) -> tuple[list[bytes], list[DamagedFile]]:
    """Read to the end as the supervisor does, setting damaged files aside."""
    bodies: list[bytes] = []
    damages: list[DamagedFile] = []
    while True:
        try:
            chunk = queue.read(read, write, max_bytes)
        except DamagedFile as damage:
            damages.append(damage)
            queue.set_aside(damage.file)
            read = damage.next_position
            write = max(read, write)
            continue
        read = chunk.next_position
        queue.drop_before(read)
        if not chunk.count:
            assert read == write
            return bodies, damages
        bodies += [record.body for record in decode_records(chunk.data, queue.max_msg_size)]


def bodies_of(sizes: list[int]) -> list[bytes]:
    return [bytes([65 + i % 26]) * size for i, size in enumerate(sizes)]


# -- positions and records


def test_positions_are_one_word() -> None:
    assert pack(0, 373) == 373
    assert pack(1, 0) == 1 << 40
    assert unpack(pack(MAX_FILE, MAX_OFFSET)) == (MAX_FILE, MAX_OFFSET)
    assert pack(MAX_FILE, MAX_OFFSET) == (1 << 64) - 1
    assert unpack(np.uint64(pack(3, 7))) == (3, 7)  # type: ignore[arg-type]
    for file, offset in [(MAX_FILE + 1, 0), (0, MAX_OFFSET + 1), (-1, 0), (0, -1)]:
        with pytest.raises(OverflowError):
            pack(file, offset)


def test_record_is_nsqds_byte_for_byte() -> None:
    record = GOLDEN_RECORD
    for ident in (record.id, int(record.id, 16)):
        encoded = encode_records([record.timestamp], [record.attempts], [ident], [record.body])
        assert encoded == GOLDEN
    assert list(decode_records(GOLDEN, LIMIT)) == [record]


def test_encoding_refuses_ids_that_are_none_and_columns_that_differ() -> None:
    for ident in (b"short", 1 << 64):
        with pytest.raises(ValueError):
            encode_records([1], [1], [ident], [b""])
    with pytest.raises(ValueError):
        encode_records([1, 2], [1], [1], [b""])
    assert encode_records([1], [65537], [1], [b""])[12:14] == b"\0\1"


@given(
    st.lists(
        st.builds(
            Record,
            st.integers(-(1 << 63), (1 << 63) - 1),
            st.integers(0, 65535),
            st.integers(0, (1 << 64) - 1).map(lambda n: b"%016x" % n),
            st.binary(max_size=40),
        )
    )
)
def test_what_is_encoded_is_decoded(records: list[Record]) -> None:
    columns = [[record[i] for record in records] for i in range(4)]
    data = encode_records(*columns)  # type: ignore[arg-type]
    assert list(decode_records(data, LIMIT)) == records
    scan = scan_records(data, LIMIT)
    assert scan.used == len(data)
    assert scan.stop == "end"


def test_scan_stops_at_every_truncation_and_says_so() -> None:
    data, lengths = records_of(bodies_of([0, 5, 12]))
    ends = np.cumsum([0, *lengths])
    for size in range(len(data) + 1):
        scan = scan_records(data[:size], LIMIT)
        whole = int(np.searchsorted(ends, size, side="right")) - 1
        assert scan.lengths.tolist() == lengths[:whole]
        assert scan.offsets.tolist() == ends[:whole].tolist()
        assert scan.used == ends[whole]
        assert scan.stop == ("end" if size == ends[whole] else "truncated")


@pytest.mark.parametrize("length", [0, 25, -1, LIMIT + 27, 0x7FFFFFFF, -(1 << 31)])
def test_scan_stops_at_an_impossible_length(length: int) -> None:
    data, lengths = records_of(bodies_of([3, 4]))
    scan = scan_records(data + struct.pack(">i", length) + bytes(100), LIMIT)
    assert (scan.lengths.tolist(), scan.used, scan.stop) == (lengths, len(data), "length")


def test_scan_accepts_the_shortest_and_the_longest_record() -> None:
    data, lengths = records_of(bodies_of([0, LIMIT]))
    assert scan_records(memoryview(data), LIMIT).lengths.tolist() == lengths
    assert scan_records(b"", LIMIT).stop == "end"


# -- planning and writing


def plan_like_nsqd(position: int, lengths: list[int], limit: int) -> list[int]:
    """go-diskqueue's writeOne, one record after the other."""
    file, offset = unpack(position)
    words = []
    for length in lengths:
        if offset > 0 and offset + length > limit:
            file, offset = file + 1, 0
        words.append(pack(file, offset))
        offset += length
    return [*words, pack(file, offset)]


@given(
    st.lists(st.integers(30, 300), max_size=60),
    st.integers(0, 5),
    st.integers(0, 250),
    st.integers(1, 300),
)
def test_plan_rolls_as_nsqd_does(
    lengths: list[int], file: int, offset: int, max_bytes: int
) -> None:
    queue = DiskQueue("/none", "t", max_bytes_per_file=max_bytes, max_msg_size=LIMIT)
    position = pack(file, offset)
    planned = queue.plan(position, lengths)
    assert planned.dtype == np.uint64
    assert planned.tolist() == plan_like_nsqd(position, lengths, max_bytes)


def test_plan_refuses_impossible_records_and_runs_out_of_files() -> None:
    queue = DiskQueue("/none", "t", max_bytes_per_file=100, max_msg_size=LIMIT)
    for length in (29, RECORD_OVERHEAD + LIMIT + 1):
        with pytest.raises(ValueError):
            queue.plan(0, [length])
    assert queue.plan(pack(LAST_FILE, 0), [50, 50]).tolist()[-1] == pack(LAST_FILE, 100)
    with pytest.raises(StorageError):
        queue.plan(pack(LAST_FILE, 0), [50, 51])


def test_records_lie_where_planned_and_files_are_private(queue: DiskQueue, tmp_path: Path) -> None:
    position = put(queue, 0, bodies_of([70, 70, 10, 70, 300, 10]))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {
        "t:c.diskqueue.000000.dat": 200,
        "t:c.diskqueue.000001.dat": 140,
        "t:c.diskqueue.000002.dat": 330,
        "t:c.diskqueue.000003.dat": 40,
    }
    assert position == pack(3, 40)
    assert all(path.stat().st_mode & 0o7777 == 0o600 for path in tmp_path.iterdir())


def test_write_goes_to_the_position_and_never_truncates(queue: DiskQueue) -> None:
    queue.file_path(0).write_bytes(b"#" * 150)
    data, lengths = records_of([b"x"])
    queue.write(data, queue.plan(50, lengths), lengths)
    assert queue.file_path(0).read_bytes() == b"#" * 50 + data + b"#" * (100 - len(data))


def test_short_writes_are_continued(queue: DiskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    bodies = bodies_of([10, 90, 100, 3])
    write = put(queue, 0, bodies)
    assert take_all(queue, 0, write) == (bodies, [])


def test_full_disk_is_the_plain_error_with_the_file_and_gives_the_bytes_back(
    queue: DiskQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = bodies_of([60, 60])
    write = put(queue, 0, bodies)
    left, pwrite = 250, os.pwrite

    def filling(fd: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = pwrite(fd, data[:left], offset)
        left -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", filling)
        with pytest.raises(OSError, match="No space") as caught:
            put(queue, write, bodies_of([50] * 12))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(queue.file_path(2))
    assert [path.name for path in tmp_path.iterdir()] == [queue.file_name(0)]
    assert queue.file_path(0).stat().st_size == 180
    write = put(queue, write, [b"later"])
    assert take_all(queue, 0, write) == ([*bodies, b"later"], [])


def test_what_an_abandoned_batch_left_is_cut_when_the_file_is_complete(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"a" * 40])
    put(queue, write, [b"abandoned" * 4])  # the position is not stored
    write = put(queue, write, [b"b" * 150])  # rolls: file 0 now ends at its first record
    assert unpack(write)[0] == 1
    assert queue.file_path(0).stat().st_size == 70
    assert take_all(queue, 0, write) == ([b"a" * 40, b"b" * 150], [])


def test_arguments_that_do_not_agree_are_refused(queue: DiskQueue, tmp_path: Path) -> None:
    data, lengths = records_of(bodies_of([10, 10]))
    good = queue.plan(0, lengths)
    for buffer, words, sizes in [
        (data[:-1], good, lengths),
        (data, good, lengths[:1]),
        (data, good[:1], lengths),
        (data, good + np.array([0, 1, 1], dtype=np.uint64), lengths),
        (data, good + np.array([0, 3 << 40, 0], dtype=np.uint64), lengths),
        (b"x", good[:0], []),
    ]:
        with pytest.raises(ValueError):
            queue.write(buffer, words, sizes)
    with pytest.raises(ValueError):
        queue.write(data, good, lengths, write_position=7)
    queue.write(b"", good[:0], [])
    assert list(tmp_path.iterdir()) == []


def test_bad_settings_are_refused() -> None:
    for base in ("", "a/b", "../a", "a:b:c", "a:", ":b", "a\n"):
        with pytest.raises(ValueError):
            DiskQueue("/none", base)
    for limits in ({"max_bytes_per_file": 0}, {"max_bytes_per_file": 1 << 40}):
        with pytest.raises(ValueError):
            DiskQueue("/none", "t", **limits)
    with pytest.raises(ValueError):
        DiskQueue("/none", "t", max_msg_size=0x7FFFFFFF)


# -- reading


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 250), max_size=20), max_size=6),
    max_bytes=st.integers(0, 500),
    limit=st.integers(1, 600),
)
def test_everything_written_is_read_in_order_and_files_go(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], max_bytes: int, limit: int
) -> None:
    path = tmp_path_factory.mktemp("queue")
    with DiskQueue(path, "t", max_bytes_per_file=limit, max_msg_size=LIMIT) as queue:
        write, bodies = 0, []
        for sizes in batches:
            batch = bodies_of(sizes)
            write = put(queue, write, batch)
            bodies += batch
        assert queue.recount(0, write) == len(bodies)
        assert take_all(queue, 0, write, max_bytes) == (bodies, [])
        assert queue.files() == ([unpack(write)[0]] if bodies else [])


def test_chunk_says_where_its_records_are(queue: DiskQueue) -> None:
    data, lengths = records_of(bodies_of([10, 20, 30, 150]))
    words = queue.plan(0, lengths)
    queue.write(data, words, lengths)
    chunk = queue.read(int(words[1]), int(words[-1]), 1 << 20)
    assert chunk.position == int(words[1])
    assert chunk.data == data[lengths[0] : sum(lengths[:3])]
    assert (chunk.position + chunk.offsets).tolist() == words[1:3].tolist()
    assert chunk.lengths.tolist() == lengths[1:3]
    assert chunk.next_position == words[3] == pack(1, 0)


def test_read_returns_one_record_however_small_the_wish(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([50, 50]))
    for wish in (0, 1, 3, 4, 79, 80, 81):
        assert queue.read(0, write, wish).count == 1
    assert queue.read(0, write, 160).count == 2


def test_read_never_crosses_the_write_position(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"good"])
    put(queue, write, [b"not committed"])
    chunk = queue.read(0, write, 1 << 20)
    assert chunk.count == 1
    assert chunk.next_position == write
    empty = queue.read(write, write, 1 << 20)
    assert (empty.data, empty.count, empty.next_position) == (b"", 0, write)
    assert empty.offsets.size == 0
    with pytest.raises(ValueError):
        queue.read(write + 1, write, 1)


def test_reader_at_the_end_of_a_completed_file_goes_on_without_damage(queue: DiskQueue) -> None:
    first = put(queue, 0, [b"a" * 100])  # caught up here, then the writer rolls (nsqd: .bad)
    write = put(queue, first, [b"b" * 100])
    chunk = queue.read(first, write, 1 << 20)
    assert (chunk.position, chunk.count) == (pack(1, 0), 1)
    nothing = queue.read(first, pack(1, 0), 1)
    assert (nothing.count, nothing.next_position) == (0, pack(1, 0))


def test_given_scanner_decides_where_the_chunk_ends(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([10, 10, 10]))
    calls: list[int] = []

    def one(buffer: bytes, max_msg_size: int) -> tuple[int, int, bool]:
        calls.append(max_msg_size)
        return 1, 40, False

    chunk = queue.read(0, write, 1 << 20, one)
    assert (chunk.count, len(chunk.data), chunk.next_position) == (1, 40, 40)
    assert chunk.lengths.tolist() == [40]
    assert calls == [LIMIT]


# -- damage


def test_every_truncation_of_the_write_file_delivers_what_is_whole(tmp_path: Path) -> None:
    bodies = bodies_of([0, 7, 20])
    data, lengths = records_of(bodies)
    ends = np.cumsum([0, *lengths]).tolist()
    for size in range(len(data)):
        path = tmp_path / str(size)
        path.mkdir()
        with DiskQueue(path, "t", max_msg_size=LIMIT) as queue:
            queue.file_path(0).write_bytes(data[:size])
            whole = sum(end <= size for end in ends[1:])
            got, damages = take_all(queue, 0, len(data))
            assert got == bodies[:whole]
            assert len(damages) == 1
            assert damages[0].is_write_file
            assert damages[0].position == ends[whole]
            assert damages[0].next_position == pack(1, 0)
            assert os.listdir(path) == [queue.file_name(0) + ".bad"]


def test_every_truncation_after_a_stop_delivers_what_is_whole_and_goes_on(tmp_path: Path) -> None:
    bodies = bodies_of([0, 7, 20])
    data, lengths = records_of(bodies)
    ends = np.cumsum([0, *lengths]).tolist()
    for size in range(len(data)):
        path = tmp_path / str(size)
        path.mkdir()
        with DiskQueue(path, "t", max_msg_size=LIMIT) as queue:
            queue.file_path(0).write_bytes(data[:size])
            queue.write_meta(3, 0, len(data))
            whole = sum(end <= size for end in ends[1:])
            meta = queue.start()
            assert meta == Meta(whole, 0, pack(1, 0))
            write = put(queue, meta.write_position, [b"new"])
            got, damages = take_all(queue, meta.read_position, write)
            assert got == [*bodies[:whole], b"new"]
            assert len(damages) == (size not in ends)


@pytest.mark.parametrize("length", [0, 25, -5, LIMIT + 27])
def test_overwritten_length_loses_the_rest_of_that_file_only(queue: DiskQueue, length: int) -> None:
    bodies = bodies_of([30, 30, 30, 30, 30])  # three in file 0, two in file 1
    write = put(queue, 0, bodies)
    with queue.file_path(0).open("r+b") as file:
        file.seek(60)
        file.write(struct.pack(">i", length))
    assert queue.recount(0, write) == 3
    got, damages = take_all(queue, 0, write)
    assert got == [bodies[0], *bodies[3:]]
    [damage] = damages
    assert (damage.path, damage.position, damage.file) == (queue.file_path(0), 60, 0)
    assert damage.reason == f"impossible record length {length}"
    assert not damage.is_write_file
    assert str(queue.file_path(0)) in str(damage)
    assert "offset 60" in str(damage)


def test_missing_files_are_skipped_in_one_step(queue: DiskQueue) -> None:
    bodies = bodies_of([150] * 6)
    write = put(queue, 0, bodies)
    for file in (1, 2, 3):
        queue.file_path(file).unlink()
    assert queue.recount(0, write) == 3
    got, damages = take_all(queue, 0, write)
    assert got == [bodies[0], *bodies[4:]]
    assert [(d.position, d.next_position) for d in damages] == [(pack(1, 0), pack(4, 0))]
    assert "missing" in damages[0].reason


def test_missing_write_file_moves_the_write_position_too(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([150, 150]))
    queue.file_path(0).unlink()
    queue.close()
    queue.file_path(1).unlink()
    got, damages = take_all(queue, 0, write)
    assert got == []
    assert [d.next_position for d in damages] == [pack(1, 0), pack(2, 0)]
    assert [d.is_write_file for d in damages] == [False, True]


def test_read_position_beyond_a_file_is_damage(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([100, 100]))
    with pytest.raises(DamagedFile, match="the file ends at 130"):
        queue.read(131, write, 100)


def test_bytes_the_disk_cannot_read_are_damage_after_what_it_can(
    queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = bodies_of([20, 20, 20])
    write = put(queue, 0, bodies)
    pread = os.pread

    def bad_sector(fd: int, size: int, offset: int) -> bytes:
        if offset >= 60:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, min(size, 60 - offset), offset)

    monkeypatch.setattr(os, "pread", bad_sector)
    got, damages = take_all(queue, 0, write)
    assert got == bodies[:1]
    assert [d.position for d in damages] == [50]


def test_other_errors_are_no_damage(queue: DiskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    write = put(queue, 0, [b"a"])

    def too_many(path: Path, flags: int, mode: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        with pytest.raises(OSError, match="Too many open files") as caught:
            queue.read(0, write, 100)
    assert not isinstance(caught.value, DamagedFile)
    assert take_all(queue, 0, write) == ([b"a"], [])


def test_files_set_aside_never_replace_each_other(queue: DiskQueue) -> None:
    path = queue.file_path(0)
    for expected in (".bad", ".bad.1", ".bad.2"):
        path.write_bytes(expected.encode())
        assert queue.set_aside(0) == path.with_name(path.name + expected)
    assert queue.set_aside(0) is None
    assert path.with_name(path.name + ".bad").read_bytes() == b".bad"


# -- position file and sync


def test_position_file_is_nsqds_byte_for_byte(queue: DiskQueue, tmp_path: Path) -> None:
    queue.write_meta(12, 0, 373)
    assert os.listdir(tmp_path) == ["t:c.diskqueue.meta.dat"]
    assert queue.meta_path.read_bytes() == b"12\n0,0\n0,373\n"
    assert queue.meta_path.stat().st_mode & 0o7777 == 0o600
    assert queue.load_meta() == Meta(12, 0, 373)
    queue.write_meta(0, pack(7, 5), pack(123456, 9))
    assert queue.meta_path.read_bytes() == b"0\n7,5\n123456,9\n"
    assert queue.load_meta() == Meta(0, pack(7, 5), pack(123456, 9))


def test_position_file_never_says_the_end_of_a_completed_file(queue: DiskQueue) -> None:
    read = put(queue, 0, bodies_of([100]))
    queue.write_meta(0, read, read)
    assert queue.load_meta() == Meta(0, read, read)
    write = put(queue, read, bodies_of([100]))
    queue.write_meta(1, read, write)
    assert queue.load_meta() == Meta(1, pack(1, 0), write)
    queue.write_meta(2, 0, write)
    assert queue.load_meta() == Meta(2, 0, write)


@pytest.mark.parametrize(
    "text",
    [b"12\n1,2\n3,4", b" 12\r\n1, 2\r\n3, 4\r\n", b"+12\n1,2\n3,4\nmore\n", b"12\n01,2\n3,4\n"],
)
def test_position_file_is_read_as_tolerantly_as_nsqd_does(queue: DiskQueue, text: bytes) -> None:
    queue.meta_path.write_bytes(text)
    assert queue.load_meta() == Meta(12, pack(1, 2), pack(3, 4))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"x",
        b"12\n",
        b"1\n2\n3\n",
        b"1\n2,3\n4\n",
        b"1\n-2,3\n4,5\n",
        b"1\n2,3\n99999999,5\n",
        b"9" * 5000 + b"\n0,0\n0,0\n",
        b"\xff\n0,0\n0,0\n",
    ],
)
def test_unparsable_position_file_is_none_and_logged(
    queue: DiskQueue, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert queue.load_meta() is None
    assert not caplog.records
    queue.meta_path.write_bytes(text)
    assert queue.load_meta() is None
    assert "not a position file" in caplog.text


def test_sync_comes_after_so_many_operations_or_so_long(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path, "t", sync_every=10, sync_timeout=2.0)
    assert not queue.maybe_sync(100.0, 0, 0, 0)
    assert not queue.maybe_sync(500.0, 0, 0, 0)  # a tick, but nothing was done
    queue.note(9)
    assert not queue.maybe_sync(501.9, 9, 0, 0)
    assert not queue.meta_path.exists()
    assert queue.maybe_sync(502.0, 9, 0, 0)
    assert queue.load_meta() == Meta(9, 0, 0)
    assert not queue.maybe_sync(503.0, 9, 0, 0)
    queue.note(10)
    assert queue.maybe_sync(503.1, 19, 0, 0)
    assert not queue.maybe_sync(600.0, 19, 0, 0)


def test_finished_and_dropped_files_make_a_sync_due(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([100]))
    assert not queue.sync_due(0.0)
    write = put(queue, write, bodies_of([100]))
    assert queue.sync_due(0.0)
    queue.sync(2, 0, write)
    assert not queue.sync_due(0.0)
    assert queue.drop_before(queue.read(0, write, 1000).next_position) == 1
    assert queue.sync_due(0.0)


def test_sync_puts_the_data_on_disk_before_the_positions(
    queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    write = put(queue, 0, bodies_of([100, 100]))
    assert synced == [queue.file_name(0)]  # completed
    queue.close()  # what was written is not forgotten with the descriptor
    queue.sync(2, 0, write)
    assert synced[1] == queue.file_name(1)
    assert synced[2].startswith("t:c.diskqueue.meta.dat.")
    assert synced[3] == queue.data_path.name
    assert len(synced) == 4
    queue.sync(2, 0, write)
    assert len(synced) == 5  # nothing written, no new file: positions only
    queue.sync(2, 0, write, names=True)
    assert synced[-1] == queue.data_path.name


def test_more_than_sync_every_is_on_disk_before_it_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    with DiskQueue(tmp_path, "t:c", max_msg_size=LIMIT, sync_every=5) as queue:

        def noting(fd: int) -> None:
            synced.append(os.fstat(fd).st_size)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noting)
        write = put(queue, 0, bodies_of([70] * 4))
        assert synced == []
        write = put(queue, write, bodies_of([70] * 4))
        assert synced == [800]
        synced.clear()
        queue.sync(8, 0, write)
        assert len(synced) == 2  # position file and directory
        write = put(queue, write, bodies_of([70] * 4))
        assert len(synced) == 2

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            put(queue, write, bodies_of([70]))
        assert queue.file_path(0).stat().st_size == write  # given back


def test_failed_sync_stays_due(queue: DiskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    write = put(queue, 0, [b"a"])

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space") as caught:
            queue.sync(1, 0, write)
        assert caught.value.filename == str(queue.file_path(0))
    assert queue.maybe_sync(0.0, 1, 0, write)
    assert not queue.sync_due(0.0)


# -- start


def test_start_of_a_new_queue_is_at_zero(queue: DiskQueue, tmp_path: Path) -> None:
    assert queue.start() == Meta(0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_clean_stop_goes_on_where_it_was(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([60, 60, 60]))
    queue.sync(2, 90, write)
    assert queue.start() == Meta(2, 90, write)
    assert queue.start(files=[0, 1]) == Meta(2, 90, write)


def test_killed_writer_is_read_to_the_real_end_and_written_anew(queue: DiskQueue) -> None:
    bodies = bodies_of([30] * 8)
    write = put(queue, 0, bodies[:1])
    queue.sync(1, 0, write)
    put(queue, write, bodies[1:])  # three files, positions never synced
    meta = queue.start()
    assert meta == Meta(8, 0, pack(3, 0))
    write = put(queue, meta.write_position, [b"new"])
    assert take_all(queue, 0, write) == ([*bodies, b"new"], [])


def test_file_of_93_bytes_with_positions_at_zero_is_nsqds_own_example(queue: DiskQueue) -> None:
    put(queue, 0, [b"a", b"b", b"c"])
    queue.write_meta(0, 0, 0)
    assert queue.file_path(0).stat().st_size == 93
    assert queue.start() == Meta(3, 0, pack(1, 0))


@pytest.mark.parametrize("text", [None, b"", b"garbage", b"3\n1,50\n1,40\n"])
def test_without_positions_every_file_is_read_and_none_overwritten(
    queue: DiskQueue, text: bytes | None
) -> None:
    bodies = bodies_of([150] * 4)
    put(queue, pack(5, 0), bodies)
    if text is not None:
        queue.meta_path.write_bytes(text)
    meta = queue.start()
    assert meta == Meta(4, pack(5, 0), pack(9, 0))
    write = put(queue, meta.write_position, [b"new"])
    assert take_all(queue, meta.read_position, write) == ([*bodies, b"new"], [])


def test_bad_positions_without_files_are_a_new_queue(queue: DiskQueue) -> None:
    queue.meta_path.write_bytes(b"3\n1,50\n1,40\n")
    assert queue.start() == Meta(0, 0, 0)


def test_start_when_the_read_file_was_deleted_before_the_positions_were_synced(
    queue: DiskQueue,
) -> None:
    bodies = bodies_of([150] * 3)
    write = put(queue, 0, bodies)
    queue.sync(3, 0, write)
    queue.drop_before(pack(1, 0))
    assert queue.start() == Meta(2, pack(1, 0), write)
    queue.drop_before(pack(3, 0))
    assert queue.start() == Meta(0, pack(3, 0), pack(3, 0))


def test_start_deletes_files_read_before_the_stop(queue: DiskQueue) -> None:
    write = put(queue, 0, bodies_of([150] * 3))
    queue.sync(1, pack(2, 0), write)
    assert queue.start() == Meta(1, pack(2, 0), write)
    assert queue.files() == [2]


def test_start_with_an_absent_write_file_not_yet_made(queue: DiskQueue) -> None:
    put(queue, 0, [b"a"])
    queue.write_meta(1, 0, pack(1, 0))
    assert queue.start() == Meta(1, 0, pack(1, 0))


def test_depth_is_zero_when_everything_is_read_whatever_the_file_says(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"a"])
    queue.write_meta(9, write, write)
    assert queue.start() == Meta(0, write, write)
    queue.write_meta(-2, 0, write)
    assert queue.start() == Meta(1, 0, write)


def test_recount_with_records_across_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmq.storage.diskqueue._COUNT_BLOCK", 1)
    queue = DiskQueue(tmp_path, "t", max_msg_size=50)
    bodies = bodies_of([i % 51 for i in range(200)])
    write = put(queue, 0, bodies)
    assert queue.recount(0, write) == 200
    assert queue.recount(30, write) == 199
    queue.close()


# -- adoption and clearing away


def test_cut_removes_what_is_beyond_the_write_position(queue: DiskQueue) -> None:
    write = put(queue, 0, [b"good"])
    put(queue, write, bodies_of([150] * 4))
    assert queue.files() == [0, 1, 2, 3, 4]
    assert queue.cut(write) == 4 * 180
    assert queue.files() == [0]
    put(queue, write, [b"half a batch"])
    assert queue.cut(write) == 42
    assert queue.cut(write) == 0
    assert queue.file_path(0).stat().st_size == write
    assert queue.cut(pack(1, 0)) == 0
    assert take_all(queue, 0, write) == ([b"good"], [])
    assert queue.cut(0) == 34
    assert queue.files() == []


def test_drop_before_keeps_the_file_being_read(tmp_path: Path) -> None:
    with DiskQueue(tmp_path, "t", max_bytes_per_file=100) as queue:
        put(queue, 0, bodies_of([50] * 5))
    with DiskQueue(tmp_path, "t") as adopted:
        assert adopted.drop_before(pack(0, 80)) == 0
        assert adopted.drop_before(pack(2, 10)) == 2
        assert adopted.files() == [2, 3, 4]
        assert adopted.drop_before(pack(4, 0)) == 2
        assert adopted.drop_before(pack(4, 0)) == 0
        assert adopted.files() == [4]


def test_remove_all_leaves_only_other_queues_and_evidence(queue: DiskQueue, tmp_path: Path) -> None:
    write = put(queue, 0, bodies_of([150] * 3))
    queue.sync(3, 0, write)
    others = ["t.diskqueue.000000.dat", "t:cc.diskqueue.000000.dat", "t:c.diskqueue.000009.dat.bad"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    assert queue.remove_all() == pack(3, 0)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    assert queue.remove_all() == 0
    assert queue.remove_all(pack(7, 70)) == pack(8, 0)
    write = put(queue, pack(3, 0), [b"new"])
    assert take_all(queue, pack(3, 0), write) == ([b"new"], [])


@pytest.mark.parametrize("deaths_after", range(5))
def test_remove_all_cut_short_brings_nothing_back(
    queue: DiskQueue, monkeypatch: pytest.MonkeyPatch, deaths_after: int
) -> None:
    write = put(queue, 0, bodies_of([150] * 3))
    queue.sync(3, 0, write)
    steps, unlink = 0, Path.unlink

    def dying(path: Path, missing_ok: bool = False) -> None:
        nonlocal steps
        if steps == deaths_after:
            raise KeyboardInterrupt
        steps += 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying)
        if deaths_after < 4:
            with pytest.raises(KeyboardInterrupt):
                queue.remove_all()
        else:
            queue.remove_all()
    meta = queue.start()
    assert meta.depth == 0
    assert queue.files() == []


@pytest.mark.parametrize("deaths_after", range(5))
def test_half_done_rename_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths_after: int
) -> None:
    bodies = bodies_of([150] * 3)
    with DiskQueue(tmp_path, "t", max_bytes_per_file=200) as backlog:
        write = put(backlog, 0, bodies)
        backlog.sync(3, 0, write)
        steps, rename = 0, Path.rename

        def dying(path: Path, target: Path) -> Path:
            nonlocal steps
            if steps == deaths_after:
                raise KeyboardInterrupt
            steps += 1
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            if deaths_after < 4:
                with pytest.raises(KeyboardInterrupt):
                    backlog.rename("t:c")
                assert backlog.meta_path.exists()  # last of all
                assert backlog.base == "t"
        backlog.rename("t:c")
        backlog.rename("t:c")
        assert backlog.base == "t:c"
        assert backlog.start() == Meta(3, 0, write)
        assert set(existing(tmp_path)) == {"t:c"}
        with DiskQueue(tmp_path, "t") as again:
            again.rename("t:c")  # a new process that does not know it is done
        write = put(backlog, write, [b"new"])
        assert take_all(backlog, 0, write) == ([*bodies, b"new"], [])


def test_rename_never_replaces_data(queue: DiskQueue, tmp_path: Path) -> None:
    put(queue, 0, bodies_of([150] * 2))
    (tmp_path / "t:d.diskqueue.000001.dat").write_bytes(b"other")
    with pytest.raises(FileExistsError, match="already there"):
        queue.rename("t:d")
    assert queue.files() == [0, 1]
    with pytest.raises(ValueError):
        queue.rename("t/d")
    queue.rename("t:c")


# -- what the directory holds


def test_existing_groups_files_by_base_and_ignores_others(tmp_path: Path) -> None:
    for name in [
        "t.diskqueue.000003.dat",
        "t.diskqueue.000001.dat",
        "t.diskqueue.meta.dat",
        "t:c.diskqueue.1000000.dat",
        "t#ephemeral:c.diskqueue.meta.dat",
        "a.diskqueue.meta.dat.diskqueue.000000.dat",
        "lost.diskqueue.000000.dat.bad",
        "lost.diskqueue.000000.dat.bad.1",
        "t.diskqueue.12345.dat",
        "t:c:d.diskqueue.000000.dat",
        "b c.diskqueue.000000.dat",
        "t.diskqueue.meta.dat.123.tmp",
        "nsqd.dat",
        "notes.txt",
    ]:
        (tmp_path / name).write_bytes(b"")
    found = existing(tmp_path)
    assert found == {
        "t": QueueFiles([1, 3], [], True),
        "t:c": QueueFiles([1000000], []),
        "t#ephemeral:c": QueueFiles([], [], True),
        "a.diskqueue.meta.dat": QueueFiles([0], []),
        "lost": QueueFiles(
            [], ["lost.diskqueue.000000.dat.bad", "lost.diskqueue.000000.dat.bad.1"]
        ),
    }
    assert [base for base, files in found.items() if not files.has_data] == ["lost"]


def test_only_what_metadata_writes_left_is_removed(tmp_path: Path) -> None:
    keep = ["t.diskqueue.meta.dat", "nsqd.dat", "other.tmp", "t.diskqueue.000000.dat"]
    left = ["t:c.diskqueue.meta.dat.81.tmp", "nsqd.dat.5577006791947779410.tmp", "shmq.dat.1.tmp"]
    for name in keep + left:
        (tmp_path / name).write_bytes(b"")
    assert remove_temporary(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(keep)
    assert remove_temporary(tmp_path) == 0


# ---- the last number of a file ----


def test_where_the_numbers_of_files_end_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    last = LAST_FILE
    record = encode_records([1], [0], [1], [b"x" * 50])
    with DiskQueue(tmp_path, "t", max_bytes_per_file=100, max_msg_size=99) as queue:
        plan = queue.plan(pack(last, 0), [len(record)])
        queue.write(record, plan, [len(record)], write_position=pack(last, 0))
        with pytest.raises(StorageError, match="stop the broker") as refusal:
            queue.plan(int(plan[-1]), [len(record)])
        assert refusal.value.filename == str(queue.file_path(last + 1))
        queue.sync(1, pack(last, 0), int(plan[-1]))
        assert queue.start() == Meta(1, pack(last, 0), int(plan[-1]))
        # when all was read the numbers begin anew, and nothing of before comes again
        queue.sync(0, int(plan[-1]), int(plan[-1]))
        assert queue.start() == Meta(0, 0, 0)
        assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", ["16777215", "16777216", "99999999999999999999", "0000001"])
def test_a_file_of_a_number_that_no_queue_gives_is_left_alone(tmp_path: Path, number: str) -> None:
    name = f"t.diskqueue.{number}.dat"
    (tmp_path / name).write_bytes(b"whatever")
    with DiskQueue(tmp_path, "t") as queue:
        assert queue.start() == Meta(0, 0, 0)
        assert queue.remove_all() == pack(0, 0)
    assert not existing(tmp_path)["t"].has_data
    assert os.listdir(tmp_path) == [name]


def test_a_damaged_last_file_has_a_position_behind_it(tmp_path: Path) -> None:
    last = LAST_FILE
    with DiskQueue(tmp_path, "t") as queue:
        queue.file_path(last).write_bytes(b"garbage")
        with pytest.raises(DamagedFile) as damage:
            queue.read(pack(last, 0), pack(last, 7), 100)
        assert damage.value.next_position == pack(last + 1, 0)
        assert queue.can_be(pack(last + 1, 0), pack(last + 1, 0))
        assert not queue.can_be(0, pack(last + 1, 1))


def test_a_position_far_off_drops_what_is_there_and_not_every_number(tmp_path: Path) -> None:
    disk = DiskQueue(tmp_path, "t")
    for file in (3, 900_000):
        disk.file_path(file).write_bytes(b"x")
    disk.drop_before(pack(1, 0))
    assert disk.drop_before(pack(800_000, 0)) == 1
    assert disk.files() == [900_000]
