"""Recovery of a disk queue after a crash, after another broker, or at a damaged file.

A queue without a shared-memory header continues where `recover_positions` says. With a header, its
positions are the truth, and only `DiskQueue.cut` is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import LAST_FILE, MAX_FILE, Meta, pack, unpack
from shmq.storage.records import Scanner, count_records, most_prefix

_COUNT_BLOCK = 8 << 20  # bytes read at once by recount

_log = logging.getLogger(__name__)


def recover_positions(
    queue: DiskQueue, files: Iterable[int] | None = None, scan: Scanner | None = None
) -> Meta:
    """Positions from which to read and write after a stop, clean or not, of shmq or nsqd.

    `files`: the numbers from `existing` (default: list the directory); `scan` as in `recount`.
    This is for queues that have no shared-memory header. A header's positions are the truth;
    with one, call `cut` instead. Nothing is written; completely read files are deleted. After
    a clean stop the result is the position file's. Otherwise:

    * The write file is longer than the write position (the writer was killed), or files exist
      after it: they are read to their real end, and writing continues in a new file after the
      last one. nsqd does the same.
    * The write file is shorter than the write position: its records are read in the same way.
      (nsqd would leave a hole.)
    * The position file is missing or malformed, or its read position is beyond its write
      position: every data file is read from the lowest number on, and writing continues after
      the last one. Messages may be delivered twice. (nsqd overwrites or deletes them.)
    * The read file is missing: reading continues in the next existing file.
    * Nothing is unread and most file numbers are used: numbering restarts at 0, as after a
      deletion.
    * The depth is recounted in all these cases, else taken from the position file.
    """
    numbers = queue.files() if files is None else sorted(files)
    meta = queue.load_meta()
    if meta is not None and meta.read_position > meta.write_position:
        _log.error("%s: read position beyond write position", queue.meta_path)
        meta = None
    if meta is not None:
        read, write = _resume(queue, meta, numbers)
    elif numbers:
        read, write = pack(numbers[0], 0), pack(numbers[-1] + 1, 0)
        _log.warning("%s: no positions; reading all files of this queue", queue.meta_path)
    else:
        read = write = 0
    read_file = unpack(read)[0]
    queue.unlink(number for number in numbers if number < read_file)
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
            count, used, damaged = scan(data, queue.max_msg_size)
            total += count
            offset += used
            if damaged or not count:
                break
    return total


def set_aside(queue: DiskQueue, file: int) -> Path | None:
    """Rename a damaged file to `.bad` (`.bad.1`, ... if that exists). Returns its new path.

    None if the file does not exist. Neither nsqd nor shmq reads it again: it is kept for
    people. Raises OSError.
    """
    source = queue.file_path(file)
    target = source.with_name(source.name + ".bad")
    attempt = 0
    while target.exists():
        attempt += 1
        target = source.with_name(f"{source.name}.bad.{attempt}")
    queue.close_file(file)
    try:
        source.rename(target)
    except FileNotFoundError:
        return None
    queue.sync_wanted = True
    return target
