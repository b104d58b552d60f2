"""Schedules of Taskiq's tasks."""

from __future__ import annotations

from taskiq import ScheduledTask
from taskiq import ScheduleSource as Base
from taskiq.abc.serializer import TaskiqSerializer
from taskiq.serializers import JSONSerializer

import shmq
from shmq.integrations.taskiq.ties import AsyncLink


class ScheduleSource(Base):
    """A results store of shmq that holds schedules, for `TaskiqScheduler`.

    instance, owner, timeout: as in `Broker`. store: the name of the results store. serializer: as
    in `AsyncBroker`; None: JSON.

    Any process may add and delete schedules; the scheduler sees them at its next update. A schedule
    for one point in time is deleted when its task was sent. Schedules survive a stop of the
    instance. Raises shmq's NotRunning if no instance runs.
    """

    def __init__(
        self,
        instance: str | shmq.Broker | None = None,
        *,
        store: str = "taskiq-schedules",
        serializer: TaskiqSerializer | None = None,
        owner: str | int | None = None,
        timeout: float = 10.0,
    ) -> None:
        self.serializer = JSONSerializer() if serializer is None else serializer
        self._link = AsyncLink(instance, owner, timeout)
        self._name = store

    @property
    def store(self) -> shmq.Results:
        """The results store, with the ids of the schedules as keys."""
        return self._link.store(self._name)

    async def startup(self) -> None:
        """Attach to the instance and make the store. Raises NotRunning."""
        await self._link.open(lambda: self.store)

    async def shutdown(self) -> None:
        """Detach from the instance."""
        self._link.close()

    async def get_schedules(self) -> list[ScheduledTask]:
        """All schedules."""
        found = self._link.retried(lambda: dict(self.store.items()))
        return [
            ScheduledTask.model_validate(self.serializer.loadb(value)) for value in found.values()
        ]

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Add a schedule, or replace the one with its id. Raises Full and MessageTooBig."""
        body = self.serializer.dumpb(schedule.model_dump(mode="json"))
        self._link.retried(lambda: self.store.set(schedule.schedule_id, body))

    async def delete_schedule(self, schedule_id: str) -> None:
        """Delete a schedule, if it is there."""
        self._link.retried(lambda: self.store.delete(schedule_id))

    async def post_send(self, task: ScheduledTask) -> None:
        """Delete a schedule for one point in time, whose task was sent."""
        if task.time is not None:
            await self.delete_schedule(task.schedule_id)
