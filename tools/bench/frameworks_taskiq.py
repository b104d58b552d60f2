"""Taskiq on shmq beside Taskiq on Redis (taskiq-redis, streams, which acknowledges).

    tools/dev bench frameworks_taskiq [--tasks 20000] [--kills 100] [--redis-kills 1]

Workers: two processes of eight tasks for the no-ops, one of four for the starts, two of one for the
kills. All settings are the defaults of both sides. `inf`: the task had not begun again after
`--patience` seconds. Besides, the time to begin with a socket in the place of a broker, which the
worker's loop reads: most of what that takes is Taskiq's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import frameworks
from taskiq import AckableMessage, AsyncBroker, BrokerMessage


class SocketBroker(AsyncBroker):
    """Datagrams from the sender to the only worker."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    async def kick(self, message: BrokerMessage) -> None:
        frameworks.until(lambda: os.path.exists(self._path))
        self._socket.sendto(message.message, self._path)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        self._socket.bind(self._path)
        while True:
            body = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
            yield AckableMessage(data=body, ack=lambda: None)


class Socket(frameworks.Server):
    name = "a socket"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self.where = f"socket:{self._folder}/socket"

    def memory(self) -> int:
        return 0

    def close(self) -> None:
        shutil.rmtree(self._folder)


def broker_at(where: str) -> AsyncBroker:
    if where.startswith("socket:"):
        return SocketBroker(where.removeprefix("socket:"))
    if where.startswith("shmq:"):
        from shmq.integrations.taskiq import Broker

        return Broker(where.removeprefix("shmq:"))
    from taskiq_redis import RedisStreamBroker

    return RedisStreamBroker(url=where)


def tasks_of(broker: AsyncBroker) -> dict[str, Any]:
    @broker.task(task_name="noop")
    async def noop(key: int) -> None:
        frameworks.note(key)

    @broker.task(task_name="held")
    async def held(key: int) -> None:
        first = frameworks.is_first(key)
        frameworks.note(key)
        if first:
            await asyncio.sleep(3600)

    return {"noop": noop, "held": held}


class Application(frameworks.Application):
    def __init__(self, where: str) -> None:
        self._broker = broker_at(where)
        self._tasks = tasks_of(self._broker)
        self._runner = asyncio.Runner()
        self._runner.run(self._broker.startup())

    def send(self, name: str, key: int) -> None:
        self._runner.run(self._tasks[name].kiq(key))

    def send_many(self, count: int) -> list[float]:
        async def work() -> list[float]:
            kiq, clock, found = self._tasks["noop"].kiq, time.perf_counter, []
            for key in range(count):
                began = clock()
                await kiq(key)
                found.append(clock() - began)
            return found

        return self._runner.run(work())

    def close(self) -> None:
        self._runner.run(self._broker.shutdown())
        self._runner.close()


def workers(processes: int, tasks: int) -> list[str]:
    words = ["taskiq", "worker", "frameworks_taskiq:broker", "--workers", str(processes)]
    return [*words, "--max-async-tasks", str(tasks), "--max-prefetch", "0", "--log-level", "ERROR"]


if __name__ == "__main__":
    frameworks.main(f"Taskiq {version('taskiq')}", Application, workers, Socket)
elif "BENCH_WHERE" in os.environ:
    broker = broker_at(os.environ["BENCH_WHERE"])
    tasks_of(broker)
