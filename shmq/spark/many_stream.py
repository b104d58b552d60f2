"""The streaming source of many instances: a micro-batch is at most one lease on each of them.

    initialOffset()        {}: no instance yet
    latestOffset(start)    on each instance as `stream` does on one. An instance that `start` does
                           not name joins: its first lease follows lease 0. The limits are for all
                           of them, in proportion to the messages that wait on each.
    partitions(start, end) the parts of the leases on all instances, in groups of about equal bytes
    read(group)            over TCP, or in shared memory where the memory is this host's
    commit(end)            the leases up to `end` are finished on the instances that answer; on the
                           others by a later latestOffset

An offset is a JSON object: from the identity of an instance's memory to the offset there, which is
that of one instance and, as "a", the address, and, as "n", the number of groups, so that the groups
are the same whenever the micro-batch is read. A lease that was taken and is in no offset, because
the process died or another instance was away, is found again by the lease before it.

A later run of the query opens the holder of its leases on each instance, which fences the run
before it there. A run calls the instances that it knows before it opens a holder on any other, so
one that was fenced ends before it can fence its successor.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from shmq.client import Lease
from shmq.errors import MemoryLost
from shmq.spark.chain import Offset, left_out
from shmq.spark.fleet import Fleet, Offsets
from shmq.spark.hosts import Host, HostAway
from shmq.spark.many import Group, grouped, groups_for, portions_of, read_group
from shmq.spark.options import Settings
from shmq.spark.stream import Patience, bounds, refuse_once

#: Seconds between two questions for the counts that are only shown.
_COUNT_EVERY: Final = 1.0


class ManyStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source of many instances; the module describes its protocol."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._fleet = Fleet(settings)
        self._consumer = settings.consumer or f"spark-{uuid.uuid4().hex}"
        self._left: dict[str, int] | None = None  # AvailableNow: messages still to be taken
        self._patience = Patience(settings)
        self._lost = 0
        self._left_out: set[str] = set()  # identities of memory that is lost
        self._counts: Offset = {}
        self._count_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fleet": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fleet = Fleet(self._settings)

    # ---- what Spark calls ----

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the messages that wait now on the instances that answer."""
        topic, channel = self._settings.topic, self._settings.channel

        def target(host: Host) -> int:
            host.broker.create_channel(topic, channel)
            return host.chain.waiting()

        fleet = self._fleet
        self._left = fleet.until(lambda: fleet.each(fleet.live({}), target))

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxMessagesPerTrigger; maxBytesPerTrigger applies as well."""
        return ReadMaxRows(self._settings.maxMessagesPerTrigger)

    def initialOffset(self) -> Offsets:
        """The offset at which a new query begins: it knows no instance."""
        return {}

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """`start` with the leases that follow it, or `start` if there is no message."""
        refuse_once(limit)
        _check(start)
        return self._fleet.until(lambda: self._latest(start, limit))

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """The parts of the leases after `start` up to `end`. After a restart Spark calls it without
        latestOffset before."""
        _check(end)
        changed = {key: offset for key, offset in end.items() if offset != start.get(key)}
        if not changed:
            return []
        return self._fleet.until(lambda: self._plan(start, changed))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Called in a task."""
        return read_group(partition)

    def commit(self, end: Offsets) -> None:
        """Finish the leases up to `end` on the instances that answer: Spark never asks for them
        again."""
        hosts = {key: host for key, host in self._fleet.connected().items() if key in end}
        with contextlib.suppress(HostAway, MemoryLost):
            self._fleet.each(hosts, lambda host: host.chain.finish(end[host.identity]), exact=True)

    def reportLatestOffset(self) -> Offset:
        """The counts of all instances together, for StreamingQueryProgress: messages, `oldest_ms`,
        the age of the longest waiting one in ms, and the addresses that are away. They are up to a
        second old."""
        if time.monotonic() >= self._count_at:
            with contextlib.suppress(HostAway, MemoryLost):
                self._count()
            self._count_at = time.monotonic() + _COUNT_EVERY
        return {**self._counts, "lost_leases": self._all_lost(), "away": self._fleet.away}

    def stop(self) -> None:
        """Close the holders when the query ends; the leases wait for the next run."""
        self._fleet.close()

    # ---- from one offset to the next ----

    def _latest(self, start: Offsets, limit: ReadLimit) -> Offsets:
        fleet = self._fleet
        consumer: str = next((offset["c"] for offset in start.values()), self._consumer)
        hosts = fleet.live(start)
        dropped = self._drop_lost(start)

        def follow(host: Host) -> tuple[str, int, Lease | None]:
            return host.chain.follow(start.get(host.identity) or _zero(consumer))

        if not start:
            fleet.each(hosts, lambda host: host.chain.begin(consumer))
        known = {key: host for key, host in hosts.items() if host.chain.is_open}
        followed = fleet.each(known, follow)
        followed |= fleet.each({key: hosts[key] for key in hosts.keys() - known.keys()}, follow)
        hosts = {key: hosts[key] for key in followed}
        found = {key: lease for key, (_, _, lease) in followed.items() if lease is not None}
        if not found:
            parents = {key: parent for key, (_, parent, _) in followed.items()}
            found = self._take(hosts, consumer, parents, limit)
        if not found:
            return start
        end = {key: offset for key, offset in start.items() if key not in dropped}
        for key in [key for key in followed if key in end and not fleet.is_named(hosts[key])]:
            del end[key]  # its last lease is finished, and nothing more is read there
        groups = groups_for(self._settings, found.values())
        for key, lease in found.items():
            at = hosts[key].chain.offset({"c": consumer}, followed[key][0], lease)
            end[key] = {"a": hosts[key].address, "n": groups, **at}
        return end

    def _drop_lost(self, start: Offsets) -> set[str]:
        """The instances of `start` whose memory is lost. Raises DataLoss, unless
        failOnDataLoss=false."""
        dropped = {key for key, offset in start.items() if self._fleet.is_lost(key, offset)}
        for key in dropped - self._left_out:
            self._leave_out(start[key], key)
        self._left_out |= dropped
        return dropped

    def _leave_out(self, offset: Offset, key: str) -> None:
        where = self._settings.channel_of(offset["a"])
        left_out(
            self._settings,
            where,
            offset["l"],
            f"the instance's memory was {key} and is lost. Messages that it wrote to its disk, "
            "when it was stopped or its memory was full, are read again",
        )
        self._lost += 1

    def _plan(self, start: Offsets, changed: Offsets) -> list[Group]:
        hosts, lost = self._fleet.needed(changed)
        self._fleet.each(hosts, lambda host: host.chain.identity, exact=True)  # before any counts
        for key, offset in lost.items():
            self._leave_out(offset, key)

        def planned(host: Host) -> tuple[str, list[Lease]]:
            end = changed[host.identity]
            return host.chain.planned(start.get(host.identity) or _zero(end["c"]), end)

        leases = self._fleet.each(hosts, planned, exact=True)
        most = max((offset["n"] for offset in changed.values()), default=1)
        return grouped(
            self._settings,
            most,
            [
                (hosts[key], identity, lease)
                for key, (identity, found) in sorted(leases.items())
                for lease in found
            ],
        )

    # ---- taking ----

    def _take(
        self,
        hosts: Mapping[str, Host],
        consumer: str,
        parents: Mapping[str, int],
        limit: ReadLimit,
    ) -> dict[str, Lease]:
        fleet, left = self._fleet, self._left
        hosts = {key: host for key, host in hosts.items() if fleet.is_named(host)}
        waiting = fleet.each(hosts, lambda host: host.chain.waiting())
        if left is not None:
            waiting = {key: min(count, left.get(key, 0)) for key, count in waiting.items()}
        total = sum(waiting.values())
        if left is None:
            if not total:
                self._wait(hosts, consumer)
                return {}
            if not self._patience.over(total):
                return {}
        portions = portions_of(self._settings, *bounds(self._settings, limit), waiting)

        def take(host: Host) -> Lease | None:
            key, portion = host.identity, portions[host.identity]
            rows = portion.rows if left is None else min(portion.rows, waiting[key])
            parts = portion.parts(waiting[key])
            lease = host.chain.adopt(consumer).lease(rows, portion.bytes, parts, parents[key])
            if lease is None and left is not None:
                lease = host.chain.take_from_disk(
                    consumer, rows, portion.bytes, portion.parts, parents[key]
                )
            return lease

        taken = fleet.each({key: hosts[key] for key in portions}, take)
        found = {key: lease for key, lease in taken.items() if lease is not None}
        if left is not None:
            for key, lease in found.items():
                left[key] -= lease.count
        return found

    def _wait(self, hosts: Mapping[str, Host], consumer: str) -> None:
        """Wait for messages for pollTimeout, on one instance after the other."""
        if not hosts:
            time.sleep(self._settings.pollTimeout)
        for key, host in hosts.items():
            seconds = self._settings.pollTimeout / len(hosts)

            def wait(host: Host, seconds: float = seconds) -> bool:
                return host.chain.adopt(consumer).wait(seconds)

            if self._fleet.each({key: host}, wait).get(key):
                return

    # ---- counts ----

    def _count(self) -> None:
        topic, channel = self._settings.topic, self._settings.channel
        found = self._fleet.each(
            self._fleet.connected(), lambda host: host.broker.channel_stats(topic, channel), True
        )
        ages = [each.oldest_age for each in found.values() if each.oldest_age is not None]
        self._counts = {
            "depth": sum(each.depth for each in found.values()),
            "in_flight": sum(each.in_flight for each in found.values()),
            "leased": sum(each.leased for each in found.values()),
            "oldest_ms": int(max(ages) * 1000) if ages else None,
            "instances": len(found),
        }

    def _all_lost(self) -> int:
        return self._lost + self._fleet.lost


def _zero(consumer: str) -> Offset:
    """The offset before an instance's first lease."""
    return {"c": consumer, "b": "", "l": 0, "p": 0}


def _check(offsets: Offsets) -> None:
    """Raises ValueError for an offset of one instance."""
    if "c" in offsets:
        raise ValueError(
            "the checkpoint is of a query that reads one instance in shared memory, and this query "
            "reads many (option instances or lookupd): give the option instance that it had, or a "
            "new checkpoint"
        )
