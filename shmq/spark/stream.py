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
from shmq.spark.chain import Chain, Offset
from shmq.spark.chain import DataLoss as DataLoss
from shmq.spark.options import Settings
from shmq.spark.reading import LeasePart, attached, parts_for, read_part


class Patience:
    """Whether there are enough messages for a micro-batch, or few for long enough."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._short_since: float | None = None

    def over(self, waiting: int) -> bool:
        """Returns True if `waiting` messages are enough to take, or if maxTriggerDelay has passed
        since there were too few. Else it sleeps for a moment."""
        settings = self._settings
        if waiting >= settings.minMessagesPerTrigger:
            self._short_since = None
            return True
        now = time.monotonic()
        self._short_since = self._short_since or now
        if now - self._short_since < settings.maxTriggerDelay:
            time.sleep(min(0.01, settings.pollTimeout or 0.01))
            return False
        self._short_since = None
        return True


def bounds(settings: Settings, limit: ReadLimit) -> tuple[int, int]:
    """The messages, and bytes, of a micro-batch at most."""
    rows, max_bytes = settings.maxMessagesPerTrigger, settings.maxBytesPerTrigger
    if isinstance(limit, ReadMaxRows):
        rows = limit.max_rows
    elif isinstance(limit, ReadMaxBytes):
        max_bytes = limit.max_bytes
    return rows, max_bytes


def refuse_once(limit: ReadLimit) -> None:
    """Raises ValueError for a trigger with which Spark does not say when the last micro-batch is
    done, so that it would never be finished and come again."""
    if isinstance(limit, ReadAllAvailable):
        raise ValueError(
            "trigger(once=True) never finishes its micro-batch: use trigger(availableNow=True), "
            "which ends as well. If that is what the query has, another source of it cannot do "
            "that: read that source in a query of its own"
        )


class ShmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source; the module describes its protocol."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chain = self._new_chain()
        self._consumer = settings.consumer or f"spark-{uuid.uuid4().hex}"
        self._query = uuid.uuid4().hex
        self._left: int | None = None  # AvailableNow: messages still to be taken
        self._patience = Patience(settings)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chain": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._chain = self._new_chain()

    def _new_chain(self) -> Chain:
        settings = self._settings
        grace = settings.restartGrace or settings.leaseTtl

        def broker() -> shmq.Broker:  # without the reader, which has the chain
            return attached(settings.instance, settings.owner)

        return Chain(settings, broker, settings.instance, grace)

    @property
    def _broker(self) -> shmq.Broker:
        return attached(self._settings.instance, self._settings.owner)

    # ---- what Spark calls ----

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the messages that wait now."""
        self._broker.create_channel(self._settings.topic, self._settings.channel)
        self._left = self._chain.waiting()

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxMessagesPerTrigger; maxBytesPerTrigger applies as well."""
        return ReadMaxRows(self._settings.maxMessagesPerTrigger)

    def initialOffset(self) -> Offset:
        """The offset at which a new query begins. Raises LeaseFenced if another query that lives
        has this consumer."""
        self._chain.begin(self._consumer)
        at = {"c": self._consumer, "b": self._chain.identity, "l": 0, "p": 0}
        return {**at, **self._chain.here, "q": self._query}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The offset of a lease that follows `start`, or `start` if there is no message."""
        refuse_once(limit)
        self._know(start)
        identity, parent, found = self._chain.follow(start)
        if found is None:
            found = self._take(parent, limit)
        return start if found is None else self._chain.offset(start, identity, found)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The parts of the leases after `start` up to `end`. After a restart Spark calls it without
        latestOffset before."""
        if start == end:
            return []
        settings = self._settings
        self._know(end)
        identity, leases = self._chain.planned(start, end)
        return [
            LeasePart(
                settings.instance,
                settings.topic,
                settings.channel,
                identity,
                lease.id,
                part,
                settings.columns,
                settings.owner,
            )
            for lease in leases
            for part in range(lease.parts)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Called in a task."""
        assert isinstance(partition, LeasePart)
        return read_part(partition)

    def commit(self, end: Offset) -> None:
        """Finish the leases up to `end`: Spark never asks for them again."""
        self._chain.finish(end)

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
            "lost_leases": self._chain.lost,
        }

    def stop(self) -> None:
        """Close the holder when the query ends; its leases wait for the next run."""
        self._chain.close()

    def _know(self, offset: Offset) -> None:
        """Go on as the query that the checkpoint is of."""
        self._consumer = _of_one(offset)["c"]
        self._query = offset.get("q", "")

    # ---- taking ----

    def _take(self, parent: int, limit: ReadLimit) -> Lease | None:
        chain, consumer = self._chain, self._consumer
        holder = chain.adopt(consumer, self._query)
        rows, max_bytes = bounds(self._settings, limit)
        if self._left is not None:
            rows = min(rows, self._left)
            if not rows:
                return None
        elif not self._enough(holder):
            return None
        lease = holder.lease(rows, max_bytes, self._parts(min(chain.waiting(), rows)), parent)
        if lease is None and self._left:
            lease = chain.take_from_disk(consumer, rows, max_bytes, self._parts, parent)
        if lease is not None and self._left is not None:
            self._left -= lease.count
        return lease

    def _parts(self, messages: int) -> int:
        return parts_for(self._settings, messages)

    def _enough(self, holder: LeaseHolder) -> bool:
        """Wait for messages for pollTimeout. Returns True if there are enough to take, or few for
        long enough."""
        if not holder.wait(self._settings.pollTimeout):
            return False
        return self._patience.over(self._chain.waiting())


def _of_one(offset: Offset) -> Offset:
    """Return the offset. Raises ValueError if it is one of many instances."""
    if "c" not in offset:
        raise ValueError(
            "the checkpoint is of a query that reads many instances (option instances or lookupd), "
            "and this query reads one: give the options that it had, or a new checkpoint"
        )
    return offset
