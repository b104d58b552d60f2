"""`shmq.Executor(timeout=...)`: what a task that runs for too long costs, and whom."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import pool_tasks as tasks
from support.processes import WATCHDOG, Child, eventually

import shmq
from shmq import procfs
from shmq.pool import timekeeper

METHODS = ("fork", "spawn", "forkserver")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_task_that_runs_for_too_long_is_ended_with_its_worker(
    pool: Callable[..., shmq.Executor], tmp_path: Path, method: str, attempts: int
) -> None:
    context = multiprocessing.get_context(method)
    executor = pool(2, context, timeout=0.5, attempts=attempts)
    late = executor.submit(tasks.record_and_hang, str(tmp_path / "pids"))
    others = [executor.submit(tasks.same, number) for number in range(20)]
    assert [future.result() for future in others] == list(range(20))
    with pytest.raises(shmq.TaskTimeout, match=r"more than 0\.5 s") as caught:
        late.result()
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(set(pids)) == attempts
    assert (caught.value.pid, caught.value.attempts) == (pids[-1], attempts)
    assert isinstance(caught.value, TimeoutError)
    assert executor.submit(tasks.same, 1).result() == 1


def test_a_task_that_was_late_once_may_succeed(
    pool: Callable[..., shmq.Executor], tmp_path: Path
) -> None:
    executor = pool(1, timeout=0.5)
    assert executor.submit(tasks.hang_once, str(tmp_path / "pids")).result() == "second"


def test_a_worker_that_is_killed_for_another_reason_died(
    pool: Callable[..., shmq.Executor],
) -> None:
    executor = pool(1, timeout=WATCHDOG, attempts=1)
    with pytest.raises(shmq.WorkerDied):
        executor.submit(tasks.die).result()


def test_a_task_that_ends_in_time_at_the_last_moment_costs_no_other(
    pool: Callable[..., shmq.Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that a worker had is done when the worker has stopped: it has another one then."""
    seen = timekeeper.Timekeeper._running
    asked = list[int]()

    def running(self: Any) -> list[Any]:
        found = seen(self)
        asked.append(len(found))
        if len(asked) % 2 == 0:  # the second look, at the stopped worker
            return [dataclasses.replace(each, id="0" * 16) for each in found]
        return found

    monkeypatch.setattr(timekeeper.Timekeeper, "_running", running)
    executor = pool(1, timeout=0.2, attempts=1)
    assert executor.submit(tasks.sleep_and_say, 1.0).result() == "done"
    assert len(asked) >= 2


def die_with_a_stopped_worker(method):
    """The crew's process is killed between its stop of a worker and its look."""
    import multiprocessing

    from shmq.pool import timekeeper

    wait_stopped = timekeeper._wait_stopped

    def wait_and_die(pid, fd):
        wait_stopped(pid, fd)
        os.kill(os.getpid(), signal.SIGKILL)

    timekeeper._wait_stopped = wait_and_die
    executor = shmq.Executor(1, multiprocessing.get_context(method), timeout=0.3)
    print("worker", executor.submit(os.getpid).result(), flush=True)
    executor.submit(time.sleep, 1.0).result()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_was_stopped_when_its_crew_died_ends(
    child: Callable[..., Child], method: str
) -> None:
    # a fork server outlives its program while it has children, so the kernel tells them nothing
    crew = child(die_with_a_stopped_worker, method)
    pid = int(crew.said("worker").split()[1])
    crew.die()
    eventually(lambda: procfs.start_time(pid) is None, what=f"worker {pid} has ended")
