"""Rows of Django's tasks: a backend with a worker in its process, and the command."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["DJANGO_SETTINGS_MODULE"] = "lifecycle.django_settings"

import django

django.setup()

from lifecycle.handles import Held, Site, handle  # noqa: E402
from lifecycle.rows_of_programs import ENDS, Program, held  # noqa: E402

from shmq.integrations.django import Backend  # noqa: E402
from shmq.integrations.django.api import TaskResultStatus, tasks  # noqa: E402
from shmq.integrations.django.worker import Duty, Worker  # noqa: E402


@tasks.task
def nap() -> None:
    """Nothing."""


def backend() -> Any:
    return tasks.task_backends["default"]


@handle(Backend, warm=True, keeps=True)
def django_tasks(site: Site) -> Held:
    made = backend()
    task = nap.enqueue()
    worker = Worker(made, Duty(burst=True))
    worker.run()
    assert worker.done
    assert made.get_result(task.id).status == TaskResultStatus.SUCCESSFUL
    return Held(made, None, None, made.home.forget)


@handle(ends=ENDS, warm=True)
def django_worker(site: Site) -> Held:
    words = [sys.executable, "-m", "django", "shmq_worker", "--processes=1"]
    made = Program(words)
    task = nap.enqueue()
    made.until(lambda: backend().get_result(task.id).is_finished)
    backend().home.forget()
    return held(made)
