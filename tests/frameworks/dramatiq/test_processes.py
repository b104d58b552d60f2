"""An application with the command `dramatiq`, whose processes are killed."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dramatiq
import pytest
from dramatiq.results import ResultFailure
from support.framework_workers import Command, Runs
from support.processes import WATCHDOG, Child, eventually, wait_ended

APP = "frameworks.dramatiq.app"
LONG = int(WATCHDOG * 1000)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@pytest.fixture
def app(instance: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The application in this process, which sends."""
    monkeypatch.setenv("SHMQ_INSTANCE", instance)
    monkeypatch.setenv("RUNS", str(runs.path))
    sys.modules.pop(APP, None)
    module = importlib.import_module(APP)
    yield module
    module.broker.close()
    for link in (module.limits, module.results):
        link.close()


@pytest.fixture
def workers(instance: str, runs: Runs, keep: Callable[[Any], Any]) -> Callable[..., Command]:
    """`workers(processes, threads)`: the command `dramatiq`."""

    def start(processes: int = 2, threads: int = 4) -> Command:
        words = ["dramatiq", APP, "--processes", str(processes), "--threads", str(threads)]
        return keep(Command(words, {"SHMQ_INSTANCE": instance, "RUNS": str(runs.path)}))

    return start


Serve = Callable[..., Child]
Start = Callable[..., Command]


def test_pipelines_groups_retries_delays_limits_and_barriers(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    serve()
    workers()
    chain = (app.add.message(1, 2) | app.add.message(3) | app.add.message(4)).run()
    assert chain.get_result(block=True, timeout=LONG) == 10
    assert list(chain.get_results(block=True, timeout=LONG)) == [3, 6, 10]
    group = dramatiq.group(app.square.message(n) for n in range(20))
    group.add_completion_callback(app.collected.message("squares"))
    group.run()
    assert list(group.get_results(block=True, timeout=LONG)) == [n * n for n in range(20)]
    eventually(lambda: runs.count("collected") == {"squares": 1})

    message = app.flaky.send("twice", 2)
    assert message.get_result(block=True, timeout=LONG) == "twice"
    assert runs.count("flaky") == {"twice": 3}

    delayed = app.square.send_with_options(args=(7,), delay=300)
    assert delayed.get_result(block=True, timeout=LONG) == 49

    for number in range(20):
        app.alone.send(str(number))
    eventually(lambda: len(runs.count("alone-end")) == 20)
    events = [(name, key) for name, key, _ in runs.lines() if name.startswith("alone")]
    for (first, one), (second, other) in zip(events[::2], events[1::2], strict=True):
        assert (first, second, one) == ("alone-begin", "alone-end", other)

    for _ in range(3):
        app.meet.send("noon", 3)
    eventually(lambda: runs.count("met") == {"noon": 3})
    app.broker.join("default", timeout=LONG)


def test_a_message_that_failed_for_good_is_a_dead_letter(
    serve: Serve, workers: Start, app: ModuleType
) -> None:
    serve()
    workers(1, 1)
    app.broken.send("this")
    topic = app.broker.topics("default")[0]
    app.broker.attachment.create_channel(topic, "workers")
    dead = app.broker.attachment.dead(topic, "workers")
    (letter,) = eventually(dead.peek)
    assert letter.error == "ValueError: this is broken"
    assert dramatiq.Message.decode(letter.body).args == ("this",)
    square = app.square.send("no number")
    with pytest.raises(ResultFailure):
        square.get_result(block=True, timeout=LONG)


def test_a_higher_priority_goes_first(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    serve()
    for priority in (0, 2, 4, 9, 7, 5, 3, None):
        options = {} if priority is None else {"broker_priority": priority}
        app.ordered.send_with_options(args=(str(priority),), **options)
    workers(1, 1)
    eventually(lambda: len(runs.count("ordered")) == 8)
    lanes = ["97", "5", "43", "02N"]
    order = [
        next(n for n, lane in enumerate(lanes) if key[0] in lane) for _, key, _ in runs.lines()
    ]
    assert order == sorted(order)


def kill_workers(
    commands: list[Command], app: ModuleType, runs: Runs, tasks: int, kills: int
) -> list[dramatiq.Message[int]]:
    """Send tasks, and kill workers when random numbers of tasks have begun. Dramatiq's command ends
    with its worker, so it is started again, as a service manager does."""
    chance = random.Random()
    sent = [app.square.send(number, 0.01) for number in range(tasks)]

    def begun(count: int) -> bool:
        for command in commands:
            command.keep()
        return len(runs.count("square")) >= count

    for when in sorted(chance.sample(range(1, tasks), kills)):
        eventually(lambda when=when: begun(when))
        eventually(lambda: begun(0) and chance.choice(commands).kill_worker(chance))
    eventually(lambda: begun(tasks), tasks / 500 * WATCHDOG)
    eventually(lambda: begun(tasks) and app.broker.size("default") == 0)
    return sent


@pytest.mark.parametrize(
    ("tasks", "kills"),
    [
        pytest.param(500, 10, marks=pytest.mark.shallow),
        # dramatiq takes seconds to start a process again: ten minutes on a quiet machine
        pytest.param(5000, 100, marks=[pytest.mark.deep, pytest.mark.timeout(1800)]),
    ],
)
def test_no_task_is_lost_when_workers_are_killed(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs, tasks: int, kills: int
) -> None:
    serve()
    commands = [workers(1), workers(1)]
    sent = kill_workers(commands, app, runs, tasks, kills)
    for number, message in enumerate(sent):
        assert message.get_result(block=True, timeout=LONG) == number * number
    again = sum(runs.count("square").values()) - tasks
    assert again <= kills * 8  # each kill repeats at most what the worker's threads had begun


def test_the_supervisor_is_killed_and_started_again_in_the_middle(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    server = serve()
    workers()
    sent = [app.square.send(number, 0.005) for number in range(300)]
    eventually(lambda: len(runs.count("square")) >= 100)
    server.kill()
    sent += [app.square.send(number, 0.005) for number in range(300, 400)]
    serve()
    for number, message in enumerate(sent):
        assert message.get_result(block=True, timeout=LONG) == number * number
    app.broker.join("default", timeout=LONG)


def test_what_was_sent_is_done_after_all_processes_were_killed(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    server, command = serve(mem_queue_size=20), workers()
    sent = [app.square.send(number, 0.005) for number in range(300)]
    sent.append(app.square.send_with_options(args=(300,), delay=100))
    eventually(lambda: len(runs.count("square")) >= 50)
    command.close()
    server.kill()
    app.broker.close()
    app.results.close()
    serve(mem_queue_size=20)
    command.start()
    for number, message in enumerate(sent):
        assert message.get_result(block=True, timeout=LONG) == number * number


def test_a_stop_and_a_start_of_the_instance_lose_nothing(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    server = serve()
    workers(1, 2)
    sent = [app.square.send(number, 0.01) for number in range(200)]
    eventually(lambda: len(runs.count("square")) >= 50)
    server.process.terminate()
    server.wait()
    serve()
    sent += [app.square.send(number, 0.0) for number in range(200, 220)]
    for number, message in enumerate(sent):
        assert message.get_result(block=True, timeout=LONG) == number * number


def test_a_long_task_runs_once(serve: Serve, workers: Start, app: ModuleType, runs: Runs) -> None:
    serve(msg_timeout="200ms")
    workers(2, 2)
    message = app.square.send(5, 1.0)  # five time-outs long
    assert message.get_result(block=True, timeout=LONG) == 25
    app.broker.join("default", timeout=LONG)
    assert runs.count("square") == {"5": 1}


def test_messages_that_a_worker_holds_come_back_when_it_is_killed(
    serve: Serve, workers: Start, app: ModuleType, runs: Runs
) -> None:
    serve(msg_timeout="600s")
    first = workers(1, 1)
    (message,) = [app.square.send(1, 0.5)]
    eventually(lambda: runs.count("square")["1"] == 1)
    (pid,) = first.workers()
    workers(1, 1)
    assert first.kill_worker(random.Random())
    wait_ended(pid)
    assert message.get_result(block=True, timeout=LONG) == 1
    assert runs.count("square") == {"1": 2}
