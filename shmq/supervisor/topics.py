"""Creates, deletes and replaces topics and queues.

Only the supervisor makes and unlinks segments. To create a queue it reserves an index and a serial,
makes the segment, fills it and enters it in the directory (one store). To delete one it goes the
other way: the queue leaves the directory first, so that nobody finds half of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from shmq import _native, audit, shm
from shmq._native import STATUS, Broker
from shmq.errors import BadName, Full, Gone, LayoutMismatch, ShmqError
from shmq.names import EPHEMERAL, base_name, is_ephemeral, valid_name
from shmq.options import Options
from shmq.ownership import NotTrusted
from shmq.settings import Patterns, Settings
from shmq.storage import deferred, own_files
from shmq.storage.deferred import ChunkFile, DeferredStore
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.diskqueue_recovery import recover_positions
from shmq.storage.positions import Meta
from shmq.supervisor import salvage
from shmq.supervisor.book import SettingsBook
from shmq.supervisor.memory import Trimmer
from shmq.supervisor.registry import FIRST_POSITION, Queue, Registry, Topic

_log = logging.getLogger(__name__)


class TopicManager:
    """Creates, deletes and replaces topics and queues, for a start and for clients' requests."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        options: Options,
        clock_floor: Callable[[], int],
        book: SettingsBook | None = None,
    ) -> None:
        """clock_floor: ids below this may already have been issued by a topic that no longer
        exists. book: the settings of what is made."""
        self._book = book or SettingsBook(Patterns(options.topics), Patterns(options.channels))
        self._broker = broker
        self._registry = registry
        self.instance = options.instance
        self._mode, self._group = options.permissions()
        self._clock_floor = clock_floor
        self._max_topics = options.max_topics
        self._trimmer = Trimmer(broker)
        self.chunks: dict[str, list[ChunkFile]] = {}
        """Chunk files on disk, by base name, of queues that do not exist (yet)."""
        self.files: dict[str, list[int]] | None = None
        """During a start: numbers of the data files by base name. Later None."""
        self._serving = False  # a client's request is being served (and not a start)
        self._noting = False  # ... and its actions go to the audit log

    @contextlib.contextmanager
    def serving(self, *, noting: bool) -> Iterator[None]:
        """A context for one client's request. noting: its actions go to the audit log."""
        self._serving, self._noting = True, noting
        try:
            yield
        finally:
            self._serving = self._noting = False

    def _note(self, action: str, topic: str, channel: str = "") -> None:
        if self._noting:
            audit.note(action, topic, channel)

    # -- create

    def create_topic(self, name: str) -> Topic:
        """The topic of this name, created if it does not exist."""
        topic = self._registry.topic(name)
        if topic is None:
            if not valid_name(name):
                raise BadName(f"topic {name!r} is not a valid name")
            if len(self._registry.topics) >= self._max_topics and self._serving:
                raise ShmqError(f"{STATUS['TABLE_FULL'][2]}: {self._max_topics} topics")
            index, generation = self._broker.create_topic(
                name, self._clock_floor(), self._first_settings(name).to_native()
            )
            topic = self._registry.enter_topic(index, generation, name)
            _log.info("TOPIC(%s): created", name)
            self._note("create_topic", name)
        return topic

    def _first_settings(self, name: str) -> Settings:
        """The settings that a new topic begins with: one for the dead letters of a pool or a queue
        is closed as theirs is."""
        own = self._book.topic(name)
        base = name.removesuffix(".dead").rpartition(".")[0]
        for source in (self._registry.topic(base), self._registry.topic(base + EPHEMERAL)):
            if source is None or not name.endswith(".dead"):
                continue
            found = self._registry.directory.topic_settings(source.index)
            if found is not None and found.sealed:
                return replace(own, sealed=True)
        return own

    def create_channel(self, topic_name: str, channel: str) -> Queue:
        """The channel of this name, created if it does not exist. The first channel of a topic
        takes over the topic's backlog."""
        topic = self.create_topic(topic_name)
        if channel in topic.queues:
            return topic.queues[channel]
        if not valid_name(channel):
            raise BadName(f"channel {channel!r} of topic {topic_name!r} is not a valid name")
        backlog = topic.queues.get(None)
        if backlog is not None and self._take_over(backlog, channel):
            queue = backlog
        else:
            queue = self.make(topic, channel)
        _log.info("TOPIC(%s): new channel(%s)", topic_name, channel)
        self._note("create_channel", topic_name, channel)
        return queue

    def join_channel(self, topic_name: str, channel: str) -> Queue:
        """As `create_channel`, for a consumer of all topics that match a pattern: a topic that was
        deleted meanwhile stays deleted. Raises Gone then."""
        if self._registry.topic(topic_name) is None:
            raise Gone(f"topic {topic_name!r} was deleted")
        return self.create_channel(topic_name, channel)

    def create_backlog(self, topic_name: str) -> Queue | None:
        """The queue that a topic publishes to while it has no channel or is paused. None if it
        needs none any more."""
        topic = self._registry.topic(topic_name)
        if topic is None:
            raise Gone(f"topic {topic_name!r} was deleted")
        if topic.channels and not int(self._registry.directory.topics[topic.index]["paused"]):
            return None  # its first channel was created meanwhile
        return topic.queues.get(None) or self.make(topic, None)

    def make(self, topic: Topic, channel: str | None, paused: bool = False) -> Queue:
        """Create a queue. If files of its name exist, it continues with their messages."""
        disk = self._registry.disk_queue(base_name(topic.name, channel))
        meta = self.positions(disk)
        store = self._registry.deferred_store(disk.base)
        store.take_up(self.chunks.pop(disk.base, ()))
        try:
            return self._make(topic, channel, paused, disk, store, meta)
        except Full:  # memory that other queues do not need may be enough
            if not self._trimmer.trim_now(self._registry.queues):
                raise
        return self._make(topic, channel, paused, disk, store, meta)

    def _make(
        self,
        topic: Topic,
        channel: str | None,
        paused: bool,
        disk: DiskQueue,
        store: DeferredStore,
        meta: Meta,
    ) -> Queue:
        index, serial, fd = shm.make_queue(
            self.instance, self._broker.reserve_queue, self._mode, self._group
        )
        try:
            self._broker.create_queue(
                fd,
                index,
                serial,
                topic.index,
                disk.base,
                disk_read=meta.read_position,
                disk_write=meta.write_position,
                disk_depth=meta.depth,
                ephemeral=(channel or topic.name).endswith(EPHEMERAL),
                paused=paused,
                chunk=store.highest,
                chunk_depth=store.depth,
                settings=self._settings(topic, channel).to_native(),
            )
            self._broker.enter_queue(index, serial, topic.index, channel)
        except BaseException:
            shm.unlink_queue(self.instance, serial)
            raise
        finally:
            os.close(fd)
        return self._registry.enter_queue(index, serial, topic, channel, disk, store)

    def _settings(self, topic: Topic, channel: str | None) -> Settings:
        """The settings of a queue that is made now."""
        own = self._registry.directory.topic_settings(topic.index) or self._book.topic(topic.name)
        return own if channel is None else self._book.channel(topic.name, own, channel)

    def settle(self, backlog: Queue) -> None:
        """Give a backlog its topic's settings again, if a death in the middle of a take-over left
        it those of the channel that it did not become."""
        settings = self._settings(backlog.topic, None)
        if backlog.view.settings != settings:
            self._broker.configure(backlog.index, backlog.serial, settings.to_native())

    def positions(self, disk: DiskQueue) -> Meta:
        """Positions from its files for a queue that has none in a header."""
        numbers = None if self.files is None else self.files.pop(disk.base, None)
        found = None
        if numbers is not None or (self.files is None and _has_files(disk)):
            found = recover_positions(disk, numbers, _native.scan_records)
        if found is None or not found.write_position:
            return Meta(0, FIRST_POSITION, FIRST_POSITION)
        return found

    def _take_over(self, backlog: Queue, channel: str) -> bool:
        """Make a backlog the topic's first channel. False if the topic is paused or has channels;
        then the spiller moves the messages once it may."""
        topic = backlog.topic
        if _has_files(self._registry.disk_queue(base_name(topic.name, channel))):
            return False  # a deletion was cut short; the backlog's files cannot get these names
        with backlog.lock:
            settings = self._settings(topic, channel)
            if self._broker.take_over(topic.index, channel, settings.to_native()) is None:
                return False
            self._registry.becomes_channel(backlog, channel)
            try:
                self.rename(backlog)
            except OSError as exc:
                _log.error("%s: its files still have its topic's name: %s", backlog, exc)
        return True

    def rename(self, queue: Queue) -> None:
        """Give the files of a taken-over queue the channel's name. The queue does not spill before.

        Raises OSError; a second call, or the next start, finishes the rename.
        """
        base = base_name(queue.topic.name, queue.channel)
        queue.disk.rename(base)
        queue.deferred_store.rename(base)
        self._broker.renamed(queue.index, base)
        self._broker.spiller_request(queue.index)

    def pause(self, topic: Topic) -> None:
        """Pause a topic that was just created."""
        self._broker.pause_topic(topic.index, topic.generation, True)

    # -- delete

    def delete_channel(self, topic_name: str, channel: str, idle: bool = False) -> None:
        """Delete a channel, its messages and its files. idle: only if it has no consumer. Raises
        Gone if it does not exist."""
        topic = self._registry.topic(topic_name)
        queue = topic.queues.get(channel) if topic is not None else None
        if topic is None or queue is None:
            raise Gone(f"channel {channel!r} of topic {topic_name!r} does not exist")
        if not self.remove(queue, idle):
            return
        self._book.forget(topic_name, channel)
        _log.info("TOPIC(%s): deleted channel(%s)", topic_name, channel)
        self._note("delete_channel", topic_name, channel)
        if is_ephemeral(topic.name) and not topic.channels:
            self.delete_topic(topic.name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its queues and files. Raises Gone if it does not exist."""
        topic = self._registry.topic(name)
        if topic is None:
            raise Gone(f"topic {name!r} does not exist")
        for queue in list(topic.queues.values()):
            self.remove(queue)
        self._broker.remove_topic(topic.index, topic.generation)
        self._registry.leave_topic(topic)
        self._book.forget(name)
        _log.info("TOPIC(%s): deleted", name)
        self._note("delete_topic", name)

    def remove(self, queue: Queue, idle: bool = False) -> bool:
        """Close a queue, unlink its segment, delete its files and take it out of the directory. If
        this process dies in between, the next supervisor goes on. idle: only if it has no consumer.
        Returns whether it was removed."""
        with queue.lock:
            try:
                if not self._broker.erase_queue(queue.index, queue.serial, idle=idle):
                    return False
            except Gone:
                pass
            self._registry.leave_queue(queue)
            shm.unlink_queue(self.instance, queue.serial)
            try:
                if queue.has_files:
                    queue.disk.remove_all(queue.positions[1])
                queue.deferred_store.remove_all()
            except OSError as exc:
                _log.error("%s: cannot delete its files: %s", queue, exc)
            with contextlib.suppress(Gone):
                self._broker.remove_queue(queue.index, queue.serial, closed=True)
        return True

    def erase_files(self, base: str) -> None:
        """Delete the files of a queue whose removal a death cut short."""
        if "/" in base or not base:  # something has overwritten its name
            return
        _log.info("%s: its removal was cut short; deleting its files", base)
        disk, store = self._registry.disk_queue(base), self._registry.deferred_store(base)
        store.take_up(self.chunks.pop(base, ()))
        try:
            disk.remove_all()
            store.remove_all()
        except OSError as exc:
            _log.error("%s: cannot delete its files: %s", base, exc)

    # -- replace

    def salvage(self, topic: Topic, channel: str | None, serial: int) -> bool:
        """Append the intact messages of an unusable queue's segment to its files, for the queue
        that will replace it. Returns whether the queue was paused. Raises OSError."""
        base = base_name(topic.name, channel)
        disk, store = self._registry.disk_queue(base), self._registry.deferred_store(base)
        store.take_up(self.chunks.pop(base, ()))
        committed = int(self._registry.directory.topics[topic.index]["committed"])
        ephemeral, paused = is_ephemeral(topic.name if channel is None else channel), False
        with contextlib.suppress(FileNotFoundError, NotTrusted):
            paused = salvage.salvage_queue(self.instance, serial, committed, disk, store, ephemeral)
        self._chunks_of(base, disk.data_path)
        return paused

    def _chunks_of(self, base: str, data_path: Path) -> None:
        self.chunks[base] = deferred.existing(data_path).get(base, [])

    def replace(self, index: int) -> None:
        """Replace a queue that cannot be repaired. Its consumers find the old one gone."""
        queue = self._registry.queue(index)
        if queue is None:
            return
        with queue.lock:
            try:
                if not shm.is_short(self.instance, queue.serial, queue.view.nbytes):
                    self._broker.audit(index)
                    return
            except LayoutMismatch:
                pass  # both locks were taken, so nobody was inside, and nobody can use it any more
            except ShmqError:
                return  # gone, locked by a stopped process, no memory: no reason to replace it
            try:
                queue.disk.rename(str(queue))  # as `rename`
                queue.deferred_store.rename(str(queue))
                queue.disk.close()
                queue.deferred_store.settle()
                self._chunks_of(str(queue), queue.disk.data_path)
                paused = self.salvage(queue.topic, queue.channel, queue.serial)
                self._broker.remove_queue(index, queue.serial, closed=True)
                self._registry.leave_queue(queue)
                self.make(queue.topic, queue.channel, paused)
            except (ShmqError, OSError) as exc:
                _log.error("%s: cannot be replaced: %s", queue, exc)


def _has_files(disk: DiskQueue) -> bool:
    """True if the queue has files. The position file, or file 1 or 0 (nsqd begins with 0), exists
    beside any others; listing a directory of thousands of queues would take too long. Raises
    OSError."""
    own_files.check_place(disk.data_path)
    return disk.meta_path.exists() or any(disk.file_path(file).exists() for file in (1, 0))
