"""Rows from leases: the code that tasks run, and the batch source."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, InputPartition

import shmq
from shmq.client import LeasedBatch
from shmq.client.message import arrow_properties
from shmq.errors import Gone, LeaseFenced, LeaseLost, NotRunning
from shmq.spark import staging
from shmq.spark.holding import Held, Holding
from shmq.spark.keeper import holder_again
from shmq.spark.options import Settings
from shmq.spark.reads import Lookout, Read, Reads, gone
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


class _Here:
    """The one instance of a read."""

    place: Final = None

    def __init__(self, broker: shmq.Broker, instance: str) -> None:
        self.broker, self.identity, self.address = broker, broker.identity, instance


class ShmqReader(DataSourceReader):
    """A batch read: the messages that a channel holds when the DataFrame is first used, up to
    maxMessagesPerTrigger and to the messages that one lease can have. These are the messages in
    memory, or the messages on disk with those in memory before them, but none that came later. They
    stay leased, so that every use of the DataFrame sees the same rows, until
    `shmq.spark.finish_lease` or `return_lease` is called or leaseTtl is over."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[LeasePart]:
        """The parts of the open leases of this DataFrame, or of a lease that is taken now. Raises
        LeaseFenced if the name is another application's, or a streaming query's, and LeaseLost,
        once, if what this application has read under it went back to the channel."""
        exempt_modules()
        settings = self._settings
        here = _Here(attached(settings.instance, settings.owner), settings.instance)
        name = lease_holder_name(settings)
        with reads_of(settings, name).locked() as reads:
            held = Holding(settings, name, reads).plan(
                {here.identity: here},
                lambda hosts, call: {key: call(host) for key, host in hosts.items()},
                lambda held: self._take(here, held),
            )
        return [
            LeasePart(
                settings.instance,
                settings.topic,
                settings.channel,
                one.identity,
                lease.id,
                part,
                settings.columns,
                settings.owner,
            )
            for one in held.values()
            for lease in one.leases
            for part in range(lease.parts)
        ]

    def _take(self, here: _Here, held: dict[str, Held]) -> None:
        settings, one = self._settings, held[here.identity]
        waiting = here.broker.channel_depth(settings.topic, settings.channel)
        parts = parts_for(settings, waiting)
        if settings.numPartitions > 1:
            parts = max(parts, 2)  # so that a look is told from a use, see `Lookout`
        lease = one.holder.lease(settings.maxMessagesPerTrigger, settings.maxBytesPerTrigger, parts)
        one.leases = [] if lease is None else [lease]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Called in a task. Without a lease there is no partition,
        and Spark passes one of its own, which has no rows."""
        if isinstance(partition, LeasePart):
            lookout = Lookout(partition.instance, partition.identity, partition.lease)
            with lookout.reading(partition.part, _is_in_turn()) as done:
                yield from read_part(partition)
                done()


def _is_in_turn() -> bool:
    """Whether this task is one of `toLocalIterator`, which reads a part when the program has come
    to it. PySpark says which call of the program a job is of."""
    task = TaskContext.get()
    return task is not None and (task.getLocalProperty("callSite.short") or "").startswith(
        "toLocalIterator "
    )


def reads_of(settings: Settings, name: str) -> Reads:
    """The reads under a name. A process that may not attach cannot foretell their place."""
    if settings.many:
        secret = (settings.proof.encode()[:64], "many")
        where = settings.instances or settings.lookupd
        return Reads(None, settings.topic, settings.channel, name, lambda: secret, where)
    return Reads(
        settings.instance,
        settings.topic,
        settings.channel,
        name,
        lambda: staging.secret_of(settings),
    )


def finish_lease(
    read: Any,
    topic: str | None = None,
    channel: str | None = None,
    consumer: str | None = None,
    owner: str | None = None,
    **many: str,
) -> int:
    """Finish the messages that a batch read has read, and nothing else. Returns their number; 0 if
    it read none, or if they were finished before.

        shmq.spark.finish_lease(df)
        shmq.spark.finish_lease(instance, topic, channel, consumer)

    read: the DataFrame as `load()` gave it, or one of its columns is enough; or the instance's
    name, and then the read's options topic, channel and consumer. In another program than the one
    that read, this works when that one has ended.

    many: the options `instances` or `lookupd`, if the batch was read with one, and `hostTimeout`;
    then `read` is the DataFrame or None. If an instance does not answer, the messages of the others
    are finished all the same, and HostAway is raised.

    Raises LeaseLost if the messages went back to the channel meanwhile: what was written comes
    again. Raises LeaseFenced if another application, which lives, has read under this name, and
    the errors of `shmq.attach`.
    """
    return _end(read, topic, channel, consumer, owner, True, many)


def return_lease(
    read: Any,
    topic: str | None = None,
    channel: str | None = None,
    consumer: str | None = None,
    owner: str | None = None,
    **many: str,
) -> int:
    """Return the messages that a batch read has read, and nothing else, to the head of the channel.
    Returns their number. The arguments and errors are those of `finish_lease`."""
    return _end(read, topic, channel, consumer, owner, False, many)


@dataclass
class Ending:
    """The end of what a batch read has read. done: it is finished, else returned."""

    topic: str
    channel: str
    name: str
    read: Read
    what: str
    done: bool

    def at(self, broker: Any) -> int:
        """End it on one instance. Returns the number of messages. Raises LeaseLost."""
        identity, ids = self.read.leases.get(broker.identity, ("", []))
        if not ids:
            return 0
        if broker.channel_identity(self.topic, self.channel) != identity:
            raise gone(self.what, ids[-1])
        if isinstance(broker, shmq.Broker):
            count = sum(self._end(broker, lease) for lease in reversed(ids))
        else:
            count = self._at_remote(broker, ids)
        self.read.leases[broker.identity] = (identity, [])
        return count

    def _end(self, broker: shmq.Broker, lease: int) -> int:
        owner = broker.lease_owner(self.topic, self.channel, self.name)
        if owner is None or lease not in [one.id for one in owner.leases]:
            raise gone(self.what, lease)
        end = broker.finish_lease if self.done else broker.return_lease
        try:
            return end(self.topic, self.channel, lease)
        except LeaseLost:
            raise gone(self.what, lease) from None

    def _at_remote(self, broker: Any, ids: list[int]) -> int:
        where = (self.topic, self.channel, self.name)
        known = self.read.holders.get(broker.identity)
        holder = None
        if known is not None:
            with contextlib.suppress(LeaseFenced):
                holder = holder_again(broker, where, known)
                there = {lease.id for lease in holder.leases()}
        if holder is None:  # the next run of the program has it, or nobody
            holder = broker.lease_holder_if_free(*where, None)
            there = {lease.id for lease in holder.leases()}
        lost = [lease for lease in ids if lease not in there]
        if lost:
            raise gone(self.what, lost[-1])
        if self.done:
            count = int(holder.finish_lease(ids[-1]))
        else:
            count = sum(holder.return_lease(lease) for lease in reversed(ids))
        if there <= set(ids):  # Spark's planning process, which lives on, is not to be its owner
            holder.close()
        return count


def _end(
    source: Any,
    topic: str | None,
    channel: str | None,
    consumer: str | None,
    owner: str | None,
    done: bool,
    many: dict[str, str],
) -> int:
    names: dict[str, Any] = {"topic": topic, "channel": channel, "consumer": consumer}
    if source is None or isinstance(source, str):
        names |= {"instance": None if many else source}
    else:
        names = names_in(source)
        many = {**names.pop("many"), **many}
    missing = [name for name in ("topic", "channel", "consumer") if names[name] is None]
    if missing:
        raise TypeError(f"finish_lease and return_lease need {', '.join(missing)}, or a DataFrame")
    instance = names["instance"]
    if instance is None and not many:
        raise ValueError("instance must be a name, unless instances or lookupd are given")
    topic, channel, name = str(names["topic"]), str(names["channel"]), str(names["consumer"])
    given = {"topic": topic, "channel": channel, **many}
    given |= {} if instance is None else {"instance": instance}
    given |= {} if owner is None else {"owner": owner}
    settings = Settings(given)
    with reads_of(settings, name).locked() as reads:
        read = reads.mine()
        if read is None:
            return _unknown(instance, topic, channel, name, owner)
        ending = Ending(topic, channel, name, read, reads.what, done)
        try:
            if many:
                count = _end_many(ending, settings)
            else:
                count = ending.at(attached(instance, owner))
            for _, left in read.leases.values():
                if left:  # in memory that is gone
                    raise gone(reads.what, left[-1])
            return count
        finally:
            reads.store(read)


def _unknown(instance: str | None, topic: str, channel: str, name: str, owner: str | None) -> int:
    """The end of what no read on this host has read: there is nothing. Raises LeaseLost if leases
    of this name are open, because it is not known who needs them."""
    held = None
    if instance is not None:
        with contextlib.suppress(Gone):
            held = attached(instance, owner).lease_owner(topic, channel, name)
    if held is None or not held.leases:
        return 0
    lease = held.leases[-1].id
    raise LeaseLost(
        f"no batch read of this user on this host has read lease {lease} of {topic}/{channel} "
        f"under {name!r}. Look at it with `shmq lease ls --instance {instance}`, and end it with "
        f"`shmq lease finish --instance {instance} {topic} {channel} {lease}` or `lease return`"
    )


def _end_many(ending: Ending, settings: Settings) -> int:
    from shmq.spark.fleet import Fleet

    fleet = Fleet(settings)
    try:
        return fleet.end(ending.at)
    finally:
        fleet.close()


#: The name in a column's metadata of what `names_in` finds.
MARK: Final = "shmq"


def names_of(settings: Settings) -> str:
    """The metadata of a read's columns, with which `finish_lease(df)` finds it."""
    where = {
        "instances": ",".join(settings.instances or ()),
        "lookupd": ",".join(settings.lookupd or ()),
    }
    return json.dumps(
        {
            "instance": None if settings.many else settings.instance,
            "topic": settings.topic,
            "channel": settings.channel,
            "consumer": lease_holder_name(settings),
            "many": {name: value for name, value in where.items() if value},
        }
    )


def names_in(rows: Any) -> dict[str, Any]:
    """The names of a read, which its columns have in their metadata. Raises ValueError if there is
    none, or more than one."""
    found = {field.metadata[MARK] for field in rows.schema.fields if MARK in field.metadata}
    if len(found) != 1:
        raise ValueError(
            f"the columns of this DataFrame come from {len(found)} batch reads of shmq, and must "
            "come from one: give the DataFrame that load() returned, or its names (instance, "
            "topic, channel, consumer)"
        )
    names: dict[str, Any] = json.loads(found.pop())
    return names


def forget_in_child() -> None:
    """Forget the parent's attachments: a forked worker attaches for itself."""
    _brokers.clear()


os.register_at_fork(after_in_child=forget_in_child)
