"""Recovery of a disk queue after a crash, after another broker, or at a damaged file.

A queue without a shared-memory header continues where `recover_positions` says. With a header, its
positions are the truth, and only `DiskQueue.cut` is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from shmq.storage import own_files
from shmq.storage.data_path import bad_name
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.metadata import atomic_write, sync_directory
from shmq.storage.positions import LAST_FILE, MAX_FILE, Meta, pack, unpack
from shmq.storage.records import (
    RECORD_OVERHEAD,
    Scanner,
    count_records,
    is_record,
    most_prefix,
    record_length,
)

_COUNT_BLOCK = 8 << 20  # bytes read at once by recount
_SEARCH_BLOCK = 1 << 20  # bytes searched at once

_IDS = re.compile(rb"(?=[0-9a-fA-F]{16})")  # every place where 16 digits begin
_BEFORE_ID = RECORD_OVERHEAD - 16  # bytes of a record before its id

_LOW = MAX_FILE // 2  # numbers above are high: they get others if any is above LAST_FILE

_log = logging.getLogger(__name__)


def recover_positions(
    queue: DiskQueue, files: Iterable[int] | None = None, scan: Scanner | None = None
) -> Meta:
    """Positions from which to read and write after a stop, clean or not, of shmq or nsqd.

    `files`: the numbers from `existing` (default: list the directory); `scan` as in `recount`.
    This is for queues that have no shared-memory header. A header's positions are the truth;
    with one, call `cut` instead. No file is deleted, but what a deletion that was cut short left.
    After a clean stop the result is the position file's. Otherwise:

    * The write file is longer than the write position (the writer was killed), or files exist
      after it: they are read to their real end, and writing continues in a new file after the
      last one. nsqd does the same.
    * The write file is shorter than the write position: its records are read in the same way.
      (nsqd would leave a hole.)
    * The position file is missing or malformed, or its read position is beyond its write
      position: every data file is read from the lowest number on, and writing continues after
      the last one. Messages may be delivered twice. (nsqd overwrites or deletes them.)
    * The read file is missing: reading continues in the next existing file.
    * The read position is no beginning of a record: reading begins at the start of its file.
      Messages may be delivered twice. (nsqd sets the rest of the file aside.)
    * Files are below the read position: a broker deletes a file before its position file leaves it
      behind, so somebody gave them their names, as with a `.bad` file. They are renamed behind the
      last one, and read after it. (nsqd leaves them where they are.)
    * Numbers are larger than those of a position word: the files are renamed. See `_renumber`.
    * Nothing is unread and most file numbers are used: numbering restarts at 0, as after a
      deletion.
    * The depth is recounted in all these cases, else taken from the position file.

    Raises OSError.
    """
    if _removal_began(queue):
        queue.remove_all()
        return Meta(0, 0, 0)
    numbers = _renumber(queue, queue.files() if files is None else sorted(files))
    meta = queue.load_meta()
    if meta is not None and meta.read_position > meta.write_position:
        _log.error("%s: read position beyond write position", queue.meta_path)
        meta = None
    if meta is not None:
        numbers = _behind_the_last(queue, meta, numbers)
        read, write = _resume(queue, meta, numbers)
        read = _at_a_record(queue, read, write, numbers, scan or count_records)
    elif numbers:
        read, write = pack(numbers[0], 0), pack(numbers[-1] + 1, 0)
        _log.warning("%s: no positions; reading all files of this queue", queue.meta_path)
    else:
        read = write = 0
    read_file = unpack(read)[0]
    queue.lowest = read_file
    if read == write:
        if read_file > MAX_FILE // 2:
            queue.unlink(numbers)
            queue.meta_path.unlink(missing_ok=True)
            queue.synced = queue.lowest = None
            read = write = 0
        return Meta(0, read, write)
    if meta is not None and meta.depth > 0 and meta == Meta(meta.depth, read, write):
        return meta
    return Meta(recount(queue, read, write, scan, numbers), read, write)


def _removal_began(queue: DiskQueue) -> bool:
    """True if `DiskQueue.remove_all` was cut short: its mark is there."""
    with contextlib.suppress(FileNotFoundError):
        os.close(own_files.open_file(queue.mark_path, os.O_RDONLY))
        return True
    return False


def _rename(queue: DiskQueue, number: int, to: int) -> None:
    queue.close_file(number)
    queue.file_path(number).rename(queue.file_path(to))


def _behind_the_last(queue: DiskQueue, meta: Meta, numbers: list[int]) -> list[int]:
    """Rename the files below the read position, so that they are read after the others. Returns the
    numbers as they are then."""
    read_file = unpack(meta.read_position)[0]
    older = [number for number in numbers if number < read_file]
    kept = numbers[len(older) :]
    last = max([unpack(meta.write_position)[0], *kept[-1:]])
    for number in older:
        if last == LAST_FILE:
            bad = set_aside(queue, number)
            _log.error("%s: no number is left; set aside as %s", queue.file_path(number), bad)
            continue
        last += 1
        _rename(queue, number, last)
        _log.warning(
            "%s: below the read position, and nothing says that its messages were delivered; "
            "renamed to %s, to be read after the others",
            queue.file_path(number),
            queue.file_name(last),
        )
        kept.append(last)
    if older:
        sync_directory(queue.data_path)
    return kept


def _renumber(queue: DiskQueue, numbers: list[int]) -> list[int]:
    """Give files whose numbers are too large for a position word the next numbers that fit. Returns
    the numbers as they are then.

    nsqd's file numbers have 63 bits, and a queue that is busy for years comes beyond 24. The files
    keep their order. The position file is written first, with a new number for the read file; a
    start that follows a death in the middle goes on by that: here 90 was 3 before its rename, and
    91 becomes 4.

        positions 90,40 91,80      files 90 91
        positions  3,40 91,80      files 90 91
        positions  3,40 91,80      files  3 91
        positions  3,40  4,80      files  3  4
    """
    text = queue.load_text() if numbers or queue.meta_path.exists() else None
    highest = max([*numbers[-1:], *([text.read_file, text.write_file] if text else [])], default=0)
    if highest <= LAST_FILE:
        return numbers
    low = [number for number in numbers if number <= _LOW]
    high = [number for number in numbers if number > _LOW]
    following = max([0, *low[-1:]]) + 1
    if text is not None and text.read_file > _LOW:
        file = following + sum(number < text.read_file for number in high)
        text = dataclasses.replace(text, read_file=file)
        queue.put_text(text)
    _log.warning(
        "%s: it has numbers above %d, so %d files get new ones, from %s on",
        queue.meta_path,
        LAST_FILE,
        len(high),
        queue.file_name(following),
    )
    renamed = {number: following + rank for rank, number in enumerate(high)}
    for number, to in renamed.items():
        _rename(queue, number, to)
    sync_directory(queue.data_path)
    if text is not None and text.write_file > _LOW:
        after = following + sum(number < text.write_file for number in high)
        file = renamed.get(text.write_file, max(after, text.read_file))
        queue.put_text(dataclasses.replace(text, write_file=file))
    return [*low, *renamed.values()]


def _resume(queue: DiskQueue, meta: Meta, numbers: list[int]) -> tuple[int, int]:
    """The positions to start with, from a valid position file and the existing file numbers."""
    read, write = meta.read_position, meta.write_position
    write_file, write_offset = unpack(write)
    size = os.stat(queue.file_path(write_file)).st_size if write_file in numbers else 0
    last = max([write_file, *numbers[-1:]])
    if size != write_offset or last > write_file:
        _log.warning(
            "%s: write position %d,%d but the file has %d bytes and %06d is the last; "
            "writing to a new file",
            queue.meta_path,
            write_file,
            write_offset,
            size,
            last,
        )
        write = pack(min(last, LAST_FILE) + 1, 0)
    read_file = unpack(read)[0]
    if read != write and read_file not in numbers:
        later = [number for number in numbers if number > read_file]
        read = pack(later[0], 0) if later else write
        _log.warning("%s: read file %06d is missing", queue.meta_path, read_file)
    return read, write


def _at_a_record(queue: DiskQueue, read: int, write: int, numbers: list[int], scan: Scanner) -> int:
    """The read position, or the start of its file if no record begins there."""
    (file, offset), (write_file, write_offset) = unpack(read), unpack(write)
    if not offset or read == write or file not in numbers:
        return read
    end = os.stat(queue.file_path(file)).st_size
    if file == write_file:
        end = min(end, write_offset)
    head = queue.read_at(file, offset, min(RECORD_OVERHEAD, max(end - offset, 0)))
    if offset == end or is_record(bytes(head), end - offset):
        return read
    if offset < end and _begins_record(queue, file, offset, end, scan):
        return read  # it is damaged, or cut off
    _log.warning(
        "%s: no record begins at the read position %d,%d; reading this file from its start, "
        "messages may be delivered twice",
        queue.meta_path,
        file,
        offset,
    )
    return pack(file, 0)


def _begins_record(queue: DiskQueue, file: int, offset: int, end: int, scan: Scanner) -> bool:
    """True if the records of a file, one after the other, lead to this offset."""
    at = 0
    while at < offset:
        _, used, _ = scan(
            queue.read_at(file, at, min(_COUNT_BLOCK, offset - at)), queue.max_msg_size
        )
        used = used or queue.record_at(file, at, end)
        if not used:
            return False
        at += used
    return at == offset


def recount(
    queue: DiskQueue,
    read_position: int,
    write_position: int,
    scan: Scanner | None = None,
    files: Iterable[int] | None = None,
) -> int:
    """Count the records between two positions: those that `read` would return.

    This reads all the bytes. A file counts up to its first damage, a missing one as empty.
    `files`: the existing numbers, rising (default: list the directory, which is slow if it
    holds many queues).
    """
    scan = scan or count_records
    read_file, read_offset = unpack(read_position)
    write_file, write_offset = unpack(write_position)
    block = max(_COUNT_BLOCK, 4 + most_prefix(queue.max_msg_size))
    total = 0
    for file in queue.files() if files is None else files:
        if not read_file <= file <= write_file:
            continue
        offset = read_offset if file == read_file else 0
        try:
            end = os.stat(queue.file_path(file)).st_size
        except FileNotFoundError:  # it was cut off meanwhile
            continue
        if file == write_file:
            end = min(end, write_offset)
        while offset < end:
            data = queue.read_at(file, offset, min(block, end - offset))
            count, used, _ = scan(data, queue.max_msg_size)
            total += count
            offset += used
            if count:
                continue
            length = queue.record_at(file, offset, end)  # longer than the limit
            if not length:
                break
            total += 1
            offset += length
    return total


def find_record(queue: DiskQueue, position: int, write_position: int) -> int | None:
    """The position of the first whole record behind a damaged one, in the same file; None if there
    is none.

    A record is recognised by the digits of its id, by a length that fits, and because another such
    record, or the end of the file, follows. Raises OSError.
    """
    file, offset = unpack(position)
    write_file, write_offset = unpack(write_position)
    try:
        end = os.stat(queue.file_path(file)).st_size
    except FileNotFoundError:
        return None
    if file == write_file:
        end = min(end, write_offset)
    at = offset + 1
    while at + RECORD_OVERHEAD <= end:
        size = min(_SEARCH_BLOCK + RECORD_OVERHEAD, end - at)
        block = bytes(queue.read_at(file, at, size))
        for match in _IDS.finditer(block, _BEFORE_ID):
            begin = at + match.start() - _BEFORE_ID
            head = block[match.start() - _BEFORE_ID : match.start() + 16]
            if is_record(head, end - begin) and _is_followed(queue, file, begin, head, end):
                return pack(file, begin)
        if len(block) < size:  # the disk cannot read the rest
            return None
        at += _SEARCH_BLOCK
    return None


def _is_followed(queue: DiskQueue, file: int, begin: int, head: bytes, end: int) -> bool:
    """True if the record at `begin` ends where another one begins, or with the file."""
    following = begin + record_length(head, end - begin)
    rest = end - following
    return not rest or is_record(
        bytes(queue.read_at(file, following, min(RECORD_OVERHEAD, rest))), rest
    )


def keep_piece(queue: DiskQueue, position: int, end: int) -> Path:
    """Write the bytes of a file from one position to another into a `.bad` file of their own, and
    sync it. Returns its path. Raises OSError; nothing is left then."""
    file, offset = unpack(position)
    return keep_record(queue, bytes(queue.read_at(file, offset, end - position)))


def keep_record(queue: DiskQueue, record: bytes) -> Path:
    """Write one record into a `.bad` file of its own, and sync it. Returns its path.

    Raises OSError; nothing is left then. A start reads it like any other file if it gets a name
    without `.bad`.
    """
    target = bad_name(queue.file_path(0))
    atomic_write(target, record)
    return target


def set_aside(queue: DiskQueue, file: int) -> Path | None:
    """Rename a damaged file to `.bad` (`.bad.1`, ... if that exists). Returns its new path.

    None if the file does not exist. Neither nsqd nor shmq reads it again: it is kept for
    people. Raises OSError.
    """
    source = queue.file_path(file)
    target = bad_name(source)
    queue.close_file(file)
    try:
        source.rename(target)
    except FileNotFoundError:
        return None
    queue.sync_wanted = True
    return target
