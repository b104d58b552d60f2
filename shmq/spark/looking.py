"""A look at a channel (option `peek`): a batch read that takes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from shmq.peek import Peeked
from shmq.spark.options import Settings
from shmq.spark.reading import attached, schema_of
from shmq.spark.workers import exempt_modules

#: Rows of the first record batch: enough for `show()`, and soon there.
_FIRST: Final = 1000
_ROWS: Final = 16_384


@dataclass(frozen=True)
class Look(InputPartition):
    """The whole of a look."""

    instance: str
    owner: str | None
    topic: str
    channel: str
    most: int
    columns: tuple[str, ...]


class PeekReader(DataSourceReader):
    """The messages that wait in a channel and are in memory, in the order of delivery, up to
    maxMessagesPerTrigger. Consumers go on meanwhile, so each use of the DataFrame may have other
    rows, and a message that is taken at that moment is left out."""

    def __init__(self, settings: Settings) -> None:
        if settings.many:
            raise ValueError(
                'option peek of shmq looks at one instance: .option("instance", NAME), or '
                "`shmq tail` on each host"
            )
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        """One, which has all rows. Raises Gone if there is no such channel."""
        exempt_modules()
        settings = self._settings
        attached(settings.instance, settings.owner).channel_identity(
            settings.topic, settings.channel
        )
        return [
            Look(
                settings.instance,
                settings.owner,
                settings.topic,
                settings.channel,
                settings.maxMessagesPerTrigger,
                settings.columns,
            )
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Called in a task."""
        assert isinstance(partition, Look)
        seen: set[str] = set()
        for most in (min(_FIRST, partition.most), partition.most):
            broker = attached(partition.instance, partition.owner)
            found = broker.peek(partition.topic, partition.channel, n=most)
            new = [message for message in found if message.id not in seen]
            new = new[: partition.most - len(seen)]
            seen.update(message.id for message in new)
            for start in range(0, len(new), _ROWS):
                yield _rows(new[start : start + _ROWS], partition)
            if len(found) < most or len(seen) >= partition.most:
                return


def _rows(messages: list[Peeked], look: Look) -> pa.RecordBatch:
    schema = schema_of(look.columns)
    columns = [
        pa.array(_values(name, messages, look), schema.field(name).type) for name in look.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(name: str, messages: Iterable[Peeked], look: Look) -> list[Any]:
    if name in ("topic", "channel"):
        return [getattr(look, name) for _ in messages]
    if name == "id":  # as the number of a lease's rows, which is signed
        return [int.from_bytes(bytes.fromhex(each.id), "big", signed=True) for each in messages]
    if name == "timestamp":
        return [each.timestamp // 1000 for each in messages]
    if name == "properties":
        return [list(each.properties.items()) for each in messages]
    return [getattr(each, name) for each in messages]
