"""Keeps what must survive the host: the names of topics and channels, and how far ids have gone.

`nsqd.dat` is written soon after the directory's generation has changed, many changes at once;
`shmq.dat` holds a reserve ahead of every topic's id clock, so that after a power loss with the
system clock set back no id is given twice. When `nsqd.dat` was written is noted in the directory
segment, so that a later supervisor sees whether another broker has had the data path since.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from shmq._native import Broker
from shmq.layout import constant
from shmq.names import is_ephemeral
from shmq.storage import metadata
from shmq.storage.metadata import ChannelMeta, TopicMeta
from shmq.supervisor.arbiter import Bell, Pace
from shmq.supervisor.roster import Roster, Topic
from shmq.supervisor.trouble import DiskTrouble

_EPOCH_NS = constant("EPOCH_NS")
_UNIT_NS = constant("ID_UNIT_NS")
_SECOND = 1_000_000_000 // _UNIT_NS  # in units of the id clock

_AHEAD = 60 * _SECOND
_RENEW_BELOW = 45 * _SECOND
_TICK = 1.0  # seconds without a ring
_SHARE = 0.25  # of a core's time for writing names that keep changing, at most
_CLOCKS_EVERY = 1.0  # seconds between two looks at the id clocks
_RETRY_AFTER = 1.0

_log = logging.getLogger(__name__)


class Ledger:
    """One loop; `flush` for the start and the end."""

    def __init__(
        self,
        broker: Broker,
        roster: Roster,
        data_path: Path,
        reserve: int,
        trouble: DiskTrouble | None = None,
    ) -> None:
        """reserve: what shmq.dat said at the start; ids begin above it. trouble: where everybody is
        told what the disk refuses."""
        self._broker = broker
        self._disk = trouble or DiskTrouble(broker)
        self._roster = roster
        self._data_path = data_path
        self._loaded = reserve
        self._reserve = reserve
        self._written = (-1, -1)  # what the names on disk are as new as
        self._names = Pace(0.0, _SHARE)
        self._clocks = Pace(_CLOCKS_EVERY, 1.0)
        self._trouble = ""

    def run(self, bell: Bell) -> None:
        """The loop."""
        while not bell.stopped:
            now = time.monotonic()
            try:
                if self._clocks.is_due(now):
                    self._keep_reserve()
                    self._clocks.did(now)
                if self._names.is_due(now) and self._keep_names():
                    self._names.did(now)
                self._trouble = ""
                self._disk.over("ledger")
            except OSError as exc:
                self._disk.met("ledger", exc)
                if str(exc) != self._trouble:
                    _log.error("cannot write metadata: %s; trying again every second", exc)
                self._trouble = str(exc)
                bell.wait(_RETRY_AFTER)
                continue
            bell.wait(self._names.left(time.monotonic()) or _TICK)

    def floor(self) -> int:
        """A new topic's ids begin above this, whatever the system clock says."""
        return max(self._loaded, self._highest())

    def flush(self) -> None:
        """Write what has changed. Raises OSError."""
        self._keep_reserve()
        self._keep_names()

    def close(self) -> None:
        """The last entry: nobody gives ids any more. Raises OSError."""
        self._written = (-1, -1)
        self.flush()
        self._store_reserve(max(self._highest(), self._loaded) + _SECOND)

    def _keep_reserve(self) -> None:
        highest = self._highest()
        if self._reserve - highest < _RENEW_BELOW:
            self._store_reserve(highest + _AHEAD)

    def _keep_names(self) -> bool:
        """Whether anything had changed."""
        # a name is in the directory before it is in the roster, and written from there
        found = (self._roster.directory.read("generation"), self._roster.changes)
        if found == self._written:
            return False
        before = metadata.modified(self._data_path)
        metadata.store(
            self._data_path,
            [self._meta(topic) for topic in self._roster.topics],
            lambda written: self._broker.names_written(before, written),
        )
        self._written = found
        return True

    def _store_reserve(self, clock: int) -> None:
        metadata.store_reserve(self._data_path, clock)
        self._reserve = clock

    def _highest(self) -> int:
        now = (time.time_ns() - _EPOCH_NS) // _UNIT_NS
        return max(now, self._roster.highest_clock(), 0)

    def _meta(self, topic: Topic) -> TopicMeta:
        directory = self._roster.directory
        channels = [
            ChannelMeta(queue.channel, bool(queue.view.read("paused")))
            for queue in topic.channels
            if queue.channel is not None and not is_ephemeral(queue.channel)
        ]
        paused = bool(directory.topics[topic.index]["paused"])
        return TopicMeta(topic.name, paused, tuple(channels))
