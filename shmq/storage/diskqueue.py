"""The overflow files of one queue, byte for byte go-diskqueue's as nsqd uses it.

    <base>.diskqueue.000000.dat ...   records: int32 length, int64 timestamp (Unix ns),
                                      uint16 attempts, 16 hex digits of id, body; big-endian
    <base>.diskqueue.meta.dat         "depth\\nreadFile,readPos\\nwriteFile,writePos\\n"
    <base>.diskqueue.000000.dat.bad   set aside after damage

`<base>` is `<topic>` for a topic's backlog and `<topic>:<channel>` for a channel.

A position is one 64-bit word, `file << 40 | offset`, so that one store can commit it. The queue's
shared-memory header holds the read and the write position; this module never remembers them. Files
change only beyond the write position (`write`), below the read position (`drop_before`), or when
the caller asks for it (`cut`, `set_aside`, `remove_all`, `rename`).

Differences from nsqd exist only to lose no intact message: see `read`, and
`diskqueue_recovery`. Source: go-diskqueue, `diskqueue.go`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmq.storage import StorageError, own_files
from shmq.storage.data_files import DataFiles
from shmq.storage.metadata import replace, sync_directory
from shmq.storage.positions import (
    FILE_SHIFT,
    LAST_FILE,
    MAX_FILE,
    MAX_OFFSET,
    MOST_META,
    Meta,
    MetaText,
    pack,
    parse_meta,
    parse_text,
    unpack,
)
from shmq.storage.records import (
    LENGTH_PREFIX,
    MESSAGE_HEADER,
    MOST_RECORD,
    RECORD_OVERHEAD,
    RecordRun,
    Scanner,
    count_records,
    is_record,
    most_prefix,
    record_length,
)

_FEW_FILES = 1000  # up to this many are unlinked by number; for more the directory is listed

_log = logging.getLogger(__name__)


class DamagedFile(StorageError):
    """There is no record at the read position; every record before it has been returned.

    The caller calls `set_aside(file)` and continues at `next_position`. If the damaged file is the
    one being written (`is_write_file`), the write position moves to `next_position` too.
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


class DiskQueue(DataFiles):
    """Reads and writes the files of one queue. Positions are arguments and never kept."""

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
        """`base`: `<topic>` or `<topic>:<channel>`. No file is touched.

        max_bytes_per_file: a file ends before a record that would make it longer (bytes).
        max_msg_size: longest body (bytes). A longer record is read too if it is whole (see
        `record_at`), so that a smaller limit loses nothing that is on disk.
        sync_every: reads and writes between two syncs; sync_timeout: most seconds between them.
        Raises ValueError for an invalid base name or an impossible limit.
        """
        super().__init__(data_path, base)
        if max_bytes_per_file < 1 or not 0 <= max_msg_size <= 0x7FFFFFFF - MESSAGE_HEADER:
            raise ValueError("max_bytes_per_file or max_msg_size out of range")
        if max(max_bytes_per_file, max_msg_size + RECORD_OVERHEAD) > MAX_OFFSET:
            raise ValueError(f"max_bytes_per_file cannot exceed {MAX_OFFSET}")
        self.max_bytes_per_file = max_bytes_per_file
        self.max_msg_size = max_msg_size
        self.sync_every = sync_every
        self.sync_timeout = sync_timeout
        self.sync_wanted = False
        """A sync is due, regardless of the number of operations."""
        self.synced: int | None = None
        """The write position in the position file. None: not known."""
        self._operations = 0
        self._next_tick: float | None = None

    # -- writing

    def plan(self, position: int, lengths: ArrayLike) -> NDArray[np.uint64]:
        """The position of each record if they are written from `position` on, then the new write
        position: one element more than `lengths`.

        `lengths`: bytes on disk, prefix included. As with nsqd, a record that would make a file
        longer than `max_bytes_per_file` begins the next file, unless it is the first in its file.
        With 1000 bytes per file, records of 600, 300 and 200 bytes from the start of file 7 get
        the positions (7, 0), (7, 600) and (8, 0); the new write position is (8, 200).
        Raises ValueError for an impossible length, StorageError if no file number is left.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        least, most = RECORD_OVERHEAD, MOST_RECORD  # longer than the limit is what was on disk
        if sizes.size and not (sizes.min() >= least and sizes.max() <= most):
            raise ValueError(f"a record length is outside [{least}, {most}]")
        file, offset = unpack(position)
        ends = np.zeros(sizes.size + 1, dtype=np.int64)
        np.cumsum(sizes, out=ends[1:])
        words = np.empty(sizes.size + 1, dtype=np.uint64)
        first = 0
        while True:
            # records [first, last) fit after `offset` in this file
            room = self.max_bytes_per_file - offset + int(ends[first])
            last = max(first, int(np.searchsorted(ends, room, side="right")) - 1)
            if last == first and first < sizes.size and offset == 0:
                last += 1  # longer than any file may be, so it gets a file of its own
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
        """Write records, back to back in `buffer`, at the positions from `plan`.

        The records count as written once the caller has stored the new write position. Files that
        the batch completes are fsynced, and all files once `sync_every` operations are reached. So
        at most `sync_every` records that count as written are not yet durable.

        `positions` as `plan` returned them (the last, the new write position, may be missing).
        `write_position`: the position passed to `plan`. If the batch begins a new file, the old
        file is cut at that position and fsynced: bytes that an abandoned batch left there would
        otherwise be read as records.
        If a file cannot grow further (EFBIG), `max_bytes_per_file` is lowered to its size, so that
        the next plan goes on in another file.
        If this raises, everything from `write_position` (or `positions[0]`) on is cut off again, so
        that a full disk gets its bytes back. A caller that abandons a batch calls `cut`.
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
                self.write_at(run_file, view[begin:stop], offset)
                file, end = run_file, offset + stop - begin
            if self._operations + sizes.size >= self.sync_every:
                self._sync_files()
        except OSError as exc:
            if exc.errno == errno.EFBIG:
                self._learn_limit(run_file)
            with contextlib.suppress(OSError):
                self.cut(start)
            raise
        self.note(sizes.size)

    def _learn_limit(self, file: int) -> None:
        """Have files end where the system lets this one not grow (RLIMIT_FSIZE, or a limit of the
        file system), which was written up to there."""
        with contextlib.suppress(OSError):
            size = os.stat(self.file_path(file)).st_size
            if 0 < size < self.max_bytes_per_file:
                self.max_bytes_per_file = size

    def prepend(self, records: bytes | memoryview, position: int, read_position: int) -> None:
        """Write records right in front of `read_position`, over records that have been read.

        They begin at `position`, either in the file of `read_position` or, if that is at the start
        of its file, as the only contents of the file before. Example with records of 100 bytes:

            read position (4, 300): two records overwrite bytes 100 to 299 of file 4
            read position (4, 0):   two records become file 3, bytes 0 to 199

        They count once the caller has stored `position` as the read position. Call `sync` first.
        Raises OSError, ValueError if the records do not end at the read position.
        """
        file, offset = unpack(position)
        view = memoryview(records)
        if position + len(view) != read_position and read_position != pack(file + 1, 0):
            raise ValueError("the records do not end at the read position")
        if unpack(read_position)[0] != file:
            self.unlink([file])
            self.write_at(file, view, 0)
            sync_directory(self.data_path)
        else:
            self.write_at(file, view, offset)
        with self.naming(file):
            self.fsync(file)
        self._unsynced.discard(file)

    @staticmethod
    def _runs(
        words: NDArray[np.uint64], sizes: NDArray[np.int64], total: int
    ) -> list[tuple[int, int, int, int]]:
        """(file, offset, begin and end in the buffer) for each file that the batch touches."""
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

    def _complete(self, file: int, end: int) -> None:
        """Finish a file: cut it at `end`, because readers go to its real end, and fsync it."""
        self.sync_wanted = True
        with contextlib.suppress(FileNotFoundError), self.naming(file):
            fd = self.open_write(file, create=False)
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)
            os.fsync(fd)
        self._unsynced.discard(file)

    # -- reading

    def read(
        self,
        read_position: int,
        write_position: int,
        max_bytes: int,
        scan: Scanner | None = None,
    ) -> RecordRun:
        """Read whole records from `read_position` on: about `max_bytes`, at least one, from one
        file, and none beyond `write_position`.

        At the end of a file that is not the write file, reading continues in the next file. So
        `next_position` of an empty result is the write position and may differ from
        `read_position`. `scan` finds the last whole record (default: a slow one in Python).
        Raises DamagedFile if there is no record where one must be, but only after earlier calls
        have returned all records before it. Raises OSError if the file cannot be opened; a missing
        file is damage, too many open files is not.
        """
        if read_position > write_position:
            raise ValueError(
                f"read position {unpack(read_position)} is beyond "
                f"the write position {unpack(write_position)}"
            )
        scan = scan or count_records
        position = int(read_position)
        while position != write_position:
            file, offset = unpack(position)
            end, is_write_file = self._end_of(file, position, write_position)
            if offset == end and not is_write_file:
                if not end:
                    _log.warning(
                        "%s is empty: if it had messages, they are lost", self.file_path(file)
                    )
                position = pack(file + 1, 0)
                continue
            data = self.read_at(file, offset, min(max_bytes, end - offset))
            count, used, _ = scan(data, self.max_msg_size)
            if not count and (length := self.record_at(file, offset, end)):
                data = self.read_at(file, offset, length)  # longer than max_bytes, or the limit
                count, used = int(len(data) == length), len(data)
            if not count:
                data = self.read_at(file, offset, self._record_length(file, offset, end))
                reason = self._what_is_wrong(data, end - offset)
                raise self._damage(position, write_position, reason)
            next_position = pack(file, offset + used)
            if offset + used == end and not is_write_file:
                next_position = pack(file + 1, 0)
            data = data if used == len(data) else data[:used]
            self.note(count)
            return RecordRun(data, position, next_position, count, max(self.max_msg_size, used))
        return RecordRun(b"", position, position, 0, self.max_msg_size)

    def _end_of(self, file: int, position: int, write_position: int) -> tuple[int, bool]:
        """(end of the valid bytes of a file, whether it is the write file). Opens it to read."""
        try:
            size = os.fstat(self.open_read(file)).st_size
        except FileNotFoundError:
            raise self._damage(position, write_position, "the file is missing") from None
        write_file, write_offset = unpack(write_position)
        end = write_offset if file == write_file else size
        offset = unpack(position)[1]
        if offset > end:
            reason = f"the file ends at {end}"
            raise self._damage(position, write_position, reason)
        return end, file == write_file

    def record_at(self, file: int, offset: int, end: int) -> int:
        """The bytes of the record at this offset of a file whose valid bytes end at `end`; 0 if
        there is none, or only part of one.

        A length within the limit is believed. A longer one is believed if the id has its digits and
        another record, or the end, follows: the limit was larger when it was written.
        Raises OSError.
        """
        room = end - offset
        head = bytes(self.read_at(file, offset, min(RECORD_OVERHEAD, room)))
        length = record_length(head, room)
        if length <= 4 + most_prefix(self.max_msg_size):
            return length
        if not is_record(head, room):
            return 0
        rest = room - length
        following = bytes(self.read_at(file, offset + length, min(RECORD_OVERHEAD, rest)))
        return length if rest < RECORD_OVERHEAD or is_record(following, rest) else 0

    def _record_length(self, file: int, offset: int, end: int) -> int:
        """How many bytes to read to have all that exists of the record at this offset."""
        data = self.read_at(file, offset, min(4, end - offset))
        if len(data) < 4:
            return len(data)
        length = int(LENGTH_PREFIX.unpack_from(data)[0])
        if not MESSAGE_HEADER <= length <= most_prefix(self.max_msg_size):
            return 4
        return min(4 + length, end - offset)

    def _what_is_wrong(self, data: bytes | memoryview, room: int) -> str:
        """Describe the damage in `data`, read where the file has `room` more bytes."""
        if len(data) < min(4, room):
            return "the file ends before the write position, or the disk cannot read it"
        if len(data) < 4:
            return f"truncated: {len(data)} bytes are no record"
        length = int(LENGTH_PREFIX.unpack_from(data)[0])
        if not MESSAGE_HEADER <= length <= most_prefix(self.max_msg_size):
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

    # -- durability

    def note(self, operations: int) -> None:
        """Count records written or read towards `sync_every`. `write` and `read` call it."""
        self._operations += operations

    def sync_due(self, now: float) -> bool:
        """True if nsqd would sync now: after `sync_every` operations, after a finished file, or
        at a tick of `sync_timeout` if there was any operation. `now`: seconds on any steady
        clock."""
        if self._next_tick is None or (now >= self._next_tick and not self._operations):
            self._next_tick = now + self.sync_timeout
        return (
            self.sync_wanted
            or self._operations >= self.sync_every
            or (now >= self._next_tick and self._operations > 0)
        )

    def maybe_sync(self, now: float, depth: int, read_position: int, write_position: int) -> bool:
        """Call `sync` if it is due. Returns whether it was. Raises OSError; it then stays due."""
        if not self.sync_due(now):
            return False
        self.sync(depth, read_position, write_position)
        return True

    def sync(
        self, depth: int, read_position: int, write_position: int, *, names: bool = False
    ) -> None:
        """fsync the data files, delete those below the read position, then write the position file.
        After it, everything below the write position survives a power loss, and a start knows that
        reading left no file below the read position. Raises OSError with `filename`; it then stays
        due.

        The directory is fsynced only if files were created, or if `names` asks for it. Without
        that, a power loss may leave an older position file: then `recover_positions` still finds
        every record that was written, and records read since the older file are delivered twice.
        """
        self.sync_wanted = True
        self._sync_files()
        self.drop_before(read_position)
        self._put_meta(depth, read_position, write_position)
        if self._new_names or names:
            sync_directory(self.data_path)
            self._new_names = False
        self._operations = 0
        self.sync_wanted = False
        self._next_tick = None

    def _sync_files(self) -> None:
        for file in sorted(self._unsynced):
            with contextlib.suppress(FileNotFoundError), self.naming(file):
                self.fsync(file)
            self._unsynced.discard(file)

    def write_meta(self, depth: int, read_position: int, write_position: int) -> None:
        """Replace the position file atomically and fsync the directory. Raises OSError."""
        self._put_meta(depth, read_position, write_position)
        sync_directory(self.data_path)

    def _put_meta(self, depth: int, read_position: int, write_position: int) -> None:
        """Write the position file. A read position at the end of a finished file is written as the
        start of the next file, because nsqd takes the former for damage.
        """
        read_file, read_offset = unpack(read_position)
        write_file, write_offset = unpack(write_position)
        if read_offset and read_file < write_file:
            with contextlib.suppress(FileNotFoundError):
                if self.file_path(read_file).stat().st_size == read_offset:
                    read_file, read_offset = read_file + 1, 0
        text = MetaText(depth, read_file, read_offset, write_file, write_offset)
        replace(self.meta_path, str(text).encode("ascii"))
        self.synced = write_position

    def can_be(self, read_position: int, write_position: int) -> bool:
        """True if these positions are possible: the write position is never below the read
        position, nor below the write position in the position file. Raises OSError.
        """
        if self.synced is None:
            meta = self.load_meta()
            self.synced = meta.write_position if meta else 0
        return max(read_position, self.synced) <= write_position <= pack(MAX_FILE, 0)

    def load_text(self) -> MetaText | None:
        """Read the position file, with numbers that may be too large for a position word. None if
        it is missing, or (logged) is no position file.

        It is parsed as tolerantly as by nsqd's Fscanf: blanks before numbers, CRLF, a missing last
        line end and anything after the third line are accepted. Raises OSError if it cannot be
        read.
        """
        try:
            text = own_files.read_start(self.meta_path, MOST_META)
        except FileNotFoundError:
            return None
        found = parse_text(text)
        if found is None:
            _log.error("%s: not a position file: %r", self.meta_path, text[:80])
        return found

    def load_meta(self) -> Meta | None:
        """Read the position file as `load_text` does. None also if its numbers are impossible."""
        found = self.load_text()
        meta = None if found is None else parse_meta(str(found).encode())
        if found is not None and meta is None:
            _log.error("%s: impossible positions: %r", self.meta_path, str(found))
        return meta

    def put_text(self, text: MetaText) -> None:
        """Replace the position file with these numbers, and fsync the directory. Raises OSError."""
        replace(self.meta_path, str(text).encode("ascii"))
        sync_directory(self.data_path)
        self.synced = None

    # -- removal

    def _find_lowest(self, read_position: int) -> int:
        """The number of the lowest file that reading has left behind, or that of `read_position`.
        Raises OSError."""
        if self.lowest is None:  # probe downwards, as listing the directory takes too long
            # A file is deleted before the position file leaves it behind. One that is further down
            # was not left by reading: somebody gave it its name (back).
            meta, lowest = self.load_meta(), unpack(read_position)[0]
            least = unpack(meta.read_position)[0] if meta else 0
            while lowest > least and self.file_path(lowest - 1).exists():
                lowest -= 1
            self.lowest = lowest
        return self.lowest

    def drop_before(self, read_position: int) -> int:
        """Delete files that have been read completely. Returns their number. Raises OSError.

        `read_position`: the lowest position that is still needed.
        """
        file, lowest = unpack(read_position)[0], self._find_lowest(read_position)
        numbers: Iterable[int] = range(lowest, file)
        if len(range(lowest, file)) > _FEW_FILES:  # an overwritten position may name any file
            numbers = [number for number in self.files() if lowest <= number < file]
        dropped = self.unlink(numbers)  # in rising order, so that a death leaves no gap
        self.lowest = max(lowest, file)
        self.sync_wanted = self.sync_wanted or dropped > 0
        return dropped

    def remove_all(self, write_position: int | None = None) -> int:
        """Delete all data files and the position file. Raises OSError.

        Returns the position at which to continue reading and writing: as with nsqd, the start of
        the file after all existing files and after the file of `write_position`. To continue within
        a removed file would leave a hole at its start.
        A mark, and a position file that calls everything read (for nsqd), are written first, so
        that a death in the middle leaves nothing that would be delivered again. If that fails (a
        full disk), the deletion continues without them.
        """
        numbers = self.files()
        last = -1 if write_position is None else unpack(write_position)[0]
        following = pack(min(max([last, *numbers[-1:]]), LAST_FILE) + 1, 0)
        self.close()
        if numbers:
            with contextlib.suppress(OSError):
                os.close(own_files.open_file(self.mark_path, os.O_CREAT | os.O_WRONLY))
                self.write_meta(0, following, following)
            self.unlink(numbers)
            sync_directory(self.data_path)
        self.meta_path.unlink(missing_ok=True)
        self.mark_path.unlink(missing_ok=True)
        self.synced = 0
        self.lowest = None
        self._operations = 0
        self.sync_wanted = False
        return following

    def rename(self, new_base: str) -> None:
        """Give all files another base name, the position file last.

        This is for a backlog that becomes its first channel's queue: `<topic>` becomes
        `<topic>:<channel>`. A second call finishes a rename that was cut short, and does nothing
        if it was complete. `.bad` files keep their names. Raises ValueError for an invalid name;
        FileExistsError, before any rename, if both names have a file of the same number; OSError.
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
        if numbers:  # the data files' new names are durable before the position file's
            sync_directory(self.data_path)
        with contextlib.suppress(FileNotFoundError):
            self.meta_path.rename(renamed.meta_path)
            sync_directory(self.data_path)
        self.base = new_base
