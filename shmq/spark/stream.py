"""The streaming source: micro-batches are leases.

    initialOffset()        takes nothing: (consumer, identity of the channel, lease 0)
    latestOffset(start)    `start` is in Spark's commit log, so its lease and all before it are
                           finished. If a lease that follows it is open, because of a crash before
                           Spark recorded it, that lease is returned again, and every other open
                           lease goes back to the channel. Otherwise a new lease is taken.
    partitions(start, end) the parts of the lease of `end`, as it was split when it was taken
    read(part)             the same rows, as often as Spark reads them
    commit(end)            the leases up to `end` are finished

An offset is {"c": consumer, "b": identity of the channel, "l": lease, "p": the lease before}.
Everything but `read` runs in one process beside the driver. When that process dies, for whatever
reason, its leases wait for `restartGrace` until the next process takes over, which fences the old
one in case it still lives.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

import shmq
from shmq.client import Lease, LeaseHolder
from shmq.errors import LeaseLost
from shmq.spark.options import Settings
from shmq.spark.reading import LeasePart, attached, parts_for, read_part

_log = logging.getLogger(__name__)

Offset = dict[str, Any]


class DataLoss(shmq.ShmqError):
    """The checkpoint names messages that the broker no longer holds."""


class ShmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source; the module describes its protocol."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._holder: LeaseHolder | None = None
        self._consumer = settings.consumer or f"spark-{uuid.uuid4().hex}"
        self._left: int | None = None  # AvailableNow: messages still to be taken
        self._short_since: float | None = None
        self._lost = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holder": None}

    # ---- the consumer ----

    @property
    def _broker(self) -> shmq.Broker:
        return attached(self._settings.instance, self._settings.owner)

    @property
    def _identity(self) -> str:
        return self._broker.channel_identity(self._settings.topic, self._settings.channel)

    def _adopt(self, consumer: str) -> LeaseHolder:
        """The holder of the name that the offset has, which is opened if it is not open."""
        if self._holder is None or self._holder.name != consumer:
            if self._holder is not None:
                self._holder.close()
            settings, self._consumer = self._settings, consumer
            self._holder = self._broker.lease_holder(
                settings.topic,
                settings.channel,
                consumer,
                ttl=settings.leaseTtl,
                grace=settings.restartGrace or settings.leaseTtl,
                keepalive=True,
            )
        return self._holder

    def _finish(self, offset: Offset) -> None:
        """Finish the leases up to the offset, which are processed for good. If the channel has
        another identity now, they no longer exist."""
        if not offset["l"] or offset["b"] != self._identity:
            return
        try:
            self._adopt(offset["c"]).finish_lease(offset["l"])
        except LeaseLost as exc:
            self._lost += 1
            if self._settings.onLostLease == "fail":
                raise LeaseLost(
                    f"{exc}. These messages were processed, but they went back to "
                    f"{self._settings.where} before that was known and come again: raise "
                    'leaseTtl, or go on with .option("onLostLease", "warn")'
                ) from None
            _log.warning("%s: processed, and come again: %s", self._settings.where, exc)

    # ---- what Spark calls ----

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the messages that wait now."""
        self._broker.create_channel(self._settings.topic, self._settings.channel)
        self._left = self._waiting()

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxMessagesPerTrigger; maxBytesPerTrigger applies as well."""
        return ReadMaxRows(self._settings.maxMessagesPerTrigger)

    def initialOffset(self) -> Offset:
        """The offset at which a new query begins."""
        self._adopt(self._consumer)
        return {"c": self._consumer, "b": self._identity, "l": 0, "p": 0}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The offset of a lease that follows `start`, or `start` if there is no message."""
        holder = self._adopt(start["c"])
        self._finish(start)
        identity = self._identity
        parent = start["l"] if start["b"] == identity else 0
        found = self._open_after(holder, parent)
        if found is None:
            found = self._take(holder, parent, limit)
        if found is None:
            return start
        return {"c": start["c"], "b": identity, "l": found.id, "p": found.parent}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The parts of the leases after `start` up to `end`. After a restart Spark calls it without
        latestOffset before."""
        if start == end:
            return []
        settings, identity = self._settings, self._identity
        holder = self._adopt(end["c"])
        parts: list[LeasePart] = []
        lease = end["l"] if end["b"] == identity else 0
        first = start["l"] if start["b"] == end["b"] else 0
        if not lease:
            self._missing(end, "the broker was restarted, or the channel created again, since")
        while lease > first:
            try:
                found = holder.look(lease, replay=True)
            except LeaseLost:
                self._missing(end, f"lease {lease} has ended")
                break
            if settings.maxReplays and found.replays > settings.maxReplays:
                raise shmq.ShmqError(
                    f"lease {lease} of {settings.where} was planned {found.replays} times "
                    f"(maxReplays): look at its messages; `shmq lease return` or `finish "
                    f"--instance {settings.instance} {settings.topic} {settings.channel} {lease}`"
                    ' and .option("failOnDataLoss", "false") let the query pass'
                )
            parts[:0] = [
                LeasePart(
                    settings.instance,
                    settings.topic,
                    settings.channel,
                    identity,
                    lease,
                    part,
                    settings.columns,
                    settings.owner,
                )
                for part in range(found.parts)
            ]
            lease = found.parent
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Called in a task."""
        assert isinstance(partition, LeasePart)
        return read_part(partition)

    def commit(self, end: Offset) -> None:
        """Finish the leases up to `end`: Spark never asks for them again."""
        self._finish(end)

    def reportLatestOffset(self) -> Offset:
        """The channel's counts, for StreamingQueryProgress: messages, and `oldest_ms`, the age of
        the longest waiting one in ms."""
        found = self._broker.channel_stats(self._settings.topic, self._settings.channel)
        age = None if found.oldest_age is None else int(found.oldest_age * 1000)
        return {
            "depth": found.depth,
            "in_flight": found.in_flight,
            "leased": found.leased,
            "oldest_ms": age,
            "lost_leases": self._lost,
        }

    def stop(self) -> None:
        """Close the holder when the query ends; its leases wait for the next run."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    # ---- taking ----

    def _waiting(self) -> int:
        return self._broker.channel_depth(self._settings.topic, self._settings.channel)

    def _open_after(self, holder: LeaseHolder, parent: int) -> Lease | None:
        """The open lease that follows `parent`; None if there is none. Every other open lease goes
        back to the channel, because no offset names it."""
        found = None
        for lease in reversed(holder.leases()):
            if lease.parent == parent and lease.id > parent and found is None:
                found = lease
            else:
                _log.warning(
                    "%s: lease %d (%d messages) follows no micro-batch of this query; its messages "
                    "go back to the channel",
                    self._settings.where,
                    lease.id,
                    lease.count,
                )
                holder.return_lease(lease.id)
        return found

    def _take(self, holder: LeaseHolder, parent: int, limit: ReadLimit) -> Lease | None:
        settings = self._settings
        rows, max_bytes = settings.maxMessagesPerTrigger, settings.maxBytesPerTrigger
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            max_bytes = limit.max_bytes
        elif isinstance(limit, ReadAllAvailable):
            rows, max_bytes = (1 << 32) - 1, (1 << 40)  # more than the broker holds in memory
        if self._left is not None:
            rows = min(rows, self._left)
            if not rows:
                return None
        elif not self._enough(holder):
            return None
        lease = holder.lease(
            rows, max_bytes, parts_for(settings, min(self._waiting(), rows)), parent
        )
        if lease is None and self._left:
            lease = self._take_from_disk(holder, rows, max_bytes, parent)
        if lease is not None and self._left is not None:
            self._left -= lease.count
        return lease

    def _take_from_disk(
        self, holder: LeaseHolder, rows: int, max_bytes: int, parent: int
    ) -> Lease | None:
        """For AvailableNow: wait for messages on disk until the supervisor has read them."""
        while self._waiting():
            parts = parts_for(self._settings, min(self._waiting(), rows))
            lease = holder.lease(rows, max_bytes, parts, parent, timeout=0.05)
            if lease is not None:
                return lease
        return None

    def _enough(self, holder: LeaseHolder) -> bool:
        """Wait for messages for pollTimeout. Returns True if there are enough to take, or if
        maxTriggerDelay has passed since there were too few."""
        settings = self._settings
        if not holder.wait(settings.pollTimeout or 0):
            return False
        if self._waiting() >= settings.minMessagesPerTrigger:
            self._short_since = None
            return True
        now = time.monotonic()
        self._short_since = self._short_since or now
        if now - self._short_since < (settings.maxTriggerDelay or 0):
            time.sleep(min(0.01, settings.pollTimeout or 0.01))
            return False
        self._short_since = None
        return True

    def _missing(self, end: Offset, why: str) -> None:
        where, lease = self._settings.where, end["l"]
        text = f"a micro-batch of {where} (lease {lease}) is not there any more: {why}"
        if self._settings.failOnDataLoss:
            raise DataLoss(
                f'{text}; to go on without it: .option("failOnDataLoss", "false"). Messages of a '
                "lease that ran out are in the channel again"
            )
        self._lost += 1
        _log.warning("%s; going on without it", text)
