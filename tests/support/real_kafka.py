"""A real broker of Kafka as a process: one node, KRaft."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from support.external_programs import peer
from support.processes import WATCHDOG, Child, eventually
from support.real_nats import free_port

#: Seconds that a JVM may take to be a broker, on a busy machine.
_START = 10 * WATCHDOG

_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=CLIENTS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{port}
listener.security.protocol.map=CLIENTS:{security},CONTROLLER:PLAINTEXT
inter.broker.listener.name=CLIENTS
log.dirs={files}
auto.create.topics.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


class KafkaServer:
    """A broker whose files are in `path`."""

    def __init__(self, path: Path, security: str = "PLAINTEXT", more: str = "") -> None:
        path.mkdir()
        self.port, controller = free_port(), free_port()
        self._settings = path / "settings"
        text = _SETTINGS.format(
            port=self.port, controller=controller, files=path / "files", security=security
        )
        self._settings.write_text(text + more)
        self._ready = security == "PLAINTEXT"
        program = Child([peer("kafka-server"), "format", str(self._settings)])
        program.succeed(_START)
        program.close()
        self.child = self._started()

    def _started(self) -> Child:
        child = Child([peer("kafka-server"), str(self._settings)])
        try:
            eventually(lambda: self._answers() or child.process.poll() is not None, watchdog=_START)
            assert child.process.poll() is None, f"Kafka ended\n{child.errors}"
        except BaseException:
            child.close()
            raise
        return child

    def _answers(self) -> bool:
        if not self._ready:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            return False
        try:
            return bool(self.admin().list_topics(timeout=5).brokers)
        except confluent_kafka.KafkaException:
            return False

    @property
    def servers(self) -> str:
        """For a client's bootstrap.servers."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where a forwarder finds it."""
        return f"kafka://{self.servers}"

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill(signal.SIGKILL)
        self.child.close()

    def start_again(self) -> None:
        """After `kill`, with the same files and port."""
        self.child = self._started()

    def close(self) -> None:
        """Kill it if it lives."""
        self.child.close()

    # ---- topics ----

    def admin(self) -> AdminClient:
        """A client for questions."""
        return AdminClient({"bootstrap.servers": self.servers, "log_level": 0})

    def make(self, topic: str, partitions: int = 1, **config: str) -> None:
        """Make a topic. config: its settings, with underscores for dots."""
        settings = {name.replace("_", "."): value for name, value in config.items()}
        admin = self.admin()  # must live until the answer
        made = admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])
        made[topic].result(WATCHDOG)

    def last(self, topic: str) -> int:
        """How many records the partitions of a topic have had, of any kind, also open ones."""
        return sum(eventually(lambda: self._ends(topic)))

    def _ends(self, topic: str) -> list[int]:
        """Of the partitions; none while a broker that was started again does not know them."""
        try:
            with self._reader() as reader:
                found = reader.list_topics(topic, timeout=WATCHDOG).topics[topic]
                return [
                    reader.get_watermark_offsets(
                        confluent_kafka.TopicPartition(topic, number), timeout=WATCHDOG
                    )[1]
                    for number in found.partitions
                ]
        except confluent_kafka.KafkaException:
            return []

    def _reader(self, isolation: str = "read_uncommitted") -> confluent_kafka.Consumer:
        conf: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "group.id": "tests",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "log_level": 0,
        }
        return confluent_kafka.Consumer(conf)

    def bodies(self, topic: str) -> list[bytes]:
        """The committed messages of all partitions, one partition after the other."""
        return [value for _, value in self.messages(topic)]

    def messages(self, topic: str) -> list[tuple[dict[str, bytes], bytes]]:
        """As `bodies`, each with its headers."""
        found: list[tuple[dict[str, bytes], bytes]] = []
        with self._reader("read_committed") as reader:
            for number in reader.list_topics(topic, timeout=WATCHDOG).topics[topic].partitions:
                reader.assign([confluent_kafka.TopicPartition(topic, number, 0)])
                while not self._read(reader, found):
                    pass
        return found

    def _read(
        self, reader: confluent_kafka.Consumer, found: list[tuple[dict[str, bytes], bytes]]
    ) -> bool:
        """Add what comes; True at the end."""
        record = reader.poll(WATCHDOG)
        assert record is not None
        error = record.error()
        if error is not None:
            assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
            return True
        value = record.value()
        assert isinstance(value, bytes)
        headers: Any = record.headers() or []
        found.append((dict(headers), value))
        return False

    def change(self, topic: str, name: str, value: str) -> None:
        """Give a topic another setting."""
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        wish = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin = self.admin()  # must live until the answer
        (changed,) = admin.incremental_alter_configs([wish]).values()
        changed.result(WATCHDOG)

    def put(self, topic: str, headers: list[tuple[str, bytes]], body: bytes) -> None:
        """Publish a message with headers."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.servers, "log_level": 0})
        producer.produce(topic, body, headers=headers)
        assert producer.flush(WATCHDOG) == 0

    def fill(self, topic: str, bodies: Sequence[bytes | None], partition: int = -1) -> None:
        """Publish."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.servers, "log_level": 0})
        for body in bodies:
            producer.produce(topic, body, partition=partition)
            producer.poll(0)
        assert producer.flush(WATCHDOG) == 0
