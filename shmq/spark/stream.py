"""The streaming source: micro-batches are leases.

    initialOffset()        nothing is taken: consumer, the channel's memory, lease 0
    latestOffset(start)    start is in Spark's commit log: its lease, and all before it, is
                           finished; an open lease that followed it (a crash before Spark wrote it
                           down) is given again, any other open one goes back; else one is taken
    partitions(start, end) the lease of `end`, in the parts it was split in when it was taken
    read(part)             as often as Spark likes, the same rows
    commit(end)            finished, up to it

An offset is {"c": consumer, "b": identity of the channel's memory, "l": lease, "p": the lease
before}. Everything but `read` runs in one process beside the driver; when that dies, whatever the
way, its leases wait `restartGrace` for the next one, which fences it should it still live.
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
from shmq.client import Lease, Lessee
from shmq.errors import LeaseLost
from shmq.spark.options import Settings
from shmq.spark.reading import LeasePart, attached, parts_for, read_part

_log = logging.getLogger(__name__)

Offset = dict[str, Any]


class DataLoss(shmq.ShmqError):
    """The checkpoint names messages that the broker no longer holds."""


class ShmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lessee: Lessee | None = None
        self._consumer = settings.consumer or f"spark-{uuid.uuid4().hex}"
        self._left: int | None = None  # AvailableNow: messages still to be taken
        self._short_since: float | None = None
        self._lost = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lessee": None}

    # ---- the consumer ----

    @property
    def _broker(self) -> shmq.Broker:
        return attached(self._settings.instance, self._settings.owner)

    @property
    def _identity(self) -> str:
        return self._broker.channel_identity(self._settings.topic, self._settings.channel)

    def _adopt(self, consumer: str) -> Lessee:
        """Be the consumer that the offset names."""
        if self._lessee is None or self._lessee.name != consumer:
            if self._lessee is not None:
                self._lessee.close()
            settings, self._consumer = self._settings, consumer
            self._lessee = self._broker.lessee(
                settings.topic,
                settings.channel,
                consumer,
                ttl=settings.leaseTtl,
                grace=settings.restartGrace or settings.leaseTtl,
                keepalive=True,
            )
        return self._lessee

    def _finish(self, offset: Offset) -> None:
        """It is processed for good. Of another memory: there is nothing left of it."""
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
        """Take what is there now, and nothing that comes later."""
        self._broker.create_channel(self._settings.topic, self._settings.channel)
        self._left = self._waiting()

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxMessagesPerTrigger; maxBytesPerTrigger is observed besides."""
        return ReadMaxRows(self._settings.maxMessagesPerTrigger)

    def initialOffset(self) -> Offset:
        """Where a new query begins."""
        self._adopt(self._consumer)
        return {"c": self._consumer, "b": self._identity, "l": 0, "p": 0}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """A lease that follows `start`, or `start` if there is nothing."""
        lessee = self._adopt(start["c"])
        self._finish(start)
        identity = self._identity
        parent = start["l"] if start["b"] == identity else 0
        found = self._open_after(lessee, parent)
        if found is None:
            found = self._take(lessee, parent, limit)
        if found is None:
            return start
        return {"c": start["c"], "b": identity, "l": found.id, "p": found.parent}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Of the leases after `start` up to `end`; also after a restart, without latestOffset."""
        if start == end:
            return []
        settings, identity = self._settings, self._identity
        lessee = self._adopt(end["c"])
        parts: list[LeasePart] = []
        lease = end["l"] if end["b"] == identity else 0
        first = start["l"] if start["b"] == end["b"] else 0
        if not lease:
            self._missing(end, "the broker was started anew, or the channel made anew, since")
        while lease > first:
            try:
                found = lessee.look(lease, replay=True)
            except LeaseLost:
                self._missing(end, f"lease {lease} has ended")
                break
            if settings.maxReplays and found.replays > settings.maxReplays:
                raise shmq.ShmqError(
                    f"lease {lease} of {settings.where} was planned {found.replays} times "
                    f"(maxReplays): look at its messages; `shmq lease requeue` or `drop "
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
        """One partition, in a task."""
        assert isinstance(partition, LeasePart)
        return read_part(partition)

    def commit(self, end: Offset) -> None:
        """Spark will never ask for anything up to `end` again."""
        self._finish(end)

    def reportLatestOffset(self) -> Offset:
        """For StreamingQueryProgress: how things stand with the channel."""
        found = self._broker.channel_stats(self._settings.topic, self._settings.channel)
        age = None if found.oldest_age is None else int(found.oldest_age * 1000)
        return {"depth": found.depth, "in_flight": found.in_flight, "leased": found.leased,
                "oldest_ms": age, "lost_leases": self._lost}  # fmt: skip

    def stop(self) -> None:
        """The query ended: its leases wait for the next run."""
        if self._lessee is not None:
            self._lessee.close()
            self._lessee = None

    # ---- taking ----

    def _waiting(self) -> int:
        return self._broker.channel_depth(self._settings.topic, self._settings.channel)

    def _open_after(self, lessee: Lessee, parent: int) -> Lease | None:
        """The open lease that follows `parent`; those that follow nothing we know of go back."""
        found = None
        for lease in reversed(lessee.leases()):
            if lease.parent == parent and lease.id > parent and found is None:
                found = lease
            else:
                _log.warning(
                    "%s: lease %d (%d messages) follows no micro-batch of this query; its messages "
                    "go back to the channel",
                    self._settings.where, lease.id, lease.count,
                )  # fmt: skip
                lessee.return_lease(lease.id)
        return found

    def _take(self, lessee: Lessee, parent: int, limit: ReadLimit) -> Lease | None:
        settings = self._settings
        rows, max_bytes = settings.maxMessagesPerTrigger, settings.maxBytesPerTrigger
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            max_bytes = limit.max_bytes
        elif isinstance(limit, ReadAllAvailable):
            rows, max_bytes = (1 << 32) - 1, (1 << 40)  # what the broker holds in memory
        if self._left is not None:
            rows = min(rows, self._left)
            if not rows:
                return None
        elif not self._enough(lessee):
            return None
        lease = lessee.lease(
            rows, max_bytes, parts_for(settings, min(self._waiting(), rows)), parent
        )
        if lease is None and self._left:
            lease = self._take_from_disk(lessee, rows, max_bytes, parent)
        if lease is not None and self._left is not None:
            self._left -= lease.count
        return lease

    def _take_from_disk(
        self, lessee: Lessee, rows: int, max_bytes: int, parent: int
    ) -> Lease | None:
        """AvailableNow: what is on disk comes as soon as the supervisor has read it."""
        while self._waiting():
            parts = parts_for(self._settings, min(self._waiting(), rows))
            lease = lessee.lease(rows, max_bytes, parts, parent, timeout=0.05)
            if lease is not None:
                return lease
        return None

    def _enough(self, lessee: Lessee) -> bool:
        """Is there something to be taken now? Waits a little for it."""
        settings = self._settings
        if not lessee.wait(settings.pollTimeout or 0):
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
