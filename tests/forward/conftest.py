"""A nats-server, a broker of Kafka, and forwarders as processes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child
from support.real_kafka import KafkaServer
from support.real_nats import NatsServer

#: Functions of a forwarder after or before which a test ends it: name -> class and method.
POINTS = {
    "before the batch is sent": ("jetstream.JetStream", "send", "before"),
    "when the batch was sent": ("jetstream.JetStream", "send", "after"),
    "when the batch was stored": ("jetstream.JetStream", "confirm", "after"),
    "when a part was sent": ("forwarder.Forwarder", "_try", "before"),
    "when a part was stored": ("forwarder.Forwarder", "_try", "after"),
    "when the letters were put": ("letters.Letters", "put", "after"),
    "when the lease was finished": ("forwarder.Forwarder", "_finish", "after"),
    "when nsqd got the batch": ("nsqd.Nsqd", "send", "after"),
    "before the transaction": ("kafka.Kafka", "send", "before"),
    "when the transaction was filled": ("kafka.Kafka", "send", "after"),
    "when the transaction was committed": ("kafka.Kafka", "confirm", "after"),
    "before the publish": ("receiver.Receiver", "_publish", "before"),
    "when it was published": ("receiver.Receiver", "_publish", "after"),
    "when JetStream was told": ("jetstream_origin.JetStreamOrigin", "done", "after"),
    "when Kafka was told": ("kafka_origin.KafkaOrigin", "done", "after"),
    "when the consumer was made": ("jetstream_origin.JetStreamOrigin", "_make", "after"),
}

#: The planted fault: markers are neither read nor compared, and marks are of one process alone.
FAULT = """
from shmq.forward.jetstream import JetStream
JetStream._read_marker = lambda self: None
JetStream._fence = lambda self: b""
from shmq.forward.kafka import Kafka
Kafka._read_marker = lambda self: None
import os, shmq.forward.receiver
shmq.forward.receiver._key = lambda lane: (os.getpid(), hash(lane) & 0xFFFFFFFF)
"""

#: As if no target knew its limits before it refuses, as over TLS, or with compression.
BLIND = """
import importlib
for module, kind in (("jetstream", "JetStream"), ("kafka", "Kafka"), ("nsqd", "Nsqd")):
    target = getattr(importlib.import_module("shmq.forward." + module), kind)
    target.too_big = lambda self, bodies, properties: {}
"""

_DEATH = """
import importlib, os
kind = getattr(importlib.import_module("shmq.forward.{module}"), "{kind}")
real, calls = kind.{method}, []
def dying(*args):
    calls.append(1)
    if len(calls) == {count} and "{when}" == "before":
        os.kill(os.getpid(), {number})
    answer = real(*args)
    if len(calls) == {count} and "{when}" == "after":
        os.kill(os.getpid(), {number})
    return answer
kind.{method} = dying
"""

#: Of Kafka's topics, so that no test needs a broker of its own.
_topics = itertools.count()

Forward = Callable[..., Child]


@pytest.fixture
def nats(tmp_path: Path, keep: Callable[[Any], Any]) -> NatsServer:
    """A nats-server with an empty stream S of the subjects `s` and `shmq.S.>`."""
    server: NatsServer = keep(NatsServer(tmp_path / "nats"))
    assert "error" not in server.make("S", "s", "shmq.S.>")
    return server


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A broker of Kafka for all tests of this process."""
    server = KafkaServer(tmp_path_factory.mktemp("kafka") / "broker")
    yield server
    server.close()


@pytest.fixture
def out(kafka: KafkaServer) -> str:
    """A new topic of one partition; OUT-markers has its markers."""
    name = f"out-{next(_topics)}"
    kafka.make(name)
    kafka.make(f"{name}-markers", cleanup_policy="compact")
    return name


def _started(
    words: list[str],
    die: str = "",
    count: int = 3,
    fault: bool = False,
    blind: bool = False,
    number: int = 9,
) -> Child:
    """`shmq forward` with these words. die: a name of POINTS; it kills itself there at the
    `count`-th time, with the signal `number`. fault: with FAULT; blind: with BLIND."""
    code = "import sys, shmq\n"
    if blind:
        code += BLIND
    if fault:
        code += FAULT
    if die:
        name, method, when = POINTS[die]
        module, kind = name.split(".")
        code += _DEATH.format(
            module=module, kind=kind, method=method, when=when, count=count, number=number
        )
    code += "from shmq.__main__ import main\nsys.exit(main())\n"
    return Child([sys.executable, "-c", code, "forward", *words, "--json"])


@pytest.fixture
def forward(instance: str, keep: Callable[[Any], Any]) -> Forward:
    """`forward(target, *words)`: a `shmq forward t c` of `instance`, see `_started`."""

    def start(target: str, *words: str, **how: Any) -> Child:
        return keep(_started(["t", "c", target, f"--instance={instance}", *words], **how))

    return start


@pytest.fixture
def back(instance: str, keep: Callable[[Any], Any]) -> Forward:
    """`back(source, *words)`: a `shmq forward t --from=...` of `instance`, see `_started`."""

    def start(source: str, *words: str, **how: Any) -> Child:
        return keep(_started(["t", f"--from={source}", f"--instance={instance}", *words], **how))

    return start
