"""nsqd's records: the bytes of one message in a segment file.

    int32 length, int64 timestamp (Unix ns), uint16 attempts, 16 hex digits of id, body; big-endian

A message with properties has an envelope in the body's place (native/core/format/record.c); here
that is a part of the body.

Everywhere in shmq the length of a record is its size on disk, the length prefix included
(`RECORD_OVERHEAD` + body); the number in the prefix is 4 less. Source: nsqd, `nsqd/message.go`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MESSAGE_HEADER = 26  # timestamp, attempts, id: the least a length prefix can say
RECORD_OVERHEAD = 4 + MESSAGE_HEADER
RECORD_MORE = 96  # bytes by which shmq's own entries may make a record longer than max_msg_size

ENVELOPE = b"\xf5shmqp\x01\n"  # a body that begins with it is an envelope
MOST_RECORD = 4 + 0x7FFFFFFF  # bytes; a length prefix has 31 bits

LENGTH_PREFIX = struct.Struct(">i")
_RECORD = struct.Struct(">iqH16s")
_DIGITS = re.compile(rb"[0-9a-fA-F]{16}")

Scanner = Callable[[bytes | memoryview, int], tuple[int, int, bool]]
"""(buffer, max_msg_size) -> (number of whole records, their bytes, damaged). damaged: the scan
ended at an impossible length. A record cut off by the end of the buffer is not damage. The C core
has a fast scanner."""


class Record(NamedTuple):
    """One message as a segment file holds it."""

    timestamp: int  # Unix ns of the publish
    attempts: int  # deliveries so far
    id: bytes  # 16 hex digits
    body: bytes


class Scan(NamedTuple):
    """The whole records at the start of a buffer, and why the scan stopped."""

    offsets: NDArray[np.int64]  # of each record's length prefix
    lengths: NDArray[np.int64]  # prefix included
    used: int  # bytes of whole records
    stop: Literal["end", "length", "truncated"]  # end of buffer, impossible length, cut-off record


def encode_records(
    timestamps: Sequence[int],
    attempts: Sequence[int],
    ids: Sequence[bytes | int],
    bodies: Sequence[bytes],
) -> bytes:
    """The bytes nsqd would write for these messages (a reference; the hot path is in C).

    `timestamps` are Unix ns, `attempts` is stored modulo 65536, an id is 16 hex digits or the
    number. Raises ValueError if the columns differ in length or an id has not 16 characters.
    """
    parts = []
    for timestamp, count, ident, body in zip(timestamps, attempts, ids, bodies, strict=True):
        digits = ident if isinstance(ident, bytes) else b"%016x" % int(ident)
        if len(digits) != 16:
            raise ValueError(f"message id {digits!r} has not 16 hex digits")
        length = MESSAGE_HEADER + len(body)
        parts.append(_RECORD.pack(length, int(timestamp), int(count) & 0xFFFF, digits))
        parts.append(body)
    return b"".join(parts)


def decode_records(data: bytes, max_msg_size: int) -> Iterator[Record]:
    """The whole records at the start of `data`, up to the first impossible one."""
    scan = scan_records(data, max_msg_size)
    for offset, length in zip(scan.offsets.tolist(), scan.lengths.tolist(), strict=True):
        _, timestamp, attempts, ident = _RECORD.unpack_from(data, offset)
        body = data[offset + RECORD_OVERHEAD : offset + length]
        yield Record(timestamp, attempts, ident, bytes(body))


def most_prefix(max_msg_size: int) -> int:
    """The largest number that a length prefix can say."""
    return max_msg_size + RECORD_MORE + MESSAGE_HEADER


def record_length(head: bytes, room: int) -> int:
    """The bytes of the record that begins with `head`, prefix included; 0 if the `room` from there
    on has no whole record of this length."""
    length = LENGTH_PREFIX.unpack_from(head)[0] if len(head) >= 4 else 0
    return 4 + length if MESSAGE_HEADER <= length <= room - 4 else 0


def is_record(head: bytes, room: int) -> bool:
    """True if `head` begins like a record whose last byte is in the `room` from there on: its
    length fits, and its id is made of hexadecimal digits."""
    ident = head[RECORD_OVERHEAD - 16 : RECORD_OVERHEAD]
    return bool(record_length(head, room)) and _DIGITS.fullmatch(ident) is not None


def scan_records(buffer: bytes | bytearray | memoryview, max_msg_size: int) -> Scan:
    """Find the records in `buffer`, which must begin with one.

    The scan stops at a length prefix outside [26, max_msg_size + RECORD_MORE + 26] ("length"), at a
    record that the buffer cuts off ("truncated"), or at the end of the buffer ("end").
    """
    view = memoryview(buffer)
    size, most = len(view), most_prefix(max_msg_size)
    starts: list[int] = []
    lengths: list[int] = []
    offset = 0
    stop: Literal["end", "length", "truncated"] = "end"
    read_prefix = LENGTH_PREFIX.unpack_from
    while offset < size:
        if size - offset < 4:
            stop = "truncated"
            break
        length = read_prefix(view, offset)[0]
        if not MESSAGE_HEADER <= length <= most:
            stop = "length"
            break
        if offset + 4 + length > size:
            stop = "truncated"
            break
        starts.append(offset)
        lengths.append(4 + length)
        offset += 4 + length
    offsets = np.array(starts, dtype=np.int64)
    return Scan(offsets, np.array(lengths, dtype=np.int64), offset, stop)


def count_records(buffer: bytes | memoryview, max_msg_size: int) -> tuple[int, int, bool]:
    """The Scanner used where the caller passes none."""
    scan = scan_records(buffer, max_msg_size)
    return len(scan.offsets), scan.used, scan.stop == "length"


@dataclass(frozen=True)
class RecordRun:
    """A run of whole records from one file, as on disk. Empty when everything has been read."""

    data: bytes | memoryview
    position: int  # of data[0]; in the next file if the requested one was at the end of a file
    next_position: int  # the read position once these records are taken
    count: int  # records
    max_msg_size: int

    @cached_property
    def _scan(self) -> Scan:
        return scan_records(self.data, self.max_msg_size)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Offset of each record in `data`; its position is `position` plus the offset."""
        return self._scan.offsets

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each record, length prefix included."""
        return self._scan.lengths
