"""Parts that the target and the source in Kafka share: librdkafka's clients and its errors."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.forward.refusal import Refused
from shmq.forward.target import Away
from shmq.printing import LONGEST, printable

TopicNames: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
#: Seconds within which Kafka answers. librdkafka repeats requests by itself within them.
_TIMEOUT: Final = 30.0
#: Seconds after which an answer that librdkafka itself gave up is not waited for any more.
_GRACE: Final = 5.0
#: Settings that decide whether a message arrives once.
_OURS: Final = frozenset(
    {"acks", "bootstrap.servers", "delivery.report.only.error", "enable.auto.commit"}
    | {"enable.auto.offset.store", "enable.idempotence", "enable.partition.eof", "group.id"}
    | {"group.instance.id", "group.protocol", "isolation.level", "request.required.acks"}
    | {"transaction.timeout.ms", "transactional.id"}
)
#: Errors that the same call gets again.
_LASTING: Final = frozenset(
    {"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "_SSL"}
    | {"CLUSTER_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"}
    | {"TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "UNSUPPORTED_VERSION", "INVALID_CONFIG"}
    | {"POLICY_VIOLATION", "INVALID_REPLICATION_FACTOR", "INVALID_TRANSACTION_TIMEOUT"}
    | {"INVALID_RECORD", "UNKNOWN_MEMBER_ID", "OFFSET_METADATA_TOO_LARGE"}
)
#: Alerts of TLS with which a broker refuses a client, among the errors of a broken connection.
_ALERT: Final = re.compile(
    r"alert (?:bad certificate|certificate \w+|unknown ca|handshake failure|protocol version)"
)
_TOO_BIG: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")

#: librdkafka's own lines say nothing that its errors do not, and it writes them to stderr.
_LOGGER: Final = logging.getLogger("shmq.forward.kafka")
_LOGGER.addHandler(logging.NullHandler())


def _library() -> Any:
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as exc:
        raise ShmqError(
            f"forward to or from Kafka: it needs the extra `kafka` (pip install 'shmq[kafka]'): "
            f"{exc}"
        ) from exc
    return confluent_kafka


def refused(tried: str, error: Any) -> ShmqError | None:
    """Our error for a KafkaError that another try gets again; None if one may help."""
    kind = type(error)
    alert = error.code() == kind._TRANSPORT and _ALERT.search(error.str())
    if alert or error.code() in [getattr(kind, name) for name in _LASTING]:
        return ShmqError(f"{tried}: Kafka refused: {error.name()}: {error.str()}")
    return None


def is_too_big(error: Any) -> bool:
    """Whether a KafkaError says that a record, or a batch of them, is too big."""
    kind = type(error)
    return error.code() in [getattr(kind, name) for name in _TOO_BIG]


class Kafkas:
    """Clients of one cluster."""

    timeout = _TIMEOUT

    def __init__(self, servers: str, settings: Mapping[str, str]) -> None:
        """settings: librdkafka's. Raises ValueError for those that decide about exactness, and
        ShmqError if librdkafka is not installed."""
        if bad := sorted(_OURS & settings.keys()):
            raise ValueError(f"the settings {', '.join(bad)} of Kafka are not free: leave them out")
        self._library = _library()
        self._servers = servers
        self._settings: dict[str, Any] = {"client.id": "shmq-forward", "log_level": 0, **settings}
        self._met = False
        self._said: Any = None
        """The error that the client told last, of those that another try gets again."""
        self.Error: type[Exception] = self._library.KafkaException

    def __str__(self) -> str:
        return f"kafka://{self._servers}"

    def setting(self, name: str) -> str | None:
        """A setting that was given."""
        return self._settings.get(name)

    def _conf(self, more: Mapping[str, Any]) -> dict[str, Any]:
        self._said = None
        mine = {"bootstrap.servers": self._servers, "error_cb": self._tell, "logger": _LOGGER}
        return {**self._settings, **mine, **more}

    def _tell(self, error: Any) -> None:
        if refused("", error):
            self._said = error

    @contextlib.contextmanager
    def calling(self, tried: str, client: Any = None) -> Iterator[None]:
        """Turn KafkaException into Away, or into ShmqError if another try cannot help. client: has
        something to say about it, perhaps."""
        try:
            yield
        except BufferError as exc:
            raise Away(f"{tried}: {exc}") from exc
        except (self.Error, TimeoutError) as exc:
            if client is not None:
                with contextlib.suppress(self.Error):  # a producer that was fenced refuses it
                    client.poll(0)
            error = self._said or (exc.args[0] if exc.args else "it does not answer")
            if hasattr(error, "code"):
                raise self.error(tried, error) from exc
            raise Away(f"{self}: {error}") from exc

    def met(self) -> None:
        """Take note that the topics are there."""
        self._met = True

    def missing(self, text: str) -> Exception:
        """The error for a topic that is not there. A broker that was started again does not know
        its topics at once, so one that was there may come back."""
        return Away(text) if self._met else ShmqError(text)

    def error(self, tried: str, error: Any) -> Exception:
        """Our error for a KafkaError: Away if another try may help, Refused for a record's size."""
        if is_too_big(error):
            return Refused(f"it refused: {error.name()}: {printable(error.str(), LONGEST)}")
        return refused(tried, error) or Away(f"{self}: {error}")

    def _made(self, kind: Any, conf: Mapping[str, Any]) -> Any:
        try:
            return kind(self._conf(conf))
        except (self.Error, TypeError, ValueError) as exc:
            raise ShmqError(f"connect to {self}: its settings are wrong: {exc}") from exc

    def producer(self, conf: Mapping[str, Any]) -> Any:
        """A Producer."""
        return self._made(self._library.Producer, conf)

    def asker(self) -> Admin:
        """A client for questions."""
        client = self._made(self._library.admin.AdminClient, {})
        return Admin(self._library, client, _TIMEOUT)

    @contextlib.contextmanager
    def admin(self, tried: str) -> Iterator[Admin]:
        """Ask about topics. The block raises as `calling`."""
        asker = self.asker()
        with self.calling(tried, asker.client):
            yield asker

    def consumer(self, conf: Mapping[str, Any]) -> Any:
        """A Consumer that sees what was committed, and the ends of partitions."""
        fixed = {"isolation.level": "read_committed", "enable.auto.commit": False}
        return self._made(self._library.Consumer, {**fixed, "enable.partition.eof": True, **conf})

    def place(self, topic: str, partition: int, offset: int = -1001, metadata: str = "") -> Any:
        """A TopicPartition. offset: -1001 for none."""
        return self._library.TopicPartition(topic, partition, offset, metadata)

    @contextlib.contextmanager
    def reading(self, topic: str, partition: int) -> Iterator[_Reader]:
        """Read a partition. The block raises as `calling`."""
        client = self.consumer({"group.id": "shmq-forward", "auto.offset.reset": "earliest"})
        try:
            with self.calling(f"read {topic} of {self}", client):
                yield _Reader(self._library, client, topic, partition)
        finally:
            client.close()


class Admin:
    """Questions about topics. Every method raises KafkaException."""

    def __init__(self, library: Any, client: Any, timeout: float) -> None:
        self._library, self.client, self._timeout = library, client, timeout

    def _answer(self, futures: Mapping[Any, Any]) -> Any:
        """Of the only one."""
        (future,) = futures.values()
        return future.result(self._timeout + _GRACE)

    def topics(self, names: Iterable[str]) -> dict[str, Any]:
        """Kafka's descriptions of the topics; None of those that are not there."""
        wanted = self._library.TopicCollection(list(names))
        asked = self.client.describe_topics(wanted, request_timeout=self._timeout)
        found: dict[str, Any] = {}
        for name, future in asked.items():
            try:
                found[name] = future.result(self._timeout + _GRACE)
            except self._library.KafkaException as exc:
                if exc.args[0].code() != self._library.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
                found[name] = None
        return found

    def partitions(self, names: Iterable[str]) -> dict[str, int]:
        """How many partitions each topic has; 0: it is not there."""
        return {
            name: 0 if found is None else len(found.partitions)
            for name, found in self.topics(names).items()
        }

    def create(self, topics: Mapping[str, dict[str, str]]) -> None:
        """Make topics with these settings: of one partition if they have any, otherwise of as many
        as Kafka's default says. Somebody else may make them at the same time."""
        if not topics:
            return
        made = [
            self._library.admin.NewTopic(name, 1 if conf else -1, -1, config=conf)
            for name, conf in topics.items()
        ]
        asked = self.client.create_topics(made, operation_timeout=self._timeout)
        for future in asked.values():
            try:
                future.result(self._timeout + _GRACE)
            except self._library.KafkaException as exc:
                if exc.args[0].code() != self._library.KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def config(self, topic: str, name: str) -> str:
        """A setting of a topic."""
        kind = self._library.admin.ConfigResource(self._library.admin.ResourceType.TOPIC, topic)
        asked = self.client.describe_configs([kind], request_timeout=self._timeout)
        return str(self._answer(asked)[name].value)

    def commit(self, group: str, places: Sequence[Any]) -> None:
        """Commit the offsets of a group without members. A consumer's own commit waits without a
        limit if its coordinator ended."""
        wanted = self._library.ConsumerGroupTopicPartitions(group, list(places))
        asked = self.client.alter_consumer_group_offsets([wanted], request_timeout=self._timeout)
        for place in self._answer(asked).topic_partitions:
            if place.error is not None:
                raise self._library.KafkaException(place.error)

    def end(self, topic: str, partition: int, committed: bool) -> int:
        """Behind the last record. committed: before the first transaction that is open."""
        levels = self._library.IsolationLevel
        level = levels.READ_COMMITTED if committed else levels.READ_UNCOMMITTED
        return self._offset(topic, partition, self._library.admin.OffsetSpec.latest(), level)

    def begin(self, topic: str, partition: int) -> int:
        """The first record that is still there."""
        level = self._library.IsolationLevel.READ_UNCOMMITTED
        return self._offset(topic, partition, self._library.admin.OffsetSpec.earliest(), level)

    def _offset(self, topic: str, partition: int, spec: Any, level: Any) -> int:
        place = self._library.TopicPartition(topic, partition)
        asked = self.client.list_offsets(
            {place: spec}, isolation_level=level, request_timeout=self._timeout
        )
        return int(self._answer(asked).offset)


class _Reader:
    """Reads ranges of one partition."""

    def __init__(self, library: Any, client: Any, topic: str, partition: int) -> None:
        self._library, self._client = library, client
        self._topic, self._partition = topic, partition

    def records(self, start: int, end: int) -> Iterator[Any]:
        """Yield the committed records from `start` until before `end`, of those that are there.
        Raises KafkaException."""
        if start >= end:
            return
        place = self._library.TopicPartition(self._topic, self._partition, start)
        self._client.assign([place])
        while True:
            record = self._client.poll(_TIMEOUT)
            if record is None:
                error = self._library.KafkaError(self._library.KafkaError._TIMED_OUT)
                raise self._library.KafkaException(error)
            error = record.error()
            if error is None:
                if record.offset() >= end:
                    return
                yield record
            elif error.code() != self._library.KafkaError._PARTITION_EOF:
                raise self._library.KafkaException(error)
            elif record.offset() >= end:
                return
