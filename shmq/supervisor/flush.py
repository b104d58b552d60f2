"""The end of an instance: everything to disk, or everything kept for the next supervisor.

Order of a flush: no client, request or publish comes in any more (`stopping`, then each topic's
publish lock once, for who was inside); nsqd.dat; every queue in order; what is left of queues that
something has overwritten; the directory is closed. A death anywhere in between leaves what is not
on disk in the segments, which the next supervisor adopts.
"""

from __future__ import annotations

import contextlib
import logging

from shmq._native import Broker, Busy, Gone, LayoutMismatch
from shmq.supervisor import damage
from shmq.supervisor.creator import Creator
from shmq.supervisor.ledger import Ledger
from shmq.supervisor.progress import Progress
from shmq.supervisor.roster import Queue, Roster
from shmq.supervisor.spill import Spiller

_log = logging.getLogger(__name__)


def flush(
    broker: Broker, roster: Roster, creator: Creator, spiller: Spiller, ledger: Ledger
) -> None:
    """Write everything, then close the directory. No loop may run any more.

    Raises OSError if the disk refuses; everything not written is still in memory then.
    """
    broker.stopping()
    for topic in roster.topics:
        with contextlib.suppress(Gone, LayoutMismatch):
            paused = bool(roster.directory.topics[topic.index]["paused"])
            broker.pause_topic(topic.index, topic.generation, paused)
    ledger.close()
    progress, broken = Progress("flushing to disk", len(roster.queues)), []
    for queue in roster.queues:
        while True:
            try:
                _flush_queue(broker, queue, creator, spiller, progress)
            except Busy:
                continue  # a stopped process holds its lock: it is waited for, never robbed
            except damage.BROKEN as exc:
                _log.error("%s: cannot be flushed: %s", queue, exc)
                broken.append(queue)
            break
        progress.step()
    for queue in broken:
        committed = int(roster.directory.topics[queue.topic.index]["committed"])
        disk, sidecar = queue.disk, queue.sidecar
        damage.salvage(creator.instance, queue.serial, committed, disk, sidecar, queue.ephemeral)
    broker.close_directory()


def _flush_queue(
    broker: Broker, queue: Queue, creator: Creator, spiller: Spiller, progress: Progress
) -> None:
    if queue.ephemeral:
        if queue.has_files:  # it took over an ordinary topic's backlog
            queue.disk.remove_all(queue.positions[1])
        queue.sidecar.remove_all()
        return
    if queue.view.read("base_pending"):
        creator.rename(queue)
    broker.audit(queue.index)  # what the rings do not list would stay behind
    damage.mend_positions(broker, queue)
    before = queue.view.read("spilled") + queue.view.read("deferred_depth")
    spiller.flush(queue, progress.within)
    written = queue.view.read("spilled") + queue.view.read("deferred_depth") - before
    if written:
        _log.info("%s: flushed %d messages to disk", queue, written)


def keep(roster: Roster, ledger: Ledger) -> None:
    """Put the positions and names on disk; messages stay in shared memory."""
    ledger.close()
    progress = Progress("keeping", len(roster.queues))
    for queue in roster.queues:
        read, write = queue.positions
        if queue.has_files and queue.disk.can_be(read, write):
            queue.disk.sync(queue.view.read("disk_depth"), read, write)
        queue.disk.close()
        progress.step()
