"""Taskiq on shmq: broker, results, schedules and dead letters, with the extra `taskiq`.

    from shmq.integrations.taskiq import Broker, ResultBackend

    broker = Broker("jobs").with_result_backend(ResultBackend("jobs"))

    @broker.task
    async def add(a: int, b: int) -> int:
        return a + b

`jobs` is the instance that `shmq serve` runs. Everything else of a program, and the command
`taskiq`, stays as it is.
"""

from __future__ import annotations

try:
    import taskiq  # noqa: F401
except ImportError as exc:
    raise ImportError(
        "shmq.integrations.taskiq needs Taskiq: install shmq with the extra `taskiq`"
    ) from exc

from shmq.integrations.taskiq.broker import Broker
from shmq.integrations.taskiq.dead import DeadLetters
from shmq.integrations.taskiq.results import ResultBackend, ResultIsMissing
from shmq.integrations.taskiq.schedules import ScheduleSource

__all__ = ["Broker", "DeadLetters", "ResultBackend", "ResultIsMissing", "ScheduleSource"]
