"""The brokers of Taskiq's tests: shmq's, with its results, in the place of a queue in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from taskiq import AckableMessage, BrokerMessage
from taskiq.exceptions import UnknownTaskError
from taskiq.receiver import Receiver

import shmq
from shmq.integrations.taskiq import Broker, ResultBackend

_numbers = itertools.count()
instance = shmq.Broker(disk=False)


class _Queue:
    """The queue of a broker, as tests look into it."""

    def __init__(self, broker: AsyncQueueBroker) -> None:
        self._broker = broker

    async def get(self) -> bytes:
        taking = self._broker.listen()
        message = await anext(taking)
        await taking.aclose()
        message.ack()
        return message.data

    def qsize(self) -> int:
        return self._broker.left

    def empty(self) -> bool:
        return not self._broker.left


class AsyncQueueBroker(Broker):
    """A queue of its own, and a way to wait until all of it was acknowledged."""

    def __init__(self) -> None:
        super().__init__(instance, queue_name=f"test{next(_numbers)}")

    @property
    def left(self) -> int:
        instance.create_channel(self.queue_name, "workers")
        stats = instance.channel_stats(self.queue_name, "workers")
        return stats.depth + stats.in_flight + stats.deferred

    @property
    def queue(self) -> _Queue:
        return _Queue(self)

    async def wait_tasks(self) -> None:
        while self.left:
            await asyncio.sleep(0.01)


class InMemoryBroker(AsyncQueueBroker):
    """Each task that is kicked is taken from the queue and run in this process."""

    def __init__(
        self,
        sync_tasks_pool_size: int = 4,
        max_stored_results: int = 100,
        cast_types: bool = True,
        max_async_tasks: int = 30,
        max_async_tasks_jitter: int = 0,
        propagate_exceptions: bool = True,
        await_inplace: bool = False,
    ) -> None:
        super().__init__()
        self.result_backend: Any = ResultBackend(instance)
        self.executor = ThreadPoolExecutor(sync_tasks_pool_size)
        self.receiver = Receiver(
            broker=self,
            executor=self.executor,
            validate_params=cast_types,
            max_async_tasks=max_async_tasks,
            max_async_tasks_jitter=max_async_tasks_jitter,
            propagate_exceptions=propagate_exceptions,
        )
        self.await_inplace = await_inplace
        self._running_tasks: set[asyncio.Task[None]] = set()

    async def kick(self, message: BrokerMessage) -> None:
        if self.find_task(message.task_name) is None:
            raise UnknownTaskError(task_name=message.task_name)
        await super().kick(message)
        if self.await_inplace:
            await self._one()
            return
        task = asyncio.create_task(self._one())
        self._running_tasks.add(task)
        task.add_done_callback(self._running_tasks.discard)

    async def _one(self) -> None:
        taking: AsyncGenerator[AckableMessage, None] = self.listen()
        message = await anext(taking)
        await taking.aclose()
        await self.receiver.callback(message)

    async def wait_all(self) -> None:
        for task in list(self._running_tasks):
            await task
