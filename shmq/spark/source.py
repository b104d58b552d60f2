"""`format("shmq")`."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader

from shmq.spark.options import COLUMNS, Settings, table
from shmq.spark.versions import STREAM, NoPySpark, need


class ShmqDataSource(DataSource):
    """Channels of a shmq broker on this host as DataFrames, and DataFrames into its topics.

    A stream of the messages of topic `clicks`, each exactly once; the checkpoint and `consumer`
    make it go on where it was, whatever was killed:

        (spark.readStream.format("shmq")
            .option("instance", "jobs").option("topic", "clicks").option("channel", "report")
            .option("consumer", "report").load()
            .selectExpr("cast(body as string) as body")
            .writeStream.format("shmq")
            .option("instance", "jobs").option("topic", "out").option("checkpointLocation", path)
            .start())

    What a channel holds now, as a batch, and that it is processed:

        df = (spark.read.format("shmq").option("instance", "jobs").option("topic", "clicks")
            .option("channel", "report").option("consumer", "once").load())
        df.write.parquet(path)
        shmq.spark.finish("jobs", "clicks", "report", "once")

    Rows: id bigint (`format(id, '016x')` is Message.id), timestamp (of the publish), attempts int,
    body binary; option `columns` chooses, also topic and channel.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._settings = Settings(dict(options))

    @classmethod
    def name(cls) -> str:
        """As in format(...)."""
        return "shmq"

    def schema(self) -> str:
        """Of what is read."""
        return ", ".join(f"{name} {COLUMNS[name]}" for name in self._settings.columns)

    def reader(self, schema: Any) -> Any:
        """Batch read."""
        from shmq.spark.reading import ShmqReader

        return ShmqReader(self._settings)

    def streamReader(self, schema: Any) -> Any:
        """Streaming read. Below 4.3 its first call raises NoPySpark."""
        try:
            need(STREAM, "a streaming read with shmq")
        except NoPySpark as exc:
            return _Refusal(str(exc))
        from shmq.spark.stream import ShmqStreamReader

        return ShmqStreamReader(self._settings)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        """Batch write."""
        from shmq.spark.sink import ShmqWriter

        if overwrite:
            raise ValueError('a topic cannot be overwritten: use .mode("append")')
        return ShmqWriter(self._settings, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        """Streaming write. NoPySpark below 4.3."""
        need(STREAM, "a streaming write with shmq")
        from shmq.spark.sink import ShmqStreamWriter

        return ShmqStreamWriter(self._settings, schema)


class _Refusal(DataSourceStreamReader):
    """Says what is missing when the stream begins. What an older Spark makes of an error before
    that does not say it."""

    def __init__(self, why: str) -> None:
        self._why = why

    def initialOffset(self) -> Any:
        """NoPySpark."""
        raise NoPySpark(self._why)

    def _refuse(self, *_: Any) -> Any:
        raise NoPySpark(self._why)

    latestOffset = partitions = read = commit = _refuse


if ShmqDataSource.__doc__:
    ShmqDataSource.__doc__ += f"\n    Options:\n\n{table()}\n"
