"""The end of an instance: everything goes to disk, or is kept for the next supervisor.

A flush has these steps:

1. No client, request or publish is admitted any more: `stopping`, and then each topic's publish
   lock is taken once, so that every publish that was under way has ended.
2. nsqd.dat is written.
3. Every queue is flushed in turn; then the intact messages of overwritten queues are saved.
4. The directory is closed.

After a death at any step the messages that are not on disk are still in the segments, which the
next supervisor adopts.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from shmq import peek
from shmq._native import Broker
from shmq.errors import Busy, Gone, LayoutMismatch
from shmq.storage import returned_leases
from shmq.supervisor import salvage
from shmq.supervisor.metadata_writer import MetadataWriter
from shmq.supervisor.overflow.spiller import Spiller
from shmq.supervisor.progress import Progress
from shmq.supervisor.registry import Queue, Registry
from shmq.supervisor.topics import TopicManager

_log = logging.getLogger(__name__)


def flush(
    broker: Broker,
    registry: Registry,
    manager: TopicManager,
    spiller: Spiller,
    metadata_writer: MetadataWriter,
) -> None:
    """Write everything to disk, then close the directory. All loops must have ended.

    Raises OSError if the disk refuses; messages that were not written are then still in memory.
    """
    broker.stopping()
    for topic in registry.topics:
        with contextlib.suppress(Gone, LayoutMismatch):
            paused = bool(registry.directory.topics[topic.index]["paused"])
            broker.pause_topic(topic.index, topic.generation, paused)
    metadata_writer.close()
    _note_leases(registry, metadata_writer.data_path)
    progress, broken = Progress("flushing to disk", len(registry.queues)), []
    for queue in registry.queues:
        while True:
            try:
                _flush_queue(broker, queue, manager, spiller, progress)
            except Busy:
                continue  # a stopped process holds its lock; a lock is never taken from its holder
            except salvage.BROKEN as exc:
                _log.error("%s: cannot be flushed: %s", queue, exc)
                broken.append(queue)
            break
        progress.step()
    for queue in broken:
        committed = int(registry.directory.topics[queue.topic.index]["committed"])
        disk, store = queue.disk, queue.deferred_store
        salvage.salvage_queue(
            manager.instance, queue.serial, committed, disk, store, queue.ephemeral
        )
    broker.close_directory()


def _note_leases(registry: Registry, data_path: Path) -> None:
    """Write down the leases that the flush returns. Raises OSError."""
    returned: returned_leases.Returned = {}
    memory = int(registry.directory.header["segment"]["instance"][0])
    for queue in registry.queues:
        with contextlib.suppress(*salvage.BROKEN):
            if queue.ephemeral or not queue.view.read("leases_committed"):
                continue
            names: dict[str, list[int]] = {}
            for lease in peek.open_leases(queue.view):
                names.setdefault(lease.holder, []).append(lease.id)
            returned[f"{memory:016x}-{int(queue.view.header['segment']['serial'])}"] = names
    if returned:
        returned_leases.add(data_path, returned)


def _flush_queue(
    broker: Broker, queue: Queue, manager: TopicManager, spiller: Spiller, progress: Progress
) -> None:
    if queue.ephemeral:
        if queue.has_files:  # it took over an ordinary topic's backlog
            queue.disk.remove_all(queue.positions[1])
        queue.deferred_store.remove_all()
        return
    if queue.view.read("base_pending"):
        manager.rename(queue)
    broker.audit(queue.index)  # a message that is in no ring would not be flushed
    salvage.repair_positions(broker, queue)
    before = queue.view.read("spilled") + queue.view.read("deferred_depth")
    spiller.flush(queue, progress.within)
    written = queue.view.read("spilled") + queue.view.read("deferred_depth") - before
    if written:
        _log.info("%s: flushed %d messages to disk", queue, written)


def keep(registry: Registry, metadata_writer: MetadataWriter, spiller: Spiller) -> None:
    """Write the positions and names to disk. The messages stay in shared memory."""
    metadata_writer.close()
    progress = Progress("keeping", len(registry.queues))
    for queue in registry.queues:
        read, write = queue.positions
        if queue.has_files and queue.disk.can_be(read, write):
            needed, again = spiller.needed(queue)
            queue.disk.sync(queue.view.read("disk_depth") + again, needed, write)
        queue.disk.close()
        progress.step()
