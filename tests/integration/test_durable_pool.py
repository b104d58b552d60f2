"""Durable pools: tasks that outlive their submitter, and the workers of `shmq worker`."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import pool_tasks as tasks
from support import processes
from support.processes import HELPERS, WATCHDOG, Child, eventually

import shmq
from shmq import procfs
from shmq.cli.status import ERROR, NOT_RUNNING, OK

Start = Callable[..., Child]


@pytest.fixture
def broker(open_broker: Callable[..., shmq.Broker]) -> shmq.Broker:
    return open_broker(disk=False, data_path=None)


@pytest.fixture
def start(broker: shmq.Broker, keep: Callable[[Any], Any]) -> Start:
    """`start(processes, name)`: `shmq worker` for an executor of support.durable_pool."""

    def run(processes: int = 2, name: str = "pool", instance: str = "", **more: str) -> Child:
        words = [f"support.durable_pool:{name}", f"--processes={processes}"]
        env = {**HELPERS, "SHMQ_INSTANCE": instance or broker.instance, **more}
        return keep(Child([sys.executable, "-m", "shmq", "worker", *words], env))

    return run


@pytest.fixture
def executor(broker: shmq.Broker) -> shmq.Executor:
    return shmq.Executor(broker=broker, topic="jobs")


def holders(broker: shmq.Broker) -> list[int]:
    """The workers that have a task in hand."""
    return [seen.pid or 0 for seen in broker.peek("jobs", "pool", "in_flight")]


def submit_and_leave(instance: str) -> None:
    from support import pool_tasks

    pool = shmq.Executor(instance=instance, topic="jobs")
    say("id", pool.submit(pool_tasks.same, "kept").id)  # noqa: F821
    vanish()  # noqa: F821


def collect(instance: str, task: str) -> None:
    pool = shmq.Executor(instance=instance, topic="jobs")
    say("value", pool.future(task).result())  # noqa: F821


def test_a_task_outlives_its_submitter_and_any_process_gets_its_value(
    broker: shmq.Broker, start: Start, child: Start
) -> None:
    submitter = child(submit_and_leave, broker.instance, env=HELPERS)
    submitter.die()
    task = submitter.said("id").split()[1]
    start()
    assert child(collect, broker.instance, task, env=HELPERS).succeed() == ["value kept"]
    assert len(broker.results("jobs")) == 0


def submit_without_end(instance: str, size: int) -> None:
    import itertools

    from support import pool_tasks

    pool = shmq.Executor(instance=instance, topic="jobs")
    for number in itertools.count():
        say("id", pool.submit(pool_tasks.add, bytes(size), b"%d" % number).id)  # noqa: F821


def map_without_end(instance: str, size: int) -> None:
    import itertools

    from support import pool_tasks

    calls = ((bytes(size), b"%d" % number) for number in itertools.count())
    pool = shmq.Executor(instance=instance, topic="jobs")
    while True:
        for future in pool.submit_all(pool_tasks.add, itertools.islice(calls, 3)):
            say("id", future.id)  # noqa: F821


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("submit", [submit_without_end, map_without_end])
def test_what_submit_has_returned_is_held_by_the_broker(
    open_broker: Callable[..., shmq.Broker],
    start: Start,
    child: Start,
    submit: Callable[..., None],
    size: int,
) -> None:
    broker = open_broker(disk=False, data_path=None, mem_queue_size=10)
    submitter = child(submit, broker.instance, size, env=HELPERS)
    eventually(lambda: "still waiting for room" in submitter.errors)
    assert "publish to 'jobs'" in submitter.errors
    submitter.kill()
    returned = [line.split()[1] for line in submitter.lines]
    assert returned
    assert broker.channel_depth("jobs", "pool") >= len(returned)
    start(instance=broker.instance)
    pool = shmq.Executor(broker=broker, topic="jobs")
    values = [pool.future(task).result() for task in returned]
    assert values == [bytes(size) + b"%d" % number for number in range(len(returned))]


def test_a_durable_submit_waits_for_room_and_for_nothing_else(
    broker: shmq.Broker, executor: shmq.Executor, start: Start
) -> None:
    """Other threads use the pool meanwhile, and its end ends the wait."""
    first = executor.submit(tasks.same, 0)
    broker.configure("jobs", "pool", max_messages=4, overflow="block")
    others = [executor.submit(tasks.same, number) for number in range(1, 4)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(executor.submit, tasks.same, number) for number in range(4, 50)]
        eventually(lambda: sum(call.running() for call in calls) == 8)
        assert first.cancel()
        assert not any(call.done() for call in calls)
        start()
        values = {call.result().result() for call in calls}
        assert values | {other.result() for other in others} == set(range(1, 50))


def test_the_end_of_a_pool_ends_a_wait_for_room(
    broker: shmq.Broker, executor: shmq.Executor
) -> None:
    executor.submit(tasks.same, 0)
    broker.configure("jobs", "pool", max_messages=1, overflow="block")
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(executor.submit, tasks.same, 1) for _ in range(8)]
        eventually(lambda: all(call.running() for call in calls))
        executor.shutdown()
        assert {type(call.exception()) for call in calls} == {RuntimeError}
    assert broker.channel_depth("jobs", "pool") == 1


def test_a_map_larger_than_the_broker_is_done(
    open_broker: Callable[..., shmq.Broker], start: Start
) -> None:
    broker = open_broker(disk=False, data_path=None, mem_queue_size=10)
    start(instance=broker.instance)
    pool = shmq.Executor(broker=broker, topic="jobs")
    assert list(pool.map(tasks.same, range(2000))) == list(range(2000))


def test_a_durable_submit_raises_what_keeps_the_task_from_its_broker(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker(disk=False, data_path=None, max_msg_size=100_000)
    pool = shmq.Executor(broker=broker, topic="jobs")
    pool.submit(tasks.same, 1)
    with pytest.raises(shmq.MessageTooBig):
        pool.submit(tasks.same, bytes(200_000))
    with pytest.raises(TypeError, match="a Closed cannot be pickled"):
        pool.submit(tasks.same, tasks.Closed())
    with pytest.raises(TypeError, match="a Closed cannot be pickled"):
        pool.map(tasks.same, [1, tasks.Closed()])
    broker.close()
    with pytest.raises(shmq.Gone):
        pool.submit(tasks.same, 2)


def test_the_workers_of_all_submit_to_each_other(
    broker: shmq.Broker, executor: shmq.Executor, start: Start
) -> None:
    start(1)
    with shmq.Executor(1, broker=broker, topic="jobs") as own:
        values = executor.map(tasks.add, range(200), range(200))
        others = own.map(tasks.add, range(200), range(200))
        assert list(values) == list(others) == list(range(0, 400, 2))
        assert list(executor.map(tasks.same, range(100), chunksize=9)) == list(range(100))
    assert executor.submit(tasks.same, 1).result() == 1


def test_a_waiting_task_is_cancelled(
    broker: shmq.Broker, executor: shmq.Executor, start: Start
) -> None:
    future, other = executor.submit(tasks.same, 1), executor.submit(tasks.same, 2)
    same = executor.future(future.id)
    assert future.cancel()
    start()
    assert other.result() == 2
    eventually(same.cancelled)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_finish_the_task_in_hand_at_a_signal(
    broker: shmq.Broker, executor: shmq.Executor, start: Start, tmp_path: Path, number: int
) -> None:
    workers = start(1)
    until = tmp_path / "until"
    future = executor.submit(tasks.hold, str(tmp_path / "begun"), str(until))
    for number_of_task in range(5000):
        executor.submit(tasks.square_slowly, number_of_task)
    eventually(lambda: holders(broker))
    [holder] = holders(broker)
    workers.process.send_signal(number)
    until.touch()
    assert workers.wait() == OK
    assert future.result(0) == holder
    assert broker.channel_depth("jobs", "pool") > 0
    assert not broker.channel_stats("jobs", "pool").in_flight


def test_a_second_signal_gives_the_task_back_uncounted(
    broker: shmq.Broker, executor: shmq.Executor, start: Start, tmp_path: Path
) -> None:
    workers = start()
    until = tmp_path / "until"
    future = executor.submit(tasks.hold, str(tmp_path / "begun"), str(until))
    eventually(lambda: holders(broker))
    workers.process.send_signal(signal.SIGTERM)
    [holder] = holders(broker)
    eventually(lambda: workers.process.poll() is not None or workers.is_asleep())
    workers.process.send_signal(signal.SIGINT)
    assert workers.wait() == OK
    assert procfs.start_time(holder) is None
    [back] = broker.peek("jobs", "pool")
    assert back.failures == 0
    until.touch()
    start()
    assert future.result(WATCHDOG) != holder


def test_a_task_of_a_killed_crew_comes_back_uncounted(
    broker: shmq.Broker, executor: shmq.Executor, start: Start, tmp_path: Path
) -> None:
    until = tmp_path / "until"
    future = executor.submit(tasks.hold, str(tmp_path / "begun"), str(until))
    for _ in range(3):  # more often than the task may fail
        workers = start()
        eventually(lambda: holders(broker))
        found = holders(broker)
        workers.kill()
        for pid in found:
            processes.wait_ended(pid)
        eventually(lambda: broker.peek("jobs", "pool"))
        assert broker.peek("jobs", "pool")[0].failures == 0
    until.touch()
    start()
    assert future.result(WATCHDOG) not in (0, os.getpid())


def test_a_task_that_kills_workers_from_outside_fails(
    executor: shmq.Executor, start: Start
) -> None:
    start()
    with pytest.raises(shmq.WorkerDied) as caught:
        executor.submit(tasks.die).result()
    assert caught.value.signal == signal.SIGKILL
    assert executor.submit(tasks.same, 1).result() == 1


def test_a_death_is_told_by_the_next_crew_if_its_own_has_ended(
    broker: shmq.Broker, start: Start
) -> None:
    """The last worker of a crew dies of the task together with the process that would tell it."""
    executor = shmq.Executor(broker=broker, topic="jobs", attempts=1)
    future = executor.submit(tasks.die_with_parent)
    first = start(1, POOL_ATTEMPTS="1")
    first.wait()
    eventually(lambda: broker.dead("jobs", "pool").depth)
    start(1, POOL_ATTEMPTS="1")
    with pytest.raises(shmq.WorkerDied):
        future.result()


def test_a_crew_whose_initializer_raises_says_so(start: Start) -> None:
    child = start(name="broken")
    assert child.wait() == ERROR
    assert "this worker does not want to" in child.errors


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("pool", "MODULE:NAME"),
        ("no_such_module:pool", "no module"),
        ("support.durable_pool:nothing", "not a shmq.Executor"),
        ("support.durable_pool:private", "private pool"),
    ],
)
def test_wrong_executors_are_refused(keep: Callable[[Any], Any], where: str, text: str) -> None:
    child = keep(Child([sys.executable, "-m", "shmq", "worker", where], HELPERS))
    assert child.wait() == ERROR
    assert text in child.errors
    assert "Traceback" not in child.errors


def test_without_a_broker_there_are_no_workers(start: Start) -> None:
    assert start(instance="no-such-instance").wait() == NOT_RUNNING


def test_a_dropped_future_can_be_had_again(executor: shmq.Executor, start: Start) -> None:
    start()
    task = executor.submit(tasks.same, "kept").id
    for number in range(100):
        assert executor.submit(tasks.same, number).result() == number
    assert executor.future(task).result() == "kept"


def test_an_id_that_is_none_is_refused(executor: shmq.Executor) -> None:
    with pytest.raises(shmq.BadArgument, match="is not the id"):
        executor.future("x")
