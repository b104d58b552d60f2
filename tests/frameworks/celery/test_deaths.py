"""Workers, their pools, and the supervisor are killed: every task is done and has its result."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import TimeoutError
from celery.result import ResultSet
from kombu.exceptions import OperationalError
from support.celery_app import add, dies_once, early, gate, gate_twice, late, names, noted
from support.celery_worker import Worker, environment
from support.processes import ROOT, WATCHDOG, Child, eventually

from shmq.integrations.celery.attachment import PATIENCE

Lines = Callable[[], list[list[str]]]


def begun(lines: Lines, name: str) -> list[list[str]]:
    return [words for words in lines() if words[:2] == ["begin", name]]


def test_a_task_whose_pool_process_is_killed_runs_again(
    app: Any, worker: Callable[..., Worker], lines: Lines, tmp_path: Path
) -> None:
    worker("--concurrency=2")
    assert dies_once.delay("a", str(tmp_path / "died")).get(WATCHDOG) == "a"
    assert lines() == [["survived", "a"]]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_late_task_of_a_killed_worker_runs_in_the_next_one(
    app: Any, worker: Callable[..., Worker], lines: Lines, tmp_path: Path, pool: str
) -> None:
    opened = tmp_path / "open"
    first = worker(f"--pool={pool}", "--concurrency=1")
    result = gate.delay("a", str(opened))
    eventually(lambda: begun(lines, "a"))
    first.kill()
    worker(f"--pool={pool}", "--concurrency=1")
    eventually(lambda: len(begun(lines, "a")) == 2)
    opened.touch()
    assert result.get(WATCHDOG) == "a"


def test_prefetched_tasks_of_a_killed_worker_run_in_another(
    app: Any, worker: Callable[..., Worker], lines: Lines, tmp_path: Path
) -> None:
    opened = tmp_path / "open"
    first = worker("--concurrency=1", "--prefetch-multiplier=10")
    results = [gate.delay(f"t{number}", str(opened)) for number in range(8)]
    eventually(lambda: begun(lines, "t0"))
    first.kill()
    opened.touch()
    worker("--concurrency=2")
    assert [result.get(WATCHDOG) for result in results] == [f"t{n}" for n in range(8)]


def test_an_early_task_of_a_killed_worker_is_not_run_again(
    app: Any, worker: Callable[..., Worker], lines: Lines, attach: Callable[[], Any]
) -> None:
    first = worker("--concurrency=1", "--prefetch-multiplier=1")
    early.delay("a", 3600)
    eventually(lambda: begun(lines, "a"))
    # The worker acknowledges it when its pool has said that it began.
    eventually(lambda: attach().channel_stats("kombu.celery", "queue").in_flight == 0)
    first.kill()
    worker("--concurrency=1")
    assert add.delay(1, 2).get(WATCHDOG) == 3
    assert len(begun(lines, "a")) == 1


def test_a_task_of_three_timeouts_runs_once(
    serve: Callable[..., Child],
    app: Any,
    worker: Callable[..., Worker],
    server: Child,
    lines: Lines,
) -> None:
    """The broker's timeout is one second here: it does not count while the worker lives."""
    server.kill()
    serve(msg_timeout="1s")
    worker("--concurrency=2")
    assert late.delay("long", 3.5).get(WATCHDOG) == "long"
    assert add.delay(1, 2).get(WATCHDOG) == 3
    assert len(begun(lines, "long")) == 1


def test_a_killed_supervisor_stops_nothing(
    app: Any, worker: Callable[..., Worker], server: Child, serve: Callable[..., Child]
) -> None:
    worker("--concurrency=2")
    assert add.delay(1, 2).get(WATCHDOG) == 3
    server.kill()
    results = [add.delay(number, 1) for number in range(50)]
    assert [result.get(WATCHDOG) for result in results] == list(range(1, 51))
    serve()
    later = add.apply_async((1, 2), countdown=0.5)
    assert later.get(WATCHDOG) == 3


def test_workers_go_on_after_the_broker_was_stopped_and_started(
    app: Any, worker: Callable[..., Worker], server: Child, serve: Callable[..., Child]
) -> None:
    worker("--concurrency=2")
    assert add.delay(1, 2).get(WATCHDOG) == 3
    server.process.send_signal(signal.SIGTERM)
    server.succeed()
    serve()
    assert add.delay(2, 2).get(2 * WATCHDOG) == 4


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
@pytest.mark.parametrize("kind", ["retry", "chain"])
def test_what_a_task_sends_while_the_broker_is_away_is_done(
    app: Any,
    worker: Callable[..., Worker],
    server: Child,
    serve: Callable[..., Child],
    lines: Lines,
    tmp_path: Path,
    kind: str,
    pool: str,
) -> None:
    """It would be lost: the task cannot be asked to send it again."""
    opened = tmp_path / "open"
    own = worker(f"--pool={pool}", "--concurrency=1")
    if kind == "retry":
        result = gate_twice.delay("a", str(opened))
    else:
        result = chain(gate.s("a", str(opened)), noted.s("b")).delay()
    eventually(lambda: begun(lines, "a"))
    server.process.send_signal(signal.SIGTERM)
    server.succeed()
    opened.touch()

    def gave_up() -> bool:
        return bool(re.search("OperationalError|refused callback", own.child.errors))

    with contextlib.suppress(AssertionError):
        eventually(gave_up, 2.0)  # Celery's own policy is over after 0.6 s
    assert not gave_up(), own.child.errors
    serve()
    assert result.get(2 * WATCHDOG) == ("a" if kind == "retry" else "a b")


def test_another_program_has_the_patience_of_its_policy(app: Any, server: Child) -> None:
    """A request of a web server does not wait for a broker that is away."""
    assert add.delay(1, 2).id
    server.process.send_signal(signal.SIGTERM)
    server.succeed()
    began = time.monotonic()
    with pytest.raises(OperationalError, match="running"):
        add.apply_async((1, 2), retry_policy={"max_retries": 1, "interval_start": 0})
    assert time.monotonic() - began < PATIENCE


def test_a_program_that_waits_outlives_a_stop_and_a_start_of_the_broker(
    app: Any,
    worker: Callable[..., Worker],
    server: Child,
    serve: Callable[..., Child],
    lines: Lines,
    tmp_path: Path,
) -> None:
    opened = tmp_path / "open"
    worker("--concurrency=2")
    results = [gate.delay(name, str(opened)) for name in ("a", "b")]
    eventually(lambda: begun(lines, "a"))
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(results[0].get, 4 * WATCHDOG)
        many = pool.submit(ResultSet(results).join_native, 4 * WATCHDOG)
        eventually(lambda: one.running() and many.running())
        server.process.send_signal(signal.SIGTERM)
        server.succeed()
        wait({one, many}, timeout=1)  # an answer now would be an error
        assert not one.done()
        assert not many.done()
        serve()
        opened.touch()
        assert one.result() == "a"
        assert many.result() == ["a", "b"]


def test_a_wait_with_a_limit_ends_although_the_broker_stays_away(app: Any, server: Child) -> None:
    result = add.delay(1, 2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(result.get, 2)
        eventually(waits.running)
        server.process.send_signal(signal.SIGTERM)
        server.succeed()
        with pytest.raises(TimeoutError):
            waits.result(WATCHDOG)


def test_what_was_enqueued_is_done_after_all_processes_were_killed(
    app: Any,
    worker: Callable[..., Worker],
    server: Child,
    serve: Callable[..., Child],
    lines: Lines,
    tmp_path: Path,
) -> None:
    opened = tmp_path / "open"
    first = worker("--concurrency=2")
    results = [gate.delay(f"t{number}", str(opened)) for number in range(20)]
    eventually(lambda: begun(lines, "t0"))
    server.kill()
    first.kill()
    opened.touch()
    serve()
    worker("--concurrency=2")
    assert [result.get(WATCHDOG) for result in results] == [f"t{n}" for n in range(20)]


@pytest.mark.parametrize(
    ("tasks", "kills"),
    [
        pytest.param(500, 10, marks=pytest.mark.shallow),
        pytest.param(5000, 100, marks=pytest.mark.deep),
    ],
)
def test_every_task_is_done_whatever_is_killed(
    app: Any, worker: Callable[..., Worker], lines: Lines, tasks: int, kills: int
) -> None:
    """Processes of pools and, one time in ten, whole workers are killed at random instants."""
    chance = random.Random(tasks)
    workers = [worker("--concurrency=2"), worker("--concurrency=2")]
    results = [late.delay(f"t{number}", 0.004) for number in range(tasks)]

    def ended() -> int:
        return sum(words[0] == "end" for words in lines())

    for number in range(kills):
        eventually(lambda number=number: ended() >= number * tasks // (kills + 1))
        if number % 10:
            victim = chance.choice(workers)
            pool = eventually(lambda victim=victim: victim.pool())
            Worker.shoot(chance.choice(pool))
        else:
            victim = workers.pop(chance.randrange(2))
            victim.kill()
            workers.append(worker("--concurrency=2"))
    for number, result in enumerate(results):
        assert result.get(5 * WATCHDOG) == f"t{number}"
    done = Counter(words[1] for words in lines() if words[0] == "end")
    assert len(done) == tasks


def test_a_chord_is_completed_although_workers_die(
    app: Any, worker: Callable[..., Worker], lines: Lines, tmp_path: Path
) -> None:
    opened = tmp_path / "open"
    first = worker("--concurrency=2")
    result = chord([gate.s(f"t{number}", str(opened)) for number in range(6)], names.s()).delay()
    eventually(lambda: begun(lines, "t0"))
    first.kill()
    opened.touch()
    worker("--concurrency=2")
    assert result.get(WATCHDOG) == [f"t{number}" for number in range(6)]


def test_nothing_of_a_killed_client_stays(
    app: Any, worker: Callable[..., Worker], attach: Callable[[], Any], instance: str
) -> None:
    """The reply queue of a program that asked for replies and died goes away."""
    worker("--concurrency=1")
    broker = attach()
    code = (
        "import os, signal; from support.celery_app import app\n"
        "assert app.control.ping(timeout=60, limit=1)\n"
        "connection = app.connection(); channel = connection.channel()\n"
        "queue = app.control.mailbox.reply_queue(channel); queue.declare()\n"
        "import kombu; kombu.Consumer(channel, [queue]).consume()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = {topic.name for topic in broker.stats().topics}
    env = environment(instance, ROOT / "nowhere", {})
    child = Child([sys.executable, "-c", code], env)
    try:
        assert child.wait() == -signal.SIGKILL, child.errors
    finally:
        child.close()
    eventually(lambda: {topic.name for topic in broker.stats().topics} <= before)
