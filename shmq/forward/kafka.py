"""Kafka as a target: every message once.

The messages of a lease and the marker are one transaction, so readers with
`isolation.level=read_committed` see all of it or nothing. The marker is a record of a compacted
topic. Its key is the source. A committed offset with metadata could not be the marker: the ids of a
lease do not fit in its 4096 bytes, and the broker forgets it seven days after its group was last
used. A compacted topic keeps the last record of each key for ever.

`open` begins with `init_transactions`. It fences the producer of an earlier forwarder, commits what
that had decided to commit and aborts the rest; it returns when this is in the logs. Only then the
marker is read, up to what was the end of the log afterwards. Transactions of other sources that are
still open hide what comes after them, so `open` waits for them. A death at any instant leaves a
transaction whole or none, and the next forwarder knows which.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.forward.headers import sent
from shmq.forward.kafka_client import Kafkas, TopicNames, is_too_big
from shmq.forward.marker import Marker
from shmq.forward.refusal import Refused
from shmq.forward.target import Away, Source
from shmq.peers.sockets import seconds_for

#: The marker has eight bytes for each message, and a record has a megabyte at most by default.
_MOST: Final = 4999
_MOST_BYTES: Final = 8 << 20
#: Seconds after which Kafka aborts the transaction of a forwarder that is gone.
_TRANSACTION: Final = 60
#: Records that are read from the end of the markers at first.
_BACK: Final = 64
#: Seconds between two looks whether other sources' transactions have ended.
_LOOK: Final = 0.1
#: One partition has all markers: their number would decide where a key is.
_PARTITION: Final = 0
#: Bytes of the head of a batch of records.
_BATCH: Final = 61
#: More than a batch with one record has besides its value, if it has no headers.
_OVERHEAD: Final = 128
#: The most bytes of a batch with a marker but for its ids and the names of its source.
_MARKER: Final = 512
#: The default topic of the markers.
MARKERS: Final = "shmq-markers"


def _varint(value: int) -> int:
    """Bytes of a number in Kafka's records."""
    return max(1, ((2 * value).bit_length() + 6) // 7)


def record_size(body: bytes, headers: Sequence[tuple[str, bytes]]) -> int:
    """Bytes of a batch with one record, not compressed."""
    size = 4 + _varint(len(body)) + len(body) + _varint(len(headers))
    for name, value in headers:
        size += _varint(len(name)) + len(name) + _varint(len(value)) + len(value)
    return _BATCH + _varint(size) + size


class Kafka:
    """A topic of Kafka."""

    most = _MOST
    most_bytes = _MOST_BYTES
    exact = True
    has_headers = True

    def __init__(
        self,
        servers: str,
        settings: Mapping[str, str],
        topic: str,
        source: Source,
        wishes: Mapping[str, str],
        create: bool = False,
    ) -> None:
        """servers: `host:port` with commas between. settings: librdkafka's. wishes: `marker`, its
        topic, and `partition` of the messages (default: any). Raises ValueError, MissingExtra."""
        self._kafkas = Kafkas(servers, settings)
        self._topic, self._source, self._create = topic, source, create
        self._marker = wishes.get("marker", MARKERS)
        for name in (self._topic, self._marker):
            if not TopicNames.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a topic of Kafka")
        if self._topic == self._marker:
            raise ValueError("the markers need a topic of their own")
        self._partition = -1
        if "partition" in wishes:
            if not re.fullmatch("[0-9]{1,9}", wishes["partition"]):
                raise ValueError(f"partition={wishes['partition']} is no number of a partition")
            self._partition = int(wishes["partition"])
        self._producer: Any = None
        self._errors: list[Any] = []
        """The errors of the messages of the last batch."""
        self._known: Marker | None = None
        """The last marker that is stored."""
        self._sent: Marker | None = None
        self._seconds: float = 0
        """Within which the batch that was sent is stored."""
        self._is_clean = False
        """Whether the transaction of a batch that was refused was aborted."""
        self._most_message = self._most_marker = 10**6
        self._limit: int | None = None
        """The most bytes of a batch of records; None: it is not known."""

    def __str__(self) -> str:
        return f"{self._kafkas}/{self._topic}"

    # ---- connecting ----

    def open(self) -> Marker | None:
        """Connect, check the topics, end what an earlier forwarder began, read the last marker.
        After a refusal the transaction was aborted, so the producer is as good as new, unless the
        topics take something else now; if it was fenced meanwhile, its next call says so."""
        if self._is_clean:
            self._is_clean, before = False, self._sizes()
            self._check()
            if self._sizes() == before:
                return self._known
        self.close()
        self._check()
        self._producer = self._kafkas.producer(
            {
                "transactional.id": f"shmq/{self._source}",
                "transaction.timeout.ms": _TRANSACTION * 1000,
                "delivery.report.only.error": True,
                **self._sizes(),
            }
        )
        with self._kafkas.calling(f"begin to forward to {self}", self._producer):
            self._producer.init_transactions(self._kafkas.timeout)
        self._known = self._read_marker()
        return self._known

    def _check(self) -> None:
        """Raise ShmqError if a topic is missing or does not keep the marker."""
        with self._kafkas.admin(f"look at the topics of {self}") as admin:
            found = admin.partitions([self._topic, self._marker])
            if self._create:
                missing = {name: self._config_of(name) for name in found if not found[name]}
                admin.create(missing)
                found |= dict.fromkeys(missing, -1)
            for name, count in found.items():
                if not count:
                    how = "with cleanup.policy=compact and 1 partition, " * (name == self._marker)
                    raise self._kafkas.missing(
                        f"forward to {self}: there is no topic {name}; make it, {how}or give "
                        "--create"
                    )
            policy = admin.config(self._marker, "cleanup.policy")
            if policy != "compact":
                raise ShmqError(
                    f"forward to {self}: cleanup.policy of {self._marker} is {policy}, which "
                    "removes markers; make it compact, or name another topic with ?marker="
                )
            self._learn(admin)
            if self._partition >= found[self._topic] > 0:
                raise ShmqError(f"forward to {self}: it has no partition {self._partition}")
            self._kafkas.met()

    def _learn(self, admin: Any) -> None:
        """Learn how large a batch of records may be in both topics. One that is compressed may be
        smaller than it looks, so then only the broker knows."""
        most, markers = (
            int(admin.config(name, "max.message.bytes")) for name in (self._topic, self._marker)
        )
        self._limit = most if self._kafkas.setting("message.max.bytes") is None else None
        for name in ("compression.type", "compression.codec"):
            if self._kafkas.setting(name) not in (None, "none"):
                self._limit = None
        self._most_message, self._most_marker = most, markers
        room = markers - _MARKER - 3 * len(str(self._source))
        self.most = min(_MOST, room // 16)  # as many may be in doubt
        if self.most < 1:
            raise ShmqError(
                f"forward to {self}: max.message.bytes of {self._marker} is {markers}, which has "
                "no room for a marker; raise it"
            )

    def _sizes(self) -> dict[str, int]:
        """Settings of the client: a message that the topic takes is sent, and no batch of several
        is larger than the topic takes, unless they were given."""
        largest = max(self._most_message, self._most_marker)
        wanted = {
            "message.max.bytes": min(max(largest + _OVERHEAD, 1000), 10**9),
            "batch.size": max(min(self._most_message - _OVERHEAD, 10**6), 1),
        }
        return {name: n for name, n in wanted.items() if self._kafkas.setting(name) is None}

    def _config_of(self, name: str) -> dict[str, str]:
        """The settings that a new topic needs. Small segments: only closed ones are compacted."""
        if name != self._marker:
            return {}
        return {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}

    # ---- the marker ----

    def _read_marker(self) -> Marker | None:
        with self._kafkas.admin(f"look for the end of {self._marker}") as admin:
            end = admin.end(self._marker, _PARTITION, committed=False)
            until = time.monotonic() + self._kafkas.timeout
            while admin.end(self._marker, _PARTITION, committed=True) < end:
                if time.monotonic() > until:
                    raise Away(f"{self}: a transaction of another source does not end")
                self._producer.poll(0)
                time.sleep(_LOOK)
            first = admin.begin(self._marker, _PARTITION)
        with self._kafkas.reading(self._marker, _PARTITION) as reader:
            back = _BACK
            while True:
                start = max(first, end - back)
                body = self._last_of(reader.records(start, end))
                if body is not None:
                    return Marker.decoded(body, f"{self}, topic {self._marker}")
                if start <= first:
                    return None
                back *= 8

    def _last_of(self, records: Any) -> bytes | None:
        key, found = str(self._source).encode(), None
        for record in records:
            if record.key() == key:
                found = record.value()
        return found

    # ---- batches ----

    def too_big(
        self, bodies: Sequence[bytes], properties: Sequence[Mapping[str, bytes]] | None
    ) -> Mapping[int, str]:
        """The messages that are too big for a batch of their own."""
        if self._limit is None:
            return {}
        if properties is None and max(map(len, bodies)) <= self._limit - _OVERHEAD:
            return {}
        own: Sequence[Mapping[str, bytes]] = properties or [{}] * len(bodies)
        pairs = zip(bodies, own, strict=True)
        sizes = [record_size(body, list(sent(one))) for body, one in pairs]
        why = f"the topic's max.message.bytes is {self._limit}, with {_BATCH} for each batch"
        return {place: why for place, size in enumerate(sizes) if size > self._limit}

    def send(
        self,
        bodies: Sequence[bytes],
        marker: Marker,
        properties: Sequence[Mapping[str, bytes]] | None = None,
    ) -> None:
        """Begin a transaction with the bodies and the marker. Raises Refused."""
        self._errors, self._sent = [], marker
        seconds = seconds_for(sum(map(len, bodies)), self._kafkas.timeout)
        self._seconds = min(seconds, _TRANSACTION)
        with self._refusing(), self._kafkas.calling(f"forward to {self}", self._producer):
            self._producer.begin_transaction()
            if properties is None:
                self._produce(bodies)
            else:
                self._produce_with(bodies, properties)
            self._producer.produce(
                self._marker,
                value=marker.encoded(),
                key=str(self._source).encode(),
                partition=_PARTITION,
                on_delivery=self._delivered(),
            )
            self._producer.poll(0)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Abort the transaction of a batch that is refused in the block."""
        try:
            yield
        except Refused:
            # without it the next `open` does the same, with a producer of its own
            with contextlib.suppress(self._kafkas.Error):
                # librdkafka waits for its purge of what is left; with nothing left the purge comes
                # later, and would meet the next batch
                is_waited_for = len(self._producer) > 0
                self._producer.abort_transaction(self._kafkas.timeout)
                self._is_clean = is_waited_for
            raise

    def _produce(self, bodies: Sequence[bytes]) -> None:
        rows = [{"value": body} for body in bodies]
        taken = self._producer.produce_batch(
            self._topic, rows, partition=self._partition, on_delivery=self._delivered()
        )
        if taken < len(rows):
            error = next(row["_error"] for row in rows if "_error" in row)
            raise self._kafkas.error(f"forward to {self}", error)

    def _produce_with(
        self, bodies: Sequence[bytes], properties: Sequence[Mapping[str, bytes]]
    ) -> None:
        """A batch of librdkafka has no headers, so these go one by one."""
        for body, own in zip(bodies, properties, strict=True):
            self._producer.produce(
                self._topic,
                value=body,
                headers=list(sent(own)),
                partition=self._partition,
                on_delivery=self._delivered(),
            )

    def _delivered(self) -> Callable[[Any, Any], None]:
        """A callback that keeps the errors of this batch; those of one that was purged come
        later."""
        errors = self._errors

        def keep(error: Any, record: Any) -> None:
            if error is not None:
                errors.append(error)

        return keep

    def _undelivered(self) -> Any:
        """The error that tells most: others follow from that of a size. None: there is none."""
        return next(filter(is_too_big, self._errors), self._errors[0] if self._errors else None)

    def confirm(self) -> None:
        """Commit. Whether a commit without an answer was made is seen by the next `open`."""
        with self._refusing(), self._kafkas.calling(f"forward to {self}", self._producer):
            until = time.monotonic() + self._seconds
            # A commit would wait for what librdkafka holds back behind a record that was refused.
            while self._producer.flush(_LOOK) and not self._errors:
                if time.monotonic() > until:  # the topic was deleted, perhaps: `open` looks
                    raise Away(f"{self}: it did not store a batch within {self._seconds:.0f} s")
            try:
                if not self._errors:
                    self._producer.commit_transaction(self._kafkas.timeout)
            except self._kafkas.Error:
                if not self._errors:
                    raise
            if self._errors:
                raise self._kafkas.error(f"forward to {self}", self._undelivered())
        self._known = self._sent

    def idle(self) -> None:
        """Have the client do what is due."""
        self._producer.poll(0)

    def close(self) -> None:
        """Close the connections, if there are any. A transaction that is open is left: the next
        `open` ends it, or Kafka after a minute."""
        self._is_clean = False
        if self._producer is not None:
            self._producer.purge()
            self._producer = None
