"""Deferred messages of one queue that wait on disk, with their due times: chunk files.

    <base>.deferred.000001.dat         a chunk; nothing of it has been read
    <base>.deferred.000001.250.dat     its messages before number 250 are in memory again
    <base>.deferred.000001.dat.bad     set aside after damage

A chunk, big-endian: 16 bytes `shmq deferred 1\\n`; number of the first message in it, count, CRC32
of these 24 bytes (u32 each); for each message its due time (int64, Unix ns), CRC32 of due time and
record (u32), and the record as in a segment file; last the CRC32 of all before (u32). Messages are
in order of due time.

A file is written whole (temporary neighbour, fsync, rename) and never changed. What has been read
of it is in its name. So that no message is lost or comes twice whatever dies, two words in the
queue's shared-memory header decide (native/core/chunk.c): `deferred_write`, the highest chunk that
counts; and `deferred_read`, how far the chunk that was read last has been read. `take_up` brings
the names in line with them. nsqd has nothing like it and does not look at these files.
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

from shmq.ownership import open_regular, read_regular
from shmq.storage import StorageError
from shmq.storage.diskqueue import RECORD_OVERHEAD
from shmq.storage.metadata import atomic_write, sync_directory, valid_name

CHUNK_SHIFT = 24
MAX_MESSAGES = 4096  # of a chunk that shmq writes
MAX_BYTES = 4 << 20

MAGIC = b"shmq deferred 1\n"
_HEADER = struct.Struct(">16sIII")  # magic, first, count, CRC of what is before it
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
    """A chunk (`filename`) that is not what was written."""


# -- the format -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A message of a chunk: due time (Unix ns) and its record as on disk."""

    due: int
    record: bytes


def encode(entries: Iterable[tuple[int, bytes | memoryview]], first: int = 0) -> bytes:
    """The bytes of a chunk with these (due time, record), which are in order of due time."""
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
    """What is in a chunk. first: number of the first message; lost: how many of those there were
    are not in `entries`; both -1 if the file does not say so any more. wrong: a sentence if it is
    damaged; `entries` is then what is intact. numbers: of each entry; between two damages the
    highest it may have."""

    first: int
    entries: list[Entry]
    numbers: Sequence[int]
    lost: int = 0
    wrong: str = ""

    def left(self, read: int) -> list[Entry]:
        """Those that are not before message `read`; rather one too many."""
        pairs = zip(self.entries, self.numbers, strict=True)
        return [entry for entry, number in pairs if number >= read]


def decode(data: bytes) -> Contents:
    """Read a chunk; whatever is wrong with it, every message that is intact.

    Raises DamagedChunk if it is no chunk at all: neither its beginning nor any message of it.
    """
    first, count, wrong = _check(data)
    # cut off behind a message, its last bytes are where the CRC should be
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
    """The numbers of `found` entries of `count`, with damage before the `breaks`."""
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
    """The intact messages behind the header, and before which of them there is damage. salvaging:
    look for more behind damage, else stop there."""
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
    """Where, from `begin` on, there is an intact message."""
    before_id = _ENTRY.size + RECORD_OVERHEAD - 16
    for match in _HEX.finditer(body[begin:]):
        at = begin + match.start() - before_id
        if at >= begin and _entry_at(body, at) is not None:
            return at
    return None


# -- what the directory holds ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk's file, by its name."""

    number: int
    read: int  # messages before this one are not in it any more
    name: str


def existing(data_path: Path | str) -> dict[str, list[ChunkFile]]:
    """The chunk files of every base name (`<topic>` or `<topic>:<channel>`), by number.

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
    """A chunk that has messages left."""

    number: int
    read: int  # number of its next message
    count: int  # messages left
    due: int  # of the next message (Unix ns)
    offset: int  # of the next message in the file
    name: str


class Piece(NamedTuple):
    """Messages of one chunk, next to each other."""

    chunk: Chunk
    data: bytes  # records, back to back
    dues: array[int]  # int64
    ends: list[int]  # offset in the file behind each
    next_due: int | None  # of the message behind them; None: it was not looked at

    @property
    def position(self) -> int:
        """What the core wants to know: chunk and number of the first."""
        return self.chunk.number << CHUNK_SHIFT | self.chunk.read


class Sidecar:
    """The chunks of one queue. One thread at a time."""

    def __init__(self, data_path: Path | str, base: str) -> None:
        """`base`: `<topic>` or `<topic>:<channel>`. Touches no file."""
        self.data_path = Path(data_path)
        self.base = base
        self.chunks: dict[int, Chunk] = {}
        self.bad_files = 0
        self._highest = 0
        self._leftover: set[str] = set()  # files that could not be deleted yet

    @property
    def depth(self) -> int:
        """Messages in all chunks."""
        return sum(chunk.count for chunk in self.chunks.values())

    @property
    def highest(self) -> int:
        """The highest number of a chunk there has been."""
        return self._highest

    @property
    def lowest(self) -> int:
        """The lowest number of a chunk that has messages left; beyond all if there is none."""
        return min(list(self.chunks), default=1 << 62)

    @property
    def due(self) -> int | None:
        """When the first message is due (Unix ns); None if there is none."""
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
        """Take up the files there are. write, read, gone: what the queue's header says, if there is
        one (`deferred_write`, `deferred_read`, `deferred_gone`); without one every chunk counts.

        Files that do not count are deleted, the last one read gets its progress into its name,
        damaged ones are set aside and what is intact of them is kept. Raises OSError.
        """
        read_number, read_message = read >> CHUNK_SHIFT, read & (1 << CHUNK_SHIFT) - 1
        self._highest = max(self._highest, write or 0, read_number)
        for file in files:
            if file.number <= gone or (write is not None and file.number > write):
                (self.data_path / file.name).unlink(missing_ok=True)
                continue
            self._highest = max(self._highest, file.number)
            known = read_message if file.number == read_number else 0
            self._open(ChunkFile(file.number, max(file.read, known), file.name))
        self.settle()

    def _open(self, file: ChunkFile) -> None:
        """Enter a chunk by its file; delete the file if nothing is left in it."""
        path = self.data_path / file.name
        data = read_regular(path)
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
        """Put what is intact and may not have been read of a damaged chunk into its place; rather
        twice than never. The damaged file is kept as `.bad`."""
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
        """Give a file a name that nobody reads; linked: besides the one it has."""
        bad, attempt = f"{name}.bad", 0
        while (self.data_path / bad).exists():
            attempt += 1
            bad = f"{name}.bad.{attempt}"
        self.bad_files += 1
        _log.error("%s: %s; set aside as %s", self.data_path / name, wrong, bad)
        (os.link if linked else os.rename)(self.data_path / name, self.data_path / bad)

    # -- out

    def write(self, dues: Sequence[int], lengths: Sequence[int], records: bytes) -> Chunk:
        """Put a chunk on disk under the next number: due times in order, records of these lengths
        back to back. It counts when the caller has stored its number and called `add`; else
        `discard` it. Raises OSError.
        """
        number = self._highest + 1
        chunk = Chunk(number, 0, len(dues), dues[0], _HEADER.size, self.file_name(number))
        data = encode(zip(dues, _cut(memoryview(records), lengths), strict=True))
        self._leftover.discard(chunk.name)
        atomic_write(self.data_path / chunk.name, data)
        return chunk

    def add(self, chunk: Chunk) -> None:
        """A chunk that was written counts from now on."""
        self._highest = max(self._highest, chunk.number)
        self.chunks[chunk.number] = chunk

    def discard(self, chunk: Chunk) -> None:
        """A chunk that was written does not count: delete it. Its number may be used again."""
        self._delete(chunk.name)

    # -- in

    def read(
        self, chunk: Chunk, until: int, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES
    ) -> Piece | None:
        """The next messages of a chunk that are due at `until` (Unix ns) or before: at least one
        if there is one, at most so many and about so many bytes. None: the file was damaged; it has
        been set aside and what is intact is in `chunks`.

        Raises OSError.
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

    def _entries(self, chunk: Chunk) -> Iterator[tuple[int, bytes | None, int]]:
        """(due, record, offset behind it) of what is left; a record None is damage."""
        at = start = chunk.offset
        block = memoryview(b"")
        path = self.data_path / chunk.name
        with open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
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
        """The first `count` messages of a piece are in memory, and the header says so. Raises
        OSError: the file's name does not say so yet; call `settle` before any other chunk is read.
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
        """Bring the names of files in line with what has been read. Raises OSError."""
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
        """Delete the chunks up to this number: they were emptied. Raises OSError."""
        for number in sorted(self.chunks):
            if number <= gone:
                name = self.chunks.pop(number).name
                self._delete(name)

    def remove_all(self) -> None:
        """Delete all chunks. Raises OSError."""
        self.drop(self._highest)

    def rename(self, new_base: str) -> None:
        """Give all chunks another base name. Calling it again finishes it if it was cut short.
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
