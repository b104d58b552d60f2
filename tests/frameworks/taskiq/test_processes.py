"""An application with the commands `taskiq worker` and `taskiq scheduler`, whose processes are
killed."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import random
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.framework_workers import Command, Runs
from support.processes import WATCHDOG, Child, eventually, wait_ended

APP = "frameworks.taskiq.app"

Serve = Callable[..., Child]
Start = Callable[..., Command]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@pytest.fixture
def app(instance: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The application in this process, which sends."""
    monkeypatch.setenv("SHMQ_INSTANCE", instance)
    monkeypatch.setenv("RUNS", str(runs.path))
    sys.modules.pop(APP, None)
    return importlib.import_module(APP)


@pytest.fixture
def command(instance: str, runs: Runs, keep: Callable[[Any], Any]) -> Start:
    """`command(words...)`: the command `taskiq`."""

    def start(*words: str) -> Command:
        env = {"SHMQ_INSTANCE": instance, "RUNS": str(runs.path)}
        return keep(Command(["taskiq", *words], env))

    return start


@pytest.fixture
def workers(command: Start) -> Callable[..., Command]:
    """`workers(processes)`: the command `taskiq worker`."""

    def start(processes: int = 2, at_a_time: int = 8) -> Command:
        words = ["--workers", str(processes), "--max-async-tasks", str(at_a_time)]
        return command("worker", f"{APP}:broker", *words)

    return start


def sending(app: ModuleType, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine while the broker of this process is started."""

    async def main() -> None:
        async with app.broker:
            await app.schedules.startup()
            await work()
            await app.schedules.shutdown()

    asyncio.run(main())


async def soon(condition: Callable[[], Any], watchdog: float = WATCHDOG) -> Any:
    return await asyncio.to_thread(eventually, condition, watchdog)


async def value(app: ModuleType, task: Any) -> Any:
    return (await app.results.wait_result(task.task_id, WATCHDOG)).return_value


def size(app: ModuleType) -> int:
    stats = [app.broker.attachment.channel_stats(t, "workers") for t in app.broker.topics()]
    return sum(each.depth + each.in_flight + each.deferred for each in stats)


def test_retries_delays_requeues_progress_and_threads(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    async def work() -> None:
        tasks = [await app.square.kiq(number) for number in range(50)]
        assert [await value(app, task) for task in tasks] == [n * n for n in range(50)]
        assert await value(app, await app.in_thread.kiq(1)) == 2
        assert await value(app, await app.flaky.kiq("thrice", 2)) == "thrice"
        assert runs.count("flaky") == {"thrice": 3}
        assert await value(app, await app.twice.kiq("again")) == "again"
        assert runs.count("twice") == {"again": 2}
        late = await app.square.kicker().with_labels(delay=0.3).kiq(9)
        assert await value(app, late) == 81
        task = await app.half.kiq(key="here")
        await soon(lambda: runs.count("half"))
        progress = await task.get_progress()
        assert (progress.state, progress.meta) == ("STARTED", {"done": 0.5})
        failed = await app.broken.kiq("this")
        result = await app.results.wait_result(failed.task_id, WATCHDOG)
        assert result.is_err
        with pytest.raises(ValueError, match="this is broken"):
            result.raise_for_error()
        dead = app.broker.attachment.dead(app.broker.topics()[0], "workers")
        (letter,) = await soon(dead.peek)
        assert letter.error == "ValueError: this is broken"
        await soon(lambda: size(app) == 0)

    serve()
    workers()
    sending(app, work)


def test_a_higher_priority_goes_first(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    async def work() -> None:
        for priority in (1, 9, 4, 6):
            await app.square.kicker().with_labels(priority=priority).kiq(priority)
        workers(1, 1)
        await soon(lambda: len(runs.count("square")) == 4)
        assert [key for _, key, _ in runs.lines()] == ["9", "6", "4", "1"]

    serve()
    sending(app, work)


def test_the_scheduler_sends_what_is_due(
    serve: Serve, workers: Start, command: Start, app: ModuleType, runs: Runs
) -> None:
    async def work() -> None:
        now = datetime.datetime.now(datetime.UTC)
        once = await app.square.schedule_by_time(app.schedules, now, 3)
        later = now + datetime.timedelta(days=1)
        other = await app.square.schedule_by_time(app.schedules, later, 4)
        every = await app.square.schedule_by_interval(app.schedules, 1, 5)
        assert len(await app.schedules.get_schedules()) == 3
        await soon(lambda: runs.count("square")["3"] == 1)
        await soon(lambda: runs.count("square")["5"] >= 2)
        await soon(lambda: runs.count("tick")["label"] >= 2)
        await every.unschedule()
        found = await app.schedules.get_schedules()
        assert [each.schedule_id for each in found] == [other.schedule_id]
        assert once.schedule_id != other.schedule_id
        assert found[0].time == later

    serve()
    workers(1)
    command("scheduler", f"{APP}:scheduler", "--update-interval", "1", "--loop-interval", "1")
    sending(app, work)


@pytest.mark.parametrize(
    ("tasks", "kills"),
    [
        pytest.param(500, 10, marks=pytest.mark.shallow),
        pytest.param(5000, 100, marks=pytest.mark.deep),
    ],
)
def test_no_task_is_lost_when_workers_are_killed(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs, tasks: int, kills: int
) -> None:
    async def work() -> None:
        chance = random.Random()
        running = workers(2)
        sent = [await app.square.kiq(number, 0.01) for number in range(tasks)]
        for when in sorted(chance.sample(range(1, tasks), kills)):
            await soon(lambda when=when: len(runs.count("square")) >= when)
            await soon(lambda: running.kill_worker(chance))
        for number, task in enumerate(sent):
            assert await value(app, task) == number * number
        assert len(runs.count("square")) == tasks
        await soon(lambda: size(app) == 0)

    serve()
    sending(app, work)


def test_the_supervisor_is_killed_and_started_again_in_the_middle(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    async def work() -> None:
        sent = [await app.square.kiq(number, 0.02) for number in range(300)]
        await soon(lambda: len(runs.count("square")) >= 100)
        server.kill()
        sent += [await app.square.kiq(number, 0.01) for number in range(300, 400)]
        await asyncio.to_thread(serve)
        for number, task in enumerate(sent):
            assert await value(app, task) == number * number
        await soon(lambda: size(app) == 0)

    server = serve()
    workers()
    sending(app, work)


def test_what_was_sent_is_done_after_all_processes_were_killed(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    sent: list[Any] = []

    async def send() -> None:
        sent.extend([await app.square.kiq(number, 0.02) for number in range(300)])
        sent.append(await app.square.kicker().with_labels(delay=0.1).kiq(300))
        await soon(lambda: len(runs.count("square")) >= 50)

    async def collect() -> None:
        for number, task in enumerate(sent):
            assert await value(app, task) == number * number

    server, running = serve(mem_queue_size=20), workers()
    sending(app, send)
    running.close()
    server.kill()
    serve(mem_queue_size=20)
    running.start()
    sending(app, collect)


def test_a_stop_and_a_start_of_the_instance_lose_nothing(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    sent: list[Any] = []

    async def send() -> None:
        sent.extend([await app.square.kiq(number, 0.02) for number in range(200)])
        await soon(lambda: len(runs.count("square")) >= 50)
        server.process.terminate()
        await asyncio.to_thread(server.wait)
        await asyncio.to_thread(serve)
        sent.extend([await app.square.kiq(number) for number in range(200, 220)])
        for number, task in enumerate(sent):
            assert await value(app, task) == number * number

    server = serve()
    workers(1)
    sending(app, send)


def test_a_long_task_runs_once(serve: Serve, workers: Start, app: ModuleType, runs: Runs) -> None:
    async def work() -> None:
        task = await app.square.kiq(5, 1.0)  # five time-outs long
        assert await value(app, task) == 25
        await soon(lambda: size(app) == 0)
        assert runs.count("square") == {"5": 1}

    serve(msg_timeout="200ms")
    workers(2)
    sending(app, work)


def test_tasks_that_a_worker_holds_come_back_when_it_is_killed(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    async def work() -> None:
        first = workers(1)
        task = await app.square.kiq(1, 0.5)
        await soon(lambda: runs.count("square")["1"] == 1)
        (pid,) = (int(each) for _, _, each in runs.lines())
        workers(1)
        assert first.kill_worker(random.Random())
        wait_ended(pid)
        assert await value(app, task) == 1
        assert runs.count("square") == {"1": 2}

    serve(msg_timeout="600s")
    sending(app, work)
