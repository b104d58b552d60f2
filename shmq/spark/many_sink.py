"""Writing to many instances: each task stages its rows on one of them, and the commit publishes
them on all.

The partitions of a write take the instances in turns. The commit of an instance is all or nothing
and happens once for each key and epoch. If the driver dies when some instances have committed and
others have not, Spark computes the micro-batch again, and the commit goes on with the others. So a
row must be in the same partition both times, as it is in every query whose plan is deterministic.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext

from shmq.spark.hosts import UNREACHABLE, HostAway, Place, remote_at, said
from shmq.spark.options import Settings
from shmq.spark.staging import bodies_of

#: Longest key that a broker takes.
_LONGEST_KEY: Final = 200
#: Seconds between two attempts to commit on an instance that does not answer.
_PAUSE: Final = 0.5


@dataclass(frozen=True)
class Sent:
    """The rows that one attempt of a task has staged on one instance. staged: as
    `RemoteBroker.stage` gave it."""

    address: str
    key: str
    epoch: int
    staged: Any

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return int(self.staged.rows)


def check(settings: Settings) -> None:
    """Raises ValueError for options with which many instances cannot be written."""
    if settings.lookupd:
        raise ValueError(
            "option lookupd of shmq is for reads: a write names its instances, because their order "
            'decides where rows go: .option("instances", "HOST:PORT,...")'
        )
    if settings.onMissingHost == "skip":
        raise ValueError(
            "option onMissingHost of shmq, 'skip': a write needs all of its instances; give fail "
            "or wait"
        )


def stage(
    batches: Iterable[pa.RecordBatch], settings: Settings, key: str, epoch: int, owner: str
) -> Sent | None:
    """Stage the rows of a task on the instance whose turn it is; None if there are no rows. Raises
    HostAway if it does not answer."""
    address = _turn(settings)
    try:
        broker = remote_at(Place.of(settings, address))
        staged = broker.stage(settings.topic, _short(key), epoch, _bodies(batches, settings))
    except UNREACHABLE as exc:
        raise _away(settings, [address], exc, "stage rows") from exc
    return None if staged is None else Sent(address, key, epoch, staged)


def publish_now(batches: Iterable[pa.RecordBatch], settings: Settings) -> int:
    """The write of a task with publish=immediate. Returns the number of rows."""
    address, rows = _turn(settings), 0
    try:
        producer = remote_at(Place.of(settings, address)).producer(settings.topic)
        for batch in batches:
            bodies = list(_bodies([batch], settings))
            producer.publish_many(bodies, timeout=settings.timeout)
            rows += len(bodies)
    except UNREACHABLE as exc:
        raise _away(settings, [address], exc, "publish rows") from exc
    return rows


def commit(staged: Sequence[Sent], settings: Settings, key: str, epoch: int) -> int:
    """Publish the epoch on every instance where rows are staged, unless it is published there
    already. An instance that does not answer is tried again: for `timeout`, or with
    onMissingHost=wait until it answers. Returns the number of rows that were published now. Raises
    HostAway."""
    waiting: dict[str, list[Any]] = {}
    for item in staged:
        waiting.setdefault(item.address, []).append(item.staged)
    skip = not settings.failOnDataLoss
    deadline = None
    if settings.onMissingHost != "wait" and settings.timeout is not None:
        deadline = time.monotonic() + settings.timeout
    published = 0
    while True:
        error: Exception | None = None
        for address in sorted(waiting):
            try:
                broker = remote_at(Place.of(settings, address))
                rows = waiting[address]
                published += broker.commit(settings.topic, _short(key), epoch, rows, skip)
            except UNREACHABLE as exc:
                error = exc
                continue
            del waiting[address]
        if error is None:
            return published
        if deadline is not None and time.monotonic() > deadline:
            raise _away(settings, sorted(waiting), error, "commit a write that others have")
        time.sleep(_PAUSE)


def drop(staged: Iterable[Sent | None], settings: Settings) -> None:
    """Forget what was staged for epochs that will not be published."""
    for item in staged:
        if item is not None:
            _forget(settings, item.address, item.key, item.epoch)


def abandon(settings: Settings, key: str, epoch: int) -> None:
    """Forget what all attempts of an epoch have staged, known or not, unless its commit has
    begun."""
    for address in settings.instances:
        _forget(settings, address, key, epoch)


def _forget(settings: Settings, address: str, key: str, epoch: int) -> None:
    try:
        remote_at(Place.of(settings, address)).abandon(settings.topic, _short(key), epoch)
    except UNREACHABLE:
        return  # the broker forgets it when its time is over


def _turn(settings: Settings) -> str:
    task = TaskContext.get()
    addresses: tuple[str, ...] = settings.instances
    return addresses[(task.partitionId() if task else 0) % len(addresses)]


def _bodies(batches: Iterable[pa.RecordBatch], settings: Settings) -> Iterator[memoryview]:
    for batch in batches:
        column = bodies_of(batch, settings)
        _, offsets, data = column.buffers()
        if data is None:
            continue
        ends = memoryview(offsets).cast("q")[column.offset : column.offset + len(column) + 1]
        view = memoryview(data)
        for number in range(len(column)):
            yield view[ends[number] : ends[number + 1]]


def _short(key: str) -> str:
    if len(key) <= _LONGEST_KEY:
        return key
    return hashlib.blake2b(key.encode(), digest_size=32).hexdigest()


def _away(settings: Settings, addresses: Sequence[str], error: Exception, tried: str) -> HostAway:
    return HostAway(
        f"{tried} to {settings.topic}: {', '.join(addresses)} of {len(settings.instances)} "
        f"instances did not answer ({said(error)}). Run the write again when they answer; "
        '.option("onMissingHost", "wait") waits for them. Where the rows are published already '
        "they are not published again"
    )
