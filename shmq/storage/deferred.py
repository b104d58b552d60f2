"""The deferred store: one queue's deferred messages on disk, with their due times, in chunk files.

    <base>.deferred.000001.dat         a chunk, of which nothing has been read
    <base>.deferred.000001.250.dat     the same chunk; messages before number 250 are in memory
    <base>.deferred.000001.dat.bad     set aside after damage

A chunk is big-endian: 16 bytes `shmq deferred 1\\n`; the number of its first message, the count,
the CRC32 of these 24 bytes (u32 each); for each message its due time (int64, Unix ns), the CRC32 of
due time and record (u32), and the record as in a segment file; last the CRC32 of everything before
(u32). Messages are in order of due time.

A file is written whole (temporary neighbour, fsync, rename) and never changed. Its name tells how
far it has been read. Two words in the queue's shared-memory header (native/core/disk/chunk.c)
decide what counts, so that no death loses a message or delivers it twice:

    deferred_write = 7          chunks up to 7 count; chunk 8, if there is one, was never committed
    deferred_read = (5, 250)    chunk 5 was read last, its messages before 250 are in memory

`take_up` brings the file names in line with these words: it deletes chunk 8 and renames chunk 5.
nsqd has nothing like it and ignores these files.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shmq.shared import Shared
from shmq.storage import StorageError, own_files
from shmq.storage.data_path import bad_name
from shmq.storage.metadata import atomic_write, sync_directory, valid_name
from shmq.storage.records import RECORD_OVERHEAD

CHUNK_SHIFT = 24
MAX_MESSAGES = 4096  # in a chunk that shmq writes
MAX_BYTES = 4 << 20
_MOST_BYTES = (2 << 30) + (8 << 20)  # of a chunk: more than the largest message and MAX_BYTES

MAGIC = b"shmq deferred 1\n"
_HEADER = struct.Struct(">16sIII")  # magic, first, count, CRC of these
_ENTRY = struct.Struct(">qI")  # due, CRC of due and record
_DUE = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_LEAST_ENTRY = _ENTRY.size + RECORD_OVERHEAD
_BLOCK = 256 << 10  # bytes read at once

_NAME = re.compile(
    r"(?P<base>.+)\.deferred\.(?P<number>\d{6,})(?:\.(?P<read>\d+))?\.dat(?P<bad>\.bad(?:\.\d+)?)?"
)
_HEX = re.compile(rb"(?=[0-9a-f]{16})")

_log = logging.getLogger(__name__)


class DamagedChunk(StorageError):
    """A file (`filename`) in which neither the beginning nor any message of a chunk is intact."""


# -- the format -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A message of a chunk: its due time (Unix ns) and its record as on disk."""

    due: int
    record: bytes


def encode(entries: Iterable[tuple[int, bytes | memoryview]], first: int = 0) -> bytes:
    """The bytes of a chunk with these (due time, record) pairs, which are in order of due time.

    first: the number of the first of them.
    """
    parts: list[bytes | memoryview] = [b""]
    for due, record in entries:
        stamp = _DUE.pack(due)
        parts += stamp, _CRC.pack(zlib.crc32(record, zlib.crc32(stamp))), record
    head = _HEADER.pack(MAGIC, first, (len(parts) - 1) // 3, 0)[: -_CRC.size]
    parts[0] = head + _CRC.pack(zlib.crc32(head))
    data = b"".join(parts)
    return data + _CRC.pack(zlib.crc32(data))


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a chunk.

    first: number of the first message. lost: how many messages are missing from `entries`. Both
    are -1 if the file no longer tells. wrong: a sentence if the file is damaged; `entries` are
    then the intact messages. numbers: the number of each entry; after a damage the highest number
    that the entry may have.
    """

    first: int
    entries: list[Entry]
    numbers: Sequence[int]
    lost: int = 0
    wrong: str = ""

    def left(self, read: int) -> list[Entry]:
        """The entries from message `read` on. After a damage it returns rather one too many."""
        pairs = zip(self.entries, self.numbers, strict=True)
        return [entry for entry, number in pairs if number >= read]


def decode(data: bytes) -> Contents:
    """Decode a chunk. From a damaged one, every intact message is returned.

    Raises DamagedChunk if neither the beginning nor any message is intact.
    """
    first, count, wrong = _check(data)
    # in a file that is cut off after a message, the message's end is where the CRC would be
    body = memoryview(data)[: len(data) if wrong else len(data) - _CRC.size]
    entries, breaks = _walk(body, salvaging=bool(wrong))
    if breaks:
        wrong = wrong or f"no message behind the first {breaks[0]}"
    if not wrong and len(entries) != count:
        wrong = f"it has {len(entries)} messages of {count}"
    if wrong and not entries and count < 0:
        raise DamagedChunk(errno.EIO, wrong)
    numbers = _numbers(first, count, len(entries), breaks)
    return Contents(first, entries, numbers, count - len(entries) if count >= 0 else -1, wrong)


def _numbers(first: int, count: int, found: int, breaks: list[int]) -> Sequence[int]:
    """The numbers of `found` entries out of `count`; each of `breaks` has damage before it."""
    if count < 0:
        return [1 << 62] * found
    lost = count - found
    before = breaks[0] if breaks else found
    return [first + i + (lost if i >= before else 0) for i in range(found)]


def _check(data: bytes) -> tuple[int, int, str]:
    """(number of the first message, count, what is wrong); the numbers are -1 if not known."""
    if len(data) < _HEADER.size + _CRC.size:
        return -1, -1, f"{len(data)} bytes are no chunk"
    magic, first, count, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or crc != zlib.crc32(data[: _HEADER.size - _CRC.size]):
        return -1, -1, "its beginning is damaged"
    body = memoryview(data)[: -_CRC.size]
    if _CRC.unpack_from(data, len(body))[0] != zlib.crc32(body):
        return first, count, "its CRC is wrong"
    return first, count, ""


def _walk(body: memoryview, salvaging: bool) -> tuple[list[Entry], list[int]]:
    """The intact messages after the header, and the indices of those with damage before them.

    salvaging: search for more messages after a damage; otherwise stop there.
    """
    entries: list[Entry] = []
    breaks: list[int] = []
    at = _HEADER.size
    while at < len(body):
        entry = _entry_at(body, at)
        if entry is not None:
            entries.append(entry)
            at += _ENTRY.size + len(entry.record)
            continue
        breaks.append(len(entries))
        following = _search(body, at + 1) if salvaging else None
        if following is None:
            break
        at = following
    return entries, breaks


def _entry_at(body: memoryview, at: int) -> Entry | None:
    """The message at this offset if it is whole and intact."""
    if len(body) - at < _LEAST_ENTRY:
        return None
    due, crc = _ENTRY.unpack_from(body, at)
    begin = at + _ENTRY.size
    end = begin + 4 + _LENGTH.unpack_from(body, begin)[0]
    if not begin + RECORD_OVERHEAD <= end <= len(body):
        return None
    if zlib.crc32(body[begin:end], zlib.crc32(body[at : at + _DUE.size])) != crc:
        return None
    return Entry(due, bytes(body[begin:end]))


def _search(body: memoryview, begin: int) -> int | None:
    """The offset of the first intact message from `begin` on."""
    before_id = _ENTRY.size + RECORD_OVERHEAD - 16
    for match in _HEX.finditer(body[begin:]):
        at = begin + match.start() - before_id
        if at >= begin and _entry_at(body, at) is not None:
            return at
    return None


# -- what the directory holds ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk's file, as its name describes it."""

    number: int
    read: int  # messages before this number have been read
    name: str


def existing(data_path: Path | str) -> dict[str, list[ChunkFile]]:
    """The chunk files of every base name (`<topic>` or `<topic>:<channel>`), in order of number.

    Raises OSError if the directory cannot be read.
    """
    found: dict[str, list[ChunkFile]] = {}
    for name in os.listdir(data_path):
        match = _NAME.fullmatch(name)
        if match is None or match["bad"]:
            continue
        topic, colon, channel = match["base"].partition(":")
        if valid_name(topic) and (not colon or valid_name(channel)):
            file = ChunkFile(int(match["number"]), int(match["read"] or 0), name)
            found.setdefault(match["base"], []).append(file)
    for files in found.values():
        files.sort(key=lambda file: (file.number, file.read))
    return found


# -- one queue ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Chunk:
    """A chunk with messages that have not been read."""

    number: int
    read: int  # number of its next message
    count: int  # messages left
    due: int  # of the next message (Unix ns)
    offset: int  # of the next message in the file
    name: str


class Piece(NamedTuple):
    """Consecutive messages of one chunk."""

    chunk: Chunk
    data: bytes  # records, back to back
    dues: array[int]  # int64
    ends: list[int]  # offset in the file after each message
    next_due: int | None  # of the message after them; None: it was not read

    @property
    def first(self) -> bytes:
        """The record of the first message."""
        return self.data[: 4 + _LENGTH.unpack_from(self.data)[0]]

    @property
    def position(self) -> int:
        """Chunk number << 24 | number of the first message, as the core takes it."""
        return self.chunk.number << CHUNK_SHIFT | self.chunk.read


class DeferredStore:
    """The chunks of one queue. For one thread at a time."""

    def __init__(self, data_path: Path | str, base: str) -> None:
        """`base`: `<topic>` or `<topic>:<channel>`. No file is touched."""
        self.data_path = Path(data_path)
        self.base = base
        self.chunks: Shared[int, Chunk] = Shared()
        self.bad_files = 0
        self._highest = 0
        self._leftover: set[str] = set()  # files that could not be deleted yet

    @property
    def depth(self) -> int:
        """Messages in all chunks."""
        return sum(chunk.count for chunk in self.chunks.values())

    @property
    def highest(self) -> int:
        """The highest chunk number that was ever used."""
        return self._highest

    @property
    def lowest(self) -> int:
        """The lowest number of a chunk with unread messages; 2^62 if there is none."""
        return min(list(self.chunks), default=1 << 62)

    @property
    def due(self) -> int | None:
        """When the earliest message is due (Unix ns); None if there is none."""
        return min((chunk.due for chunk in list(self.chunks.values())), default=None)

    def file_name(self, number: int, read: int = 0) -> str:
        """The name of a chunk's file in the data path."""
        progress = f".{read}" if read else ""
        return f"{self.base}.deferred.{number:06d}{progress}.dat"

    # -- start and adoption

    def take_up(
        self,
        files: Iterable[ChunkFile],
        write: int | None = None,
        read: int = 0,
        gone: int = 0,
    ) -> None:
        """Take up the existing files.

        write, read, gone: the words `deferred_write`, `deferred_read` and `deferred_gone` of the
        queue's header. Without a header (write is None) every chunk counts.
        Files that do not count are deleted. The chunk that was read last gets its progress into
        its name. Damaged files are set aside and their intact messages are kept. Raises OSError.
        """
        read_number, read_message = read >> CHUNK_SHIFT, read & (1 << CHUNK_SHIFT) - 1
        self._highest = max(self._highest, write or 0, read_number)
        twice: list[ChunkFile] = []
        for file in files:
            if file.number <= gone or (write is not None and file.number > write):
                (self.data_path / file.name).unlink(missing_ok=True)
                continue
            self._highest = max(self._highest, file.number)
            if write is None and file.number in self.chunks:
                twice.append(file)
                continue
            known = read_message if file.number == read_number else 0
            self._open(ChunkFile(file.number, max(file.read, known), file.name))
        for file in twice:  # somebody gave a chunk that was set aside this number
            self._highest += 1
            name = self.file_name(self._highest, file.read)
            os.rename(self.data_path / file.name, self.data_path / name)
            self._open(ChunkFile(self._highest, file.read, name))
        self.settle()

    def _open(self, file: ChunkFile) -> None:
        """Enter the chunk of a file. Deletes the file if it has no unread message."""
        path = self.data_path / file.name
        try:
            data = own_files.read_file(path, _MOST_BYTES)
        except MemoryError:
            self._set_aside(file.name, "it does not fit in memory")
            return
        except OSError as exc:
            if exc.errno != errno.EFBIG:
                raise
            self._set_aside(file.name, str(exc.strerror))
            return
        first, count, wrong = _check(data)
        if not wrong and file.read <= first and count and len(data) > _HEADER.size + _DUE.size:
            due = _DUE.unpack_from(data, _HEADER.size)[0]
            self.chunks[file.number] = Chunk(
                file.number, first, count, due, _HEADER.size, file.name
            )
            return
        try:
            contents = decode(data)
        except DamagedChunk as exc:
            self._set_aside(file.name, str(exc.strerror))
            return
        if contents.wrong:
            self._salvage(file, contents)
            return
        left = contents.left(file.read)
        if not left:
            self._delete(file.name)
            return
        begin = len(data) - _CRC.size - sum(_ENTRY.size + len(entry.record) for entry in left)
        self.chunks[file.number] = Chunk(
            file.number, file.read, len(left), left[0].due, begin, file.name
        )

    def _salvage(self, file: ChunkFile, contents: Contents) -> None:
        """Replace a damaged chunk by its intact messages that may not have been read: a duplicate
        is better than a loss. The damaged file is kept as `.bad`."""
        left = contents.left(file.read)
        self._set_aside(
            file.name, f"{contents.wrong}; {len(left)} messages are intact", linked=True
        )
        if not left:
            self._delete(file.name)
            return
        left = sorted(left, key=lambda entry: entry.due)
        atomic_write(self.data_path / file.name, encode(left, file.read))
        self.chunks[file.number] = Chunk(
            file.number, file.read, len(left), left[0].due, _HEADER.size, file.name
        )

    def _set_aside(self, name: str, wrong: str, linked: bool = False) -> None:
        """Give a file a `.bad` name. linked: as a second name, so that the file also stays."""
        bad = bad_name(self.data_path / name).name
        self.bad_files += 1
        _log.error("%s: %s; set aside as %s", self.data_path / name, wrong, bad)
        (os.link if linked else os.rename)(self.data_path / name, self.data_path / bad)

    # -- out

    def write(self, dues: Sequence[int], lengths: Sequence[int], records: bytes) -> Chunk:
        """Write a chunk under the next number: due times in order, records of these lengths back
        to back. It counts once the caller has stored its number in the queue's header and called
        `add`; otherwise the caller calls `discard`. Raises OSError.
        """
        number = self._highest + 1
        chunk = Chunk(number, 0, len(dues), dues[0], _HEADER.size, self.file_name(number))
        data = encode(zip(dues, _cut(memoryview(records), lengths), strict=True))
        self._leftover.discard(chunk.name)
        atomic_write(self.data_path / chunk.name, data)
        return chunk

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that was written."""
        self._highest = max(self._highest, chunk.number)
        self.chunks[chunk.number] = chunk

    def discard(self, chunk: Chunk) -> None:
        """Delete a chunk that was written but does not count. Its number may be used again."""
        self._delete(chunk.name)

    # -- in

    def read(
        self, chunk: Chunk, until: int, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES
    ) -> Piece | None:
        """The next messages of a chunk that are due at `until` (Unix ns) or before.

        At least one if there is one, at most `messages`, about `nbytes` bytes. None if the file was
        damaged: it has been set aside, and its intact messages are in `chunks`. Raises OSError.
        """
        parts: list[bytes] = []
        dues: array[int] = array("q")
        ends: list[int] = []
        next_due = None
        for due, record, end in self._entries(chunk):
            if record is None:
                self._damaged(chunk)
                return None
            over = len(dues) == messages or (dues and ends[-1] - chunk.offset >= nbytes)
            if due > until or over:
                next_due = due
                break
            parts.append(record)
            dues.append(due)
            ends.append(end)
        return Piece(chunk, b"".join(parts), dues, ends, next_due)

    def keep_first(self, piece: Piece) -> Path:
        """Set the first message of a piece aside in a chunk of its own, and leave the others.
        Returns the path of that chunk. Raises OSError; the message is then where it was.

        A death in the middle leaves the message in both, and the next try sets it aside again.
        """
        chunk, path = piece.chunk, self.data_path / piece.chunk.name
        contents = decode(own_files.read_file(path, _MOST_BYTES))
        first, *left = contents.left(chunk.read)
        self._highest += 1  # no chunk gets this number while this store lives
        bad = bad_name(self.data_path / self.file_name(self._highest))
        atomic_write(bad, encode([first]))
        self.bad_files += 1
        if left:
            atomic_write(path, encode(left, chunk.read))
            self.chunks[chunk.number] = Chunk(
                chunk.number, chunk.read, len(left), left[0].due, _HEADER.size, chunk.name
            )
        else:
            del self.chunks[chunk.number]
            self._delete(chunk.name)
        return bad

    def _entries(self, chunk: Chunk) -> Iterator[tuple[int, bytes | None, int]]:
        """(due, record, offset after it) of each unread message. A record None means damage."""
        at = start = chunk.offset
        block = memoryview(b"")
        path = self.data_path / chunk.name
        with open(own_files.open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size - _CRC.size
            for _ in range(chunk.count):
                need = _LEAST_ENTRY
                if len(block) - (at - start) >= need:
                    length = _LENGTH.unpack_from(block, at - start + _ENTRY.size)[0]
                    need = max(_ENTRY.size + 4 + length, need)
                if len(block) - (at - start) < need <= size - at:
                    start, block = at, memoryview(os.pread(file.fileno(), max(_BLOCK, need), at))
                    if len(block) >= _LEAST_ENTRY:
                        length = _LENGTH.unpack_from(block, _ENTRY.size)[0]
                        need = max(_ENTRY.size + 4 + length, need)
                    if len(block) < need <= size - at:
                        block = memoryview(os.pread(file.fileno(), need, at))
                entry = _entry_at(block, at - start) if need <= size - at else None
                if entry is None:
                    yield 0, None, at
                    return
                at += _ENTRY.size + len(entry.record)
                yield entry.due, entry.record, at

    def _damaged(self, chunk: Chunk) -> None:
        del self.chunks[chunk.number]
        self._open(ChunkFile(chunk.number, chunk.read, chunk.name))

    def took(self, piece: Piece, count: int) -> None:
        """Note that the first `count` messages of a piece are in memory and that the queue's header
        says so. Raises OSError if the file's name cannot follow; then call `settle` before another
        chunk is read.
        """
        chunk = piece.chunk
        chunk.read += count
        chunk.count -= count
        if chunk.count and count:
            chunk.offset = piece.ends[count - 1]
            if count < len(piece.dues):
                chunk.due = piece.dues[count]
            elif piece.next_due is not None:
                chunk.due = piece.next_due
        if not chunk.count:
            del self.chunks[chunk.number]
            self._delete(chunk.name)
        self.settle()

    def settle(self) -> None:
        """Bring the file names in line with what has been read. Raises OSError."""
        for name in list(self._leftover):
            self._delete(name)
        for chunk in self.chunks.values():
            name = self.file_name(chunk.number, chunk.read)
            if chunk.name != name:
                os.rename(self.data_path / chunk.name, self.data_path / name)
                chunk.name = name

    def _delete(self, name: str) -> None:
        self._leftover.add(name)
        (self.data_path / name).unlink(missing_ok=True)
        self._leftover.discard(name)

    # -- clearing away

    def drop(self, gone: int) -> None:
        """Delete the chunks up to number `gone`, which were emptied. Raises OSError."""
        for number in sorted(self.chunks):
            if number <= gone:
                name = self.chunks.pop(number).name
                self._delete(name)

    def remove_all(self) -> None:
        """Delete all chunks. Raises OSError."""
        own_files.check_place(self.data_path)
        self.drop(self._highest)

    def rename(self, new_base: str) -> None:
        """Give all chunks another base name. A second call finishes a rename that was cut short.
        Raises OSError."""
        if new_base == self.base:
            return
        self.base = new_base
        self.settle()
        if self.chunks:
            sync_directory(self.data_path)


def _cut(view: memoryview, lengths: Iterable[int]) -> Iterator[memoryview]:
    begin = 0
    for length in lengths:
        yield view[begin : begin + length]
        begin += length
