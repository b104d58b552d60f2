"""The tasks that the tests of django-tasks-db and django-tasks-rq enqueue, by their names. Their
source packages have the tests without these."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shmq.integrations.django.api import TaskContext, tasks

task: Any = tasks.task


@task
def noop_task(*args: object, **named: object) -> None:
    """Does nothing."""


@task
async def noop_task_async(*args: object, **named: object) -> None:
    """Does nothing in a loop."""


@task
def calculate_meaning_of_life() -> int:
    """Gives a number."""
    return 42


@task
def failing_task_value_error() -> None:
    """Fails."""
    raise ValueError("This task failed due to ValueError")


@task
def failing_task_system_exit() -> None:
    """Fails with what would end a process."""
    raise SystemExit("This task failed due to SystemExit")


@task
def failing_task_keyboard_interrupt() -> None:
    """Fails as if by Ctrl-C."""
    raise KeyboardInterrupt("This task failed due to KeyboardInterrupt")


@task
def complex_exception() -> None:
    """Fails with an exception within another."""
    raise ValueError(ValueError("This task failed"))


@task
def complex_return_value() -> Callable[[], bool]:
    """Gives what is no JSON."""
    return lambda: True


@task
def exit_task() -> None:
    """Would end its process."""
    raise SystemExit(1)


@task
def sleep_for(seconds: float) -> None:
    """Takes some time."""
    time.sleep(seconds)


@task(takes_context=True)
def get_task_id(context: Any) -> str:
    """Gives the id of its result."""
    found: str = context.task_result.id
    return found


@task(takes_context=True)
def test_context(context: Any, attempt: int) -> None:
    """Looks at its context."""
    assert isinstance(context, TaskContext)
    assert context.attempt == attempt
