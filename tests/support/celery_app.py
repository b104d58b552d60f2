"""The Celery application of tests/frameworks/celery.

SHMQ_INSTANCE names the instance, CELERY_SETTINGS has settings as JSON, and CELERY_NOTES is a file
to which tasks append a line when they begin and when they end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import celery

app = celery.Celery("support.celery_app", broker="shmq://", backend="shmq://", set_as_current=True)
app.conf.update(json.loads(os.environ.get("CELERY_SETTINGS", "{}")))


def note(*words: object) -> None:
    """Append a line to the notes, in one write."""
    line = " ".join(map(str, words)) + "\n"
    notes = os.open(os.environ["CELERY_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(notes, line.encode())
    finally:
        os.close(notes)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def names(found: list[str]) -> list[str]:
    return sorted(found)


@app.task
def long_text(length: int) -> str:
    return "x" * length


@app.task(bind=True, ignore_result=True)
def again(self: Any) -> None:
    """Sends itself again and again, so that its queue always has a task."""
    time.sleep(0.02)
    self.apply_async(queue="busy")


@app.task
def noted(*words: str) -> str:
    note(*words)
    return " ".join(words)


@app.task(bind=True, max_retries=5, retry_backoff=True)
def flaky(self: Any, name: str, failures: int) -> int:
    """Fails so many times, then returns how often it was tried."""
    note("try", name)
    tried = int(self.request.retries)
    if tried < failures:
        raise self.retry(countdown=0.05 * 2**tried)
    return tried + 1


@app.task(acks_late=True, reject_on_worker_lost=True)
def late(name: str, seconds: float) -> str:
    """Works for so long, and notes its beginning and its end."""
    note("begin", name, os.getpid())
    time.sleep(seconds)
    note("end", name, os.getpid())
    return name


@app.task
def early(name: str, seconds: float) -> str:
    """As `late`, but it was acknowledged before."""
    note("begin", name, os.getpid())
    time.sleep(seconds)
    note("end", name, os.getpid())
    return name


@app.task(acks_late=True, reject_on_worker_lost=True)
def gate(name: str, path: str) -> str:
    """Waits until a file is there."""
    note("begin", name, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.01)
    note("end", name, os.getpid())
    return name


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def gate_twice(self: Any, name: str, path: str) -> str:
    """Waits until a file is there, and is retried once."""
    note("begin", name, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.01)
    if not self.request.retries:
        raise self.retry(countdown=0)
    note("end", name, os.getpid())
    return name


@app.task(acks_late=True, reject_on_worker_lost=True)
def dies_once(name: str, path: str) -> str:
    """Kills its process, unless it did so before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        note("survived", name)
        return name
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
