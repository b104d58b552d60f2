"""Writing a DataFrame to a topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from shmq.configurable import at_once
from shmq.spark import staging
from shmq.spark.options import Settings
from shmq.spark.reading import attached
from shmq.spark.staging import Staged
from shmq.spark.workers import exempt_modules

if TYPE_CHECKING:
    from shmq.spark.many_sink import Sent

#: Rows and bytes that are published together, if the broker and the channels have room for them.
_MANY = 1 << 40

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # 4.0: `ShmqDataSource.streamWriter` says what it needs
    DataSourceStreamArrowWriter = object


@dataclass
class Written(WriterCommitMessage):
    """The message of a task to the driver: the key of the write, and what it staged in a file or on
    another host; staged None: there is nothing to commit. run: what tells this run of the query,
    or application, from others."""

    key: str
    staged: Staged | Sent | None
    rows: int
    run: str = ""


def _outlet(settings: Settings) -> Any:
    """The module that stages and commits: on this host, or on many."""
    if not settings.many:
        return staging
    from shmq.spark import many_sink

    return many_sink


def _checked(settings: Settings) -> str:
    """The application that stages on this host, "" if none does. Raises ValueError for options with
    which nothing can be written."""
    if not settings.many:
        return staging.application()
    from shmq.spark import many_sink

    many_sink.check(settings)
    return ""


def _publish_now(batches: Iterable[pa.RecordBatch], settings: Settings) -> int:
    """The write of a task with publish=immediate. Returns the number of rows."""
    if settings.many:
        from shmq.spark import many_sink

        return many_sink.publish_now(batches, settings)
    broker, rows = attached(settings.instance, settings.owner), 0
    producer = broker.producer(settings.topic)
    most, _ = at_once(broker, settings.topic, _MANY, _MANY)
    for batch in batches:
        column = staging.bodies_of(batch, settings)
        for start in range(0, len(column), most):
            piece = column[start : start + most]
            producer.publish_many(piece, timeout=settings.timeout)
            rows += len(piece)
    return rows


def _write(
    batches: Iterator[pa.RecordBatch], settings: Settings, key: str, epoch: int, owner: str
) -> Written:
    exempt_modules()
    if settings.publish == "immediate":
        return Written(key, None, _publish_now(batches, settings))
    staged = _outlet(settings).stage(batches, settings, key, epoch, owner)
    return Written(key, staged, staged.rows if staged else 0, _run() or owner)


def _run() -> str:
    """The run of the streaming query for which this task works, also in foreachBatch; "" if it
    works for none."""
    task = TaskContext.get()
    if task is None or task.getLocalProperty("sql.streaming.queryId") is None:
        return ""
    return task.getLocalProperty("spark.jobGroup.id") or ""


def _commit(messages: Sequence[Any], settings: Settings, epoch: int, repeats: bool = True) -> None:
    found = [message for message in messages if message is not None]
    if settings.publish == "immediate" or not found:
        return
    staged = [message.staged for message in found if message.staged is not None]
    exempt_modules()
    if settings.many:
        from shmq.spark import many_sink

        many_sink.commit(staged, settings, found[0].key, epoch)
    else:
        staging.commit(staged, settings, found[0].key, epoch, found[0].run, repeats)


class ShmqWriter(DataSourceArrowWriter):
    """A batch write, which is published when all of it succeeded; with txnAppId and txnVersion,
    once."""

    def __init__(self, settings: Settings, schema: Any) -> None:
        if (settings.txnAppId is None) != (settings.txnVersion is None):
            raise ValueError(
                "a write that may be repeated needs both options, txnAppId and txnVersion"
            )
        self._settings = settings
        self._key = settings.txnAppId or f"write-{settings.stamp}"
        self._epoch = settings.txnVersion or 0
        self._owner = _checked(settings)
        exempt_modules()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage or publish the rows of one attempt of a task. Called in the task."""
        return _write(iterator, self._settings, self._key, self._epoch, self._owner)

    def commit(self, messages: Sequence[Any]) -> None:
        """Publish the rows of all tasks. Called in the driver when all succeeded."""
        _commit(messages, self._settings, self._epoch, self._settings.txnAppId is not None)

    def abort(self, messages: Sequence[Any]) -> None:
        """Forget the rows. Called in the driver when the write failed; `messages` does not have the
        attempts that succeeded."""
        _outlet(self._settings).abandon(self._settings, self._key, self._epoch)


class ShmqStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write, keyed by the query's id. Each micro-batch is published once, also if
    processes are killed."""

    def __init__(self, settings: Settings, schema: Any) -> None:
        self._settings = settings
        self._owner = _checked(settings)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage or publish the rows of one attempt of a task. Called in the task. The query and the
        micro-batch are known only from the task's properties."""
        task = TaskContext.get()
        query = task.getLocalProperty("sql.streaming.queryId") if task else None
        epoch = task.getLocalProperty("streaming.sql.batchId") if task else None
        if query is None or epoch is None:
            raise RuntimeError("a streaming write to shmq runs in a task of a streaming query")
        key = self._settings.txnAppId or query
        return _write(iterator, self._settings, key, int(epoch), self._owner)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Publish a micro-batch. Called in the driver, and again after a restart if Spark does not
        know whether it was done."""
        _commit(messages, self._settings, batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Forget a micro-batch. Called in the driver when it failed. The next commit removes the
        files of attempts that died."""
        outlet = _outlet(self._settings)
        outlet.drop((message.staged for message in messages if message), self._settings)


def publish(
    df: Any,
    topic: str,
    instance: str | None = None,
    *,
    txnAppId: str,
    txnVersion: int,
    **options: Any,
) -> None:
    """Publish a DataFrame's column `body`, once for each txnAppId and txnVersion: for foreachBatch.

        query.writeStream.foreachBatch(
            lambda df, epoch: shmq.spark.publish(df, "out", txnAppId="report", txnVersion=epoch))

    txnVersion must rise with every write. The last one may be written again, after a death, and is
    skipped then. One below it is an error, because its rows would be lost: a query with a new
    checkpoint needs a new txnAppId, and two writes of one micro-batch need two.

    instance: None means SHMQ_INSTANCE or `default`. options: those of `format("shmq")`.
    """
    chosen = {"topic": topic, "txnAppId": txnAppId, "txnVersion": txnVersion, **options}
    if instance is not None:
        chosen["instance"] = instance
    writer = df.write.format("shmq").mode("append")
    for name, value in chosen.items():
        writer = writer.option(name, value)
    writer.save()
