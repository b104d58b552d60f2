"""The frame of messages that LREAD answers with: read here, and written by the gateway.

    0  u32  CRC-32 (zlib's) of all bytes that follow it
    4  u16  version of this layout: 1
    6  u16  1: the messages' properties are in it
    8  u64  index of the first message in its part
   16  u32  number of messages, n
   20  u32  bytes of the bodies
   24  u32  bytes of the blocks of properties
   28  u32  0
   32       ids, n u64; timestamps, n i64; attempts, n i32; offsets of the bodies, n + 1 i32;
            with properties: the offsets of their blocks, n + 1 i32;
            the bodies; the blocks

All numbers are little-endian. docs/on-disk.md describes a block of properties.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shmq.errors import LayoutMismatch
from shmq.leased import LeasedBatch

try:
    from isal.isal_zlib import crc32  # the same numbers, at nine times the speed
except ImportError:
    from zlib import crc32

VERSION: Final = 1
WITH_PROPERTIES: Final = 1
HEAD: Final = struct.Struct("<IHHQIIII")
#: The kind of such a frame in nsqd's protocol, which has 0 to 2.
ROWS: Final = 3

#: The most rows and bytes of bodies of one frame, and bytes of one LREAD, that may be asked for. A
#: single message may have more bytes. The event loop of a gateway process moves what the socket has
#: not taken yet at each send, so long frames would cost it too much.
MOST_ROWS: Final = 1 << 16
MOST_BYTES: Final = 1 << 20
MOST_CREDIT: Final = 64 << 20

#: Bytes of the properties of one message.
MOST_PROPERTIES: Final = 4096

_FRAME: Final = struct.Struct(">ii")
_CHECK: Final = struct.Struct("<I")
_NO_PROPERTIES: Final[Mapping[str, bytes]] = MappingProxyType({})


class RemoteBatch(LeasedBatch):
    """Messages read from a lease over the network; as `LeasedBatch`."""

    __slots__ = ()

    @property
    def data(self) -> bytes:
        """All bodies, one after the other."""
        whole: Any = self._data  # a memoryview of the frame, until somebody asks
        if not isinstance(whole, bytes):
            whole = self._data = bytes(whole)
        return bytes(whole)

    @staticmethod
    def _unpacked(block: bytes) -> Mapping[str, bytes]:
        return unpacked(block)


def unpacked(block: bytes) -> Mapping[str, bytes]:
    """The properties in a block, without those of shmq's own. Raises LayoutMismatch if it is
    none."""
    if not block:
        return _NO_PROPERTIES
    found: dict[str, bytes] = {}
    at, end = 0, len(block)
    while at < end:
        name_end = at + 1 + block[at]
        value_end = name_end + 2 + int.from_bytes(block[name_end : name_end + 2], "little")
        if value_end > end or not block[at]:
            raise LayoutMismatch("properties from the network: the bytes are no properties")
        name = block[at + 1 : name_end].decode("latin-1")
        if not name.startswith("shmq-"):
            found[name] = block[name_end + 2 : value_end]
        at = value_end
    return MappingProxyType(found)


def framed(index: int, batch: LeasedBatch) -> list[bytes]:
    """The pieces of the frame of a batch whose first message has this index in its part, with the
    head that all frames of the protocol have."""
    ids, timestamps, attempts, offsets, data, blocks = batch.columns()
    ends, packed = blocks if blocks is not None else (b"", b"")
    flags = 0 if blocks is None else WITH_PROPERTIES
    head = HEAD.pack(0, VERSION, flags, index, len(batch), len(data), len(packed), 0)[4:]
    columns = [ids, timestamps, attempts, offsets, ends, data, packed]
    check = crc32(head)
    for column in columns:
        check = crc32(column, check)
    size = 4 + HEAD.size + sum(len(column) for column in columns)
    return [_FRAME.pack(size, ROWS) + _CHECK.pack(check) + head, *filter(None, columns)]


def after(batch: LeasedBatch, count: int) -> LeasedBatch:
    """The batch without its first `count` messages, which are fewer than it has."""
    ids, timestamps, attempts, offsets, data, blocks = batch.columns()
    return RemoteBatch(
        len(batch) - count,
        ids[8 * count :],
        timestamps[8 * count :],
        attempts[4 * count :],
        *_from(offsets, data, count),
        None if blocks is None else _from(*blocks, count),
    )


def _from(offsets: bytes, data: bytes, count: int) -> tuple[bytes, bytes]:
    """Offsets, and what they are of, from number `count` on."""
    ends = memoryview(offsets).cast("i")
    first = ends[count]
    return array.array("i", [end - first for end in ends[count:]]).tobytes(), data[first:]


def decoded(frame: memoryview) -> tuple[int, RemoteBatch]:
    """The index and the messages of a frame. Raises ValueError if it is not as it was sent."""
    if len(frame) < HEAD.size:
        raise ValueError(f"a frame of messages has {len(frame)} bytes")
    check, version, flags, index, count, size, packed, _ = HEAD.unpack_from(frame)
    if crc32(frame[4:]) != check:
        raise ValueError("the checksum of a frame of messages is not right")
    if version != VERSION or flags & ~WITH_PROPERTIES:
        raise ValueError(f"a frame of messages has layout {version}/{flags}, not {VERSION}")
    if sys.byteorder != "little":
        raise ValueError("this processor is big-endian, which the client does not know")
    with_properties = flags & WITH_PROPERTIES
    sizes = [8 * count, 8 * count, 4 * count, 4 * (count + 1)]
    sizes += [4 * (count + 1) if with_properties else 0, size, packed]
    if HEAD.size + sum(sizes) != len(frame):
        raise ValueError(f"a frame of {count} messages has {len(frame)} bytes")
    parts: list[Any] = []
    at = HEAD.size
    for length in sizes:
        parts.append(frame[at : at + length])
        at += length
    ids, timestamps, attempts, offsets, ends, data, blocks = parts
    if not _rises(offsets, size) or (with_properties and not _rises(ends, packed)):
        raise ValueError("the bodies of a frame of messages are not where they should be")
    batch = RemoteBatch(
        count,
        ids,
        timestamps,
        attempts,
        offsets,
        data,
        (ends, blocks) if with_properties else None,
    )
    return index, batch


def _rises(offsets: memoryview, end: int) -> bool:
    """Whether offsets begin with 0, never fall, and end with `end`: readers of columns take them
    for places in memory."""
    found = offsets.cast("i")
    if found[0] != 0 or found[-1] != end:
        return False
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numbers = numpy.frombuffer(offsets, numpy.int32)
        return bool((numbers[1:] >= numbers[:-1]).all())
    listed = found.tolist()
    return listed == sorted(listed)
