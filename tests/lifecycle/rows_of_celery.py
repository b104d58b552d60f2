"""Rows of Celery: a connection of kombu, a result backend, a worker. The module is the application,
too."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import celery
import kombu
from lifecycle.handles import SECONDS, Held, Site, handle
from lifecycle.rows_of_programs import ENDS, Program, held

from shmq.integrations.celery import attachment
from shmq.integrations.celery.backend import Backend
from shmq.integrations.celery.channel import Channel
from shmq.integrations.celery.transport import Transport

app = celery.Celery("lifecycle", broker="shmq://", backend="shmq://")
app.conf.update(worker_prefetch_multiplier=1, task_default_queue="lifecycle")


@app.task(name="nap")
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@handle(Transport, Channel, warm=True, keeps=True)
def celery_connection(site: Site) -> Held:
    connection = kombu.Connection(f"shmq://{site.instance}")
    queue = connection.SimpleQueue("lifecycle.connection")
    if not queue.qsize():
        queue.put({"number": 1})
    return Held(connection, None, (queue, queue.get(timeout=SECONDS)))


@handle(Backend, warm=True, keeps=True)
def celery_results(site: Site) -> Held:
    made = Backend(app, f"shmq://{site.instance}")
    made.store_result("id", 1, "SUCCESS")
    assert made.wait_for("id", SECONDS)["result"] == 1
    return Held(made)


@handle(ends=ENDS, warm=True)
def celery_worker(site: Site) -> Held:
    words = [sys.executable, "-m", "celery", "-A", __name__, "worker", "-c", "1", "-l", "INFO"]
    env = {"SHMQ_INSTANCE": site.instance, "C_FORCE_ROOT": "1"}
    made = Program([*words, "--without-gossip", "--without-mingle", "-n", "w@h"], env)
    made.until(lambda: " ready." in made.said)
    with contextlib.closing(kombu.Connection(f"shmq://{site.instance}")) as connection:
        task: Any = app.signature("nap", (0.2,))
        task.apply_async(connection=connection, ignore_result=True)
    attachment.detach(site.instance)
    made.until(lambda: "succeeded" in made.said)
    return held(made)
