"""Task results as bytes: the body of a task's message, and its value in the results store."""

from __future__ import annotations

import json
from datetime import datetime
from traceback import format_exception
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.utils import timezone
from django.utils.module_loading import import_string

from shmq.integrations.django.api import (
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
)

_TIMES = ("enqueued_at", "started_at", "finished_at", "last_attempted_at")


def pack(result: Any) -> bytes:
    """The bytes of a TaskResult. Raises TypeError or ValueError if its value is not JSON."""
    task = result.task
    fields: dict[str, Any] = {
        "id": result.id,
        "task": task.module_path,
        "queue": task.queue_name,
        "priority": task.priority,
        "run_after": _text(task.run_after),
        "status": str(result.status.value),
        "args": result.args,
        "kwargs": result.kwargs,
        "backend": result.backend,
        "errors": [[error.exception_class_path, error.traceback] for error in result.errors],
        "workers": result.worker_ids,
        "value": result._return_value,
    }
    for name in _TIMES:
        fields[name] = _text(getattr(result, name))
    return json.dumps(fields, separators=(",", ":")).encode()


def parse(packed: bytes) -> dict[str, Any]:
    """The fields that `pack` wrote."""
    fields: dict[str, Any] = json.loads(packed)
    return fields


def restore(fields: dict[str, Any]) -> Any:
    """The TaskResult of the fields. Raises ImportError if there is no such task any more,
    SuspiciousOperation if the name is that of something else, and what the backend raises for a
    task that it does not allow."""
    result = TaskResult(
        task=_task(fields),
        id=fields["id"],
        status=TaskResultStatus(fields["status"]),
        args=fields["args"],
        kwargs=fields["kwargs"],
        backend=fields["backend"],
        errors=[
            TaskError(exception_class_path=path, traceback=text) for path, text in fields["errors"]
        ],
        worker_ids=list(fields["workers"]),
        **{name: _time(fields[name]) for name in _TIMES},
    )
    change(result, _return_value=fields["value"])
    return result


def change(result: Any, **values: Any) -> None:
    """Set attributes of a TaskResult, which is frozen for its users."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def run_after(fields: dict[str, Any]) -> datetime | None:
    """The earliest time at which the task may run."""
    return _time(fields["run_after"])


def _task(fields: dict[str, Any]) -> Any:
    found = import_string(fields["task"])
    if not isinstance(found, Task):
        raise SuspiciousOperation(
            f"Task {fields['id']} does not point to a Task ({fields['task']})"
        )
    return found.using(
        priority=fields["priority"],
        queue_name=fields["queue"],
        run_after=_time(fields["run_after"]),
        backend=fields["backend"],
    )


def _text(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def failed(fields: dict[str, Any], exc: BaseException) -> bytes:
    """The bytes of a task that cannot be restored."""
    path = f"{type(exc).__module__}.{type(exc).__qualname__}"
    error = [path, "".join(format_exception(exc))]
    finished = timezone.now().isoformat()
    changes = {"status": "FAILED", "finished_at": finished, "errors": [*fields["errors"], error]}
    return json.dumps({**fields, **changes}, separators=(",", ":")).encode()


def shorter(packed: bytes, most: int) -> bytes:
    """The bytes of a failed task with `most` characters of each traceback, its beginning and its
    end. 0: without arguments too, which leaves a few hundred bytes."""
    fields = parse(packed)
    fields["errors"] = [[path, _cut(text, most)] for path, text in fields["errors"]]
    if not most:
        fields.update(args=[], kwargs={}, workers=fields["workers"][-1:])
    return json.dumps(fields, separators=(",", ":")).encode()


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[len(text) - (most - most // 2) :]
    return f"{head}\n... {len(text) - most} characters are left out ...\n{tail}"
