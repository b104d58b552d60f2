"""Repairs the directory at a start, if something has overwritten names in it or has cut it short.

* A topic or channel with an impossible name gets back the name that its queues' own headers have.
  Nothing else of it is touched.
* If the headers have no name, or one that is taken, the messages of its queues go to the files that
  the headers name, its entries are removed, and it is created again. All others continue.
* A directory that was cut short is not used at all: each queue's segment tells which queue it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from shmq import _native, shm
from shmq._native import Broker
from shmq.errors import Gone, LayoutMismatch, ShmqError
from shmq.names import valid_name
from shmq.options import Options
from shmq.ownership import NotTrusted
from shmq.storage import metadata
from shmq.storage.metadata import MetadataError, TopicMeta
from shmq.supervisor import salvage
from shmq.supervisor.registry import Registry
from shmq.supervisor.topics import TopicManager
from shmq.views import DirectoryView, QueueEntry, QueueView, TopicEntry

_log = logging.getLogger(__name__)


class Lost(NamedTuple):
    """Indices of the entries whose names are impossible and cannot be recovered."""

    topics: frozenset[int]
    queues: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.topics or self.queues)


class _Said(NamedTuple):
    """The name of a queue according to its own header. channel None: a backlog, or not known."""

    topic: str
    channel: str | None


# -- a directory that was cut short


def salvage_all(options: Options) -> None:
    """Write the messages of all queues of an instance whose directory is unusable to disk, and
    remove the queues. Raises OSError; messages that were not written are then still in shared
    memory."""
    for item in shm.list_objects(options.instance):
        if item.kind == "queue" and item.serial is not None:
            try:
                if salvage.is_store(options, item.serial):
                    _log.error("%s: a results store without its directory; removed", item.name)
                    item.unlink()
                    continue
                salvage.salvage_unnamed(options, item.serial)
            except (FileNotFoundError, NotTrusted) as exc:
                _log.error("%s: %s; left alone", item.name, exc)


# -- names


def recover_names(broker: Broker, directory: DirectoryView, options: Options) -> Lost:
    """Write back overwritten names of topics and channels where their queues' headers have them.
    Returns the entries whose names are lost. Nobody else may be creating topics or queues."""
    topics, queues = directory.live_topics(), directory.live_queues()
    said = {entry.index: name for entry in queues if (name := _said(broker, entry)) is not None}
    known = _Known(Path(options.data_path or "."))
    new_topics = _topic_names(topics, queues, said, known)
    names = {topic.index: new_topics.get(topic.index, topic.name) for topic in topics}
    new_channels = _channel_names(queues, said, names, known)
    if new_topics or new_channels:
        fd = shm.open_segment(shm.directory_name(options.instance), owners=shm.own())
        try:
            for topic in topics:
                _correct(fd, directory, "topic", topic.index, topic.name, new_topics)
            for entry in queues:
                _correct(fd, directory, "entry", entry.index, entry.channel, new_channels)
        finally:
            os.close(fd)
    return Lost(
        frozenset(index for index, name in new_topics.items() if name is None),
        frozenset(index for index, name in new_channels.items() if name is None),
    )


def _said(broker: Broker, entry: QueueEntry) -> _Said | None:
    with contextlib.suppress(Gone, LayoutMismatch, NotTrusted):
        view = QueueView(broker.view(entry.index), f"queue {entry.serial}")
        found = salvage.parse_base(view.base)
        if found is not None:
            return _Said(found[0], None if view.read("base_pending") else found[1])
    return None


def _topic_names(
    topics: list[TopicEntry], queues: list[QueueEntry], said: dict[int, _Said], known: _Known
) -> dict[int, str | None]:
    """By index, the true names of the topics whose present name is impossible. None: not known."""
    votes: dict[int, set[str]] = {topic.index: set() for topic in topics}
    for entry in queues:
        if entry.index in said and entry.topic in votes:
            votes[entry.topic].add(said[entry.index].topic)
    taken = Counter(topic.name for topic in topics)
    supported = {name for names in votes.values() for name in names}
    wrong: dict[int, str | None] = {}
    for topic in topics:
        name, voted = topic.name, votes[topic.index]
        can_be = valid_name(name) and (
            taken[name] == 1 or name in voted or (name not in supported and not voted)
        )
        if can_be and (not voted or name in voted or name in known.topics):
            continue
        other = next(iter(voted)) if len(voted) == 1 else None
        if other is not None and taken[other] == 0 and other not in wrong.values():
            wrong[topic.index] = other
        elif not can_be:
            wrong[topic.index] = None
    return wrong


def _channel_names(
    queues: list[QueueEntry], said: dict[int, _Said], names: dict[int, str | None], known: _Known
) -> dict[int, str | None]:
    """The same as `_topic_names` for the channels of topics whose name is known."""
    taken = Counter((entry.topic, entry.channel) for entry in queues)
    wrong: dict[int, str | None] = {}
    for entry in queues:
        topic = names.get(entry.topic)
        if entry.channel is None or topic is None:
            continue
        own = said[entry.index].channel if entry.index in said else None
        can_be = valid_name(entry.channel) and (
            taken[entry.topic, entry.channel] == 1 or own in (None, entry.channel)
        )
        if can_be and (own in (None, entry.channel) or (topic, entry.channel) in known.channels):
            continue
        if own is not None and taken[entry.topic, own] == 0:
            wrong[entry.index] = own
            taken[entry.topic, own] += 1
        elif not can_be:
            wrong[entry.index] = None
    return wrong


class _Known:
    """The names in nsqd.dat, read at the first use."""

    def __init__(self, data_path: Path) -> None:
        self._data_path = data_path
        self._names: list[TopicMeta] | None = None

    def _load(self) -> list[TopicMeta]:
        if self._names is None:
            self._names = _load(self._data_path)
        return self._names

    @property
    def topics(self) -> set[str]:
        """The names of all topics."""
        return {topic.name for topic in self._load()}

    @property
    def channels(self) -> set[tuple[str, str]]:
        """The (topic, channel) names of all channels."""
        return {(topic.name, channel.name) for topic in self._load() for channel in topic.channels}


def _load(data_path: Path) -> list[TopicMeta]:
    try:
        return metadata.load(data_path)
    except MetadataError as exc:
        _log.error("%s", exc)
        return []


def _correct(
    fd: int,
    directory: DirectoryView,
    structure: str,
    index: int,
    before: str | None,
    names: dict[int, str | None],
) -> None:
    if index not in names:
        return
    name, what = names[index], "topic" if structure == "topic" else "channel"
    if name is None:
        _log.error(
            "something has overwritten the name of a %s (%r), and nothing says what it was; it is "
            "removed from the directory",
            what,
            before,
        )
        return
    _, offset, size, _ = _native.LAYOUT[structure]["name"]
    table = directory.read("topics_at" if structure == "topic" else "queues_at")
    place = table + index * _native.SIZES[structure] + offset
    os.pwrite(fd, name.encode("ascii").ljust(size, b"\0"), place)
    _log.error("something has overwritten the name of %s %r (%r); corrected", what, name, before)


def drop_unnamed(
    broker: Broker, directory: DirectoryView, options: Options, lost: Lost
) -> list[str]:
    """Remove the entries without a name from the directory, after the messages of their queues are
    written to the files that the queues' headers name. Returns the base names of those files.
    Raises OSError."""
    found = []
    for entry in directory.live_queues() if lost else ():
        if entry.topic not in lost.topics and entry.index not in lost.queues:
            continue
        table = directory.topics
        committed = int(table[entry.topic]["committed"]) if entry.topic < len(table) else 0
        with contextlib.suppress(FileNotFoundError, NotTrusted):
            base = salvage.salvage_unnamed(options, entry.serial, committed)
            if base is not None:
                found.append(base)
        broker.remove_queue(entry.index, entry.serial, closed=True)
    for index in lost.topics:
        try:
            broker.remove_topic(index, int(directory.topics[index]["generation"]))
        except ShmqError as exc:
            _log.error("topic %d: cannot be removed: %s", index, exc)
    return found


def create_rescued(
    manager: TopicManager, registry: Registry, data_path: Path, bases: list[str]
) -> None:
    """Create the missing topics and queues that nsqd.dat or `bases` name. Raises OSError."""
    for meta in _load(data_path):
        is_new = registry.topic(meta.name) is None
        topic = manager.create_topic(meta.name)
        for channel in meta.channels:
            if channel.name not in topic.queues:
                manager.make(topic, channel.name, channel.paused)
        if meta.paused and is_new:
            manager.pause(topic)
    for base in bases:
        names = salvage.parse_base(base)
        assert names is not None
        topic = manager.create_topic(names[0])
        if names[1] not in topic.queues:
            manager.make(topic, names[1])
