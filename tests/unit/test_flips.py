"""Every place at which a small file can end, and every bit of it turned over: what is intact comes,
the rest is set aside or refused with an error that names the file, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmq import _native
from shmq.storage import deferred, metadata
from shmq.storage import diskqueue_recovery as recovery
from shmq.storage.deferred import DeferredStore
from shmq.storage.diskqueue import DamagedFile, DiskQueue
from shmq.storage.metadata import ChannelMeta, MetadataError, TopicMeta
from shmq.storage.positions import pack, parse_meta
from shmq.storage.records import encode_records, scan_records

MOST = 200  # max_msg_size
BODIES = [b"first", b"second" * 5, b"third", b"fourth" * 9, b"fifth"]
RECORDS = [
    encode_records([1767225600000000000 + i], [i], [0x1234567890ABCDE0 + i], [body])
    for i, body in enumerate(BODIES)
]
STARTS = [sum(map(len, RECORDS[:i])) for i in range(len(RECORDS) + 1)]


def cut(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(first byte that is not as it was, the rest cut off there)"""
    return ((at, data[:at]) for at in range(len(data)))


def flipped(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(the byte that is not as it was, with one bit turned over)"""
    for bit in range(8 * len(data)):
        at = bit // 8
        yield at, data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]


DAMAGES = {"cut": cut, "flipped": flipped}
Damage = Callable[[bytes], Iterator[tuple[int, bytes]]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files need not survive the host."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(params=DAMAGES)
def damage(request: pytest.FixtureRequest) -> Damage:
    return DAMAGES[request.param]


def read_all(path: Path) -> tuple[list[bytes], int]:
    """The records that a start and reading to the end give, and how many files were set aside."""
    came, aside = [], 0
    with DiskQueue(path, "t:c", max_msg_size=MOST) as queue:
        found = recovery.recover_positions(queue, None, _native.scan_records)
        read, write = found.read_position, found.write_position
        for _ in range(50):
            if read == write:
                return came, aside
            try:
                chunk = queue.read(read, write, 100, _native.scan_records)
            except DamagedFile as exc:
                named = exc.filename == str(queue.file_path(exc.file))
                aside += named and recovery.set_aside(queue, exc.file) is not None
                read, write = exc.next_position, max(write, exc.next_position)
                continue
            for begin, length in zip(chunk.offsets.tolist(), chunk.lengths.tolist(), strict=True):
                came.append(chunk.data[begin : begin + length])
            read = chunk.next_position
    raise AssertionError("reading does not end")


def test_of_a_segment_file(tmp_path: Path, damage: Damage) -> None:
    prefixes = {start + i for start in STARTS[:-1] for i in range(4)}
    for number, (at, data) in enumerate(damage(b"".join(RECORDS))):
        path = tmp_path / str(number)
        path.mkdir()
        with DiskQueue(path, "t:c", max_msg_size=MOST) as queue:
            queue.file_path(0).write_bytes(data)
            queue.file_path(1).write_bytes(RECORDS[0])
            queue.write_meta(6, 0, pack(1, len(RECORDS[0])))
        came, aside = read_all(path)
        whole = sum(end <= at for end in STARTS[1:])
        assert came[:whole] == RECORDS[:whole], at
        assert came[-1] == RECORDS[0], at  # the next file is intact
        if len(data) < STARTS[-1]:
            assert aside == (at not in STARTS), at
        else:  # of what is in a message only the message can tell
            assert aside == (at in prefixes), at
        shutil.rmtree(path)


def test_of_a_position_file(tmp_path: Path, damage: Damage) -> None:
    with DiskQueue(tmp_path, "t:c", max_msg_size=MOST) as queue:
        queue.write_meta(3, pack(0, STARTS[2]), pack(0, STARTS[5]))
        text = queue.meta_path.read_bytes()
    for at, data in damage(text):
        path = tmp_path / "x"
        path.mkdir()
        with DiskQueue(path, "t:c", max_msg_size=MOST) as queue:
            queue.file_path(0).write_bytes(b"".join(RECORDS))
            queue.meta_path.write_bytes(data)
        said = parse_meta(data)
        came, _ = read_all(path)
        if said is None or said.read_position > said.write_position:
            assert came == RECORDS, at  # rather twice than never
        elif said.read_position <= STARTS[2] and said.read_position in STARTS:
            assert came[-3:] == RECORDS[2:], at
        shutil.rmtree(path)


@contextlib.contextmanager
def refused_by_name(file: Path) -> Iterator[list[MetadataError]]:
    """Done, or refused with an error that names the file: then that is in the list."""
    refusal: list[MetadataError] = []
    try:
        yield refusal
    except MetadataError as exc:
        refusal.append(exc)
    assert all(exc.filename == str(file) for exc in refusal)


def test_of_nsqd_dat(tmp_path: Path, damage: Damage) -> None:
    topics = [TopicMeta("t", True, (ChannelMeta("c"), ChannelMeta("d", True))), TopicMeta("u")]
    metadata.store(tmp_path, topics)
    file = tmp_path / metadata.METADATA_NAME
    refused = 0
    for _, data in damage(file.read_bytes()):
        file.write_bytes(data)
        with refused_by_name(file) as refusal:
            found = metadata.load(tmp_path)
            assert all(metadata.valid_name(topic.name) for topic in found)
        refused += len(refusal)
        assert file.read_bytes() == data
    assert refused > 50


def test_of_the_reserve(tmp_path: Path, damage: Damage) -> None:
    metadata.store_reserve(tmp_path, 123456789)
    file = tmp_path / metadata.RESERVE_NAME
    for _, data in damage(file.read_bytes()):
        file.write_bytes(data)
        with refused_by_name(file):
            assert metadata.load_reserve(tmp_path) >= 0


def test_of_a_chunk(tmp_path: Path, damage: Damage) -> None:
    entries = [(100 + i, record) for i, record in enumerate(RECORDS)]
    data = deferred.encode(entries)
    starts = [28 + 12 * i + start for i, start in enumerate(STARTS)]
    for at, damaged in damage(data):
        path = tmp_path / "x"
        path.mkdir()
        store = DeferredStore(path, "t:c")
        (path / store.file_name(1)).write_bytes(damaged)
        store.take_up(deferred.existing(path).get("t:c", []))
        came = []
        for chunk in list(store.chunks.values()):
            piece = store.read(chunk, 1 << 62)
            assert piece is not None
            scan = scan_records(piece.data, MOST)
            ends = [*scan.offsets[1:].tolist(), len(piece.data)]
            came += [piece.data[i:j] for i, j in zip(scan.offsets.tolist(), ends, strict=True)]
        # each that the damage does not touch; a file cut off has none behind it
        intact = [
            record
            for record, begin, end in zip(RECORDS, starts, [*starts[1:]], strict=False)
            if end <= at or (begin > at and len(damaged) == len(data))
        ]
        assert came == [record for record in RECORDS if record in intact], at
        assert store.bad_files == 1, at
        assert list(path.glob("*.bad")), at
        shutil.rmtree(path)


def test_a_reader_that_believes_a_length_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believes(data: bytes, most: int) -> tuple[int, int, bool]:
        return (1, len(data), False) if data else (0, 0, False)

    monkeypatch.setattr(_native, "scan_records", believes)
    with pytest.raises(AssertionError):
        test_of_a_segment_file(tmp_path, cut)
