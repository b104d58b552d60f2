"""An application that is really run: canvases, retries, times, exchanges, pools."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult
from support.celery_app import add, again, flaky, gate, long_text, names, noted, total
from support.celery_worker import Worker
from support.processes import WATCHDOG, eventually

POOLS = [("prefork", "2"), ("threads", "2"), ("solo", "1"), ("gevent", "10")]


@pytest.mark.parametrize(("pool", "size"), POOLS)
def test_tasks_and_canvases_run_in_each_pool(
    app: Any, worker: Callable[..., Worker], pool: str, size: str
) -> None:
    worker(f"--pool={pool}", f"--concurrency={size}")
    assert add.delay(1, 2).get(WATCHDOG) == 3
    assert chain(add.s(1, 2), add.s(3), add.s(4)).delay().get(WATCHDOG) == 10
    assert group(add.s(n, n) for n in range(10)).delay().get(WATCHDOG) == list(range(0, 20, 2))
    assert chord((add.s(n, n) for n in range(10)), total.s()).delay().get(WATCHDOG) == 90
    assert app.control.ping(timeout=WATCHDOG, limit=1)


def test_a_task_that_fails_is_tried_again_after_a_growing_time(
    app: Any, worker: Callable[..., Worker], lines: Callable[[], list[list[str]]]
) -> None:
    worker("--concurrency=2")
    assert flaky.delay("x", 3).get(WATCHDOG) == 4
    assert lines() == [["try", "x"]] * 4


def test_a_task_with_a_countdown_waits_in_the_broker(
    app: Any, worker: Callable[..., Worker], attach: Callable[[], Any]
) -> None:
    worker("--concurrency=1")
    began = time.time()
    result = noted.apply_async(("later",), countdown=2)
    channel = attach().channel_stats("kombu.celery", "queue")
    assert channel.deferred == 1 or result.ready()
    assert result.get(WATCHDOG) == "later"
    assert time.time() >= began + 2


def test_higher_priorities_run_first(
    app: Any, worker: Callable[..., Worker], lines: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    for priority in (9, 6, 3, 0):
        noted.apply_async((f"p{priority}",), priority=priority)
    worker("--concurrency=1", "--prefetch-multiplier=1")
    eventually(lambda: len(lines()) == 4)
    assert lines() == [["p0"], ["p3"], ["p6"], ["p9"]]


def test_workers_answer_inspection_and_revoke_tasks(
    app: Any, worker: Callable[..., Worker], lines: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    name = worker("--concurrency=1").name
    opened = tmp_path / "open"
    running = gate.delay("a", str(opened))
    waiting = noted.delay("never")
    eventually(lambda: lines()[:1] and lines()[0][:2] == ["begin", "a"])
    inspect = app.control.inspect([name], timeout=5)

    def told(question: Callable[[], Any]) -> Any:
        return eventually(lambda: (question() or {}).get(name), what="the worker answers")

    assert [task["id"] for task in told(inspect.active)] == [running.id]
    eventually(lambda: [task["id"] for task in told(inspect.reserved)] == [waiting.id])
    assert told(inspect.stats)["broker"]["transport"] == "shmq"
    assert told(inspect.active_queues)[0]["name"] == "celery"
    app.control.revoke(waiting.id, reply=True, timeout=WATCHDOG, limit=1)
    opened.touch()
    assert running.get(WATCHDOG) == "a"
    with pytest.raises(Exception, match="revoked"):
        waiting.get(WATCHDOG)
    assert ["never"] not in lines()


def test_every_question_to_a_worker_is_answered(app: Any, worker: Callable[..., Worker]) -> None:
    """A program deletes its queue of replies after each question, and declares it for the next."""
    name = worker("--concurrency=1").name
    eventually(lambda: app.control.inspect([name], timeout=5).ping(), what="the worker answers")
    inspect = app.control.inspect([name], timeout=WATCHDOG)
    for _ in range(100):
        assert inspect.ping() == {name: {"ok": "pong"}}


def test_a_worker_begins_and_ends_to_consume_a_queue_while_it_runs_a_task(
    app: Any, worker: Callable[..., Worker], lines: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    name = worker("--concurrency=1").name
    opened = tmp_path / "open"
    running = gate.delay("a", str(opened))
    eventually(lambda: lines()[:1])
    wait = {"reply": True, "timeout": WATCHDOG, "limit": 1, "destination": [name]}
    app.control.add_consumer("other", **wait)
    opened.touch()
    assert running.get(WATCHDOG) == "a"
    assert noted.apply_async(("other",), queue="other").get(WATCHDOG) == "other"
    app.control.cancel_consumer("other", **wait)
    left = noted.apply_async(("left",), queue="other")
    assert add.delay(1, 1).get(WATCHDOG) == 2
    assert not left.ready()
    assert [words[:2] for words in lines()].count(["begin", "a"]) == 1


def test_a_busy_queue_holds_up_no_other(app: Any, worker: Callable[..., Worker]) -> None:
    """The busy one always has tasks, which were there first."""
    for _ in range(5):
        again.apply_async(queue="busy")
    worker("--concurrency=1", "--prefetch-multiplier=1", "--queues=busy,quiet")
    assert add.apply_async((1, 2), queue="quiet").get(WATCHDOG) == 3


def test_a_task_that_expires_before_a_worker_takes_it_is_revoked(
    app: Any, worker: Callable[..., Worker]
) -> None:
    results = [
        add.apply_async((1, 1), expires=0.01),
        add.apply_async((1, 1), expires=0.01, priority=9),
        chain(add.s(1, 1).set(expires=0.01), add.s(1))(),
    ]
    time.sleep(0.02)
    worker("--concurrency=1")
    for result in (*results[:2], results[2].parent):
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(WATCHDOG)
        assert result.state == "REVOKED"
    assert add.apply_async((1, 1), expires=3600).get(WATCHDOG) == 2


def test_a_group_of_many_parts_is_stored_and_found(app: Any) -> None:
    parts = [app.AsyncResult(f"{number:036d}") for number in range(25_000)]
    store = app.backend.client
    header = app.GroupResult("many", parts)
    header.save()
    assert len(store) > 1
    assert app.GroupResult.restore("many").results == parts
    header.delete()
    assert app.GroupResult.restore("many") is None
    assert len(store) == 0


def test_a_body_whose_arguments_can_never_fit_fails_at_once(
    app: Any, worker: Callable[..., Worker], lines: Callable[[], list[list[str]]]
) -> None:
    started = worker("--concurrency=1")
    body = chord([long_text.s(100_000) for _ in range(12)], names.s()).delay()
    with pytest.raises(ChordError, match="max_msg_size is 1048576"):
        body.get(WATCHDOG)
    assert started.child.errors.count("its body was not started") == 1


def test_a_result_that_can_never_fit_is_a_failure(app: Any, worker: Callable[..., Worker]) -> None:
    worker("--concurrency=1")
    with pytest.raises(Exception, match="max_msg_size") as caught:
        long_text.delay(2 << 20).get(WATCHDOG)
    assert type(caught.value).__name__ == "MessageTooBig"


@pytest.mark.parametrize("state", ["STARTED", "RETRY", "FAILURE", "REVOKED"])
def test_a_success_outlives_what_a_slower_run_stores(
    app: Any, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped for a while says that its run is retried, after another run of the
    same task had success: Celery had looked before."""
    backend, look = app.backend, app.backend._get_task_meta_for

    def slowly(task: str) -> Any:
        found = look(task)
        monkeypatch.undo()
        app.backend.store_result(task, 7, "SUCCESS")
        return found

    monkeypatch.setattr(backend, "_get_task_meta_for", slowly)
    backend.store_result("a", {} if state == "STARTED" else ValueError("slow"), state)
    assert AsyncResult("a", app=app).get(WATCHDOG) == 7


def test_a_task_that_failed_and_runs_again_has_no_result(app: Any) -> None:
    app.backend.store_result("a", ValueError("once"), "FAILURE")
    assert AsyncResult("a", app=app).state == "FAILURE"
    app.backend.store_result("a", ValueError("twice"), "FAILURE")
    app.backend.store_result("a", ValueError("again"), "RETRY")  # of the run that sent this one
    assert app.AsyncResult("a").state == "FAILURE"
    app.backend.store_result("a", {}, "STARTED")
    assert AsyncResult("a", app=app).state == "STARTED"
    app.backend.store_result("a", 7, "SUCCESS")
    assert AsyncResult("a", app=app).get(WATCHDOG) == 7
