"""Dead letters of Taskiq's tasks."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from taskiq import TaskiqMessage, TaskiqMiddleware, TaskiqResult
from taskiq.exceptions import NoResultError

_NEVER_RUN: Final = "no task of this name, or a message that cannot be read"

#: The state of the delivery that the current task of the event loop handles. Each task has a
#: context of its own.
_began: ContextVar[bool] = ContextVar("began", default=False)
_failed: ContextVar[tuple[TaskiqResult[Any], BaseException] | None] = ContextVar(
    "failed", default=None
)


class DeadLetters(TaskiqMiddleware):
    """A middleware that makes dead letters of tasks that raised, in place of acknowledging them.

    A task that a retry middleware has sent again is no dead letter, and neither is one that raised
    NoResultError. A task that calls `context.reject()` becomes one, and so does a message that
    cannot be read or that names an unknown task. With `ack_type="when_received"` a task is
    acknowledged before it fails.

    `shmq dead ls taskiq workers` lists them, and `shmq dead redrive` sends them back.
    """

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Note that the task is known."""
        _began.set(True)
        return message

    def on_error(
        self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException
    ) -> None:
        """Note that the task raised."""
        _failed.set((result, exception))


def error_of_delivery() -> str | None:
    """Why the delivery that is being acknowledged is a dead letter; None if it is none. Called in
    the context of the task of the event loop that handles the delivery."""
    if not _began.get():
        return _NEVER_RUN
    failed = _failed.get()
    if failed is None or isinstance(failed[0].error, NoResultError):
        return None
    return f"{type(failed[1]).__name__}: {failed[1]}"
