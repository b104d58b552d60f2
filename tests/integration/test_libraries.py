"""Libraries that take any queue or executor of the standard library's kind take shmq's."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array
import numpy as np
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.pool import BasePoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from support.processes import WATCHDOG

import shmq


@pytest.fixture
def executor() -> Iterator[shmq.Executor]:
    """Two workers, for one test."""
    with shmq.Executor(2) as executor:
        yield executor


def double(number: int) -> int:
    return 2 * number


def process_of(*numbers: int) -> tuple[int, int]:
    return os.getpid(), sum(numbers)


def fail(text: str) -> None:
    raise LookupError(text)


# ---- asyncio ----


def test_asyncio_awaits_calls_of_the_executor(executor: shmq.Executor) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(executor, double, number) for number in range(20)]
        with pytest.raises(LookupError, match="no such page"):
            await loop.run_in_executor(executor, fail, "no such page")
        return await asyncio.gather(*calls)

    assert asyncio.run(main()) == [2 * number for number in range(20)]


# ---- Dask ----


def test_dask_runs_a_graph_in_the_executor(executor: shmq.Executor) -> None:
    parts = [dask.delayed(process_of)(number) for number in range(8)]
    with dask.config.set(scheduler=executor):
        found = dask.compute(*parts)
    assert [number for _, number in found] == list(range(8))
    assert os.getpid() not in {pid for pid, _ in found}


def test_dask_computes_with_large_arrays(executor: shmq.Executor) -> None:
    array = dask.array.ones((1024, 1024), chunks=(512, 512))
    with dask.config.set(scheduler=executor):
        product = (array + array.T).sum(axis=0).compute()
    np.testing.assert_array_equal(product, np.full(1024, 2048.0))


def test_dask_sends_lambdas_by_its_own_pickler(executor: shmq.Executor) -> None:
    graph = dask.delayed(lambda number: (os.getpid(), number + 1))(1)
    with dask.config.set(scheduler="processes", pool=executor):
        pid, number = graph.compute()
    assert number == 2
    assert pid != os.getpid()


def test_dask_raises_the_error_of_a_task(executor: shmq.Executor) -> None:
    with (
        dask.config.set(scheduler=executor),
        pytest.raises(LookupError, match="no such column"),
    ):
        dask.delayed(fail)("no such column").compute()


# ---- APScheduler ----


class Workers(BasePoolExecutor):
    """As the page shows it."""

    def __init__(self, executor: shmq.Executor) -> None:
        super().__init__(executor)


@pytest.fixture
def schedule(executor: shmq.Executor) -> Iterator[Callable[..., JobExecutionEvent]]:
    """`schedule(function, *args)`: how its job ended, which is to be run at once."""
    scheduler = BackgroundScheduler(executors={"default": Workers(executor)}, timezone="UTC")
    scheduler.start()

    def run(function: Callable[..., Any], *args: Any) -> JobExecutionEvent:
        ended, events = threading.Event(), []

        def listen(event: JobExecutionEvent) -> None:
            events.append(event)
            ended.set()

        scheduler.add_listener(listen, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
        scheduler.add_job(function, args=args, misfire_grace_time=None)
        assert ended.wait(WATCHDOG)
        scheduler.remove_listener(listen)
        return events[0]

    yield run
    scheduler.shutdown()


def test_apscheduler_runs_jobs_in_the_executor(
    schedule: Callable[..., JobExecutionEvent],
) -> None:
    pid, total = schedule(process_of, 1, 2).retval
    assert total == 3
    assert pid != os.getpid()


def test_apscheduler_is_told_of_an_error(schedule: Callable[..., JobExecutionEvent]) -> None:
    assert isinstance(schedule(fail, "no such job").exception, LookupError)


# ---- logging ----


def log_lines(queue: Any, name: str, count: int) -> None:
    logger = logging.getLogger(f"shmq-test.{name}")
    logger.handlers = [logging.handlers.QueueHandler(queue)]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    for number in range(count):
        logger.info("line %d", number)
    try:
        raise LookupError(name)
    except LookupError:
        logger.exception("failed")


class Kept(logging.Handler):
    """A handler that keeps the records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_processes_log_through_a_queue() -> None:
    queue, kept = shmq.Queue(), Kept()
    listener = logging.handlers.QueueListener(queue, kept, respect_handler_level=True)
    listener.start()
    names = ["left", "right"]
    processes = [
        multiprocessing.Process(target=log_lines, args=(queue, name, 50)) for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    listener.stop()
    queue.close()
    for name, process in zip(names, processes, strict=True):
        records = [record for record in kept.records if record.name == f"shmq-test.{name}"]
        assert [record.getMessage() for record in records[:-1]] == [
            f"line {number}" for number in range(50)
        ]
        assert {record.process for record in records} == {process.pid}
        assert "failed" in records[-1].getMessage()
        assert f"LookupError: {name}" in records[-1].getMessage()
