"""Records, positions and where a file ends: nsqd's bytes and nsqd's rules."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.disk_files import GOLDEN, GOLDEN_RECORD, LIMIT, bodies_of, records_of

from shmq.storage import StorageError
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import LAST_FILE, MAX_FILE, MAX_OFFSET, pack, unpack
from shmq.storage.records import (
    MOST_RECORD,
    RECORD_MORE,
    Record,
    decode_records,
    encode_records,
    scan_records,
)


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


@pytest.mark.parametrize("length", [0, 25, -1, LIMIT + RECORD_MORE + 27, 0x7FFFFFFF, -(1 << 31)])
def test_scan_stops_at_an_impossible_length(length: int) -> None:
    data, lengths = records_of(bodies_of([3, 4]))
    scan = scan_records(data + struct.pack(">i", length) + bytes(100), LIMIT)
    assert (scan.lengths.tolist(), scan.used, scan.stop) == (lengths, len(data), "length")


def test_scan_accepts_the_shortest_and_the_longest_record() -> None:
    data, lengths = records_of(bodies_of([0, LIMIT]))
    assert scan_records(memoryview(data), LIMIT).lengths.tolist() == lengths
    assert scan_records(b"", LIMIT).stop == "end"


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
    for length in (29, MOST_RECORD + 1):
        with pytest.raises(ValueError):
            queue.plan(0, [length])
    assert queue.plan(pack(LAST_FILE, 0), [50, 50]).tolist()[-1] == pack(LAST_FILE, 100)
    with pytest.raises(StorageError):
        queue.plan(pack(LAST_FILE, 0), [50, 51])
