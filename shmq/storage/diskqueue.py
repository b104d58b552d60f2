"""The overflow files of one queue, byte for byte go-diskqueue's as nsqd uses it.

    <base>.diskqueue.000000.dat ...   records: int32 length, int64 timestamp (Unix ns),
                                      uint16 attempts, 16 hex digits of id, body; big-endian
    <base>.diskqueue.meta.dat         "depth\\nreadFile,readPos\\nwriteFile,writePos\\n"
    <base>.diskqueue.000000.dat.bad   set aside after damage

`<base>` is `<topic>` for a topic's backlog and `<topic>:<channel>` for a channel.

A position is one 64-bit word, `file << 40 | offset`, so that one store can commit it. The truth of
the read and the write position is in the queue's shared-memory header; nothing here remembers
them. Files only change beyond the write position (`write`), below the read position
(`drop_before`), or because the caller says so (`cut`, `set_aside`, `remove_all`, `rename`).

In this module the length of a record is what it takes on disk, its length prefix included
(`RECORD_OVERHEAD` + body); the number in the prefix is 4 less.

Where this differs from nsqd, it is to lose nothing that is good: see `DiskQueue.start`, `read` and
`set_aside`. Source: nsqd, `nsqd/message.go`; go-diskqueue, `diskqueue.go`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmq.ownership import open_regular, read_regular
from shmq.storage import StorageError
from shmq.storage.metadata import replace, sync_directory, valid_name

FILE_SHIFT = 40
MAX_OFFSET = (1 << FILE_SHIFT) - 1
MAX_FILE = (1 << (64 - FILE_SHIFT)) - 1
LAST_FILE = MAX_FILE - 1  # the highest number a file has: what comes behind it is a position still

MESSAGE_HEADER = 26  # timestamp, attempts, id: the least a length prefix can say
RECORD_OVERHEAD = 4 + MESSAGE_HEADER

_PREFIX = struct.Struct(">i")
_RECORD = struct.Struct(">iqH16s")
_COUNT_BLOCK = 8 << 20  # bytes read at once by recount
_FEW_FILES = 1000  # are unlinked by number; of more those that the directory has

_DATA_NAME = re.compile(r"(?P<base>.+)\.diskqueue\.(?P<file>\d{6,})\.dat(?P<bad>\.bad(?:\.\d+)?)?")
_META_NAME = re.compile(r"(?P<base>.+)\.diskqueue\.meta\.dat")
_TEMPORARY_NAME = re.compile(
    r"(?:.+\.diskqueue\.meta|.+\.deferred\.\d{6,}(?:\.\d+)?|nsqd|shmq)\.dat\.\d+\.tmp"
)
_META_TEXT = re.compile(
    rb"[ \t]*([+-]?\d{1,19})[ \t]*\r?\n"
    rb"[ \t]*\+?(\d{1,19}),[ \t]*\+?(\d{1,19})[ \t]*\r?\n"
    rb"[ \t]*\+?(\d{1,19}),[ \t]*\+?(\d{1,19})[ \t]*(?:\r?\n|\Z)"
)

_log = logging.getLogger(__name__)

Scanner = Callable[[bytes, int], tuple[int, int, bool]]
"""(buffer, max_msg_size) -> (whole records, bytes they take, whether an impossible length ended
it). A record cut off by the end of the buffer is no damage. The C core has a fast one."""


# -- positions and records ------------------------------------------------------------------------


def pack(file: int, offset: int) -> int:
    """The position word of a file number and a byte offset in it.

    Raises OverflowError if either does not fit (2^24 files, 2^40 bytes).
    """
    if not (0 <= file <= MAX_FILE and 0 <= offset <= MAX_OFFSET):
        raise OverflowError(f"position {file},{offset} does not fit in a word")
    return file << FILE_SHIFT | offset


def unpack(position: int) -> tuple[int, int]:
    """(file number, byte offset) of a position word."""
    word = int(position)
    return word >> FILE_SHIFT, word & MAX_OFFSET


class Record(NamedTuple):
    """One message as it is on disk."""

    timestamp: int  # Unix ns of the publish
    attempts: int  # deliveries so far
    id: bytes  # 16 hex digits
    body: bytes


class Scan(NamedTuple):
    """The whole records at the start of a buffer, and what ended them."""

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
    """The bytes nsqd would write for these messages (reference; the hot path is in C).

    `timestamps` in Unix ns; `attempts` modulo 65536; an id is 16 hex digits or the number.
    Raises ValueError if the columns differ in length or an id has not 16 characters.
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
    """The whole records at the start of `data`, up to the first that cannot be right."""
    scan = scan_records(data, max_msg_size)
    for offset, length in zip(scan.offsets.tolist(), scan.lengths.tolist(), strict=True):
        _, timestamp, attempts, ident = _RECORD.unpack_from(data, offset)
        body = data[offset + RECORD_OVERHEAD : offset + length]
        yield Record(timestamp, attempts, ident, bytes(body))


def scan_records(buffer: bytes | bytearray | memoryview, max_msg_size: int) -> Scan:
    """Find the records in `buffer`, which begins with one.

    Stops at a length prefix outside [26, max_msg_size + 26] ("length"), at a record the buffer
    does not hold whole ("truncated"), or at the buffer's end ("end").
    """
    view = memoryview(buffer)
    size, most = len(view), max_msg_size + MESSAGE_HEADER
    starts: list[int] = []
    lengths: list[int] = []
    offset = 0
    stop: Literal["end", "length", "truncated"] = "end"
    read_prefix = _PREFIX.unpack_from
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


def _scan(buffer: bytes, max_msg_size: int) -> tuple[int, int, bool]:
    """The Scanner used where the caller has none."""
    scan = scan_records(buffer, max_msg_size)
    return len(scan.offsets), scan.used, scan.stop == "length"


# -- what the directory holds ---------------------------------------------------------------------


@dataclass(slots=True)
class QueueFiles:
    """The files of one base name in a data path."""

    numbers: list[int]  # of the .dat files, rising
    bad: list[str]  # names of .bad files: evidence, no queue by themselves
    meta: bool = False

    @property
    def has_data(self) -> bool:
        """Whether there is a queue to open, as against only .bad files."""
        return self.meta or bool(self.numbers)


def existing(data_path: Path | str) -> dict[str, QueueFiles]:
    """Every base name (`<topic>` or `<topic>:<channel>`) that has files in the directory.

    One pass over the directory for all queues: hand `numbers` to `DiskQueue.start`. Files whose
    names are not nsqd's are left out. Raises OSError if the directory cannot be read.
    """
    found: dict[str, QueueFiles] = {}
    for name in os.listdir(data_path):
        data, meta = _DATA_NAME.fullmatch(name), _META_NAME.fullmatch(name)
        match = data or meta
        if match is None or not _valid_base(match["base"]):
            continue
        files = found.setdefault(match["base"], QueueFiles([], []))
        if data is None:
            files.meta = True
        elif data["bad"]:
            files.bad.append(name)
        elif (number := _number(data)) is not None:
            files.numbers.append(number)
    for files in found.values():
        files.numbers.sort()
        files.bad.sort()
    return found


def _number(match: re.Match[str]) -> int | None:
    """The number in a data file's name; None if no queue gives a file this name."""
    number = int(match["file"])
    return number if number <= LAST_FILE and match["file"] == f"{number:06d}" else None


def remove_temporary(data_path: Path | str) -> int:
    """Delete what metadata writes cut short by a crash left (`*.dat.<random>.tmp`): how many.

    Only under the data path's lock. Raises OSError.
    """
    names = [name for name in os.listdir(data_path) if _TEMPORARY_NAME.fullmatch(name)]
    for name in names:
        os.unlink(os.path.join(data_path, name))
    return len(names)


def _valid_base(base: str) -> bool:
    topic, colon, channel = base.partition(":")
    return valid_name(topic) and (not colon or valid_name(channel))


# -- one queue ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meta:
    """What the position file says: records not yet read, and both position words."""

    depth: int
    read_position: int
    write_position: int


def parse_meta(text: bytes) -> Meta | None:
    """What a position file with this text says; None if nothing possible."""
    match = _META_TEXT.match(text)
    if match is None:
        return None
    depth, read_file, read_offset, write_file, write_offset = map(int, match.groups())
    try:
        return Meta(depth, pack(read_file, read_offset), pack(write_file, write_offset))
    except OverflowError:
        return None


@dataclass(frozen=True)
class Chunk:
    """Whole records from one file, as they are on disk; empty when everything has been read."""

    data: bytes
    position: int  # of data[0]: not the read position asked for if that was at the end of a file
    next_position: int  # the read position once these are taken
    count: int  # records
    max_msg_size: int

    @cached_property
    def _scan(self) -> Scan:
        return scan_records(self.data, self.max_msg_size)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Offset in `data` of each record; its position is `position` plus that."""
        return self._scan.offsets

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each record, length prefix included."""
        return self._scan.lengths


class DamagedFile(StorageError):
    """What is at the read position cannot be a record; everything before it has been delivered.

    The caller calls `set_aside(file)` and goes on at `next_position`; if that is beyond the write
    position (`is_write_file`), the write position moves to it too.
    """

    def __init__(
        self, path: Path, position: int, reason: str, next_position: int, is_write_file: bool
    ) -> None:
        file, offset = unpack(position)
        sentence = f"damaged at offset {offset} ({reason}); the rest of this file cannot be read"
        super().__init__(errno.EIO, sentence, str(path))
        self.path = path
        self.position = position
        self.file = file
        self.reason = reason
        self.next_position = next_position
        self.is_write_file = is_write_file


class DiskQueue:
    """Reads and writes the files of one queue; positions are arguments, never kept.

    Descriptors are opened when needed and kept until `close`, which may be called at any time:
    the next call opens them again. One thread at a time.
    """

    def __init__(
        self,
        data_path: Path | str,
        base: str,
        *,
        max_bytes_per_file: int = 104857600,
        max_msg_size: int = 1048576,
        sync_every: int = 2500,
        sync_timeout: float = 2.0,
    ) -> None:
        """`base`: `<topic>` or `<topic>:<channel>`. Touches no file.

        max_bytes_per_file: a file ends before a record that would make it longer (bytes).
        max_msg_size: longest body (bytes); a record that claims more is damage, so never lower it
        below what files already hold.
        sync_every: reads and writes between two syncs; sync_timeout: most seconds between them.
        Raises ValueError for a base that is no queue's name or a limit that cannot be.
        """
        if not _valid_base(base):
            raise ValueError(f"{base!r} is not a topic or topic:channel")
        if max_bytes_per_file < 1 or not 0 <= max_msg_size <= 0x7FFFFFFF - MESSAGE_HEADER:
            raise ValueError("max_bytes_per_file or max_msg_size out of range")
        if max(max_bytes_per_file, max_msg_size + RECORD_OVERHEAD) > MAX_OFFSET:
            raise ValueError(f"max_bytes_per_file cannot exceed {MAX_OFFSET}")
        self.data_path = Path(data_path)
        self.base = base
        self.max_bytes_per_file = max_bytes_per_file
        self.max_msg_size = max_msg_size
        self.sync_every = sync_every
        self.sync_timeout = sync_timeout
        self._read_fd = self._write_fd = -1
        self._read_file = self._write_file = -1
        self._unsynced: set[int] = set()  # files written since their last fsync
        self._new_names = True  # files may have been made since the directory's last fsync
        self._lowest: int | None = None  # no file below this one exists; None: not known
        self._operations = 0
        self._sync_wanted = False
        self._next_tick: float | None = None
        self._synced: int | None = None

    # -- names

    def file_name(self, file: int) -> str:
        """The name of a data file in the data path."""
        return f"{self.base}.diskqueue.{file:06d}.dat"

    def file_path(self, file: int) -> Path:
        """The path of a data file (what `read` of a lease opens by itself)."""
        return self.data_path / self.file_name(file)

    @property
    def meta_path(self) -> Path:
        """The path of the position file."""
        return self.data_path / f"{self.base}.diskqueue.meta.dat"

    def files(self) -> list[int]:
        """The numbers of the data files there are, rising. Reads the whole directory."""
        numbers, prefix = [], f"{self.base}."
        for name in os.listdir(self.data_path):
            match = _DATA_NAME.fullmatch(name) if name.startswith(prefix) else None
            if match and match["base"] == self.base and not match["bad"]:
                numbers.append(_number(match))
        return sorted(number for number in numbers if number is not None)

    # -- writing

    def plan(self, position: int, lengths: ArrayLike) -> NDArray[np.uint64]:
        """The position each record will get from write position `position` on, then the new one.

        `lengths`: bytes on disk, prefix included. nsqd's rule: the next file begins before a
        record that would make a file that has something in it longer than `max_bytes_per_file`.
        Raises ValueError for a length that no record can have, StorageError where the numbers of
        files are used up.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        least, most = RECORD_OVERHEAD, RECORD_OVERHEAD + self.max_msg_size
        if sizes.size and not (sizes.min() >= least and sizes.max() <= most):
            raise ValueError(f"a record length is outside [{least}, {most}]")
        file, offset = unpack(position)
        ends = np.zeros(sizes.size + 1, dtype=np.int64)
        np.cumsum(sizes, out=ends[1:])
        words = np.empty(sizes.size + 1, dtype=np.uint64)
        first = 0
        while True:
            # records [first, last) fit behind offset in this file
            room = self.max_bytes_per_file - offset + int(ends[first])
            last = max(first, int(np.searchsorted(ends, room, side="right")) - 1)
            if last == first and first < sizes.size and offset == 0:
                last += 1  # alone too long for any file, so it has one of its own
            if file > LAST_FILE and sizes.size:
                sentence = (
                    f"no file after number {LAST_FILE} can be made; consume all of this queue, "
                    "then stop the broker and start it again"
                )
                raise StorageError(errno.EFBIG, sentence, str(self.file_path(file)))
            base = pack(file, offset)
            end = offset + int(ends[last] - ends[first])
            words[first : last + 1] = (ends[first : last + 1] - ends[first]).astype(np.uint64)
            words[first : last + 1] += np.uint64(base)
            if last == sizes.size:
                pack(file, end)
                return words
            file, offset, first = file + 1, 0, last

    def write(
        self,
        buffer: bytes | bytearray | memoryview,
        positions: NDArray[np.uint64],
        lengths: ArrayLike,
        *,
        write_position: int | None = None,
    ) -> None:
        """Put records, back to back in `buffer`, where `plan` said; fsync files that it completes,
        and all of it if `sync_every` operations are reached: so never more than that many count as
        written (the caller stores the write position after this) and are not on disk.

        `positions` as `plan` returned them (the last, the new write position, may be missing).
        `write_position`: the one planned from. Give it: if the batch begins a new file, the old
        one is cut there (what an abandoned batch left would be read as records) and fsynced.
        Nothing counts as written before the caller has stored the new write position. If this
        raises, everything from `write_position` (or `positions[0]`) on is cut off again, so that a
        full disk gets its bytes back; a batch that the caller abandons he should `cut` himself.
        Raises OSError with `filename` (disk full, ...), ValueError if the arguments do not agree.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        view = memoryview(buffer).cast("B")
        if not sizes.size and not len(view):
            return
        words = np.asarray(positions, dtype=np.uint64)[: sizes.size]
        runs = self._runs(words, sizes, len(view))
        start = int(words[0]) if write_position is None else int(write_position)
        file, end = unpack(start)
        if int(words[0]) not in (start, (file + 1) << FILE_SHIFT):
            raise ValueError(f"the batch was not planned from write position {file},{end}")
        try:
            for run_file, offset, begin, stop in runs:
                if run_file != file:
                    self._complete(file, end)
                self._pwrite(run_file, view[begin:stop], offset)
                file, end = run_file, offset + stop - begin
            if self._operations + sizes.size >= self.sync_every:
                self._sync_files()
        except OSError:
            with contextlib.suppress(OSError):
                self.cut(start)
            raise
        self.note(sizes.size)

    def write_ahead(self, records: bytes | memoryview, position: int, read_position: int) -> None:
        """Put records where everything has been read, right in front of `read_position`, on disk:
        from `position` on, in the same file or as the whole of the file before. They count when the
        caller has stored `position` as the read position. `sync` first. Raises OSError.
        """
        file, offset = unpack(position)
        view = memoryview(records)
        if position + len(view) != read_position and read_position != pack(file + 1, 0):
            raise ValueError("the records do not end at the read position")
        if unpack(read_position)[0] != file:
            self._unlink_data([file])
            self._pwrite(file, view, 0)
            sync_directory(self.data_path)
        else:
            self._pwrite(file, view, offset)
        with self._naming(file):
            self._fsync(file)
        self._unsynced.discard(file)

    @staticmethod
    def _runs(
        words: NDArray[np.uint64], sizes: NDArray[np.int64], total: int
    ) -> list[tuple[int, int, int, int]]:
        """(file, offset, begin and end in the buffer) of each stretch within one file."""
        ends = np.cumsum(sizes)
        if words.size != sizes.size or not sizes.size or ends[-1] != total:
            raise ValueError("positions, lengths and buffer do not belong together")
        numbers = words >> np.uint64(FILE_SHIFT)
        gaps = np.flatnonzero(words[1:] != words[:-1] + sizes[:-1].astype(np.uint64)) + 1
        if np.any(numbers[gaps] != numbers[gaps - 1] + np.uint64(1)) or np.any(
            words[gaps] & np.uint64(MAX_OFFSET)
        ):
            raise ValueError("positions are not a plan: a gap within a file")
        firsts = [0, *gaps.tolist()]
        begins = [int(ends[i] - sizes[i]) for i in firsts]
        return [
            (*unpack(int(words[i])), begin, stop)
            for i, begin, stop in zip(firsts, begins, [*begins[1:], total], strict=True)
        ]

    def _pwrite(self, file: int, view: memoryview, offset: int) -> None:
        with self._naming(file):
            fd = self._open_write(file)
            self._unsynced.add(file)
            while view:
                done = os.pwrite(fd, view, offset)
                view, offset = view[done:], offset + done

    def _complete(self, file: int, end: int) -> None:
        """`file` is written no more: cut it at `end` (readers will go to its real end), fsync."""
        self._sync_wanted = True
        with contextlib.suppress(FileNotFoundError), self._naming(file):
            fd = self._open_write(file, create=False)
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)
            os.fsync(fd)
        self._unsynced.discard(file)

    def _open_write(self, file: int, *, create: bool = True) -> int:
        if self._write_file != file:
            self._close_write()
            flags = os.O_RDWR | (os.O_CREAT if create else 0)
            self._new_names = self._new_names or create
            self._write_fd = open_regular(self.file_path(file), flags)
            self._write_file = file
            if self._lowest is not None:
                self._lowest = min(self._lowest, file)
        return self._write_fd

    @contextlib.contextmanager
    def _naming(self, file: int) -> Iterator[None]:
        """Errors of calls on descriptors get the name of the file too."""
        try:
            yield
        except OSError as exc:
            exc.filename = str(self.file_path(file))
            raise

    # -- reading

    def read(
        self,
        read_position: int,
        write_position: int,
        max_bytes: int,
        scan: Scanner | None = None,
    ) -> Chunk:
        """Whole records from `read_position` on: about `max_bytes`, at least one, from one file.

        Never goes beyond `write_position`. At the end of a file that is not the write file it
        goes to the next one; so `next_position` of an empty chunk is the write position, and may
        differ from `read_position`. `scan` finds the last whole record (default: slow, Python).
        Raises DamagedFile if there is no record where one must be, but only when the records
        before it have been returned by earlier calls; OSError if the file cannot be opened (that
        it is not there is damage; too many open files is not).
        """
        if read_position > write_position:
            raise ValueError(
                f"read position {unpack(read_position)} is beyond "
                f"the write position {unpack(write_position)}"
            )
        scan = scan or _scan
        position = int(read_position)
        while position != write_position:
            file, offset = unpack(position)
            end, is_write_file = self._end_of(file, position, write_position)
            if offset == end and not is_write_file:
                position = pack(file + 1, 0)
                continue
            data = self._pread(file, offset, min(max_bytes, end - offset))
            count, used, damaged = scan(data, self.max_msg_size)
            if not count and not damaged:  # longer than max_bytes, or cut off
                data = self._pread(file, offset, self._record_length(data, file, offset, end))
                count, used, damaged = scan(data, self.max_msg_size)
            if not count:
                reason = self._what_is_wrong(data, end - offset)
                raise self._damage(position, write_position, reason)
            next_position = pack(file, offset + used)
            if offset + used == end and not is_write_file:
                next_position = pack(file + 1, 0)
            data = data if used == len(data) else data[:used]
            self.note(count)
            return Chunk(data, position, next_position, count, self.max_msg_size)
        return Chunk(b"", position, position, 0, self.max_msg_size)

    def _end_of(self, file: int, position: int, write_position: int) -> tuple[int, bool]:
        """(where the good bytes of a file end, whether it is the write file); opens it to read."""
        try:
            size = os.fstat(self._open_read(file)).st_size
        except FileNotFoundError:
            raise self._damage(position, write_position, "the file is missing") from None
        write_file, write_offset = unpack(write_position)
        end = write_offset if file == write_file else size
        offset = unpack(position)[1]
        if offset > end:
            reason = f"the file ends at {end}"
            raise self._damage(position, write_position, reason)
        return end, file == write_file

    def _record_length(self, data: bytes, file: int, offset: int, end: int) -> int:
        """How many bytes to read to have the first record whole, or all there is of it."""
        if len(data) < 4:
            data = self._pread(file, offset, min(4, end - offset))
        if len(data) < 4:
            return len(data)
        length = int(_PREFIX.unpack_from(data)[0])
        if not MESSAGE_HEADER <= length <= self.max_msg_size + MESSAGE_HEADER:
            return 4
        return min(4 + length, end - offset)

    def _what_is_wrong(self, data: bytes, room: int) -> str:
        """Names the damage in the bytes at a position with `room` bytes behind it."""
        if len(data) < min(4, room):
            return "the file ends before the write position, or the disk cannot read it"
        if len(data) < 4:
            return f"truncated: {len(data)} bytes are no record"
        length = int(_PREFIX.unpack_from(data)[0])
        if not MESSAGE_HEADER <= length <= self.max_msg_size + MESSAGE_HEADER:
            return f"impossible record length {length}"
        return f"truncated: {len(data)} bytes of a record of {4 + length}"

    def _damage(self, position: int, write_position: int, reason: str) -> DamagedFile:
        file, _ = unpack(position)
        write_file, _ = unpack(write_position)
        following = pack(min(file, LAST_FILE) + 1, 0)
        if file < write_file and not self.file_path(file + 1).exists():
            later = [number for number in self.files() if file < number < write_file]
            following = pack(min(later, default=write_file), 0)
        path = self.file_path(file)
        return DamagedFile(path, position, reason, following, file == write_file)

    def _pread(self, file: int, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the file's end, or before bytes the disk cannot read."""
        fd = self._open_read(file)
        parts: list[bytes] = []
        while size > 0:
            try:
                part = os.pread(fd, size, offset)
            except OSError as exc:
                if exc.errno != errno.EIO:
                    exc.filename = str(self.file_path(file))
                    raise
                _log.error("%s: cannot read at offset %d: %s", self.file_path(file), offset, exc)
                break
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _open_read(self, file: int) -> int:
        if self._read_file != file:
            self._close_read()
            self._read_fd = open_regular(self.file_path(file), os.O_RDONLY)
            self._read_file = file
        return self._read_fd

    def recount(
        self,
        read_position: int,
        write_position: int,
        scan: Scanner | None = None,
        files: Iterable[int] | None = None,
    ) -> int:
        """How many records are between two positions: those that `read` would return.

        Reads all the bytes. A file counts up to its first damage, a missing one as empty. `files`:
        the numbers there are, rising (default: look now, which takes long among many queues).
        """
        scan = scan or _scan
        read_file, read_offset = unpack(read_position)
        write_file, write_offset = unpack(write_position)
        block = max(_COUNT_BLOCK, RECORD_OVERHEAD + self.max_msg_size)
        total = 0
        for file in self.files() if files is None else files:
            if not read_file <= file <= write_file:
                continue
            offset = read_offset if file == read_file else 0
            try:
                end = os.stat(self.file_path(file)).st_size
            except FileNotFoundError:  # cut off meanwhile
                continue
            if file == write_file:
                end = min(end, write_offset)
            while offset < end:
                data = self._pread(file, offset, min(block, end - offset))
                count, used, damaged = scan(data, self.max_msg_size)
                total += count
                offset += used
                if damaged or not count:
                    break
        return total

    # -- durability

    def note(self, operations: int) -> None:
        """Count records written or read; `write` and `read` do it by themselves."""
        self._operations += operations

    def sync_due(self, now: float) -> bool:
        """Whether nsqd would sync now: `sync_every` operations, a file finished, or any operation
        and a tick of `sync_timeout`. `now`: seconds on any steady clock."""
        if self._next_tick is None or (now >= self._next_tick and not self._operations):
            self._next_tick = now + self.sync_timeout
        return (
            self._sync_wanted
            or self._operations >= self.sync_every
            or (now >= self._next_tick and self._operations > 0)
        )

    def maybe_sync(self, now: float, depth: int, read_position: int, write_position: int) -> bool:
        """`sync` if it is due; whether it was. Raises OSError; it then stays due."""
        if not self.sync_due(now):
            return False
        self.sync(depth, read_position, write_position)
        return True

    def sync(
        self, depth: int, read_position: int, write_position: int, *, names: bool = False
    ) -> None:
        """fsync what was written, then write the position file: what is below the write position
        survives a power loss. Raises OSError with `filename`; it then stays due.

        The directory is fsynced only if files were made, or if it shall be (`names`). With an older
        position file `start` finds all that was written, and what was read since comes twice.
        """
        self._sync_wanted = True
        self._sync_files()
        self._put_meta(depth, read_position, write_position)
        if self._new_names or names:
            sync_directory(self.data_path)
            self._new_names = False
        self._operations = 0
        self._sync_wanted = False
        self._next_tick = None

    def _sync_files(self) -> None:
        for file in sorted(self._unsynced):
            with contextlib.suppress(FileNotFoundError), self._naming(file):
                self._fsync(file)
            self._unsynced.discard(file)

    def _fsync(self, file: int) -> None:
        if file == self._write_file:
            os.fsync(self._write_fd)
            return
        fd = open_regular(self.file_path(file), os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_meta(self, depth: int, read_position: int, write_position: int) -> None:
        """Replace the position file atomically; the directory is fsynced too. Raises OSError."""
        self._put_meta(depth, read_position, write_position)
        sync_directory(self.data_path)

    def _put_meta(self, depth: int, read_position: int, write_position: int) -> None:
        """The end of a file that is written no more is put down as the start of the next one, for
        nsqd would take it for damage.
        """
        read_file, read_offset = unpack(read_position)
        write_file, write_offset = unpack(write_position)
        if read_offset and read_file < write_file:
            with contextlib.suppress(FileNotFoundError):
                if self.file_path(read_file).stat().st_size == read_offset:
                    read_file, read_offset = read_file + 1, 0
        text = f"{depth}\n{read_file},{read_offset}\n{write_file},{write_offset}\n"
        replace(self.meta_path, text.encode("ascii"))
        self._synced = write_position

    def can_be(self, read_position: int, write_position: int) -> bool:
        """Whether this queue can be read and written at these positions: writing has never been
        before reading, nor before what the position file says. Raises OSError.
        """
        if self._synced is None:
            meta = self.load_meta()
            self._synced = meta.write_position if meta else 0
        return max(read_position, self._synced) <= write_position <= pack(MAX_FILE, 0)

    def load_meta(self) -> Meta | None:
        """What the position file says; None if it is missing, or (logged) says nothing possible.

        As tolerant as nsqd's Fscanf: blanks before numbers, CRLF, a missing last line end and
        anything after the third line are accepted. Raises OSError if it cannot be read.
        """
        try:
            text = read_regular(self.meta_path)
        except FileNotFoundError:
            return None
        meta = parse_meta(text)
        if meta is None:
            _log.error("%s: not a position file: %r", self.meta_path, text[:80])
        return meta

    # -- start, adoption, clearing away

    def start(self, files: Iterable[int] | None = None, scan: Scanner | None = None) -> Meta:
        """Where reading and writing go on after a stop, clean or not, of shmq or nsqd.

        `files`: the numbers `existing` found (default: look now); `scan` as in `recount`.
        Only for queues whose shared-memory header is gone; with a header, its positions are the
        truth and `cut` is the thing to call. Positions are in the result; nothing is written,
        completely read files are deleted. Clean stop: as the position file says. Otherwise:

        * write file longer than the write position (killed), or files after it: they are read to
          their real end; writing goes on in a new file after the last one. As nsqd.
        * write file shorter than the write position: what is there is read, the same way. (nsqd
          would leave a hole.)
        * position file missing or unparsable, or reading beyond writing: every data file there is
          is read from the lowest number on, writing goes on after the last one; messages may come
          twice. (nsqd overwrites them, or deletes them.)
        * read file missing: reading goes on at the next there is.
        * nothing unread and most numbers of files used: they begin anew, as after a deletion.
        * depth is recounted when one of these happened, else believed.
        """
        numbers = self.files() if files is None else sorted(files)
        meta = self.load_meta()
        if meta is not None and meta.read_position > meta.write_position:
            _log.error("%s: read position beyond write position", self.meta_path)
            meta = None
        if meta is not None:
            read, write = self._resume(meta, numbers)
        elif numbers:
            read, write = pack(numbers[0], 0), pack(numbers[-1] + 1, 0)
            _log.warning("%s: no positions; reading all files of this queue", self.meta_path)
        else:
            read = write = 0
        read_file = unpack(read)[0]
        self._unlink_data(number for number in numbers if number < read_file)
        self._lowest = read_file
        if read == write:
            if read_file > MAX_FILE // 2:
                self._unlink_data(numbers)
                self.meta_path.unlink(missing_ok=True)
                self._synced = self._lowest = None
                read = write = 0
            return Meta(0, read, write)
        if meta is not None and meta.depth > 0 and meta == Meta(meta.depth, read, write):
            return meta
        return Meta(self.recount(read, write, scan, numbers), read, write)

    def _resume(self, meta: Meta, numbers: list[int]) -> tuple[int, int]:
        """Read and write position to start with, from a sane position file and what there is."""
        read, write = meta.read_position, meta.write_position
        write_file, write_offset = unpack(write)
        size = os.stat(self.file_path(write_file)).st_size if write_file in numbers else 0
        last = max([write_file, *numbers[-1:]])
        if size != write_offset or last > write_file:
            _log.warning(
                "%s: write position %d,%d but the file has %d bytes and %06d is the last; "
                "writing to a new file",
                self.meta_path, write_file, write_offset, size, last,
            )  # fmt: skip
            write = pack(min(last, LAST_FILE) + 1, 0)
        read_file = unpack(read)[0]
        if read != write and read_file not in numbers:
            later = [number for number in numbers if number > read_file]
            read = pack(later[0], 0) if later else write
            _log.warning("%s: read file %06d is missing", self.meta_path, read_file)
        return read, write

    def cut(self, write_position: int) -> int:
        """Remove everything beyond the write position: how many bytes it was.

        For a supervisor that adopts a queue (its predecessor may have died while writing) and for
        an abandoned batch. Raises OSError.
        """
        file, offset = unpack(write_position)
        last = file
        while self.file_path(last + 1).exists():
            last += 1
        removed = 0
        # from the end, so that a death half-way leaves no gap that hides the rest
        for later in range(last, file if offset else file - 1, -1):
            path = self.file_path(later)
            with contextlib.suppress(FileNotFoundError):
                removed += path.stat().st_size
                self._unlink_data([later])
        if offset:
            path = self.file_path(file)
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                if size > offset:
                    os.truncate(path, offset)
                    removed += size - offset
        return removed

    def drop_before(self, read_position: int) -> int:
        """Delete files that have been read completely: how many. Raises OSError.

        `read_position`: the lowest still needed (a lease's, if one is behind the reader).
        """
        file, _ = unpack(read_position)
        lowest = self._lowest
        if lowest is None:  # adopted: look downwards, reading the directory would take too long
            lowest = file
            while lowest and self.file_path(lowest - 1).exists():
                lowest -= 1
        numbers: Iterable[int] = range(lowest, file)
        if len(range(lowest, file)) > _FEW_FILES:  # a position that something has overwritten
            numbers = [number for number in self.files() if lowest <= number < file]
        dropped = self._unlink_data(numbers)  # rising: a death leaves no gap
        self._lowest = max(lowest, file)
        self._sync_wanted = self._sync_wanted or dropped > 0
        return dropped

    def set_aside(self, file: int) -> Path | None:
        """Rename a damaged file to `.bad` (`.bad.1`, ... if that exists): its new path.

        None if the file is not there. nsqd never looks at it again, nor does shmq: it is for
        people. Raises OSError.
        """
        source = self.file_path(file)
        target = source.with_name(source.name + ".bad")
        attempt = 0
        while target.exists():
            attempt += 1
            target = source.with_name(f"{source.name}.bad.{attempt}")
        self._forget(file)
        try:
            source.rename(target)
        except FileNotFoundError:
            return None
        self._sync_wanted = True
        return target

    def remove_all(self, write_position: int | None = None) -> int:
        """Delete all data files and the position file, for empty and delete. Raises OSError.

        Returns the position, for reading and writing, to go on from: the start of the file after
        all there were and after `write_position`'s, as nsqd. Going on within a removed file would
        leave a hole at its start. (To empty without a new position: `drop_before`, `write_meta`.)
        First a position file that calls everything read is written, so that a death half-way
        leaves nothing that would be delivered again (a full disk may prevent that; then not).
        """
        numbers = self.files()
        last = -1 if write_position is None else unpack(write_position)[0]
        following = pack(min(max([last, *numbers[-1:]]), LAST_FILE) + 1, 0)
        self.close()
        if numbers:
            with contextlib.suppress(OSError):
                self.write_meta(0, following, following)
            self._unlink_data(numbers)
            sync_directory(self.data_path)
        self.meta_path.unlink(missing_ok=True)
        self._synced = 0
        self._lowest = None
        self._operations = 0
        self._sync_wanted = False
        return following

    def rename(self, new_base: str) -> None:
        """Give all files another base name, the position file last.

        A backlog that becomes its first channel's queue: `<topic>` to `<topic>:<channel>`. If it
        was cut short, calling it again finishes it; when all is renamed it does nothing.
        `.bad` files keep their names. Raises ValueError for a bad name; FileExistsError, before
        anything is renamed, if the new name has a file of a number the old one has too; OSError.
        """
        renamed = DiskQueue(self.data_path, new_base)
        if new_base == self.base:
            return
        numbers = self.files()
        for number in numbers:
            if renamed.file_path(number).exists():
                sentence = f"cannot rename the files of {self.base!r}: already there"
                raise FileExistsError(errno.EEXIST, sentence, str(renamed.file_path(number)))
        for number in numbers:
            self.file_path(number).rename(renamed.file_path(number))
        if numbers:  # on disk under their new names before the position file is
            sync_directory(self.data_path)
        with contextlib.suppress(FileNotFoundError):
            self.meta_path.rename(renamed.meta_path)
            sync_directory(self.data_path)
        self.base = new_base

    def close(self) -> None:
        """Close descriptors; no sync (that needs positions: `sync` first)."""
        self._close_read()
        self._close_write()

    def _unlink_data(self, numbers: Iterable[int]) -> int:
        count = 0
        for number in numbers:
            self._forget(number)
            with contextlib.suppress(FileNotFoundError):
                self.file_path(number).unlink()
                count += 1
        return count

    def _forget(self, file: int) -> None:
        """Close a file that is about to go."""
        self._unsynced.discard(file)
        if self._read_file == file:
            self._close_read()
        if self._write_file == file:
            self._close_write()

    def _close_read(self) -> None:
        fd, self._read_fd, self._read_file = self._read_fd, -1, -1
        if fd >= 0:
            os.close(fd)

    def _close_write(self) -> None:
        fd, self._write_fd, self._write_file = self._write_fd, -1, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> DiskQueue:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
