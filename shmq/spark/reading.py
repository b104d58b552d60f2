"""Rows from leases: what tasks run, and the batch source."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

import shmq
from shmq.client import LeasedBatch
from shmq.errors import Gone, LeaseLost, NotRunning
from shmq.spark.options import Settings

_ARROW: Final = {
    "id": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "attempts": pa.int32(),
    "body": pa.binary(),
    "topic": pa.string(),
    "channel": pa.string(),
}
#: Of one record batch: enough that neither side pays for the batch, little enough that slots and
#: bodies stay in a core's cache from the first look at them to the copy.
_ROWS: Final = 2048
_BYTES: Final = 4 << 20

_brokers: dict[tuple[str, str | None], shmq.Broker] = {}
_lock = threading.Lock()


def attached(instance: str, owner: str | None = None, timeout: float = 2.0) -> shmq.Broker:
    """This process's attachment, kept for all its tasks; a new one when the broker is another."""
    with _lock:
        broker = _brokers.get((instance, owner))
        if broker is not None:
            try:
                if not broker.ended:
                    return broker
            except (Gone, NotRunning):
                pass
            broker.close()
        named: Any = {} if owner is None else {"owner": owner}
        broker = _brokers[instance, owner] = shmq.attach(instance, timeout=timeout, **named)
        return broker


@dataclass(frozen=True)
class LeasePart(InputPartition):
    """One part of a lease: all that a task needs to know."""

    instance: str
    topic: str
    channel: str
    identity: str
    lease: int
    part: int
    columns: tuple[str, ...]
    owner: str | None = None


def schema_of(columns: tuple[str, ...]) -> pa.Schema:
    """As Spark wants it, to the letter."""
    return pa.schema([pa.field(name, _ARROW[name]) for name in columns])


def read_part(part: LeasePart) -> Iterator[pa.RecordBatch]:
    """Its rows. LeaseLost if the lease has ended, also while it is read: nothing of another message
    was handed out then."""
    broker = attached(part.instance, part.owner)
    if broker.channel_identity(part.topic, part.channel) != part.identity:
        raise LeaseLost(
            f"read lease {part.lease} of {part.topic}/{part.channel}: the channel was made anew "
            "since"
        )
    schema = schema_of(part.columns)
    leased = broker.read_lease(part.topic, part.channel, part.lease, part.part, _ROWS, _BYTES)
    for batch in leased:
        columns = [_column(name, batch, part) for name in part.columns]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(name: str, batch: LeasedBatch, part: LeasePart) -> pa.Array:
    count = len(batch)
    if name == "body":
        buffers = [None, pa.py_buffer(batch.offsets), pa.py_buffer(batch.data)]
        return pa.Array.from_buffers(pa.binary(), count, buffers, 0)
    if name in ("topic", "channel"):
        return pa.repeat(getattr(part, name), count)
    numbers: Any = batch.ids if name == "id" else batch.attempts
    if name == "timestamp":
        numbers = batch.timestamps // 1000
    return pa.Array.from_buffers(_ARROW[name], count, [None, pa.py_buffer(numbers)], 0)


def parts_for(settings: Settings, waiting: int) -> int:
    """In how many partitions so many messages are read."""
    most: int = min(settings.numPartitions, 32)
    least: int = settings.minPartitionRows
    return max(1, min(most, -(-waiting // least)))


def lessee_name(settings: Settings) -> str:
    """What the leases of a batch read are held under."""
    return settings.consumer or f"spark-{settings.token}"


class ShmqReader(DataSourceReader):
    """What a channel holds when the DataFrame is first used, up to maxMessagesPerTrigger and to
    what one lease can have: what waits in memory, or what is on disk with what waits in front of
    it; not what came after that. The messages stay leased, so that every use of the DataFrame sees
    the same rows, until `shmq.spark.finish` or `give_back`, or else leaseTtl has gone by."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[LeasePart]:
        """The open leases of this DataFrame, or one that is taken now."""
        settings = self._settings
        broker = attached(settings.instance, settings.owner)
        ttl = settings.leaseTtl
        lessee = broker.lessee(
            settings.topic, settings.channel, lessee_name(settings), ttl=ttl, grace=ttl
        )
        try:
            leases = lessee.leases()
            if not leases:
                waiting = broker.channel_depth(settings.topic, settings.channel)
                lease = lessee.lease(
                    settings.maxMessagesPerTrigger,
                    settings.maxBytesPerTrigger,
                    parts_for(settings, waiting),
                )
                leases = [] if lease is None else [lease]
            identity = broker.channel_identity(settings.topic, settings.channel)
        finally:
            lessee.close()  # the planning process does not live long; `grace` holds them
        return [
            LeasePart(settings.instance, settings.topic, settings.channel, identity, lease.id, part,
                      settings.columns, settings.owner)
            for lease in leases
            for part in range(lease.parts)
        ]  # fmt: skip

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One partition, in a task. Without a lease there is none, and Spark asks for one of its
        own making all the same: it has no rows."""
        return read_part(partition) if isinstance(partition, LeasePart) else iter(())


def finish(instance: str, topic: str, channel: str, consumer: str, owner: str | None = None) -> int:
    """Finish what a batch read under this `consumer` holds; how many messages."""
    return _end(attached(instance, owner), topic, channel, consumer, True)


def give_back(
    instance: str, topic: str, channel: str, consumer: str, owner: str | None = None
) -> int:
    """Give it back to the channel instead."""
    return _end(attached(instance, owner), topic, channel, consumer, False)


def _end(broker: shmq.Broker, topic: str, channel: str, consumer: str, done: bool) -> int:
    with broker.lessee(topic, channel, consumer) as lessee:
        ids = [lease.id for lease in lessee.leases()]
        if done:
            return lessee.finish_lease(ids[-1]) if ids else 0
        return sum(lessee.return_lease(lease) for lease in reversed(ids))


def forget_in_child() -> None:
    """A forked worker has its own attachment; the parent's stays the parent's."""
    _brokers.clear()


os.register_at_fork(after_in_child=forget_in_child)
