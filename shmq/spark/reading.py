"""Rows from leases: the code that tasks run, and the batch source."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

import shmq
from shmq.client import LeasedBatch
from shmq.client.message import arrow_properties
from shmq.errors import Gone, LeaseLost, NotRunning
from shmq.spark.options import Settings
from shmq.spark.workers import exempt_modules

if TYPE_CHECKING:
    from shmq.spark.hosts import Place

_ARROW: Final = {
    "id": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "attempts": pa.int32(),
    "body": pa.binary(),
    "topic": pa.string(),
    "channel": pa.string(),
    "properties": pa.map_(pa.string(), pa.binary()),
}
#: Rows, and bytes of bodies, of one record batch. Spark has a cost for each: with 2048 rows of 100
#: bytes a query took 2 to 4 % longer.
_ROWS: Final = 16_384
_BYTES: Final = 2 << 20

_brokers: dict[tuple[str, str | None], shmq.Broker] = {}
_lock = threading.Lock()


def attached(instance: str, owner: str | None = None, timeout: float = 2.0) -> shmq.Broker:
    """This process's attachment, kept for all its tasks; a new one if the broker has ended since.
    Raises as `shmq.attach`."""
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
    """One part of a lease, with everything that a task needs to read it. identity: of the channel,
    see `Broker.channel_identity`. place: where the instance is; None: it is `instance` on this
    host."""

    instance: str
    topic: str
    channel: str
    identity: str
    lease: int
    part: int
    columns: tuple[str, ...]
    owner: str | None = None
    place: Place | None = None

    @property
    def broker(self) -> Any:
        """This process's attachment or connection to the instance. Raises as `shmq.attach`, or as
        `broker_at`."""
        if self.place is None:
            return attached(self.instance, self.owner)
        from shmq.spark.hosts import broker_at

        return broker_at(self.place)


def schema_of(columns: tuple[str, ...]) -> pa.Schema:
    """The Arrow schema of these columns, exactly as Spark requires it."""
    return pa.schema([pa.field(name, _ARROW[name]) for name in columns])


def read_part(part: LeasePart) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part. Raises LeaseLost if the lease has ended, also in the middle; the
    rows before are those of the lease."""
    exempt_modules()
    broker = part.broker
    if broker.channel_identity(part.topic, part.channel) != part.identity:
        raise LeaseLost(
            f"read lease {part.lease} of {part.topic}/{part.channel}: the channel was "
            "created again since"
        )
    schema = schema_of(part.columns)
    leased = broker.read_lease(
        part.topic,
        part.channel,
        part.lease,
        part.part,
        _ROWS,
        _BYTES,
        properties="properties" in part.columns,
    )
    for batch in leased:
        columns = [_column(name, batch, part) for name in part.columns]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(name: str, batch: LeasedBatch, part: LeasePart) -> pa.Array:
    count = len(batch)
    if name == "body":
        *_, offsets, data, _ = batch.columns()  # `data` would copy what came over a network
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), count, buffers, 0)
    if name == "properties":
        return arrow_properties(batch.blocks())[1]
    if name in ("topic", "channel"):
        return pa.repeat(getattr(part, name), count)
    numbers: Any = batch.ids if name == "id" else batch.attempts
    if name == "timestamp":
        numbers = batch.timestamps // 1000
    return pa.Array.from_buffers(_ARROW[name], count, [None, pa.py_buffer(numbers)], 0)


def parts_for(settings: Settings, waiting: int) -> int:
    """The number of partitions in which `waiting` messages are read."""
    most: int = min(settings.numPartitions, 32)
    least: int = settings.minPartitionRows
    return max(1, min(most, -(-waiting // least)))


def lease_holder_name(settings: Settings) -> str:
    """The name under which the leases of a batch read are held."""
    return settings.consumer or f"spark-{settings.stamp}"


class ShmqReader(DataSourceReader):
    """A batch read: the messages that a channel holds when the DataFrame is first used, up to
    maxMessagesPerTrigger and to the messages that one lease can have. These are the messages in
    memory, or the messages on disk with those in memory before them, but none that came later. They
    stay leased, so that every use of the DataFrame sees the same rows, until
    `shmq.spark.finish_lease` or `return_lease` is called or leaseTtl is over."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[LeasePart]:
        """The parts of the open leases of this DataFrame, or of a lease that is taken now."""
        exempt_modules()
        settings = self._settings
        broker = attached(settings.instance, settings.owner)
        ttl = settings.leaseTtl
        holder = broker.lease_holder(
            settings.topic, settings.channel, lease_holder_name(settings), ttl=ttl, grace=ttl
        )
        try:
            leases = holder.leases()
            if not leases:
                waiting = broker.channel_depth(settings.topic, settings.channel)
                lease = holder.lease(
                    settings.maxMessagesPerTrigger,
                    settings.maxBytesPerTrigger,
                    parts_for(settings, waiting),
                )
                leases = [] if lease is None else [lease]
            identity = broker.channel_identity(settings.topic, settings.channel)
        finally:
            holder.close()  # the planning process ends soon; `grace` keeps the leases open
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
        """Yield the rows of one partition. Called in a task. Without a lease there is no partition,
        and Spark passes one of its own, which has no rows."""
        return read_part(partition) if isinstance(partition, LeasePart) else iter(())


def finish_lease(
    instance: str | None,
    topic: str,
    channel: str,
    consumer: str,
    owner: str | None = None,
    **many: str,
) -> int:
    """Finish the messages that a batch read with this option `consumer` holds. Returns their
    number. Raises the errors of `shmq.attach`, and LeaseLost if the lease has ended.

    many: the options `instances` or `lookupd`, if the batch was read with one, and `hostTimeout`;
    then instance is None. If an instance does not answer, the messages of the others are finished
    all the same, and HostAway is raised.
    """
    return _end(Ending(instance, topic, channel, consumer, owner, True), many)


def return_lease(
    instance: str | None,
    topic: str,
    channel: str,
    consumer: str,
    owner: str | None = None,
    **many: str,
) -> int:
    """Return the messages that a batch read with this option `consumer` holds to the head of the
    channel. Returns their number. The arguments and errors are those of `finish_lease`."""
    return _end(Ending(instance, topic, channel, consumer, owner, False), many)


@dataclass(frozen=True)
class Ending:
    """The end of the leases of a batch read. done: they are finished, else returned."""

    instance: str | None
    topic: str
    channel: str
    consumer: str
    owner: str | None
    done: bool

    def at(self, broker: Any) -> int:
        """End them on one instance. Returns the number of messages."""
        with broker.lease_holder(self.topic, self.channel, self.consumer) as holder:
            ids = [lease.id for lease in holder.leases()]
            if self.done:
                return holder.finish_lease(ids[-1]) if ids else 0
            return sum(holder.return_lease(lease) for lease in reversed(ids))


def _end(ending: Ending, many: dict[str, str]) -> int:
    if not many:
        if ending.instance is None:
            raise ValueError("instance must be a name, unless instances or lookupd are given")
        return ending.at(attached(ending.instance, ending.owner))
    from shmq.spark.fleet import Fleet

    given = {"topic": ending.topic, "channel": ending.channel, **many}
    if ending.instance is not None:
        given["instance"] = ending.instance
    if ending.owner is not None:
        given["owner"] = ending.owner
    fleet = Fleet(Settings(given))
    try:
        return fleet.end(ending.at)
    finally:
        fleet.close()


def forget_in_child() -> None:
    """Forget the parent's attachments: a forked worker attaches for itself."""
    _brokers.clear()


os.register_at_fork(after_in_child=forget_in_child)
