"""Workers and submitters of a pool that are killed at any instant: every value is right and comes
once, the pool goes on, and nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import pool_tasks as tasks
from support import processes
from support.processes import HELPERS, WATCHDOG, Child, eventually

import shmq
from shmq import procfs
from shmq.pool import worker
from shmq.pool.site import CHANNEL
from shmq.queues import tree

METHODS = ("fork", pytest.param("spawn", marks=pytest.mark.deep), "forkserver")
TASKS = 10_000


@pytest.fixture
def run(keep: Callable[[Any], Any]) -> Callable[..., Child]:
    """`run(program, method, ...)`: one of support.pool_programs."""

    def start(program: str, method: str, *words: str) -> Child:
        line = [sys.executable, "-m", "support.pool_programs", program, method, *words]
        return keep(Child(line, HELPERS))

    return start


def named(child: Child) -> tuple[str, list[int]]:
    """The broker and the workers of a program."""
    instance = child.said("broker").split()[1]
    return instance, [int(pid) for pid in child.said("workers").split()[1:]]


def nothing_is_left(instance: str, workers: list[int]) -> None:
    """Wait until the workers and the broker have ended, and the memory is gone."""
    for pid in workers:
        processes.wait_ended(pid)
    eventually(lambda: not processes.supervisors(instance), what="the supervisor ended")
    assert not [name for name in os.listdir("/dev/shm") if instance in name]


class Killer:
    """A thread that kills workers at random instants, each time after some progress."""

    def __init__(self, executor: shmq.Executor, kills: int, seed: int) -> None:
        self.done = 0
        """Values that came so far."""
        self.kills = 0
        self._executor, self._most = executor, kills
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = -1
        step = TASKS // (self._most + 1)
        while self.kills < self._most and not self._over.wait(self._random.random() * 0.002):
            crew = self._executor._crew
            pids = [pid for pid in crew.pids() if pid] if crew is not None else []
            if pids and self.done >= last + step // 2:
                try:
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                except ProcessLookupError:  # killed before, and the crew has not seen it yet
                    continue
                self.kills += 1
                last = self.done


def kill_during_a_map(executor: shmq.Executor, kills: int, seed: int) -> None:
    """No value is wrong, missing or doubled, and the pool leaves nothing in the broker."""
    squares = [number * number for number in range(TASKS)]
    with Killer(executor, kills, seed) as killer:
        while killer.kills < kills:  # a busy machine gets to fewer of them in one map
            values = []
            for value in executor.map(tasks.square_slowly, range(TASKS)):
                values.append(value)
                killer.done += 1
            assert values == squares
    assert executor._site is not None
    topic = executor._site.place.topic
    executor.shutdown()
    broker = tree.broker()
    assert not [found.name for found in broker.stats().topics if found.name.startswith(topic)]
    assert not [name for name in broker.results_names() if name.startswith(topic)]


@pytest.mark.parametrize("method", METHODS)
def test_workers_killed_during_a_map_cost_no_value(
    pool: Callable[..., shmq.Executor], method: str
) -> None:
    executor = pool(2, multiprocessing.get_context(method), attempts=100)
    kill_during_a_map(executor, 20, seed=1)


@pytest.mark.deep
@pytest.mark.parametrize("method", METHODS)
def test_many_workers_killed_during_a_map_cost_no_value(
    pool: Callable[..., shmq.Executor], method: str
) -> None:
    executor = pool(2, multiprocessing.get_context(method), attempts=100)
    kill_during_a_map(executor, 200, seed=2)


@pytest.mark.parametrize("method", METHODS)
def test_workers_killed_in_their_initializer_are_replaced(
    pool: Callable[..., shmq.Executor], tmp_path: Path, method: str
) -> None:
    context = multiprocessing.get_context(method)
    executor = pool(1, context, tasks.hold, (str(tmp_path / "begun"), str(tmp_path / "until")))
    future = executor.submit(tasks.same, 1)

    def pids() -> list[int]:
        begun = tmp_path / "begun"
        return [int(word) for word in begun.read_text().split()] if begun.exists() else []

    for count in range(1, 4):
        eventually(lambda count=count: len(pids()) == count)
        os.kill(pids()[-1], signal.SIGKILL)
    (tmp_path / "until").touch()
    assert future.result(WATCHDOG) == 1


@pytest.mark.parametrize("program", ["idle", "busy"])
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_program_leaves_nothing(
    run: Callable[..., Child], program: str, method: str
) -> None:
    child = run(program, method)
    instance, workers = named(child)
    child.said("ready")
    child.kill()
    nothing_is_left(instance, workers)


@pytest.mark.parametrize("program", ["pickling", "between", "callback", "starting"])
@pytest.mark.parametrize("method", METHODS)
def test_a_program_that_dies_in_the_middle_leaves_nothing(
    run: Callable[..., Child], program: str, method: str
) -> None:
    child = run(program, method)
    child.die()
    nothing_is_left(*named(child))


@pytest.mark.parametrize("method", METHODS)
def test_a_program_that_ends_has_its_tasks_done(
    run: Callable[..., Child], tmp_path: Path, method: str
) -> None:
    child = run("unfinished", method, str(tmp_path / "noted"))
    child.succeed()
    nothing_is_left(*named(child))
    found = (tmp_path / "noted").read_text().split()
    assert sorted(map(int, found)) == list(range(200))


@pytest.mark.parametrize("method", METHODS)
def test_a_task_may_have_a_pool_of_its_own(run: Callable[..., Child], method: str) -> None:
    child = run("nested", method)
    assert "said 7" in child.succeed()
    nothing_is_left(*named(child))


def test_threads_share_a_pool(run: Callable[..., Child]) -> None:
    child = run("threads", "fork")
    assert "done" in child.succeed()
    nothing_is_left(*named(child))


def test_a_stopped_worker_holds_nobody_up(
    pool: Callable[..., shmq.Executor], tmp_path: Path
) -> None:
    """No time-out takes a task from a worker that is only slow."""
    executor = pool(2)
    begun, until = tmp_path / "begun", tmp_path / "until"
    future = executor.submit(tasks.hold, str(begun), str(until))
    eventually(lambda: tasks.has_begun(begun))
    worker = int(begun.read_text())
    processes.stop_process(worker)
    try:
        assert list(executor.map(tasks.same, range(100))) == list(range(100))
        assert future.running()
    finally:
        os.kill(worker, signal.SIGCONT)
    until.touch()
    assert future.result(WATCHDOG) == worker
    assert procfs.start_time(worker) is not None
    assert begun.read_text().split() == [str(worker)]


def test_a_task_whose_outcome_is_stored_is_not_run_again(
    pool: Callable[..., shmq.Executor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies between the store of the outcome and the end of the message."""
    deliver, died = worker._Worker._deliver, tmp_path / "died"

    def deliver_and_die(self: Any, key: bytes, found: Any) -> None:
        deliver(self, key, found)
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(worker._Worker, "_deliver", deliver_and_die)
    executor = pool(1, multiprocessing.get_context("fork"))
    future = executor.submit(tasks.noted, str(tmp_path / "ran"), 7)
    eventually(died.exists)
    site = executor._site
    assert site is not None
    stats = site.broker.channel_stats
    eventually(lambda: stats(site.place.topic, CHANNEL).finished == 1)
    assert future.result(WATCHDOG) == 7
    assert (tmp_path / "ran").read_text().split() == ["7"]


def test_each_death_is_answered_by_one_start(pool: Callable[..., shmq.Executor]) -> None:
    executor = pool(1)
    pids = [executor.submit(tasks.pid).result()]
    for _ in range(10):
        os.kill(pids[-1], signal.SIGKILL)
        pids.append(executor.submit(tasks.pid).result(WATCHDOG))
    assert len(set(pids)) == 11
    assert executor._crew is not None
    assert executor._crew.pids() == pids[-1:]
