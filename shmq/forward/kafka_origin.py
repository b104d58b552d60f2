"""A topic of Kafka as the origin, with the offsets of a consumer group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.forward.headers import NoProperties, packed, read
from shmq.forward.kafka_client import Admin, Kafkas, TopicNames
from shmq.forward.origin import Portion, Reached, Sink
from shmq.forward.target import Away

#: An instance remembers 256 marks, and others need some.
_MOST_PARTITIONS: Final = 128


class KafkaOrigin:
    """All partitions of a topic, for one group.

    They are assigned by hand, not by the group's coordinator: a partition that went to the
    forwarder of another broker would take its mark with it to where nobody has it.
    """

    def __init__(
        self,
        servers: str,
        settings: Mapping[str, str],
        topic: str,
        group: str,
        sink: Sink,
        with_headers: bool = True,
    ) -> None:
        """Raises ValueError, and ShmqError if librdkafka is missing."""
        self._kafkas = Kafkas(servers, settings)
        if not TopicNames.fullmatch(topic):
            raise ValueError(f"{topic!r} is no name of a topic of Kafka")
        if not group:
            raise ValueError("a group needs a name")
        self._topic, self._group, self._sink = topic, group, sink
        self._with_headers = with_headers
        self._consumer: Any = None
        self._asker: Admin | None = None
        self._lanes: dict[int, str] = {}
        self._ended: set[int] = set()
        """Partitions whose end was reached."""

    def __str__(self) -> str:
        return f"{self._kafkas}/{self._topic}"

    def open(self, reached: Reached) -> None:
        """Connect, and begin each partition behind what is committed and what was published."""
        self.close()
        with self._kafkas.admin(f"look at {self}") as admin:
            found = admin.topics([self._topic])[self._topic]
            if found is None:
                raise self._kafkas.missing(f"forward from {self}: there is no topic {self._topic}")
            self._kafkas.met()
            count = len(found.partitions)
            if count > _MOST_PARTITIONS:
                raise ShmqError(
                    f"forward from {self}: it has {count} partitions, and the marks of at most "
                    f"{_MOST_PARTITIONS} are kept"
                )
            spans = {
                number: (
                    admin.begin(self._topic, number),
                    admin.end(self._topic, number, committed=False),
                )
                for number in range(count)
            }
        # The topic's id changes when it is deleted and created again, which no name shows.
        self._lanes = {
            number: f"kafka/{found.topic_id}/{self._topic}/{number}/{self._group}"
            for number in spans
        }
        self._consumer = self._kafkas.consumer(
            {
                "group.id": self._group,
                "auto.offset.reset": "error",
                "enable.auto.offset.store": False,
            }
        )
        with self._kafkas.calling(f"forward from {self}"):
            wanted = [self._kafkas.place(self._topic, number) for number in spans]
            committed = self._consumer.committed(wanted, self._kafkas.timeout)
            self._consumer.assign([self._start(place, reached, spans) for place in committed])
        self._asker = self._kafkas.asker()
        self._ended = set()

    def _start(self, place: Any, reached: Reached, spans: Mapping[int, tuple[int, int]]) -> Any:
        if place.error is not None:
            raise Away(f"{self}: {place.error}")
        if place.metadata and place.metadata != str(self._sink):
            raise ShmqError(
                f"forward from {self}: the group {self._group} belongs to {place.metadata}, not to "
                f"{self._sink}; give another ?group=NAME, or --host as it was"
            )
        first, end = spans[place.partition]
        published = reached(self._lanes[place.partition])
        if max(published, place.offset) > end:
            raise ShmqError(
                f"forward from {self}: partition {place.partition} has {end} records, and "
                f"{max(published, place.offset)} were read: Kafka has lost some; look at what is "
                "missing, and go on with another ?group=NAME"
            )
        offset = max(published, place.offset, first)
        return self._kafkas.place(self._topic, place.partition, offset)

    def take(self, most: int, timeout: float) -> Sequence[Portion]:
        """The next records, a portion for each partition."""
        with self._kafkas.calling(f"forward from {self}"):
            first = self._consumer.poll(timeout)
            # `consume` alone would wait until it has as many as are asked for
            records = [] if first is None else [first, *self._consumer.consume(max(1, most - 1), 0)]
        rows: dict[int, list[Any]] = defaultdict(list)
        for record in records:
            error, partition = record.error(), record.partition()
            if error is None:
                rows[partition].append(record)
                self._ended.discard(partition)
            elif error.code() == error._PARTITION_EOF:
                self._ended.add(partition)
            else:
                raise self._kafkas.error(f"forward from {self}", error)
        return [
            Portion(
                self._lanes[partition],
                [record.offset() + 1 for record in found],
                [record.value() or b"" for record in found],
                self._properties(found),
            )
            for partition, found in rows.items()
        ]

    def _properties(self, records: list[Any]) -> list[bytes | NoProperties] | None:
        if not self._with_headers:
            return None
        return read(packed, [record.headers() or () for record in records])

    def named(self, lane: str, number: int) -> str:
        """By its offset."""
        numbers = {lane: number for number, lane in self._lanes.items()}
        return f"at offset {number - 1} of partition {numbers[lane]} of {self._topic}"

    def done(self, portions: Sequence[Portion]) -> None:
        """Commit the offsets. The metadata says which topic of shmq they are for."""
        numbers = {lane: number for number, lane in self._lanes.items()}
        places = [
            self._kafkas.place(
                self._topic, numbers[portion.lane], portion.numbers[-1], str(self._sink)
            )
            for portion in portions
        ]
        assert self._asker is not None
        with self._kafkas.calling(f"forward from {self}", self._asker.client):
            self._asker.commit(self._group, places)

    def drained(self) -> bool:
        """Whether the end of every partition was reached."""
        return self._ended == self._lanes.keys()

    def idle(self) -> None:
        """Nothing: the client has threads of its own."""

    def close(self) -> None:
        """Close the connections, if there are any."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = self._asker = None
