"""shmq.Executor: the semantics of ProcessPoolExecutor, and what a death costs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import pool_tasks as tasks
from support.processes import WATCHDOG, eventually

import shmq
from shmq import procfs
from shmq.pool import site
from shmq.queues import tree

METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture(scope="module")
def shared() -> Iterator[shmq.Executor]:
    """A pool of two workers for tests that leave it as it was."""
    with shmq.Executor(2) as executor:
        assert list(executor.map(tasks.same, range(10))) == list(range(10))
        eventually(lambda: executor._crew is not None and len(executor._crew.pids()) == 2)
        yield executor


class Held:
    """A task that runs until it is released."""

    def __init__(self, executor: shmq.Executor, path: Path) -> None:
        self._begun, self._until = path / "begun", path / "until"
        self.future = executor.submit(tasks.hold, str(self._begun), str(self._until))
        eventually(lambda: tasks.has_begun(self._begun))
        self.pid = int(self._begun.read_text())

    def release(self) -> None:
        self._until.touch()


# ---- values and errors ----


def test_a_value_comes_back(shared: shmq.Executor) -> None:
    assert shared.submit(tasks.add, 1, right=2).result() == 3
    assert shared.submit(tasks.pid).result() != os.getpid()


def test_an_exception_comes_back_with_its_remote_traceback(shared: shmq.Executor) -> None:
    future = shared.submit(tasks.fail, "no")
    with pytest.raises(ValueError, match="no") as caught:
        future.result()
    assert "in fail" in str(caught.value.__cause__)
    assert future.exception() is caught.value


def test_arguments_that_cannot_be_pickled_give_the_future_an_error(
    shared: shmq.Executor,
) -> None:
    with pytest.raises(TypeError, match="a Closed cannot be pickled"):
        shared.submit(tasks.same, tasks.Closed()).result()


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (tasks.closed, TypeError, "a Closed cannot be pickled"),
        (tasks.fail_closed, TypeError, "a ClosedError cannot be pickled"),
        (tasks.fail_with_two_words, TypeError, "second"),
    ],
)
def test_an_outcome_that_cannot_travel_is_an_error_and_the_worker_lives(
    shared: shmq.Executor, function: Callable[[], object], error: type[Exception], text: str
) -> None:
    assert shared._crew is not None
    before = set(shared._crew.pids())
    with pytest.raises(error, match=text) as caught:
        shared.submit(function).result()
    assert "Traceback" in str(caught.value.__cause__)
    assert set(shared._crew.pids()) == before


def test_large_arrays_travel_through_shared_memory(shared: shmq.Executor) -> None:
    array = np.arange(1 << 17)
    result = shared.submit(tasks.double, array).result()
    assert (result == array * 2).all()
    assert not shared.submit(tasks.is_writeable, array).result()


def test_ids_are_unique(shared: shmq.Executor) -> None:
    futures = [shared.submit(tasks.same, number) for number in range(100)]
    assert len({future.id for future in futures}) == 100
    assert [future.result() for future in futures] == list(range(100))


@pytest.mark.parametrize("method", METHODS)
def test_each_start_method_works(pool: Callable[..., shmq.Executor], method: str) -> None:
    context = multiprocessing.get_context(method)
    executor = pool(1, context, tasks.greet, ("Ada",))
    assert executor.submit(tasks.greeting).result() == "Ada"


# ---- map ----


@pytest.mark.parametrize("chunksize", [1, 7])
@pytest.mark.parametrize("buffersize", [None, 3])
def test_map_keeps_the_order(shared: shmq.Executor, chunksize: int, buffersize: int | None) -> None:
    found = shared.map(
        tasks.add, range(100), range(1000), chunksize=chunksize, buffersize=buffersize
    )
    assert list(found) == list(range(0, 200, 2))


def test_map_with_a_buffer_begins_no_more_tasks_than_that(shared: shmq.Executor) -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    values = shared.map(tasks.same, numbers(), buffersize=5)
    assert len(taken) == 5
    assert next(values) == 0
    assert len(taken) == 6
    assert list(values) == list(range(1, 100))


def test_map_raises_what_a_call_raises_and_times_out(shared: shmq.Executor, tmp_path: Path) -> None:
    values = shared.map(tasks.fail, ["a", "b"])
    with pytest.raises(ValueError, match="a"):
        next(values)
    until = tmp_path / "until"
    slow = shared.map(tasks.hold, [str(tmp_path / "begun")], [str(until)], timeout=0.05)
    with pytest.raises(TimeoutError):
        next(slow)
    until.touch()


@pytest.mark.parametrize("wrong", [{"chunksize": 0}, {"buffersize": 0}, {"progress": "bar"}])
def test_map_refuses_wrong_arguments(shared: shmq.Executor, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        shared.map(tasks.same, [1], **wrong)


def test_map_with_progress_needs_no_terminal(shared: shmq.Executor) -> None:
    assert list(shared.map(tasks.same, range(10), progress="text")) == list(range(10))


# ---- futures ----


def test_wait_as_completed_and_callbacks(shared: shmq.Executor) -> None:
    futures = [shared.submit(tasks.same, number) for number in range(500)]
    came: list[Any] = []
    called = threading.Event()
    futures[-1].add_done_callback(lambda future: (came.append(future.result()), called.set()))
    done = {future.result() for future in concurrent.futures.as_completed(futures)}
    assert done == set(range(500))
    assert called.wait(WATCHDOG)
    assert came == [499]
    assert not concurrent.futures.wait(futures).not_done


def test_a_callback_of_a_finished_future_runs_at_once(shared: shmq.Executor) -> None:
    future = shared.submit(tasks.same, 1)
    assert future.result() == 1
    came: list[Any] = []
    future.add_done_callback(came.append)
    assert came == [future]


def test_several_threads_wait_for_one_future(
    pool: Callable[..., shmq.Executor], tmp_path: Path
) -> None:
    held = Held(pool(1), tmp_path)
    with pytest.raises(TimeoutError):
        held.future.result(0.01)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = [threads.submit(held.future.result, WATCHDOG) for _ in range(4)]
        hurried = [threads.submit(held.future.exception, 0.01) for _ in range(4)]
        held.release()
        assert {result.result() for result in results} == {held.pid}
        for each in hurried:
            each.exception()  # it gave up, or came late enough to see the end
    assert held.future.done()


def test_a_thread_that_gives_up_leaves_the_future_to_the_others(
    pool: Callable[..., shmq.Executor], tmp_path: Path
) -> None:
    held = Held(pool(1), tmp_path)
    came = threading.Event()

    def give_up(key: bytes, timeout: float | None) -> None:
        """The wait of a thread during which another one begins to watch."""
        held.future.add_done_callback(lambda future: came.set())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held.future._inbox, "_take", give_up)
        with pytest.raises(TimeoutError):
            held.future.result(1)
    held.release()
    assert came.wait(WATCHDOG)


def test_running_and_cancel(pool: Callable[..., shmq.Executor], tmp_path: Path) -> None:
    executor = pool(1)
    held = Held(executor, tmp_path)
    ran = tmp_path / "ran"
    waiting = [executor.submit(tasks.noted, str(ran), number) for number in range(3)]
    assert held.future.running()
    assert not held.future.cancel()
    assert not waiting[1].running()
    assert waiting[1].cancel()
    assert waiting[1].cancelled()
    assert waiting[1].done()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting[1].result()
    held.release()
    assert [waiting[0].result(), waiting[2].result()] == [0, 2]
    assert not waiting[0].cancel()
    assert ran.read_text().split() == ["0", "2"]


def test_outcomes_of_dropped_futures_are_deleted(shared: shmq.Executor) -> None:
    def store() -> shmq.Results:
        assert shared._site is not None
        return shared._site.store

    for _ in range(1000):
        shared.submit(tasks.same, 1)

    def swept() -> bool:
        shared.submit(tasks.same, 1).result()
        return not any(len(key) == site.KEY_BYTES for key in store())

    eventually(swept)


# ---- the end ----


def test_outcomes_stay_after_the_end(pool: Callable[..., shmq.Executor]) -> None:
    with pool(2) as executor:
        futures = [executor.submit(tasks.same, number) for number in range(100)]
        failed = executor.submit(tasks.fail, "no")
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures] == list(range(100))
    assert isinstance(failed.exception(), ValueError)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(tasks.same, 1)


def test_an_ended_pool_leaves_nothing_in_the_broker(pool: Callable[..., shmq.Executor]) -> None:
    executor = pool(1)
    with pytest.raises(shmq.WorkerDied):
        executor.submit(tasks.die).result()
    assert executor._site is not None
    topic = executor._site.place.topic
    executor.shutdown()
    broker = tree.broker()
    assert f"{topic}#ephemeral" not in broker.results_names()
    assert not [found.name for found in broker.stats().topics if found.name.startswith(topic)]


def test_shutdown_cancels_what_waits(pool: Callable[..., shmq.Executor], tmp_path: Path) -> None:
    executor = pool(1)
    held = Held(executor, tmp_path)
    waiting = [executor.submit(tasks.same, number) for number in range(300)]
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    assert not held.future.done()
    held.release()
    executor.shutdown()
    assert held.future.result() == held.pid


def test_shutdown_without_waiting_does_all_tasks(pool: Callable[..., shmq.Executor]) -> None:
    executor = pool(2)
    futures = [executor.submit(tasks.same, number) for number in range(200)]
    executor.shutdown(wait=False)
    assert [future.result() for future in futures] == list(range(200))


def test_a_pool_that_nobody_refers_to_does_its_tasks_and_ends() -> None:
    executor = shmq.Executor(1)
    worker = executor.submit(tasks.pid).result()
    future = executor.submit(tasks.same, 5)
    del executor
    assert future.result() == 5
    eventually(lambda: procfs.start_time(worker) is None)


def test_a_pool_of_no_use_starts_nothing() -> None:
    with shmq.Executor(1) as executor:
        assert executor._site is None


def test_workers_are_replaced_after_their_tasks(pool: Callable[..., shmq.Executor]) -> None:
    executor = pool(1, max_tasks_per_child=3)
    pids = [executor.submit(tasks.pid).result() for _ in range(9)]
    assert [len(set(pids[at : at + 3])) for at in (0, 3, 6)] == [1, 1, 1]
    assert len(set(pids)) == 3


# ---- deaths ----


def test_a_task_that_kills_its_workers_fails_and_the_pool_goes_on(
    pool: Callable[..., shmq.Executor],
) -> None:
    executor = pool(2, attempts=3)
    future = executor.submit(tasks.die)
    others = [executor.submit(tasks.same, number) for number in range(100)]
    with pytest.raises(shmq.WorkerDied) as caught:
        future.result()
    assert caught.value.attempts == 3
    assert caught.value.signal == signal.SIGKILL
    assert caught.value.pid
    assert [other.result() for other in others] == list(range(100))


def test_an_exit_in_a_task_is_a_death_without_a_signal(
    pool: Callable[..., shmq.Executor],
) -> None:
    executor = pool(1)
    with pytest.raises(shmq.WorkerDied) as caught:
        executor.submit(tasks.leave, 0).result()
    assert caught.value.signal is None
    assert executor.submit(tasks.same, 1).result() == 1


def test_a_death_is_one_attempt(pool: Callable[..., shmq.Executor], tmp_path: Path) -> None:
    executor = pool(1)
    assert executor.submit(tasks.die_once, str(tmp_path / "died")).result() == "survived"


def test_a_death_while_unpickling_is_one_of_the_task(pool: Callable[..., shmq.Executor]) -> None:
    executor = pool(1)
    with pytest.raises(shmq.WorkerDied):
        executor.submit(tasks.same, tasks.DeadlyToUnpickle()).result()
    assert executor.submit(tasks.same, 1).result() == 1


def test_the_last_death_before_the_end_is_told(pool: Callable[..., shmq.Executor]) -> None:
    with pool(2) as executor:
        future = executor.submit(tasks.die)
    with pytest.raises(shmq.WorkerDied):
        future.result()


@pytest.mark.parametrize("initializer", [tasks.refuse, tasks.exit_at_once])
def test_an_initializer_that_fails_breaks_the_pool(
    pool: Callable[..., shmq.Executor], initializer: Callable[[], None]
) -> None:
    executor = pool(2, initializer=initializer)
    future = executor.submit(tasks.same, 1)
    called = threading.Event()
    future.add_done_callback(lambda future: called.set())
    with pytest.raises(BrokenProcessPool, match=r"does not want to|status 3"):
        future.result()
    assert called.wait(WATCHDOG)
    with pytest.raises(BrokenProcessPool):
        executor.submit(tasks.same, 3)


def test_kills_of_starting_workers_do_not_break_the_pool(
    pool: Callable[..., shmq.Executor],
) -> None:
    """With spawn a worker takes long to start. A kill in this time says nothing about the pool."""
    executor = pool(1, multiprocessing.get_context("spawn"))
    future = executor.submit(tasks.same, 1)
    killed: set[int] = set()

    def kill_a_new_one() -> bool:
        assert executor._crew is not None
        for pid in set(executor._crew.pids()) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return len(killed) >= 15

    eventually(kill_a_new_one)
    assert future.result() == 1


@pytest.mark.parametrize("way", ["kill_workers", "terminate_workers"])
def test_workers_are_ended_at_once(
    pool: Callable[..., shmq.Executor], tmp_path: Path, way: str
) -> None:
    executor = pool(1)
    held = Held(executor, tmp_path)
    waiting = executor.submit(tasks.same, 1)
    getattr(executor, way)()
    assert procfs.start_time(held.pid) is None
    for future in (held.future, waiting):
        with pytest.raises(BrokenProcessPool):
            future.result()
    with pytest.raises((BrokenProcessPool, RuntimeError)):
        executor.submit(tasks.same, 2)


# ---- no room ----


@pytest.mark.deep
def test_a_full_store_of_outcomes_holds_nobody_up(
    pool: Callable[..., shmq.Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "_KEYS", 16)
    executor = pool(2)
    futures = [executor.submit(tasks.same, number) for number in range(200)]
    assert futures[-1].result() == 199
    assert [future.result() for future in futures] == list(range(200))
    again = [executor.submit(tasks.same, number) for number in range(100)]
    done = {future.result() for future in concurrent.futures.as_completed(again[90:])}
    assert done == set(range(90, 100))


def test_submit_to_a_private_pool_never_waits_for_room(
    pool: Callable[..., shmq.Executor], tmp_path: Path
) -> None:
    executor = pool(1)
    held = Held(executor, tmp_path)
    large = bytes(20_000)
    futures = [executor.submit(tasks.add, large, b"%d" % number) for number in range(500)]
    assert executor._feeder is not None
    held.release()
    assert [future.result() for future in futures] == [large + b"%d" % n for n in range(500)]


def test_a_task_may_be_larger_than_what_waits_in_the_channel(
    pool: Callable[..., shmq.Executor], tmp_path: Path
) -> None:
    executor = pool(1)
    held = Held(executor, tmp_path)
    arrays = [np.full(size, size % 251, np.uint8) for size in (1 << 20, 5 << 20, 9 << 20)]
    futures = [executor.submit(tasks.double, array) for array in arrays for _ in range(3)]
    held.release()
    for number, future in enumerate(futures):
        assert (future.result() == arrays[number // 3] * 2).all()


def test_a_worker_that_has_died_before_it_is_watched_is_replaced(
    pool: Callable[..., shmq.Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start of a process by any thread reads the status of the children that have ended."""
    opened, late = os.pidfd_open, list[int]()

    def open_late(pid: int, flags: int = 0) -> int:
        if len(late) < 3:
            late.append(pid)
            eventually(lambda: pid not in {c.pid for c in multiprocessing.active_children()})
        return opened(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", open_late)
    executor = pool(1, multiprocessing.get_context("spawn"), attempts=3)
    with pytest.raises(shmq.WorkerDied) as caught:
        executor.submit(tasks.die).result()
    assert (caught.value.pid, caught.value.signal) == (late[-1], signal.SIGKILL)
    assert executor.submit(tasks.same, 1).result() == 1


def test_a_nursery_that_was_killed_is_replaced(
    pool: Callable[..., shmq.Executor], caplog: pytest.LogCaptureFixture
) -> None:
    executor = pool(1, multiprocessing.get_context("fork"))
    assert executor.submit(tasks.same, 1).result() == 1
    crew = executor._crew
    assert crew is not None
    assert crew._nursery is not None
    nursery = crew._nursery._process.pid
    assert nursery is not None
    os.kill(nursery, signal.SIGKILL)
    eventually(lambda: crew._nursery is not None and not crew._nursery.lives())
    os.kill(executor.submit(tasks.pid).result(), signal.SIGKILL)
    assert executor.submit(tasks.same, 2).result() == 2
    assert "forking another" in caplog.text


def test_children_reaped_by_the_program_do_not_hold_up_a_pool_that_replaces_workers(
    pool: Callable[..., shmq.Executor],
) -> None:
    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    for method in ("fork", "spawn"):
        before = signal.signal(signal.SIGCHLD, reap)
        try:
            context = multiprocessing.get_context(method)
            with pool(2, context, max_tasks_per_child=2) as executor:
                assert list(executor.map(tasks.same, range(8))) == list(range(8))
        finally:
            signal.signal(signal.SIGCHLD, before)


class Raising:
    """An object that raises while it is pickled, or unpickled."""

    def __init__(self, error: type[BaseException], late: bool) -> None:
        self.error, self.late = error, late

    def __getstate__(self) -> dict[str, Any]:
        if not self.late:
            raise self.error("of the program")
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["error"]("of the program")


@pytest.mark.parametrize("error", [SystemExit, pickle.UnpicklingError, EOFError, ValueError])
@pytest.mark.parametrize("late", [False, True])
def test_what_an_object_raises_in_its_pickling_is_the_error_of_its_task(
    shared: shmq.Executor, error: type[BaseException], late: bool
) -> None:
    for future in (
        shared.submit(tasks.same, Raising(error, late)),
        *shared.submit_all(tasks.same, [(Raising(error, late),)]),
    ):
        with pytest.raises(error, match="of the program"):
            future.result()


class Slow:
    """Its pickling runs until a signal comes."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        return int, (1,)


def test_the_handler_of_a_signal_ends_the_program_also_while_it_pickles(
    shared: shmq.Executor,
) -> None:
    def end(*_: object) -> None:
        raise SystemExit("the handler")

    before = signal.signal(signal.SIGUSR2, end)
    try:
        with pytest.raises(SystemExit, match="the handler"):
            shared.submit(tasks.same, Slow())
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_worker_that_starts_leaves_the_room_for_large_tasks(
    pool: Callable[..., shmq.Executor],
) -> None:
    executor = pool(2, max_tasks_per_child=1)
    array = np.zeros(6 << 20, np.uint8)
    futures = [executor.submit(tasks.double, array) for _ in range(8)]
    assert [len(future.result()) for future in futures] == [len(array)] * 8


# ---- arguments ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_workers": 0},
        {"max_tasks_per_child": 0},
        {"attempts": 0},
        {"timeout": 0},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"attempts": 70_000},
        {"topic": "a" * 64},
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong))) + "|name"):
        shmq.Executor(**wrong)


def test_a_private_pool_has_no_futures_of_others(shared: shmq.Executor) -> None:
    with pytest.raises(ValueError, match="durable"):
        shared.future("0" * 20)


def test_a_pool_without_room_for_its_stores_says_how_many_there_may_be() -> None:
    """It leaves nothing of itself, and the next one works when there is room."""
    broker = tree.broker()
    made: list[str] = []

    def fill() -> None:
        for number in range(1000):
            broker.results(f"fill-{number}#ephemeral", 1, 1 << 16)
            made.append(f"fill-{number}#ephemeral")

    refused = shmq.Executor(1)
    try:
        with pytest.raises(shmq.ShmqError, match="a table is full"):
            fill()
        broker.delete_results(made.pop())  # a pool has two
        before = {topic.name for topic in broker.stats().topics}
        with pytest.raises(shmq.ShmqError, match="have room for 64 at a time: shut one down"):
            refused.submit(pow, 2, 3)
        assert {topic.name for topic in broker.stats().topics} == before
    finally:
        for name in made:
            broker.delete_results(name)
    assert refused.submit(pow, 2, 3).result(WATCHDOG) == 8
    refused.shutdown()
