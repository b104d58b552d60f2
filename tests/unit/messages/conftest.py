"""One broker for all tests of this folder, a topic for each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

import shmq
from shmq import Consumer, Producer

numbers = itertools.count()


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shmq.Broker]:
    path = tmp_path_factory.mktemp("data")
    instance = f"test-messages-{time.time_ns():x}"
    with shmq.Broker(data_path=path, instance=instance, max_req_timeout=3600) as broker:
        yield broker


@pytest.fixture
def broker(module_broker: shmq.Broker) -> shmq.Broker:
    return module_broker


@pytest.fixture
def topic(broker: shmq.Broker) -> Iterator[str]:
    """A topic of its own, deleted at the end."""
    name = f"topic-{next(numbers)}"
    broker.create_topic(name)
    yield name
    broker.delete_topic(name)


@pytest.fixture
def producer(broker: shmq.Broker, topic: str) -> Producer:
    return broker.producer(topic)


@pytest.fixture
def consumer(broker: shmq.Broker, topic: str) -> Iterator[Consumer]:
    with broker.consumer(topic, "channel", max_in_flight=5000) as consumer:
        yield consumer
