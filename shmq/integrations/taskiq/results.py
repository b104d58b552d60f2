"""Results and progress of Taskiq's tasks."""

from __future__ import annotations

import logging
from typing import Any, Final, TypeVar

from taskiq import AsyncResultBackend, TaskiqResult
from taskiq.abc.serializer import TaskiqSerializer
from taskiq.depends.progress_tracker import TaskProgress
from taskiq.exceptions import ResultGetError, TaskiqResultTimeoutError
from taskiq.serializers import JSONSerializer

import shmq
from shmq.arguments import number
from shmq.integrations.taskiq.ties import AsyncLink

T = TypeVar("T")

_log = logging.getLogger(__name__)

_DAY: Final = 24 * 3600.0
_PROGRESS: Final = "__progress"


class ResultIsMissing(ResultGetError):
    """There is no result of this task, or not any more."""

    __template__ = "There is no result of this task"


class ResultBackend(AsyncResultBackend[T]):
    """A results store of shmq for the results and the progress of tasks.

    instance, owner, timeout: as in `Broker`. ttl: seconds for which a result is kept; None: for
    ever. keep_results: whether a result stays when it was read. serializer: as in `AsyncBroker`;
    None: JSON. store: the name of the results store. max_keys, max_bytes: its limits when it is
    made; None: a million keys and 64 MiB.

    Raises shmq's NotRunning if no instance runs, and Full if the store has no room.
    """

    def __init__(
        self,
        instance: str | shmq.Broker | None = None,
        *,
        ttl: float | None = _DAY,
        keep_results: bool = True,
        serializer: TaskiqSerializer | None = None,
        store: str = "taskiq-results",
        max_keys: int | None = None,
        max_bytes: int | None = None,
        owner: str | int | None = None,
        timeout: float = 10.0,
    ) -> None:
        if ttl is not None and not number("ttl", ttl) > 0:
            raise ValueError(f"ttl must be None or seconds above 0, not {ttl}")
        self.serializer = JSONSerializer() if serializer is None else serializer
        self.keep_results, self.ttl = keep_results, ttl
        self._link = AsyncLink(instance, owner, timeout)
        self._where = store, max_keys, max_bytes

    @property
    def store(self) -> shmq.Results:
        """The results store."""
        return self._link.store(*self._where)

    async def startup(self) -> None:
        """Attach to the instance and make the store. Raises NotRunning."""
        await self._link.open(lambda: self.store)

    async def shutdown(self) -> None:
        """Detach from the instance."""
        self._link.close()

    async def set_result(self, task_id: str, result: TaskiqResult[T]) -> None:
        """Store the result of a task, and wake `wait_result`. One that can never fit is stored as
        an error that names the limit. Raises Full."""
        try:
            self._set(task_id, result)
        except shmq.MessageTooBig as exc:
            # Nobody would ever hear of a result that is not stored.
            _log.error("the result of task %s is stored as an error: %s", task_id, exc)
            failed: TaskiqResult[Any] = TaskiqResult(
                is_err=True,
                return_value=None,
                execution_time=result.execution_time,
                labels=result.labels,
                error=shmq.MessageTooBig(f"{exc}{_raised(result)}"),
            )
            try:
                self._set(task_id, failed)
            except shmq.MessageTooBig:  # its labels are what is too long
                failed.labels = {}
                self._set(task_id, failed)

    async def is_result_ready(self, task_id: str) -> bool:
        """Whether there is a result of the task."""
        return self._link.retried(lambda: task_id in self.store)

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[T]:
        """The result of a task. with_logs: with what it logged. Raises ResultIsMissing."""

        def look() -> bytes | None:
            store = self.store
            return store.get(task_id) if self.keep_results else store.pop(task_id)

        return self._result(self._link.retried(look), with_logs)

    async def wait_result(
        self, task_id: str, timeout: float | None = None, with_logs: bool = False
    ) -> TaskiqResult[T]:
        """The result of a task, as soon as it is there: `AsyncTaskiqTask.wait_result` polls.
        timeout: seconds; None: no limit. Raises TaskiqResultTimeoutError."""
        found = await self._link.retried_async(
            lambda: self.store.wait_async(task_id, timeout, not self.keep_results)
        )
        if found is None:
            raise TaskiqResultTimeoutError(timeout=timeout)
        return self._result(found, with_logs)

    def _result(self, found: bytes | None, with_logs: bool) -> TaskiqResult[T]:
        if found is None:
            raise ResultIsMissing
        result: TaskiqResult[T] = TaskiqResult.model_validate(self.serializer.loadb(found))
        if not with_logs:
            result.log = None
        return result

    async def set_progress(self, task_id: str, progress: TaskProgress[Any]) -> None:
        """Store how far a task is. Raises Full and MessageTooBig."""
        self._set(task_id + _PROGRESS, progress)

    async def get_progress(self, task_id: str) -> TaskProgress[Any] | None:
        """How far a task said that it is; None if it said nothing."""
        found = self._link.retried(lambda: self.store.get(task_id + _PROGRESS))
        return None if found is None else TaskProgress.model_validate(self.serializer.loadb(found))

    def _set(self, key: str, value: TaskiqResult[T] | TaskProgress[Any]) -> None:
        body = self.serializer.dumpb(value.model_dump(mode="json"))
        self._link.retried(lambda: self.store.set(key, body, self.ttl))


def _raised(result: TaskiqResult[Any]) -> str:
    return f" (the task raised {type(result.error).__name__})" if result.error else ""
