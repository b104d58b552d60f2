"""Parts of leases on many instances, and the batch source that reads them."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from shmq.client import Lease
from shmq.errors import NotRunning
from shmq.spark.fleet import Fleet
from shmq.spark.holding import Held, Holding
from shmq.spark.hosts import Host, HostAway
from shmq.spark.options import Settings
from shmq.spark.reading import LeasePart, lease_holder_name, parts_for, read_part, reads_of
from shmq.spark.workers import exempt_modules

_log = logging.getLogger(__name__)

#: Seconds between two attempts of a task to read from an instance that is away.
_LOOK_AGAIN: Final = 0.5


@dataclass(frozen=True)
class Group(InputPartition):
    """Parts of leases that one task reads, one after the other."""

    parts: tuple[LeasePart, ...]


def read_group(group: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a group. Without a lease Spark passes a partition of its own, which has no
    rows."""
    return itertools.chain.from_iterable(
        _patiently(part) for part in (group.parts if isinstance(group, Group) else ())
    )


def _patiently(part: LeasePart) -> Iterator[pa.RecordBatch]:
    """The rows of a part. If its instance does not answer, and the task may wait for it, reading
    goes on after the last row when it is back: a part has the same rows in the same order each
    time."""
    given = 0
    while True:
        try:
            before = given
            for batch in read_part(part):
                if before >= len(batch):
                    before -= len(batch)
                    continue
                rest = batch.slice(before)
                before = 0
                given += len(rest)
                yield rest
            return
        except NotRunning as exc:
            if part.place is None or not part.place.patient:
                raise
            _log.warning("%s: after %d rows: %s", part.place.address, given, exc)
            time.sleep(_LOOK_AGAIN)


def shared(total: int, waiting: Mapping[str, int]) -> dict[str, int]:
    """`total` in proportion to what waits: at least 1 for each instance where something waits, but
    no more than `total` together; then the instances with most have it."""
    there = {key: count for key, count in waiting.items() if count > 0}
    chosen = sorted(there, key=lambda key: -there[key])[:total]
    all_of_them = sum(there[key] for key in chosen)
    left, shares = total - len(chosen), dict[str, int]()
    for key in chosen:
        shares[key] = 1 + left * there[key] // all_of_them
    return shares


@dataclass(frozen=True)
class Portion:
    """How much is taken from one of many instances at most: rows, and bytes of bodies."""

    rows: int
    bytes: int
    most_parts: int
    settings: Settings

    def parts(self, messages: int) -> int:
        """The number of parts in which so many messages are read."""
        return min(parts_for(self.settings, min(messages, self.rows)), self.most_parts)


def portions_of(
    settings: Settings, rows: int, max_bytes: int, waiting: Mapping[str, int]
) -> dict[str, Portion]:
    """The limits of a micro-batch, shared among the instances by what waits on each."""
    shares = shared(rows, waiting)
    sizes = shared(max_bytes, {key: waiting[key] for key in shares})
    total, parts = sum(shares.values()), settings.numPartitions
    return {
        key: Portion(shares[key], size, -(-parts * shares[key] // total), settings)
        for key, size in sizes.items()
    }


def groups_for(settings: Settings, leases: Iterable[Lease]) -> int:
    """The number of tasks that read these leases."""
    most: int = settings.numPartitions
    least: int = settings.minPartitionRows
    return max(1, min(most, -(-sum(lease.count for lease in leases) // least)))


def grouped(
    settings: Settings, most: int, leases: Sequence[tuple[Host, str, Lease]]
) -> list[Group]:
    """The parts of the leases in at most `most` groups of about equal bytes. Each lease comes with
    its host and the identity of its channel. It is the same for the same leases."""
    parts = [
        (lease.bytes // lease.parts, _part(settings, host, identity, lease, part))
        for host, identity, lease in leases
        for part in range(lease.parts)
    ]
    groups: list[list[LeasePart]] = [[] for _ in range(min(most, len(parts)))]
    sizes = [(0, number) for number in range(len(groups))]
    for size, part in sorted(parts, key=lambda item: -item[0]):
        taken, number = sizes[0]
        groups[number].append(part)
        heapq.heapreplace(sizes, (taken + size, number))
    return [Group(tuple(group)) for group in groups]


def _part(settings: Settings, host: Host, identity: str, lease: Lease, part: int) -> LeasePart:
    return LeasePart(
        settings.instance,
        settings.topic,
        settings.channel,
        identity,
        lease.id,
        part,
        settings.columns,
        settings.owner,
        host.place,
    )


class ManyReader(DataSourceReader):
    """A batch read of many instances: on each of them as `ShmqReader` on one, the limits for all of
    them together. If one of them holds leases of this DataFrame already, those of all are read
    again and nothing is taken."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[Group]:
        """The parts of the open leases of this DataFrame, or of leases that are taken now. Raises
        as `ShmqReader.partitions`, and HostAway."""
        exempt_modules()
        settings = self._settings
        name = lease_holder_name(settings)
        fleet = Fleet(settings)
        try:
            with reads_of(settings, name).locked() as reads:
                holding = Holding(settings, name, reads)
                found = fleet.until(lambda: self._leases(fleet, holding))
            most = groups_for(settings, (lease for _, _, lease in found))
            return grouped(settings, most, found)
        finally:
            fleet.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Called in a task."""
        return read_group(partition)

    def _leases(self, fleet: Fleet, holding: Holding) -> list[tuple[Host, str, Lease]]:
        hosts = fleet.live({})
        held = holding.plan(hosts, fleet.each, lambda found: self._take(fleet, hosts, found))
        return [
            (hosts[key], held[key].identity, lease)
            for key in sorted(held)
            for lease in held[key].leases
        ]

    def _take(self, fleet: Fleet, hosts: Mapping[str, Host], held: dict[str, Held]) -> None:
        settings = self._settings
        waiting = fleet.each({key: hosts[key] for key in held}, lambda host: host.chain.waiting())
        portions = portions_of(
            settings, settings.maxMessagesPerTrigger, settings.maxBytesPerTrigger, waiting
        )

        def take(host: Host) -> None:
            portion, one = portions[host.identity], held[host.identity]
            lease = one.holder.lease(
                portion.rows, portion.bytes, portion.parts(waiting[host.identity])
            )
            one.leases = [] if lease is None else [lease]

        try:
            fleet.each({key: hosts[key] for key in portions}, take)
        except HostAway:  # the next attempt takes all that wait, so these go back
            for key, one in held.items():
                for lease in one.leases:
                    _log.warning("%s: lease %d goes back", hosts[key].chain.where, lease.id)
                    one.holder.return_lease(lease.id)
            raise
