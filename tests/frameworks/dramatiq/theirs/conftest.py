"""The fixtures of Dramatiq's tests, with shmq's broker and backends in the place of its own."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.rate_limits import RateLimiterBackend as LimiterBase
from dramatiq.results import ResultBackend as ResultsBase

import shmq
from shmq.integrations.dramatiq import Broker, Consumer, RateLimiterBackend, ResultBackend

_numbers = itertools.count()


class _Recording(Consumer):
    """Notes what it rejects, as the stub broker does."""

    dead: list[Any]

    def nack(self, message: Any) -> None:
        super().nack(message)
        self.dead.append(message)

    def __next__(self) -> Any:
        found = super().__next__()
        if found is not None:
            found.clear_exception = lambda: None
        return found


class StubBroker(Broker):
    """shmq's broker with what only the stub broker has: a list of dead letters, and `fail_fast`."""

    def __init__(self, *args: Any, fail_fast_default: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fail_fast_default = fail_fast_default
        self.dead_letters_by_queue: defaultdict[str, list[Any]] = defaultdict(list)

    @property
    def dead_letters(self) -> list[Any]:
        return [one for found in self.dead_letters_by_queue.values() for one in found]

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 100) -> Consumer:
        made = super().consume(queue_name, prefetch, timeout)
        made.__class__ = _Recording
        made.dead = self.dead_letters_by_queue[queue_name]  # type: ignore[attr-defined]
        return made

    def join(  # type: ignore[override]
        self,
        queue_name: str,
        *,
        interval: int = 10,
        timeout: int | None = None,
        fail_fast: bool | None = None,
    ) -> None:
        super().join(queue_name, interval=interval, timeout=timeout)
        if self.fail_fast_default if fail_fast is None else fail_fast:
            for message in self.dead_letters_by_queue[queue_name]:
                raise message._exception or Exception("Message failed with unknown error")


@pytest.fixture(scope="session")
def instance() -> Iterator[shmq.Broker]:
    with shmq.Broker(disk=False) as broker:
        yield broker


def _app(instance: shmq.Broker, fail_fast: bool) -> Iterator[StubBroker]:
    namespace = f"test{next(_numbers)}"
    app = StubBroker(instance, namespace=namespace, fail_fast_default=fail_fast)
    app.emit_after("process_boot")
    dramatiq.set_broker(app)
    yield app
    app.emit_before("process_stop")
    app.close()
    for topic in instance.stats().topics:
        if topic.name.startswith(f"{app.namespace}."):
            instance.delete_topic(topic.name)


@pytest.fixture
def stub_broker(instance: shmq.Broker) -> Iterator[StubBroker]:
    yield from _app(instance, True)


@pytest.fixture
def redis_broker(instance: shmq.Broker) -> Iterator[StubBroker]:
    yield from _app(instance, False)


def _working(app: StubBroker) -> Iterator[dramatiq.Worker]:
    made = dramatiq.Worker(app, worker_timeout=100, worker_threads=32)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def stub_worker(stub_broker: StubBroker) -> Iterator[dramatiq.Worker]:
    yield from _working(stub_broker)


@pytest.fixture
def redis_worker(redis_broker: StubBroker) -> Iterator[dramatiq.Worker]:
    yield from _working(redis_broker)


@pytest.fixture
def result_backend(instance: shmq.Broker) -> Iterator[ResultsBase]:
    name = f"results{next(_numbers)}"
    yield ResultBackend(instance, store=name)
    if name in instance.results_names():
        instance.delete_results(name)


redis_result_backend = stub_result_backend = result_backend


@pytest.fixture
def rate_limiter_backend(instance: shmq.Broker) -> Iterator[LimiterBase]:
    name = f"limits{next(_numbers)}"
    yield RateLimiterBackend(instance, store=name)
    if name in instance.results_names():
        instance.delete_results(name)


redis_rate_limiter_backend = stub_rate_limiter_backend = rate_limiter_backend
