"""The application of these tests, as a user of Taskiq writes one. SHMQ_INSTANCE names the instance,
RUNS the file in which tasks note that they begin."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from support.framework_workers import began
from taskiq import Context, SmartRetryMiddleware, TaskiqDepends, TaskiqScheduler
from taskiq.depends.progress_tracker import ProgressTracker, TaskState
from taskiq.schedule_sources import LabelScheduleSource

from shmq.integrations.taskiq import Broker, DeadLetters, ResultBackend, ScheduleSource

results: ResultBackend[Any] = ResultBackend()
broker = (
    Broker(max_priority=9)
    .with_result_backend(results)
    .with_middlewares(
        DeadLetters(), SmartRetryMiddleware(default_delay=0.05, use_delay_exponent=True)
    )
)
schedules = ScheduleSource()
scheduler = TaskiqScheduler(broker, [schedules, LabelScheduleSource(broker)])


@broker.task
async def square(number: int, pause: float = 0.0) -> int:
    began("square", number)
    await asyncio.sleep(pause)
    return number * number


@broker.task
def in_thread(number: int) -> int:
    began("in_thread", number)
    time.sleep(0.01)
    return number + 1


@broker.task(retry_on_error=True, max_retries=5)
async def flaky(key: str, fails: int) -> str:
    began("flaky", key)
    if int(results.store.incr(f"flaky {key}") or 0) <= fails:
        raise RuntimeError(f"{key} fails {fails} times")
    return key


@broker.task
async def broken(key: str) -> None:
    raise ValueError(f"{key} is broken")


@broker.task
async def half(tracker: Annotated[ProgressTracker[Any], TaskiqDepends()], key: str) -> None:
    await tracker.set_progress(TaskState.STARTED, {"done": 0.5})
    began("half", key)


@broker.task
async def twice(key: str, context: Annotated[Context, TaskiqDepends()]) -> str:
    began("twice", key)
    if "X-Taskiq-requeue" not in context.message.labels:
        await context.requeue()
    return key


@broker.task(schedule=[{"interval": 1, "args": ["label"]}])
async def tick(key: str) -> None:
    began("tick", key)
