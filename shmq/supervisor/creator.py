"""Creates and deletes topics and queues: what clients ask for, and what ephemeral ones need.

Only the supervisor makes and unlinks segments. A new queue: reserve an index and a serial, make the
segment, fill it, enter it in the directory (one store). A deleted one the other way round: out of
the directory first, so that nobody finds half of it. A request that fails is answered with a status
and logged; it never ends the loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shmq import _native, audit, segments
from shmq._native import (
    CONSTANTS,
    STATUS,
    BadName,
    Broker,
    Full,
    Gone,
    LayoutMismatch,
    NotRunning,
    ShmqError,
)
from shmq.layout import Kind
from shmq.names import EPHEMERAL, base_name, is_ephemeral, valid_name
from shmq.options import Options
from shmq.ownership import NotTrusted
from shmq.storage import deferred
from shmq.storage.deferred import ChunkFile
from shmq.storage.diskqueue import DiskQueue, Meta
from shmq.supervisor import damage
from shmq.supervisor.arbiter import Bell, Pace
from shmq.supervisor.memory import Thrift
from shmq.supervisor.roster import FIRST_POSITION, Queue, Roster, Topic

_TICK = 1.0  # seconds without a ring
_TAKEN = 1000  # names in a row that others have, after which no queue is made
_SHARE = 0.002  # of a core's time for looking whether ephemeral channels are left, at most

#: What a request is called in the audit log, of those that somebody asks for.
_ACTIONS = {
    CONSTANTS["CREATE_TOPIC"]: "create_topic",
    CONSTANTS["CREATE_CHANNEL"]: "create_channel",
    CONSTANTS["DELETE_TOPIC"]: "delete_topic",
    CONSTANTS["DELETE_CHANNEL"]: "delete_channel",
}

_log = logging.getLogger(__name__)


class Creator:
    """One loop, and what the start uses to make everything anew."""

    def __init__(
        self, broker: Broker, roster: Roster, options: Options, clock_floor: Callable[[], int]
    ) -> None:
        """clock_floor: below it ids may have been given to a topic that is gone."""
        self._broker = broker
        self._roster = roster
        self.instance = options.instance  # its name
        self._mode, self._group = options.permissions()
        self._clock_floor = clock_floor
        self._ephemeral = Pace(0.0, _SHARE)
        self._thrift = Thrift(broker)
        self.chunks: dict[str, list[ChunkFile]] = {}
        """Chunk files on disk, by base name, of queues that are not there (yet)."""
        self.broken: deque[int] = deque()
        """Queues that something has overwritten, to be replaced by this loop."""
        self.files: dict[str, list[int]] | None = None
        """At the start: numbers of data files, by base name, of whatever has files."""
        self._requests: dict[int, Callable[[str, str], object]] = {
            CONSTANTS["CREATE_TOPIC"]: lambda topic, _: self.create_topic(topic),
            CONSTANTS["CREATE_CHANNEL"]: self.create_channel,
            CONSTANTS["CREATE_BACKLOG"]: lambda topic, _: self.create_backlog(topic),
            CONSTANTS["DELETE_TOPIC"]: lambda topic, _: self.delete_topic(topic),
            CONSTANTS["DELETE_CHANNEL"]: self.delete_channel,
        }
        self._max_topics = options.max_topics
        self._serving = False  # whether a client has asked; what was there before is taken up
        self._noting = False  # whether a client on shared memory has asked for what is done now

    def run(self, bell: Bell) -> None:
        """The loop."""
        while not bell.stopped:
            request = self._broker.next_request()
            if request is not None:
                ticket, kind, topic, channel, client = request
                self._broker.answer(ticket, self._serve(kind, topic, channel, client))
                continue
            if self.broken:
                self._replace(self.broken.popleft())
                continue
            now = time.monotonic()
            if self._ephemeral.is_due(now):
                self._drop_ephemeral()
                self._ephemeral.did(now)
                bell.wait(_TICK)
            else:
                bell.wait(self._ephemeral.left(now))

    def _serve(self, kind: int, topic: str, channel: str, client: int) -> int:
        """Do what was asked; the status to answer with."""
        try:
            if kind not in self._requests:
                return STATUS["INVALID"][0]
            with self._on_behalf(client):
                try:
                    self._requests[kind](topic, channel)
                except Exception as exc:
                    self._note_refusal(kind, topic, channel, exc)
                    raise
            return 0
        except Exception as exc:
            status = status_of(exc)
            what = f"request {kind} of client {client} for {base_name(topic, channel or None)!r}"
            if isinstance(exc, ShmqError | OSError):
                _log.warning("%s refused: %s", what, exc)
            else:
                _log.exception("%s crashed", what)
            return status

    # -- the audit log

    @contextlib.contextmanager
    def _on_behalf(self, client: int) -> Iterator[None]:
        """Note what is done inside as this client's. A gateway process notes itself, for it knows
        whom it serves."""
        entry = self._roster.directory.clients[client]
        self._serving = True
        self._noting = int(entry["kind"]) != Kind.GATEWAY
        try:
            with audit.acting(audit.by_process(int(entry["pid"]))):
                yield
        finally:
            self._serving = self._noting = False

    def _note(self, action: str, topic: str, channel: str = "") -> None:
        if self._noting:
            audit.note(action, topic, channel)

    def _note_refusal(self, kind: int, topic: str, channel: str, exc: Exception) -> None:
        action = _ACTIONS.get(kind)
        if self._noting and action is not None:
            audit.note(action, topic, channel, audit.result_of(exc))

    # -- create

    def create_topic(self, name: str) -> Topic:
        """The topic of this name, new or not."""
        topic = self._roster.topic(name)
        if topic is None:
            if not valid_name(name):
                raise BadName(f"topic {name!r} is not a valid name")
            if len(self._roster.topics) >= self._max_topics and self._serving:
                raise ShmqError(f"{STATUS['TABLE_FULL'][2]}: {self._max_topics} topics")
            index, generation = self._broker.create_topic(name, self._clock_floor())
            topic = self._roster.enter_topic(index, generation, name)
            _log.info("TOPIC(%s): created", name)
            self._note("create_topic", name)
        return topic

    def create_channel(self, topic_name: str, channel: str) -> Queue:
        """The channel of this name, new or not; the topic's first one takes over its backlog."""
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

    def create_backlog(self, topic_name: str) -> Queue | None:
        """The queue a topic publishes to while it has no channel or is paused."""
        topic = self._roster.topic(topic_name)
        if topic is None:
            raise Gone(f"topic {topic_name!r} was deleted")
        if topic.channels and not int(self._roster.directory.topics[topic.index]["paused"]):
            return None  # its first channel came in between
        return topic.queues.get(None) or self.make(topic, None)

    def make(self, topic: Topic, channel: str | None, paused: bool = False) -> Queue:
        """A new queue, reading on in files of its name if there are any."""
        disk = self._roster.disk_queue(base_name(topic.name, channel))
        meta = self.positions(disk)
        sidecar = self._roster.sidecar(disk.base)
        sidecar.take_up(self.chunks.pop(disk.base, ()))
        try:
            return self._make(topic, channel, paused, disk, sidecar, meta)
        except Full:  # what others do not need may be enough
            if not self._thrift.at_once(self._roster.queues):
                raise
        return self._make(topic, channel, paused, disk, sidecar, meta)

    def _make(
        self,
        topic: Topic,
        channel: str | None,
        paused: bool,
        disk: DiskQueue,
        sidecar: deferred.Sidecar,
        meta: Meta,
    ) -> Queue:
        index, serial, fd = self._segment()
        try:
            self._broker.create_queue(
                fd, index, serial, topic.index, disk.base,
                disk_read=meta.read_position,
                disk_write=meta.write_position,
                disk_depth=meta.depth,
                ephemeral=(channel or topic.name).endswith(EPHEMERAL),
                paused=paused,
                chunk=sidecar.highest,
                chunk_depth=sidecar.depth,
            )  # fmt: skip
            self._broker.enter_queue(index, serial, topic.index, channel)
        except BaseException:
            segments.unlink_queue(self.instance, serial)
            raise
        finally:
            os.close(fd)
        return self._roster.enter_queue(index, serial, topic, channel, disk, sidecar)

    def _segment(self) -> tuple[int, int, int]:
        """(index, serial, descriptor) of a new queue's segment."""
        for _ in range(_TAKEN):
            index, serial = self._broker.reserve_queue()
            with contextlib.suppress(FileExistsError):  # anybody may have put something there
                fd = segments.create_queue(self.instance, serial, self._mode, self._group)
                return index, serial, fd
        name = segments.queue_name(self.instance, serial)
        raise FileExistsError(
            errno.EEXIST,
            f"this name and the {_TAKEN - 1} before it are taken; have them removed",
            segments.path_of(name),
        )

    def positions(self, disk: DiskQueue) -> Meta:
        """Where a queue goes on that has no positions of its own."""
        numbers = None if self.files is None else self.files.pop(disk.base, None)
        found = None
        if numbers is not None or (self.files is None and _has_files(disk)):
            found = disk.start(numbers, _native.scan_records)
        if found is None or not found.write_position:
            return Meta(0, FIRST_POSITION, FIRST_POSITION)
        return found

    def _take_over(self, backlog: Queue, channel: str) -> bool:
        """Make a backlog the topic's first channel. False: it is paused, or has channels; then the
        spiller moves the messages when it may."""
        topic = backlog.topic
        if _has_files(self._roster.disk_queue(base_name(topic.name, channel))):
            return False  # of a deletion cut short: the backlog's could not get their names
        with backlog.lock:
            if self._broker.take_over(topic.index, channel) is None:
                return False
            self._roster.becomes_channel(backlog, channel)
            try:
                self.rename(backlog)
            except OSError as exc:
                _log.error("%s: its files still have its topic's name: %s", backlog, exc)
        return True

    def rename(self, queue: Queue) -> None:
        """Give a taken-over queue's files its own name; it does not spill before.

        Raises OSError; calling it again, or the next start, finishes it.
        """
        base = base_name(queue.topic.name, queue.channel)
        queue.disk.rename(base)
        queue.sidecar.rename(base)
        self._broker.renamed(queue.index, base)
        self._broker.attend(queue.index)

    def pause(self, topic: Topic) -> None:
        """Pause a topic that was just made."""
        self._broker.pause_topic(topic.index, topic.generation, True)

    # -- delete

    def delete_channel(self, topic_name: str, channel: str, idle: bool = False) -> None:
        """Delete a channel, its contents and its files; idle: unless it has a consumer. Gone if
        there is none."""
        topic = self._roster.topic(topic_name)
        queue = topic.queues.get(channel) if topic is not None else None
        if topic is None or queue is None:
            raise Gone(f"channel {channel!r} of topic {topic_name!r} does not exist")
        if not self.remove(queue, idle):
            return
        _log.info("TOPIC(%s): deleted channel(%s)", topic_name, channel)
        self._note("delete_channel", topic_name, channel)
        if is_ephemeral(topic.name) and not topic.channels:
            self.delete_topic(topic.name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its queues and files. Gone if there is none."""
        topic = self._roster.topic(name)
        if topic is None:
            raise Gone(f"topic {name!r} does not exist")
        for queue in list(topic.queues.values()):
            self.remove(queue)
        self._broker.remove_topic(topic.index, topic.generation)
        self._roster.leave_topic(topic)
        _log.info("TOPIC(%s): deleted", name)
        self._note("delete_topic", name)

    def remove(self, queue: Queue, idle: bool = False) -> bool:
        """Take a queue out of the directory, then unlink its segment and delete its files; idle:
        unless it has a consumer. Whether it was removed."""
        with queue.lock:
            try:
                if not self._broker.remove_queue(queue.index, queue.serial, idle=idle):
                    return False
            except Gone:
                pass
            self._roster.leave_queue(queue)
            segments.unlink_queue(self.instance, queue.serial)
            try:
                if queue.has_files:
                    queue.disk.remove_all(queue.positions[1])
                queue.sidecar.remove_all()
            except OSError as exc:
                _log.error("%s: cannot delete its files: %s", queue, exc)
        return True

    # -- replace

    def salvage(self, topic: Topic, channel: str | None, serial: int) -> bool:
        """Put what is intact in the segment of a queue that cannot be used to what is in its files,
        for the queue that is made in its place; whether it was paused. Raises OSError."""
        base = base_name(topic.name, channel)
        disk, sidecar = self._roster.disk_queue(base), self._roster.sidecar(base)
        sidecar.take_up(self.chunks.pop(base, ()))
        committed = int(self._roster.directory.topics[topic.index]["committed"])
        ephemeral, paused = is_ephemeral(topic.name if channel is None else channel), False
        with contextlib.suppress(FileNotFoundError, NotTrusted):
            paused = damage.salvage(self.instance, serial, committed, disk, sidecar, ephemeral)
        self._chunks_of(base, disk.data_path)
        return paused

    def _chunks_of(self, base: str, data_path: Path) -> None:
        self.chunks[base] = deferred.existing(data_path).get(base, [])

    def _replace(self, index: int) -> None:
        """Another queue in the place of one that cannot be repaired. Its consumers find it gone."""
        queue = self._roster.queue(index)
        if queue is None:
            return
        with queue.lock:
            try:
                if not segments.is_short(self.instance, queue.serial, queue.view.nbytes):
                    self._broker.audit(index)
                    return
            except LayoutMismatch:
                pass  # nobody was under its locks, and nobody can use it any more
            except ShmqError:
                return  # gone, held by a stopped process, no memory: no reason to replace it
            try:
                queue.disk.rename(str(queue))  # as `rename`
                queue.sidecar.rename(str(queue))
                queue.disk.close()
                queue.sidecar.settle()
                self._chunks_of(str(queue), queue.disk.data_path)
                paused = self.salvage(queue.topic, queue.channel, queue.serial)
                self._broker.remove_queue(index, queue.serial, closed=True)
                self._roster.leave_queue(queue)
                self.make(queue.topic, queue.channel, paused)
            except (ShmqError, OSError) as exc:
                _log.error("%s: cannot be replaced: %s", queue, exc)

    def _drop_ephemeral(self) -> None:
        """Ephemeral channels go when their last consumer has left."""
        for queue in list(self._roster.ephemeral.values()):
            sessions = queue.view.sessions
            queue.had_consumer = queue.had_consumer or bool(np.any(sessions["since"]))
            if queue.channel is not None and queue.had_consumer and not np.any(sessions["client"]):
                _log.info("%s: its last consumer has left", queue)
                try:  # unless one has come since: the core looks again, under the queue's lock
                    self.delete_channel(queue.topic.name, queue.channel, idle=True)
                except (ShmqError, OSError) as exc:
                    _log.error("%s: cannot delete it: %s", queue, exc)


def status_of(exc: BaseException) -> int:
    """The core's status that says what went wrong."""
    text = str(exc)
    for number, _, sentence in STATUS.values():
        if number < 0 and sentence in text:
            return number
    names = [(Gone, "GONE"), (BadName, "BAD_NAME"), (Full, "NO_SPACE"), (NotRunning, "NOT_RUNNING")]
    for kind, name in names:
        if isinstance(exc, kind):
            return STATUS[name][0]
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return STATUS["NO_SPACE"][0]
    if isinstance(exc, MemoryError) or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM):
        return STATUS["NO_MEMORY"][0]
    return STATUS["INVALID"][0]


def _has_files(disk: DiskQueue) -> bool:
    """Whether there are files of this name. Reading the directory would take long with thousands of
    queues; one of these goes with any others (nsqd begins with file 0)."""
    return disk.meta_path.exists() or any(disk.file_path(file).exists() for file in (1, 0))
