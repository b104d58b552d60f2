"""How a supervisor takes over the topics and queues that a dead one left."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from shmq import _native, shm, sources
from shmq._native import Broker
from shmq.errors import Busy, Gone, LayoutMismatch, ShmqError
from shmq.layout import EntryState
from shmq.names import base_name
from shmq.options import Options
from shmq.ownership import NotTrusted
from shmq.storage import deferred, metadata
from shmq.storage.diskqueue_recovery import recount
from shmq.supervisor import directory_recovery, salvage, startup
from shmq.supervisor.progress import Progress
from shmq.supervisor.registry import Queue, Registry, Topic
from shmq.supervisor.startup import create_missing, data_files
from shmq.supervisor.systemd import Notifier
from shmq.supervisor.topics import TopicManager
from shmq.views import DirectoryView, QueueEntry

_log = logging.getLogger(__name__)


def adopt(
    broker: Broker, registry: Registry, manager: TopicManager, options: Options, notifier: Notifier
) -> None:
    """Take over the topics and queues that a dead supervisor left; each is resolved and rebuilt.

    If another broker (nsqd, or a shmq instance of another name) has used the data path since,
    messages in memory stay, and reading continues where the other broker left the files, because
    this instance's positions are no longer meaningful. Messages may be delivered twice then.

    Raises OSError if files cannot be opened; clients then continue with the messages in memory.
    Raises ShmqError, with nothing changed, if messages are on disk and the directory has no
    nsqd.dat: its file system is not mounted, or somebody has emptied it.
    """
    directory, data_path = registry.directory, Path(options.data_path or ".")
    had_another = _had_another(directory, data_path)
    if had_another and not metadata.modified(data_path):
        _refuse_if_on_disk(options, data_path)
    lost = directory_recovery.recover_names(broker, directory, options)
    rescued = directory_recovery.drop_unnamed(broker, directory, options, lost)
    manager.chunks, files = deferred.existing(data_path), data_files(data_path)
    if had_another:
        _warn_of_another(data_path)
        manager.files = files
    adoption = _Adoption(broker, registry, manager, None if had_another else files)
    adoption.take_over(notifier)
    _finish_deletions(broker, directory, manager, ours=not had_another)
    if had_another:
        create_missing(manager, data_path, notifier)
    elif lost:
        directory_recovery.create_rescued(manager, registry, data_path, rescued)
    _sweep(directory, options.instance)
    _tell_what_they_keep(registry, options)
    _log.info("adopted %d topics, %d queues", len(registry.topics), len(registry.queues))


def _tell_what_they_keep(registry: Registry, options: Options) -> None:
    """Warn of options that adopted queues do not follow: their memory is laid out when they are
    made."""
    told = (("mem_queue_size", "mem_queue_size"), ("in_flight_slots", "in_flight_slots"))
    for option, field in (*told, ("arena_size", "arena_max")):
        wanted = int(getattr(options, option))
        kept = [size for queue in registry.queues if (size := queue.view.read(field)) != wanted]
        if kept:
            _log.warning(
                "adopted queues: %d keep %s=%s, and new ones get %d: for all to follow it, stop "
                "this broker with --on-stop=flush, and start it again",
                len(kept),
                option,
                ",".join(map(str, sorted(set(kept))[:5])),
                wanted,
            )


def _had_another(directory: DirectoryView, data_path: Path) -> bool:
    """True if nsqd.dat is not as this instance's supervisor wrote it. Each start of any broker
    writes the file."""
    ours = directory.read("names_written"), directory.read("names_replaced")
    return metadata.modified(data_path) not in ours


def _refuse_if_on_disk(options: Options, data_path: Path) -> None:
    count = 0
    with sources.open_readonly(options.instance) as source:
        for entry in source.directory.live_queues():
            with contextlib.suppress(ShmqError, OSError, LayoutMismatch):
                view = source.queue(entry)
                count += view.read("disk_depth") + view.read("deferred_depth")
    if count:
        path = str(data_path.absolute())
        raise ShmqError(
            f"instance {options.instance!r} has {count} messages on disk in {path}, and there is "
            "no nsqd.dat there any more: mount its file system, or bring back what was there; to "
            f"go on without them: {startup.without_files(path)}"
        )


def _warn_of_another(data_path: Path) -> None:
    if metadata.modified(data_path):
        what = "another broker has used %s since: going on with the files it left; messages "
        what += "may be delivered twice"
    else:
        what = "%s has no nsqd.dat any more (was it emptied, or is its file system not "
        what += "mounted?): going on with what is in memory and the files that are there"
    _log.warning(what, data_path)


class _Adoption:
    """Takes over topics and queues: the topics first, then unusable queues, then the others."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        manager: TopicManager,
        files: dict[str, list[int]] | None,
    ) -> None:
        """files: numbers of the data files by base name. None: another broker left the files."""
        self._broker = broker
        self._registry = registry
        self._manager = manager
        self._files = files
        self._topics: dict[int, Topic] = {}

    def take_over(self, notifier: Notifier) -> None:
        """Take over everything. Raises OSError."""
        for entry in self._registry.directory.live_topics():
            self._topics[entry.index] = self._registry.enter_topic(
                entry.index, entry.generation, entry.name
            )
        live = self._registry.directory.live_queues()
        progress = Progress("adopting", len(live), notifier)
        usable, wrecks = self._sort(live)
        # unusable queues are replaced first, because the repair of a topic maps all of its queues
        for queue_entry in wrecks:
            self._replace(queue_entry)
            progress.step()
        for queue_entry in usable:
            if self._adopt(queue_entry):
                progress.step()

    def _sort(self, live: list[QueueEntry]) -> tuple[list[QueueEntry], list[QueueEntry]]:
        """The usable and the unusable queues."""
        usable, wrecks = [], []
        for entry in live:
            if entry.topic not in self._topics:
                _log.error("queue %d belongs to no topic; left alone", entry.serial)
            elif _can_be_used(self._broker, entry):
                usable.append(entry)
            else:
                wrecks.append(entry)
        return usable, wrecks

    def _replace(self, entry: QueueEntry) -> None:
        """Replace a queue that cannot be used (or whose segment was removed by hand). The new queue
        has the messages of its files, and the intact ones of its segment."""
        topic = self._topics[entry.topic]
        paused = self._manager.salvage(topic, entry.channel, entry.serial)
        self._broker.remove_queue(entry.index, entry.serial, closed=True)
        self._manager.make(topic, entry.channel, paused)

    def _adopt(self, entry: QueueEntry) -> bool:
        """Take over one queue, or replace it if it turns out unusable. Returns whether it was taken
        over."""
        broker, topic = self._broker, self._topics[entry.topic]
        base = base_name(topic.name, entry.channel)
        try:
            broker.adopt(entry.index)
            with contextlib.suppress(Busy):  # finish a trim in which the predecessor died
                broker.trim(entry.index)
            queue = self._registry.enter_queue(
                entry.index,
                entry.serial,
                topic,
                entry.channel,
                self._registry.disk_queue(base),
                self._registry.deferred_store(base),
            )
            if queue.channel is None:
                self._manager.settle(queue)
        except (Gone, LayoutMismatch) as exc:
            _log.error("%s: %s", base, exc)
            self._replace(entry)
            return False
        if self._files is None:
            self._adopt_anothers_files(queue)
        else:
            self._adopt_files(queue, self._files)
        return True

    def _adopt_anothers_files(self, queue: Queue) -> None:
        """Adopt the files that now carry this queue's name."""
        if queue.view.read("base_pending"):
            self._broker.renamed(queue.index, queue.disk.base)
        queue.deferred_store.take_up(self._manager.chunks.pop(queue.disk.base, []))
        found = self._manager.positions(queue.disk)
        self._broker.disk_adopt(
            queue.index,
            found.read_position,
            found.write_position,
            found.depth,
            queue.deferred_store.highest,
        )
        self._broker.chunk_depth(queue.index, queue.deferred_store.depth)
        queue.first_read = found.read_position

    def _adopt_files(self, queue: Queue, files: dict[str, list[int]]) -> None:
        """Continue with this instance's own files, at the positions of the queue's header."""
        base, topic = queue.disk.base, queue.topic.name
        pending = bool(queue.view.read("base_pending"))
        chunks, numbers = self._manager.chunks.pop(base, []), files.get(base, [])
        if pending:
            queue.disk = self._registry.disk_queue(topic)
            queue.deferred_store = self._registry.deferred_store(topic)
            chunks += self._manager.chunks.pop(topic, [])
            numbers = [*numbers, *files.get(topic, [])]
        salvage.take_up_chunks(self._broker, queue, chunks)
        self._broker.chunk_depth(queue.index, queue.deferred_store.depth)
        if pending:
            self._manager.rename(queue)
        repaired = salvage.repair_positions(self._broker, queue)
        read, write = queue.positions
        queue.disk.cut(write)
        if not repaired:
            salvage.set_renamed_aside(queue, numbers)
        if read == write:
            return
        depth = recount(queue.disk, read, write, _native.scan_records, sorted(numbers))
        if depth != queue.view.read("disk_depth"):
            self._broker.disk_set(queue.index, read, read, depth)


def _can_be_used(broker: Broker, entry: QueueEntry) -> bool:
    """True if its segment exists and has a valid header."""
    try:
        broker.view(entry.index)
    except (Gone, LayoutMismatch, NotTrusted) as exc:
        _log.error("queue %d: %s", entry.serial, exc)
        return False
    return True


def _finish_deletions(
    broker: Broker, directory: DirectoryView, manager: TopicManager, *, ours: bool
) -> None:
    """Finish the removals of queues that a death cut short. ours: the files on disk are this
    instance's, and no other broker's."""
    topics = {topic.index: topic.name for topic in directory.live_topics()}
    erasing = directory.queues_in(EntryState.ERASING)
    # A removal that could not take its entry out has deleted its files. If a queue of that name was
    # made since, the files are that one's.
    live = {(entry.topic, entry.channel) for entry in directory.live_queues()}
    for entry in [*directory.queues_in(EntryState.DELETING), *erasing]:
        is_live = (entry.topic, entry.channel) in live
        if ours and entry in erasing and entry.topic in topics and not is_live:
            manager.erase_files(base_name(topics[entry.topic], entry.channel))
        try:
            try:
                broker.remove_queue(entry.index, entry.serial)
            except (Gone, LayoutMismatch):  # its segment is closed or gone already
                broker.remove_queue(entry.index, entry.serial, closed=True)
        except ShmqError as exc:
            _log.error("queue %d: cannot finish its removal: %s", entry.serial, exc)
        shm.unlink_queue(manager.instance, entry.serial)


def _sweep(directory: DirectoryView, instance: str) -> None:
    """Remove queue segments that no entry names. A death between creating a segment and entering it
    leaves one."""
    entered = {entry.serial for entry in directory.live_queues()}
    entered |= {entry.serial for entry in directory.live_stores()}
    for item in shm.list_objects(instance):
        if item.kind == "queue" and item.serial not in entered and item.unlink():
            _log.info("%s: in no directory; removed", item.name)
