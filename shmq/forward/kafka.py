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

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.forward.kafka_client import Kafkas, TopicNames
from shmq.forward.marker import Marker
from shmq.forward.target import Away, Source

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
#: The default topic of the markers.
MARKERS: Final = "shmq-markers"


class Kafka:
    """A topic of Kafka."""

    most = _MOST
    most_bytes = _MOST_BYTES
    exact = True

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
        self._undelivered: Any = None
        """The error of a message that the broker refused."""

    def __str__(self) -> str:
        return f"{self._kafkas}/{self._topic}"

    # ---- connecting ----

    def open(self) -> Marker | None:
        """Connect, check the topics, end what an earlier forwarder began, read the last marker."""
        self.close()
        self._check()
        self._producer = self._kafkas.producer(
            {
                "transactional.id": f"shmq/{self._source}",
                "transaction.timeout.ms": _TRANSACTION * 1000,
                "delivery.report.only.error": True,
            }
        )
        with self._kafkas.calling(f"begin to forward to {self}", self._producer):
            self._producer.init_transactions(self._kafkas.timeout)
        return self._read_marker()

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
            if self._partition >= found[self._topic] > 0:
                raise ShmqError(f"forward to {self}: it has no partition {self._partition}")
            self._kafkas.met()

    def _config_of(self, name: str) -> dict[str, str]:
        """The settings that a new topic needs. Small segments: only closed ones are compacted."""
        if name != self._marker:
            return {}
        return {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}

    # ---- the marker ----

    def _read_marker(self) -> Marker | None:
        with self._kafkas.admin(f"look for the end of {self._marker}") as admin:
            end = admin.end(self._marker, _PARTITION, committed=False)
            until = time.monotonic() + self._kafkas.timeout + _TRANSACTION
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

    def send(self, bodies: Sequence[bytes], marker: Marker) -> None:
        """Begin a transaction with the bodies and the marker. Raises MessageTooBig."""
        self._undelivered = None
        with self._kafkas.calling(f"forward to {self}", self._producer):
            self._producer.begin_transaction()
            rows = [{"value": body} for body in bodies]
            taken = self._producer.produce_batch(
                self._topic, rows, partition=self._partition, on_delivery=self._delivered
            )
            if taken < len(rows):
                error = next(row["_error"] for row in rows if "_error" in row)
                raise self._kafkas.error(f"forward to {self}", error)
            self._producer.produce(
                self._marker,
                value=marker.encoded(),
                key=str(self._source).encode(),
                partition=_PARTITION,
                on_delivery=self._delivered,
            )
            self._producer.poll(0)

    def _delivered(self, error: Any, record: Any) -> None:
        if error is not None:
            self._undelivered = error

    def confirm(self) -> None:
        """Commit. Whether a commit without an answer was made is seen by the next `open`."""
        with self._kafkas.calling(f"forward to {self}", self._producer):
            try:
                self._producer.commit_transaction(self._kafkas.timeout)
            except self._kafkas.Error:
                if self._undelivered is not None:
                    raise self._kafkas.error(f"forward to {self}", self._undelivered) from None
                raise

    def idle(self) -> None:
        """Have the client do what is due."""
        self._producer.poll(0)

    def close(self) -> None:
        """Close the connections, if there are any. A transaction that is open is left: the next
        `open` ends it, or Kafka after a minute."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None
