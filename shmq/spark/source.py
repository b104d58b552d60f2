"""The data source of `format("shmq")`."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from shmq.spark.options import Settings, table
from shmq.spark.versions import STREAM, NoPySpark, need
from shmq.spark.workers import exempt_modules

_TYPES: Final[dict[str, DataType]] = {
    "id": LongType(),
    "timestamp": TimestampType(),
    "attempts": IntegerType(),
    "body": BinaryType(),
    "topic": StringType(),
    "channel": StringType(),
    "properties": MapType(StringType(), BinaryType()),
}


class ShmqDataSource(DataSource):
    """Channels of a shmq broker on this host, or of those on many hosts, as DataFrames, and
    DataFrames into their topics.

    A stream of the messages of topic `clicks`, each exactly once. With the checkpoint and
    `consumer` it continues where it was, whichever process was killed:

        (spark.readStream.format("shmq")
            .option("instance", "jobs").option("topic", "clicks").option("channel", "report")
            .option("consumer", "report").load()
            .selectExpr("cast(body as string) as body")
            .writeStream.format("shmq")
            .option("instance", "jobs").option("topic", "out").option("checkpointLocation", path)
            .start())

    The messages that a channel holds now, as a batch, which is finished when it is processed:

        df = (spark.read.format("shmq").option("instance", "jobs").option("topic", "clicks")
            .option("channel", "report").load())
        df.write.parquet(path)
        shmq.spark.finish_lease(df)

    With .option("instances", "a:4150,b:4150") in place of `instance` both read the channels of many
    hosts, over TCP.

    Rows have id bigint (`format(id, '016x')` is Message.id), timestamp (of the publish), attempts
    int and body binary. The option `columns` chooses other columns, also topic, channel and
    properties map<string, binary>.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._settings = Settings(dict(options))
        exempt_modules()

    @classmethod
    def name(cls) -> str:
        """The name that `format(...)` takes."""
        return "shmq"

    def schema(self) -> StructType:
        """The schema of the rows that are read. The metadata of a column say which read it is of,
        for `shmq.spark.finish_lease`."""
        from shmq.spark.reading import MARK, names_of

        metadata = {} if self._settings.peek else {MARK: names_of(self._settings)}
        return StructType(
            [StructField(name, _TYPES[name], True, metadata) for name in self._settings.columns]
        )

    def reader(self, schema: Any) -> Any:
        """The reader of a batch query. Raises ValueError for a schema that is not `schema()`."""
        if (other := self._other(schema)) is not None:
            raise other
        if self._settings.peek:
            from shmq.spark.looking import PeekReader

            return PeekReader(self._settings)
        if self._settings.many:
            from shmq.spark.many import ManyReader

            return ManyReader(self._settings)
        from shmq.spark.reading import ShmqReader

        return ShmqReader(self._settings)

    def _other(self, schema: Any) -> ValueError | None:
        """The error for a schema that the user gave. Its columns do not say which read they are of,
        so what is read could not be finished; and if it is not that of the rows, that is found
        when they are leased."""
        mine = self.schema()
        if schema is None or schema == mine:
            return None
        return ValueError(
            f'the rows of format("shmq") have the schema {mine.simpleString()}: leave out '
            '.schema(...), choose columns with .option("columns", "id,body"), and cast them in '
            "the query"
        )

    def streamReader(self, schema: Any) -> Any:
        """The reader of a streaming query. With PySpark below 4.3 its first call raises
        NoPySpark."""
        try:
            need(STREAM, "a streaming read with shmq")
        except NoPySpark as exc:
            return _Refusal(NoPySpark(str(exc)))
        if (other := self._other(schema)) is not None:
            return _Refusal(other)
        if self._settings.peek:
            return _Refusal(ValueError("option peek of shmq is for batch reads: spark.read"))
        if self._settings.many:
            from shmq.spark.many_stream import ManyStreamReader

            return ManyStreamReader(self._settings)
        from shmq.spark.stream import ShmqStreamReader

        return ShmqStreamReader(self._settings)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        """The writer of a batch query. Raises ValueError for the mode `overwrite`."""
        from shmq.spark.sink import ShmqWriter

        if overwrite:
            raise ValueError('a topic cannot be overwritten: use .mode("append")')
        return ShmqWriter(self._settings, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        """The writer of a streaming query. Raises NoPySpark with PySpark below 4.3."""
        need(STREAM, "a streaming write with shmq")
        from shmq.spark.sink import ShmqStreamWriter

        return ShmqStreamWriter(self._settings, schema)


class _Refusal(DataSourceStreamReader):
    """A reader that says what is missing when the stream begins. An older Spark hides the text of
    an error that is raised before."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def initialOffset(self) -> Any:
        """Raises the error."""
        raise self._error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    latestOffset = partitions = read = commit = _refuse


if ShmqDataSource.__doc__:
    ShmqDataSource.__doc__ += f"\n    Options:\n\n{table()}\n"
