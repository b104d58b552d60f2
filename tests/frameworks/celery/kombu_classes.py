"""kombu's own test classes on shmq's transport; run by test_their_tests.py in kombu's directory."""

from __future__ import annotations

import os
from typing import Any

import kombu
import pytest
from t.integration.common import (
    BaseEventLoop,
    BaseExchangeTypes,
    BaseMessage,
    BasePriority,
    BaseTimeToLive,
    BasicFunctionality,
)

import shmq.integrations.celery.alias  # noqa: F401 makes the name known

URL = f"shmq://{os.environ['SHMQ_INSTANCE']}"


class Draining(kombu.Connection):
    """One `drain_events` of py-amqp delivers all that is there; of the virtual transports, one."""

    def drain_events(self, **options: Any) -> Any:
        super().drain_events(**options)
        try:
            while True:
                super().drain_events(timeout=0.1)
        except TimeoutError:
            pass


@pytest.fixture
def connection() -> Any:
    return kombu.Connection(URL)


@pytest.fixture
def invalid_connection() -> Any:
    return kombu.Connection("shmq://nobody-serves-this")


class TestBasicFunctionality(BasicFunctionality):
    pass


class TestExchangeTypes(BaseExchangeTypes):
    pass


class TestTimeToLive(BaseTimeToLive):
    pass


class TestPriority(BasePriority):
    PRIORITY_ORDER = "desc"  # 0 is the first, as with Redis

    @pytest.fixture
    def connection(self) -> Any:
        return Draining(URL)


class TestMessage(BaseMessage):
    pass


class TestEventLoop(BaseEventLoop):
    pass
