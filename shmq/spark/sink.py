"""Writing a DataFrame to a topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from shmq.spark import staging
from shmq.spark.options import Settings
from shmq.spark.reading import attached
from shmq.spark.staging import Staged

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # 4.0: `ShmqDataSource.streamWriter` says what it needs
    DataSourceStreamArrowWriter = object


@dataclass
class Written(WriterCommitMessage):
    """What a task says to the driver: under which key, and what it staged; None: nothing to
    commit."""

    key: str
    staged: Staged | None
    rows: int


def _publish_now(batches: Iterable[pa.RecordBatch], settings: Settings) -> int:
    """publish=immediate."""
    producer, rows = attached(settings.instance, settings.owner).producer(settings.topic), 0
    limits = attached(settings.instance, settings.owner).limits
    most = max(1, max(limits["mem_queue_size"], 256) // 4)
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
    if settings.publish == "immediate":
        return Written(key, None, _publish_now(batches, settings))
    staged = staging.stage(batches, settings, key, epoch, owner)
    return Written(key, staged, staged.rows if staged else 0)


def _commit(messages: Sequence[Any], settings: Settings, epoch: int) -> None:
    found = [message for message in messages if message is not None]
    if settings.publish == "immediate" or not found:
        return
    staged = [message.staged for message in found if message.staged is not None]
    staging.commit(staged, settings, found[0].key, epoch)


class ShmqWriter(DataSourceArrowWriter):
    """A batch write: published when all of it succeeded; with writer_id and epoch, once."""

    def __init__(self, settings: Settings, schema: Any) -> None:
        if (settings.writer_id is None) != (settings.epoch is None):
            raise ValueError("a write that may be repeated needs both options, writer_id and epoch")
        self._settings = settings
        self._key = settings.writer_id or f"write-{settings.token}"
        self._epoch = settings.epoch or 0
        self._owner = staging.application()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """One attempt of a task."""
        return _write(iterator, self._settings, self._key, self._epoch, self._owner)

    def commit(self, messages: Sequence[Any]) -> None:
        """In the driver: all tasks succeeded."""
        _commit(messages, self._settings, self._epoch)

    def abort(self, messages: Sequence[Any]) -> None:
        """In the driver: the write failed. Spark does not name the attempts that succeeded."""
        staging.abandon(self._settings, self._key, self._epoch)


class ShmqStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write: each micro-batch once, whatever is killed, keyed by the query's id."""

    def __init__(self, settings: Settings, schema: Any) -> None:
        self._settings = settings
        self._owner = staging.application()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """One attempt of a task. Spark does not say here which query and micro-batch it is for; the
        task's properties do."""
        task = TaskContext.get()
        query = task.getLocalProperty("sql.streaming.queryId") if task else None
        epoch = task.getLocalProperty("streaming.sql.batchId") if task else None
        if query is None or epoch is None:
            raise RuntimeError("a streaming write to shmq runs in a task of a streaming query")
        key = self._settings.writer_id or query
        return _write(iterator, self._settings, key, int(epoch), self._owner)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """In the driver; again after a restart if it is not certain that it was done."""
        _commit(messages, self._settings, batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """In the driver: the micro-batch failed. What died attempts left goes with the next
        commit."""
        staging.drop((message.staged for message in messages if message), self._settings)


def publish(
    df: Any, topic: str, instance: str | None = None, *, writer_id: str, epoch: int, **options: Any
) -> None:
    """Publish a DataFrame's column `body` once for each writer_id and epoch: for foreachBatch.

        query.writeStream.foreachBatch(
            lambda df, epoch: shmq.spark.publish(df, "out", writer_id="report", epoch=epoch))

    Epochs rise; a lower one than the last is taken for written. options: as of format("shmq").
    """
    chosen = {"topic": topic, "writer_id": writer_id, "epoch": epoch, **options}
    if instance is not None:
        chosen["instance"] = instance
    writer = df.write.format("shmq").mode("append")
    for name, value in chosen.items():
        writer = writer.option(name, value)
    writer.save()
