"""Celery's other programs on shmq: beat, `celery multi`, `celery inspect`, Flower; and programs
that have nothing but a URL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.celery_app import add
from support.celery_worker import Worker, environment
from support.processes import WATCHDOG, Child, eventually, wait_ended

Lines = Callable[[], list[list[str]]]


def celery(instance: str, notes: Path, *words: str, **settings: Any) -> Child:
    argv = [sys.executable, "-m", "celery", "-A", "support.celery_app", *words]
    return Child(argv, environment(instance, notes, settings))


def test_a_program_with_nothing_but_a_url_finds_transport_and_backend(
    worker: Callable[..., Worker], instance: str, keep: Callable[[Any], Any]
) -> None:
    worker("--concurrency=1")
    code = (
        "import celery, sys\n"
        f"app = celery.Celery(broker='shmq://{instance}', backend='shmq://{instance}')\n"
        "task = app.send_task('support.celery_app.add', (1, 2))\n"
        "assert task.get(timeout=60) == 3\n"
        "print(app.connection().as_uri())"
    )
    child = keep(Child([sys.executable, "-c", code]))
    assert child.succeed() == [f"shmq://{instance}"]


def test_the_full_name_of_the_transport_works_too(server: Child, instance: str) -> None:
    import kombu

    transport = "shmq.integrations.celery.transport:Transport"
    with (
        kombu.Connection(f"shmq://{instance}", transport=transport) as connection,
        contextlib.closing(connection.SimpleQueue("simple")) as queue,
    ):
        queue.put({"a": 1})
        message = queue.get(timeout=WATCHDOG)
        assert message.payload == {"a": 1}
        message.ack()


def test_beat_sends_what_is_due(
    app: Any,
    worker: Callable[..., Worker],
    lines: Lines,
    instance: str,
    notes: Path,
    tmp_path: Path,
    keep: Callable[[Any], Any],
) -> None:
    worker("--concurrency=1")
    entry = {"task": "support.celery_app.noted", "schedule": 0.1, "args": ["tick"]}
    words = ("beat", f"--schedule={tmp_path / 'schedule'}", "--pidfile=")
    keep(celery(instance, notes, *words, beat_schedule={"tick": entry}))
    eventually(lambda: len(lines()) >= 3)
    assert {tuple(words) for words in lines()} == {("tick",)}


def test_the_command_inspect_is_answered(
    app: Any,
    worker: Callable[..., Worker],
    instance: str,
    notes: Path,
    keep: Callable[[Any], Any],
) -> None:
    name = worker("--concurrency=1").name
    words = ("inspect", "ping", "--json", f"--timeout={WATCHDOG}", "-d", name)
    said = keep(celery(instance, notes, *words)).succeed(2 * WATCHDOG)
    assert json.loads(said[-1] if said[-1].startswith("{") else "".join(said)) == {
        name: {"ok": "pong"}
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_flower_shows_workers_and_tasks(
    app: Any,
    worker: Callable[..., Worker],
    instance: str,
    notes: Path,
    keep: Callable[[Any], Any],
) -> None:
    pytest.importorskip("flower")
    name = worker("--concurrency=1", "--task-events").name
    port = free_port()
    words = ("flower", "--address=127.0.0.1", f"--port={port}")
    env = {**environment(instance, notes, {}), "FLOWER_UNAUTHENTICATED_API": "true"}
    argv = [sys.executable, "-m", "celery", "-A", "support.celery_app", *words]
    flower = keep(Child(argv, env))

    def ask(path: str, method: str = "GET") -> Any:
        url, body = f"http://127.0.0.1:{port}/api/{path}", b"{}" if method == "POST" else None
        request = urllib.request.Request(url, body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WATCHDOG) as answer:
                return json.load(answer)
        except OSError as exc:
            assert flower.process.poll() is None, flower.errors
            return {"error": str(exc)}

    eventually(lambda: name in ask("workers?refresh=1"), 2 * WATCHDOG)
    task = add.delay(20, 22)
    assert task.get(WATCHDOG) == 42

    def shown() -> bool:
        return bool(ask(f"task/info/{task.id}").get("state") == "SUCCESS")

    eventually(shown)
    assert ask(f"task/info/{task.id}")["result"] == "42"
    sent = ask("task/send-task/support.celery_app.add", "POST")
    eventually(lambda: ask(f"task/info/{sent['task-id']}").get("state") == "FAILURE")


@pytest.mark.deep
def test_celery_multi_starts_restarts_and_stops_workers(
    app: Any, instance: str, notes: Path, tmp_path: Path
) -> None:
    env = {**os.environ, **environment(instance, notes, {})}
    where = [f"--pidfile={tmp_path}/%n.pid", f"--logfile={tmp_path}/%n%I.log"]

    def multi(command: str) -> None:
        words = ["-m", "celery", "multi", command, "2", "-A", "support.celery_app", "-c1", *where]
        subprocess.run([sys.executable, *words], env=env, check=True, timeout=10 * WATCHDOG)

    def pids() -> list[int]:
        found = [path.read_text().strip() for path in tmp_path.glob("*.pid")]
        return sorted(int(text) for text in found if text)

    try:
        multi("start")
        first = eventually(lambda: len(pids()) == 2 and pids(), 2 * WATCHDOG)
        assert add.delay(1, 2).get(WATCHDOG) == 3
        multi("restart")
        second = eventually(
            lambda: len(pids()) == 2 and not set(pids()) & set(first) and pids(), 2 * WATCHDOG
        )
        assert add.delay(2, 2).get(WATCHDOG) == 4
        multi("stopwait")
        for pid in (*first, *second):
            wait_ended(pid)
    finally:
        for pid in pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
