"""Writes the metadata that must survive the host: topic and channel names, and the id clock.

`nsqd.dat` is written soon after the directory's generation has changed, with many changes at once.
`shmq.dat` holds a reserve ahead of every topic's id clock, so that no id is issued twice even if
the system clock is set back after a power loss. The directory segment records when `nsqd.dat` was
written, so that a later supervisor sees whether another broker has used the data path since.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from shmq._native import Broker
from shmq.layout import constant
from shmq.names import is_ephemeral
from shmq.settings import Patterns, Settings
from shmq.storage import metadata, remedies
from shmq.storage.metadata import ChannelMeta, TopicMeta
from shmq.supervisor.book import SettingsBook, to_document
from shmq.supervisor.loops import Bell, Pace
from shmq.supervisor.registry import Registry, Topic
from shmq.supervisor.trouble import DiskTrouble

_EPOCH_NS = constant("EPOCH_NS")
_UNIT_NS = constant("ID_UNIT_NS")
_SECOND = 1_000_000_000 // _UNIT_NS  # in units of the id clock

_AHEAD = 60 * _SECOND
_RENEW_BELOW = 45 * _SECOND
_TICK = 1.0  # seconds without a ring
_SHARE = 0.25  # of a core's time, at most, to write names that keep changing
_CLOCKS_EVERY = 1.0  # seconds between two looks at the id clocks
_RETRY_AFTER = 1.0

_log = logging.getLogger(__name__)


class MetadataWriter:
    """The loop that writes metadata. A start and a stop call `flush` and `close`."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        data_path: Path,
        reserve: int,
        trouble: DiskTrouble | None = None,
        book: SettingsBook | None = None,
    ) -> None:
        """reserve: the id clock that shmq.dat had at the start; ids begin above it. trouble: where
        disk errors are published. book: where the settings of topics and channels are saved."""
        self._broker = broker
        self._disk = trouble or DiskTrouble(broker)
        self._registry = registry
        self._data_path = data_path
        self._loaded = reserve
        self._reserve = reserve
        self._book = book or SettingsBook(Patterns(()), Patterns(()))
        self._settings: dict[str, Any] | None = None  # on disk; None: not known
        self._written = (-1, -1)  # generation and count of changes of the names on disk
        self._names = Pace(0.0, _SHARE)
        self._clocks = Pace(_CLOCKS_EVERY, 1.0)
        self._trouble = ""

    @property
    def data_path(self) -> Path:
        """Where the metadata are written."""
        return self._data_path

    def run(self, bell: Bell) -> None:
        """Write what has changed until the bell is stopped."""
        while not bell.check():
            now = time.monotonic()
            try:
                if self._clocks.is_due(now):
                    self._keep_reserve()
                    self._clocks.did(now)
                if self._names.is_due(now) and self._keep_names():
                    self._names.did(now)
                self._trouble = ""
                self._disk.over("metadata writer")
            except OSError as exc:
                self._disk.met("metadata writer", exc)
                if str(exc) != self._trouble:
                    _log.error(
                        "cannot write metadata: %s; trying again every second",
                        remedies.sentence(exc),
                    )
                self._trouble = str(exc)
                bell.wait(_RETRY_AFTER)
                continue
            bell.wait(self._names.left(time.monotonic()) or _TICK)

    def floor(self) -> int:
        """The id clock above which a new topic's ids begin, regardless of the system clock."""
        return max(self._loaded, self._highest())

    def begin(self, *, fresh: bool) -> None:
        """Write everything at a start. A full disk does not end the start, because consumers make
        room, and an adoption goes on in any case, because its clients live: the loop tries again
        then. fresh: the instance is new. Raises other OSErrors."""
        try:
            self.flush()
        except OSError as exc:
            if fresh and exc.errno not in remedies.FULL:
                raise
            if fresh:  # the names that are there are ours, whoever wrote them
                written = metadata.modified(self._data_path)
                self._broker.names_written(written, written)
            self._disk.met("metadata writer", exc)
            self._trouble = str(exc)
            _log.error(
                "cannot write metadata: %s; serving what is there, trying again every second",
                remedies.sentence(exc),
            )

    def flush(self) -> None:
        """Write what has changed. Raises OSError."""
        self._keep_reserve()
        self._keep_names()

    def close(self) -> None:
        """Write everything for the last time, when no id is issued any more. Raises OSError."""
        self._written = (-1, -1)
        self.flush()
        self._store_reserve(max(self._highest(), self._loaded) + _SECOND)

    def _keep_reserve(self) -> None:
        highest = self._highest()
        if self._reserve - highest < _RENEW_BELOW:
            self._store_reserve(highest + _AHEAD)

    def _keep_names(self) -> bool:
        """Write nsqd.dat if a name has changed. Returns whether one had."""
        # A name enters the directory before it enters the registry, from which nsqd.dat is written.
        found = (self._registry.directory.read("generation"), self._registry.changes)
        if found == self._written:
            return False
        self._keep_settings()
        before = metadata.modified(self._data_path)
        metadata.store(
            self._data_path,
            [self._meta(topic) for topic in self._registry.topics],
            lambda written: self._broker.names_written(before, written),
        )
        self._written = found
        return True

    def _keep_settings(self) -> None:
        """Write shmq.dat if the settings that the defaults do not give have changed. This comes
        before the names, so no channel is ever on disk without its settings."""
        saved = self._book.to_save(
            {topic.name: self._settings_of(topic) for topic in self._registry.topics}
        )
        self._book.save(saved)
        document = to_document(saved)
        if document != self._settings:
            self._settings = document
            try:
                self._store_reserve(self._reserve)
            except OSError:
                self._settings = None
                raise

    def _settings_of(self, topic: Topic) -> tuple[Settings, dict[str, Settings]]:
        """A topic's settings, and those of its channels. Saved ones replace those that cannot be
        right."""
        directory = self._registry.directory
        own = directory.topic_settings(topic.index) or self._book.topic(topic.name)
        channels = {}
        for queue in topic.channels:
            assert queue.channel is not None
            channels[queue.channel] = queue.view.settings or self._book.channel(
                topic.name, own, queue.channel
            )
        return own, channels

    def _store_reserve(self, clock: int) -> None:
        metadata.store_reserve(self._data_path, clock, self._settings)
        self._reserve = clock

    def _highest(self) -> int:
        now = (time.time_ns() - _EPOCH_NS) // _UNIT_NS
        return max(now, self._registry.highest_clock(), 0)

    def _meta(self, topic: Topic) -> TopicMeta:
        directory = self._registry.directory
        channels = [
            ChannelMeta(queue.channel, bool(queue.view.read("paused")))
            for queue in topic.channels
            if queue.channel is not None and not is_ephemeral(queue.channel)
        ]
        paused = bool(directory.topics[topic.index]["paused"])
        return TopicMeta(topic.name, paused, tuple(channels))
