"""The fixtures of Taskiq's tests. Its broker in memory is replaced before a test imports it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import taskiq
import taskiq.brokers.inmemory_broker
from taskiq.abc.broker import AsyncBroker

from . import utils

taskiq.InMemoryBroker = utils.InMemoryBroker  # type: ignore[misc,assignment]
taskiq.brokers.inmemory_broker.InMemoryBroker = (  # type: ignore[misc]
    utils.InMemoryBroker  # type: ignore[assignment]
)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _instance() -> Iterator[None]:
    yield
    utils.instance.close()


@pytest.fixture(autouse=True)
def reset_broker() -> Iterator[None]:
    yield
    AsyncBroker.global_task_registry = {}
    AsyncBroker.is_worker_process = False
    AsyncBroker.is_scheduler_process = False


@pytest.fixture
def mock_sleep() -> Iterator[None]:
    import asyncio

    sleep = asyncio.sleep
    with patch("asyncio.sleep", lambda delay: sleep(delay / 10000)):
        yield
