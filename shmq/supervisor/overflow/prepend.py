"""Writes messages right in front of those on disk."""

from __future__ import annotations

from shmq._native import Broker
from shmq.layout import SpillSource
from shmq.storage.positions import pack, unpack
from shmq.supervisor.overflow.files import Files
from shmq.supervisor.registry import Queue


def prepend(broker: Broker, files: Files, queue: Queue, *, live: bool) -> bool:
    """Write messages right in front of the read position. Returns whether another call may write
    more. Raises OSError; the messages are then back in memory.

    A flush (not live) writes the messages in flight and then the requeue ring, because both are
    delivered before those on disk:

        in flight [1 2]  ring [3 4]  disk [5 6]     becomes     disk [1 2 3 4 5 6]

    They overwrite the records before the read position or, if that is at the start of its file,
    become the file before it. If the youngest of them (3 and 4) fill the space in the file exactly,
    the next call writes the others (1 and 2) as the file before. If neither is possible, none is
    written, and the flush appends them after newer messages.

    While clients work (live), only messages of the requeue ring that wait for no others are
    written, the youngest first and as many as fit. The others stay in memory.
    """
    read, write = queue.positions
    if not live and (read == write or not (queue.waiting or queue.view.read("in_flight_len"))):
        return False
    depth, most = queue.view.read("disk_depth"), queue.view.read("in_use")
    source = SpillSource.PREPEND if live else SpillSource.PREPEND_FLUSH
    batch = broker.spill_begin(queue.index, most, 0, source)
    if batch is None:
        return False
    try:
        # The position file is written first, so that no reader starts amid the overwritten records
        # after a power loss, and so that the file before is never below the position file.
        kept, again = files.needed(queue, read)
        file, before = unpack(read)[0], unpack(batch.position)[0]
        first = kept if before == file else min(kept, pack(before, 0))
        queue.disk.sync(depth + again, first, write, names=before != file)
        queue.disk.prepend(batch.encode(), batch.position, read)
        queue.disk.note(batch.count)
        files.active.add(queue)
    except BaseException:
        batch.end(0, False)
        raise
    return batch.end(0, True) or not live
